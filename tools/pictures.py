"""The pictures of the console in the documents, from a real run: `python -m tools.pictures`.

It starts a cluster of processes with the demo model, keeps it busy, and lets a browser without a
head look: the cluster under load (also on a phone), a node in the dark, then the timeline of a
request whose decode node was killed.
Needs Chromium and playwright (dependency group `test`).
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.console.browser import Visit, browser, visit
from tests.console.live import KEY, LiveConsole, kill_in_mid_stream, live_console

FOLDER: Final = Path(__file__).resolve().parents[1] / "docs" / "pictures"
MOST_BYTES: Final = 150_000  # of one picture
NUM_CLIENTS: Final = 6
CHARTS_S: Final = 40  # of load before the cluster is shown, for the charts
SCREEN: Final = {"width": 1280, "height": 600}
PHONE: Final = {"width": 390, "height": 844}
PICTURE_TOKENS: Final = 400
MARGIN: Final = 6  # pixels below what a picture shows
CLUSTER_END: Final = "section.panel"
TIMELINE_END: Final = ".legend"


async def _take(tab: Visit, name: str, last: str) -> None:
    """Save the page down to the end of the element `last`; a phone's down to the screen's."""
    viewport = tab.page.viewport_size
    box = await tab.page.locator(last).first.bounding_box()
    assert box is not None, last
    assert viewport is not None
    tall = box["y"] + box["height"] + MARGIN
    if viewport["width"] == PHONE["width"]:
        tall = min(tall, PHONE["height"])
    clip = {"x": 0, "y": 0, "width": viewport["width"], "height": tall}
    file = FOLDER / f"{name}.png"
    await tab.page.screenshot(path=file, clip=clip, full_page=True)  # pyright: ignore[reportArgumentType]
    size = file.stat().st_size
    if size > MOST_BYTES:
        raise RuntimeError(f"{file.name} has {size} bytes, more than {MOST_BYTES}")
    sys.stdout.write(f"{file.name}: {size} bytes\n")


async def _in_load(light: Visit, dark: Visit, phone: Visit, live: LiveConsole) -> None:
    """What is seen of a busy cluster: on a screen in light, one node in dark, a phone."""
    async with live.busy(NUM_CLIENTS):
        for tab in (light, dark, phone):
            await tab.open(KEY)
        await asyncio.sleep(CHARTS_S)
        for tab, name in ((light, "console-cluster"), (phone, "console-phone")):
            await tab.page.wait_for_selector(".lines path")  # KV has moved in the last seconds
            await _take(tab, name, CLUSTER_END)
        await dark.show("node/d0")
        await dark.page.click("button:has-text('Request')")
        await dark.page.wait_for_selector("svg.roofline circle, section[aria-label=Tiers]")
        await _take(dark, "console-node-dark", "section[aria-label=Roofline]")


async def _timeline(tab: Visit, live: LiveConsole) -> None:
    name, _ = await kill_in_mid_stream(live, PICTURE_TOKENS)
    await tab.open(KEY, f"requests/{name}")
    await tab.page.wait_for_selector(".gantt rect")
    await _take(tab, "request-timeline", TIMELINE_END)


async def pictures() -> None:
    """Make all pictures."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        async with (
            browser() as chromium,
            live_console(Path(directory)) as live,
            visit(chromium, live.admin, SCREEN, color_scheme="light") as light,
            visit(chromium, live.admin, SCREEN, color_scheme="dark") as dark,
            visit(chromium, live.admin, PHONE, color_scheme="light") as phone,
        ):
            await _in_load(light, dark, phone, live)
            await _timeline(light, live)


def main(arguments: Sequence[str]) -> int:
    if arguments:
        sys.stderr.write("usage: python -m tools.pictures\n")
        return 2
    asyncio.run(pictures())
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
