"""The console of a live cluster in a real browser: what an operator clicks when something is slow,
when a node dies, and when he wants to see an answer.

How long a view takes to load is logged (pytest --log-cli-level=info) and held loosely: the machine
may be busy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.console.browser import Visit, browser, visit
from tests.console.live import KEY, LONG_TOKENS, kill_in_mid_stream, live_console

pytestmark = pytest.mark.long
logger = logging.getLogger(__name__)

LOADED: Final = {
    "cluster": ".card", "requests": "tbody tr", "node": ".figures", "transfer": ".panel",
    "events": "tbody tr", "playground": ".ask",
}  # fmt: skip
HANGS_MS: Final = 20_000


async def load_ms(tab: Visit, view: str) -> float:
    """From a fresh load of the page to the view with its data, by the browser's clock."""
    await tab.page.goto("about:blank")
    await tab.page.goto(f"{tab.origin}/console#/{view}")
    await tab.page.wait_for_selector(f"main[data-view={view}][data-ready=true] {LOADED[view]}")
    return float(await tab.page.evaluate("performance.now()"))


async def test_every_view_loads_under_load(
    tmp_path: Path, record_testsuite_property: Callable[[str, object], None]
) -> None:
    async with browser() as chromium, live_console(tmp_path) as live, live.busy(3):
        await live.complete("PagedAttention is", 20)  # one has ended
        async with visit(chromium, live.admin) as tab:
            key = f"sessionStorage.setItem('baton-console-key', '{KEY}')"
            await tab.page.add_init_script(f"if (location.protocol !== 'about:') {{ {key} }}")
            taken = {view: await load_ms(tab, view) for view in LOADED}
            assert tab.outside == []
            for view, each in taken.items():
                record_testsuite_property(f"{view}_ms", round(each))
                logger.info("%s: loaded in %.0f ms", view, each)
            assert max(taken.values()) < HANGS_MS


async def test_who_went_on_when_a_decode_node_was_killed(tmp_path: Path) -> None:
    async with browser() as chromium, live_console(tmp_path) as live:
        for _ in range(3):
            await live.complete("The KV cache", 8)
        async with visit(chromium, live.admin) as tab:
            await tab.open(KEY, "requests")
            name, killed = await kill_in_mid_stream(live)
            other = "d1" if killed == "d0" else "d0"
            await tab.page.click("button:has-text('Slowest')")
            first = tab.page.locator("tbody tr").first
            await first.locator(f"a:has-text('{name}')").click()
            await tab.page.wait_for_selector(".gantt rect")
            said = await tab.page.inner_text(".trouble")
            assert f"on {killed}" in said
            assert f"{other} went on" in said
            strip = await tab.page.get_attribute(".strip", "aria-label")
            assert strip is not None
            assert strip.index(f"{killed} made") < strip.index(f"{other} made")
            assert strip.endswith(f"to {LONG_TOKENS}")
            await tab.page.keyboard.press("5")
            await tab.page.wait_for_selector(f"tr:has-text('node-lost'):has-text('{killed}')")
            await tab.page.click("tr:has-text('retry') a.id >> nth=-1")
            await tab.page.wait_for_selector(".gantt rect")
            await tab.page.keyboard.press("1")
            await tab.page.wait_for_selector(f".card.away:has-text('{killed}')")
            tab.clean()


async def test_a_chat_is_played(tmp_path: Path) -> None:
    async with (
        browser() as chromium,
        live_console(tmp_path, 1) as live,
        visit(chromium, live.admin) as tab,
    ):
        await tab.open(KEY, "playground")
        await tab.page.click("text=Send")
        await tab.page.wait_for_selector(".stream[data-run='1'][data-status=ended]")
        assert "attention algorithm" in await tab.page.inner_text(".stream")
        await tab.page.wait_for_selector(".stream .node-1")
        titles = await tab.page.evaluate(
            "[...document.querySelectorAll('.stream > span')].map((each) => each.title)"
        )
        assert titles[0].startswith("p0 p ")
        assert {each.split()[0] for each in titles[1:]} == {"d0"}
        await tab.page.click("button:has-text('JSON schema')")
        await tab.page.click("text=Send")
        await tab.page.wait_for_selector(".stream[data-run='2'][data-status=ended]")
        assert (await tab.page.inner_text(".stream")).strip().startswith("{")
        await tab.page.click("button:has-text('Completion')")
        await tab.page.click("text=Send")
        await tab.page.wait_for_selector(".stream[data-run='3'][data-status=ended]")
        await tab.page.click("dl a.id")
        await tab.page.wait_for_selector(".gantt rect")
        tab.clean()
