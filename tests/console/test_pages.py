"""The console's pages in a real browser, over a fake router that tells what a test needs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from tests.console.browser import DESKTOP, PHONE, READY, Visit, browser, served, visit
from tests.console.fake_console import KEY, SLOW_REQUEST, FakeConsole, perfetto

pytestmark = pytest.mark.long

OTHER: Final = "chatcmpl-00000000000000000000000000000009"
VIEWS: Final = {
    "cluster": ".card", "requests": "tbody tr", f"requests/{SLOW_REQUEST}": ".gantt rect",
    f"requests/{SLOW_REQUEST}/vs/{OTHER}": ".gantt rect", "node/d1": ".blocks canvas",
    "transfer": ".flow-cell", "events": "tbody tr", "playground": ".ask", "break": "progress",
}  # fmt: skip
# Preact runs effects, here the painting, in a timer of the frame after a change.
EFFECTS: Final = "() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"
PAINTED: Final = """(() => {
  const shown = document.querySelector('.blocks canvas');
  const copy = new OffscreenCanvas(shown.width, shown.height);
  const pen = copy.getContext('2d', { willReadFrequently: true });
  pen.drawImage(shown, 0, 0);
  const { data } = pen.getImageData(0, 0, shown.width, shown.height);
  return new Set(new Uint32Array(data.buffer)).size;
})()"""
SERIOUS: Final = ("serious", "critical")


@asynccontextmanager
async def console(
    fake: FakeConsole | None = None, view: str = "cluster", **options: Any
) -> AsyncIterator[Visit]:
    """A tab on a fake console, its data shown; at the end the page must not have complained."""
    async with tab_on(fake or FakeConsole(), **options) as tab:
        await tab.open(KEY, view)
        yield tab
        tab.clean()


@asynccontextmanager
async def tab_on(fake: FakeConsole, **options: Any) -> AsyncIterator[Visit]:
    """A tab that has opened nothing yet."""
    async with (
        browser() as chromium,
        served(fake.app()) as origin,
        visit(chromium, origin, **options) as tab,
    ):
        yield tab


async def serious_faults(tab: Visit) -> list[str]:
    """What axe-core finds that keeps people out."""
    files = pytest.importorskip("axe_playwright_python", reason="axe-core is not installed")
    await tab.page.evaluate((Path(files.__file__).parent / "axe.min.js").read_text())
    found = json.loads(await tab.page.evaluate("async () => JSON.stringify(await axe.run())"))
    assert len(found["passes"]) > 5, "axe has looked"
    return [
        f"{fault['id']}: {fault['nodes'][0]['html'][:200]} {fault['nodes'][0]['failureSummary']}"
        for fault in found["violations"]
        if fault["impact"] in SERIOUS
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_nobody_is_kept_out_of_a_view(scheme: str) -> None:
    faults: dict[str, list[str]] = {}
    async with console(color_scheme=scheme) as tab:
        for view, part in VIEWS.items():
            await tab.show(view)
            await tab.page.wait_for_selector(part)
            if view == "playground":
                await tab.page.click("text=Send")
                await tab.page.wait_for_selector(".stream[data-status=ended]")
            faults[view] = await serious_faults(tab)
    assert faults == {view: [] for view in VIEWS}


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
async def test_no_view_is_wider_than_the_screen(viewport: dict[str, int]) -> None:
    async with console(viewport=viewport) as tab:
        for view, part in VIEWS.items():
            await tab.show(view)
            await tab.page.wait_for_selector(part)
            wide = await tab.page.evaluate("document.documentElement.scrollWidth")
            assert wide <= viewport["width"], view


async def test_a_key_is_asked_for_taken_and_refused() -> None:
    async with tab_on(FakeConsole()) as tab:
        await tab.page.goto(f"{tab.origin}/console")
        await tab.page.fill("input[type=password]", "wrong")
        await tab.page.click("text=Open")
        assert "not known" in await tab.page.inner_text("[role=alert]")
        await tab.page.fill("input[type=password]", KEY)
        await tab.page.click("text=Open")
        await tab.page.wait_for_selector(READY)
        assert KEY not in tab.page.url
        await tab.page.reload()  # the tab keeps it
        await tab.page.wait_for_selector(READY)
        assert tab.outside == []


async def test_the_address_loses_its_key() -> None:
    async with console(view="events") as tab:
        assert KEY not in tab.page.url
        assert await tab.page.evaluate("sessionStorage.length") == 1
        await tab.page.evaluate(f"location.hash = '#key={KEY}'")  # pasted once more
        await tab.page.wait_for_selector("main[data-view=cluster]")
        assert KEY not in tab.page.url


async def test_the_keyboard_alone() -> None:
    async with console() as tab:
        keys = tab.page.keyboard
        for number, view in enumerate(
            ("cluster", "requests", "node", "transfer", "events", "playground", "break"), 1
        ):
            await keys.press(str(number))
            await tab.page.wait_for_selector(f"main[data-view={view}]")
        await keys.press("5")
        await tab.page.wait_for_selector("main[data-view=events]")
        await keys.press("/")
        await keys.type("1 7?")  # typed into the search, not taken for shortcuts
        assert await tab.page.input_value("input[type=search]") == "1 7?"
        assert await tab.page.get_attribute("main", "data-view") == "events"
        await tab.page.evaluate("document.activeElement.blur()")
        await keys.press("?")
        await tab.page.wait_for_selector("dialog[open]")
        await keys.press("Escape")
        await tab.page.wait_for_selector("dialog", state="detached")
        await keys.press("t")
        await tab.page.wait_for_selector("html[data-theme=light]")
        await tab.page.reload()
        await tab.page.wait_for_selector(READY)
        await tab.page.wait_for_selector("html[data-theme=light]")


async def test_every_control_is_in_the_tab_order() -> None:
    async with console(view="transfer") as tab:
        await tab.page.wait_for_selector(".flow-cell")
        await tab.page.evaluate("document.body.focus()")
        seen: set[str] = set()
        for _ in range(60):
            await tab.page.keyboard.press("Tab")
            seen.add(
                await tab.page.evaluate(
                    "(e => e.getAttribute('aria-label') ?? e.textContent.trim())"
                    "(document.activeElement)"
                )
            )
        for name in ("To the view", "Search pairs", "Keyboard help", "p0", "d1", "Busiest pairs"):
            assert name in seen


async def test_a_slow_request_and_who_went_on() -> None:
    async with console(view="requests") as tab:
        await tab.page.click("button:has-text('Slowest')")
        first = tab.page.locator("tbody tr").first
        await first.locator("text=8.21 s").wait_for()
        await first.locator(f"a:has-text('{SLOW_REQUEST}')").click()
        await tab.page.wait_for_selector(".gantt rect")
        said = await tab.page.inner_text(".trouble")
        assert "d0" in said.split(":")[0]
        assert "was lost" in said
        assert "d1 went on" in said
        strip = await tab.page.get_attribute(".strip", "aria-label")
        assert strip is not None
        assert "d0 made tokens 2 to 41, p1 made tokens 42 to 42, d1 made tokens 43 to 100" in strip
        async with tab.page.expect_download() as waiting:
            await tab.page.click("text=Trace for Perfetto")
        saved = await (await waiting.value).path()
        assert json.loads(saved.read_text()) == perfetto(SLOW_REQUEST), "as the router made it"


async def test_two_requests_beside_each_other() -> None:
    async with console(view="requests") as tab:
        boxes = tab.page.locator("tbody input[type=checkbox]")
        names = await boxes.evaluate_all("all => all.map((each) => each.ariaLabel)")
        for name in names[:2]:  # by name: new rows come above them
            await tab.page.check(f"[aria-label='{name}']")
        await tab.page.click("text=Compare two")
        await tab.page.wait_for_selector("section[aria-label='Two requests']")
        assert await tab.page.locator(".gantt").count() == 2


async def test_who_went_away_is_no_failure() -> None:
    async with console(view="requests") as tab:
        ends = tab.page.locator("tbody td:last-child")
        told = dict(await ends.evaluate_all("all => all.map((it) => [it.innerText, it.className])"))
    assert told == {"finished": "", "cancelled": "", "failed": "bad"}


async def test_an_id_is_found_by_search() -> None:
    async with console() as tab:
        await tab.page.keyboard.press("2")
        await tab.page.keyboard.press("/")
        await tab.page.wait_for_selector("main[data-view=requests]")
        await tab.page.fill("input[type=search]", SLOW_REQUEST)
        await tab.page.keyboard.press("Enter")
        await tab.page.wait_for_selector(".gantt rect")


async def test_a_node_of_many_and_its_blocks() -> None:
    async with console(FakeConsole(1000)) as tab:
        assert await tab.page.locator(".grid i").count() == 1000
        assert await tab.page.locator(".card").count() == 16
        await tab.page.fill("input[type=search]", "d333")
        await tab.page.click(".card:has-text('d333')")
        await tab.page.wait_for_selector(".blocks canvas")
        said = await tab.page.get_attribute(".blocks canvas", "aria-label")
        assert said is not None
        assert said.startswith("Block map of 400 blocks: 216 used, 120 cached")
        painted: dict[str, int] = {}
        for by in ("State", "Request", "Age"):
            await tab.page.click(f"[aria-label='Colours of blocks'] >> text={by}")
            await tab.page.wait_for_selector(f"button[aria-pressed=true]:has-text('{by}')")
            await tab.page.evaluate(EFFECTS)
            painted[by] = await tab.page.evaluate(PAINTED)
        legend = await tab.page.inner_text("section[aria-label=Blocks] .legend")
        assert "evicted next" in legend
        assert painted["State"] > 3  # colours
        assert painted["Request"] > painted["State"]
        assert painted["Age"] == painted["State"] + 3, "cached blocks have four colours"


async def test_store_and_lanes_are_told_apart_by_their_state() -> None:
    fake = FakeConsole()
    fake.broken_lane = True
    async with console(fake) as tab:
        said = " ".join((await tab.page.inner_text(".health")).split())
        assert "store redis healthy" in said
        assert "grpc healthy" in said
        shm = " ".join((await tab.page.inner_text("[data-lane=shm]")).split())
        assert "failing" in shm
        assert "9 faults" in shm
        assert "fell back to grpc" in shm
        await tab.show("transfer")
        assert "9 faults of shm" in await tab.page.inner_text(".flow-cell.fault")


async def test_events_by_kind() -> None:
    async with console(view="events") as tab:
        kinds = tab.page.locator("tbody td:nth-child(2)")
        assert "drain" in await kinds.all_inner_texts()
        await tab.page.click("button:has-text('drain')")
        await tab.page.wait_for_selector("button[aria-pressed=false]:has-text('drain')")
        assert "drain" not in await kinds.all_inner_texts()


async def test_the_playground_streams_and_colours() -> None:
    async with console(view="playground") as tab:
        await tab.page.click("text=Send")
        await tab.page.wait_for_selector(".stream[data-status=ended]")
        await tab.page.wait_for_selector(".stream .node-0")
        colours = await tab.page.evaluate(
            "[...document.querySelectorAll('.stream > span')].map((each) => each.className.trim())"
        )
        assert [each.split()[0] for each in (colours[0], colours[1], colours[41], colours[60])] == [
            "node-0", "node-1", "node-2", "node-3",
        ]  # fmt: skip
        await tab.page.select_option("label:has-text('Colours') select", "logprob")
        await tab.page.wait_for_selector(".stream .sure-4")
        await tab.page.click("button:has-text('JSON schema')")
        await tab.page.fill("textarea >> nth=1", "{no json")
        await tab.page.click("text=Send")
        assert "Schema" in await tab.page.inner_text("[role=alert]")


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
async def test_every_fault_is_in_sight(viewport: dict[str, int]) -> None:
    async with console(view="break", viewport=viewport) as tab:
        place = tab.page.locator("[aria-label='Nodes to break']")
        hidden = await place.evaluate("place => place.scrollWidth - place.clientWidth")
        assert await place.locator("button").count() > 0
    assert hidden <= 0


async def test_a_broken_node_is_asked_for() -> None:
    fake = FakeConsole()
    async with console(fake, "break") as tab:
        await tab.page.click("button[aria-label='Kill -9 d0']")
        await tab.page.wait_for_selector("text=it is done")
    assert fake.breaks == [{"node": "d0", "action": "kill"}]


async def test_without_the_demo_nothing_can_be_broken() -> None:
    async with console(FakeConsole(demo=False)) as tab:
        assert await tab.page.locator("nav a").count() == 6
        await tab.page.keyboard.press("7")
        assert await tab.page.get_attribute("main", "data-view") == "cluster"


async def test_a_router_that_went_away_is_said_and_found_again() -> None:
    async with tab_on(FakeConsole()) as tab:
        away = True
        await tab.page.route(
            "**/data/stream", lambda route: route.abort() if away else route.continue_()
        )
        await tab.page.goto(f"{tab.origin}/console#key={KEY}")
        await tab.page.wait_for_selector(".link.lost")
        away = False
        await tab.page.wait_for_selector(READY)
        await tab.page.wait_for_selector(".link.live")
