"""One request in the console: while it runs, and its text for those who may see it."""

from __future__ import annotations

import pytest

from tests.console.fake_console import API_KEY, SLOW_REQUEST, TEXT, FakeConsole
from tests.console.test_pages import console, serious_faults

pytestmark = pytest.mark.long

PAGE = f"requests/{SLOW_REQUEST}"
PROMPT = ".text[aria-label=Prompt]"


async def test_a_request_under_way_has_a_page() -> None:
    async with console(view="requests") as tab:
        await tab.page.click("button:has-text('Under way')")
        await tab.page.click("tbody tr:first-child a.id")
        await tab.page.wait_for_selector(".gantt rect")
        assert "so far" in await tab.page.inner_text("[role=status]:has-text('Under way')")
        async with tab.page.expect_request("**/v1/requests/*/timeline*"):
            pass  # asked again, as it goes on


async def test_a_fetch_is_divided_by_layers_and_the_log_has_a_track() -> None:
    async with console(view=PAGE) as tab:
        await tab.page.wait_for_selector(".gantt rect.layers")
        drawn = await tab.page.locator(".gantt rect.layers title").all_text_contents()
        assert len(drawn) % 4 == 0
        assert drawn[0].startswith("layers 0-1: 375 kB in ")
        tracks = await tab.page.locator(".gantt text.track").all_text_contents()
        assert tracks[-2:] == ["KV transfer", "token log"]
        rows = await tab.page.locator("td.part").all_inner_texts()
        assert {"layers 0-1", "layers 6-7", "export", "subscribe"} <= set(rows)
        assert "Log appends" in await tab.text()
        assert await serious_faults(tab) == []


async def test_an_operator_sees_no_text_without_the_flag() -> None:
    async with console(view=PAGE) as tab:
        await tab.page.wait_for_selector(".gantt rect")
        assert await tab.page.locator(".text").count() == 0
        assert TEXT["prompt"] not in await tab.text()


async def test_an_operator_sees_text_with_the_flag() -> None:
    async with console(FakeConsole(shows_text=True), PAGE) as tab:
        assert await tab.page.inner_text(PROMPT) == TEXT["prompt"]
        assert await tab.page.inner_text(".text >> nth=1") == TEXT["answers"][0]
        assert await serious_faults(tab) == []


@pytest.mark.parametrize(("key", "sees"), [(API_KEY, True), ("another", False)])
async def test_the_api_key_of_the_playground_sees_its_own_text(key: str, sees: bool) -> None:
    async with console(FakeConsole(needs_api_key=True), "playground") as tab:
        await tab.page.fill("input[type=password]", key)
        await tab.page.click("text=Send")
        await tab.page.wait_for_selector(".stream[data-status=ended]")
        await tab.show(PAGE)
        await tab.page.wait_for_selector(".gantt rect")
        assert await tab.page.locator(PROMPT).count() == int(sees)
