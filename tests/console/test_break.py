"""Break it, as a visitor does: `baton up --demo`, the console in a browser, and a stream beside it
that goes on although its decode node is killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.breaking import LANE_MS
from tests.console.browser import Visit, browser, visit
from tests.deploy.test_up import running
from tests.waiting import eventually

pytestmark = pytest.mark.long
DECODE = ("decode-0", "decode-1")


async def press(tab: Visit, name: str) -> None:
    """Press a button of the view, and wait until it was done."""
    await tab.page.click(f"button[aria-label='{name}']")
    node = name.split()[-1]
    done = (f"{node} was", f"{node} goes", f"from {node} takes", f"leaves {node} at")
    await tab.page.wait_for_selector(", ".join(f".said:has-text('{it}')" for it in done))


async def held_request(client: httpx.AsyncClient) -> dict[str, Any]:
    """The stream's request, once it is on a decode node. All of them are stopped, so it stays."""

    async def there() -> dict[str, Any] | None:
        requests = (await client.get("/debug")).json()["requests"]
        return next((each for each in requests if each["decode_node"]), None)

    found = await eventually(there)
    assert found is not None
    return found


@asynccontextmanager
async def demo(folder: Path) -> AsyncIterator[tuple[Visit, httpx.AsyncClient]]:
    """A browser on view 7 of a `baton up --demo`, its stream begun, and a client of its admin
    port."""
    with running(folder, ["--no-warm-up", "--decode", "2", "--demo"]) as up:
        await asyncio.to_thread(up.wait_line, '"ready": true')
        shown = next(line for line in up.shown if line.startswith("console  "))
        url, key = shown.removeprefix("console  ").strip().split("#key=")
        origin = url.removesuffix("/console")
        headers = {"authorization": f"Bearer {key}"}
        async with (
            browser() as chromium,
            httpx.AsyncClient(base_url=origin, headers=headers, trust_env=False) as client,
            visit(chromium, origin) as tab,
        ):
            await tab.open(key, "break")
            await tab.page.wait_for_selector(".stream span")
            yield tab, client
            tab.clean()


@pytest.mark.redis
async def test_the_stream_goes_on_when_its_node_is_killed(tmp_path: Path) -> None:
    async with demo(tmp_path) as (tab, client):
        for node in DECODE:
            await press(tab, f"Stop {node}")
        request = await held_request(client)
        killed = str(request["decode_node"])
        (other,) = {*DECODE} - {killed}
        await press(tab, f"Kill -9 {killed}")
        await press(tab, f"Resume {other}")
        await tab.page.wait_for_selector(f"tr:has-text('broken'):has-text('{killed}')")
        await tab.page.wait_for_selector(f"tr:has-text('node-lost'):has-text('{killed}')")
        await tab.page.wait_for_selector(".stream[data-status=ended] >> nth=0")
        await tab.page.click("button:has-text('Pause')")

        async def ended() -> bool:
            listed = (await client.get("/v1/requests?limit=100")).json()["data"]
            return any(each["request_id"] == request["id"] for each in listed)

        await eventually(ended)
        await tab.show(f"requests/{request['id']}")
        await tab.page.wait_for_selector(".gantt rect")
        said = await tab.page.inner_text(".trouble >> nth=0")
        assert f"on {killed}" in said
        assert f"{other} went on" in said


@pytest.mark.redis
async def test_the_stream_goes_on_over_a_slow_lane(tmp_path: Path) -> None:
    async with demo(tmp_path) as (tab, client):

        async def hand_over_ms() -> float:
            listed = (await client.get("/v1/requests?limit=1")).json()["data"]
            if not listed or listed[0]["error"]:
                return 0.0
            name = listed[0]["request_id"]
            stages = (await client.get(f"/v1/requests/{name}/timeline")).json()["stages"]
            return sum(it["end_ms"] - it["start_ms"] for it in stages if it["stage"] == "hand-over")

        async def is_slow() -> bool:
            return await hand_over_ms() >= LANE_MS  # the lane sleeps as long, at the least

        async def is_quick() -> bool:
            return 0 < await hand_over_ms() < LANE_MS

        await press(tab, "Slow lane prefill-0")
        await eventually(is_slow)
        await press(tab, "Slow lane prefill-0")
        await eventually(is_quick)
        await tab.page.wait_for_selector("tr:has-text('broken'):has-text('prefill-0')")
        assert await tab.page.locator("[role=alert]").count() == 0, "no stream failed"
