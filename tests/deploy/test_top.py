"""`baton top` and the feed behind it: states and deltas, addresses, what the screen shows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from textual.pilot import Pilot
from textual.widgets import DataTable, Static, TabbedContent

from baton.protocol.errors import ConfigError, RequestNotFound, Unavailable
from deploy import top
from deploy.console_feed import (
    MOST_KEPT,
    URL_FILE,
    ConsoleFeed,
    Snapshot,
    console_address,
    merged,
)
from deploy.top import MAP_CELLS, TopApp, block_map, head_of, node_row, node_view, request_rows
from tests.waiting import eventually


def node(name: str, role: str = "decode", used: int = 10, **more: Any) -> dict[str, Any]:
    told = {
        "id": name, "role": role, "state": "serving", "address": "127.0.0.1:1", "instance": "a",
        "model": "m", "running": 1, "waiting": 2, "kv_used": used, "kv_total": 100, "kv_cached": 5,
        "mbu": 0.5, "mfu": None, "tokens_per_s": 123.4, "precision": "bf16", "ranks": 1, "text": "",
    }  # fmt: skip
    return told | more


def live(name: str) -> dict[str, Any]:
    return {
        "request_id": name, "age_ms": 12.0, "stage": "decode", "prompt_tokens": 7,
        "output_tokens": 3, "prefill_node": "p", "decode_node": "d", "retries": 0, "migrations": 0,
        "tenant": None,
    }  # fmt: skip


def ended(name: str, error: str | None = None) -> dict[str, Any]:
    return {
        "request_id": name, "arrived_at": 0.0, "total_ms": 50.0, "ttft_ms": None, "error": error,
        "outcome": "FINISHED", "prompt_tokens": 7, "output_tokens": 3, "prefill_node": None,
        "decode_node": "d", "retries": 1,
    }  # fmt: skip


def snapshot(**more: Any) -> Snapshot:
    figures = {"p50": 12.0, "p95": None, "p99": 40.0}
    told = {
        "seq": 1,
        "at": 0.0,
        "router": {
            "id": "r", "version": "0.1", "models": ["demo"], "uptime_s": 90.0, "draining": False,
            "demo": False, "needs_api_key": False,
        },
        "totals": {
            "running": 3, "waiting": 1, "requests_per_s": 2.0, "prompt_tokens_per_s": 10.0,
            "output_tokens_per_s": 99.0, "refused_per_s": 0.0, "retried_per_s": 0.0,
            "failed_per_s": 0.0, "ttft_ms": figures, "tpot_ms": figures,
        },
        "store": {"kind": "redis", "ok": True, "text": ""},
        "nodes": [node("d-0"), node("p-0", "prefill")],
        "flows": [],
        "requests": {"live": [live("l-1")], "num_live": 1, "ended": [ended("e-1")]},
        "events": [{"seq": 1, "kind": "node-joined"}],
    }  # fmt: skip
    return told | more


DETAIL = {
    "id": "d-0",
    "role": "decode",
    "blocks": {
        "size": 16,
        "total": 8,
        "states": [["used", 2, "r"], ["free", 5, None], ["cached", 1, None]],
    },
    "prefixes": [],
    "steps": [
        {"at": 0.0, "ms": 1.5, "prefill_tokens": 0, "decode_rows": 2, "requests": ["a", "b"]}
    ],
    "roofline": None,
    "tiers": [{"name": "disk", "used_bytes": 2**20, "total_bytes": 2**21, "hits": 4}],
}


class FakeFeed(ConsoleFeed):
    """Yields the given states, then breaks off; knows one timeline and one node."""

    def __init__(self, states: list[Snapshot]) -> None:
        self.states = states
        self.asked: list[str] = []

    async def snapshots(self) -> AsyncIterator[Snapshot]:
        for state in self.states:
            yield state
            await asyncio.sleep(0)
        self.states = []
        raise Unavailable("the router is away")

    async def get(self, path: str) -> Any:
        self.asked.append(path)
        if path == "/console/data/nodes/d-0":
            return DETAIL
        raise RequestNotFound(f"nothing at {path}")


def text_of(shown: object) -> str:
    console = Console(width=200, color_system=None)
    with console.capture() as caught:
        console.print(shown)
    return caught.get()


# ---- the feed ----


def test_a_first_delta_is_the_snapshot() -> None:
    assert merged({}, snapshot()) == snapshot()


def test_a_delta_changes_what_it_holds() -> None:
    before = snapshot()
    delta = {
        "seq": 2,
        "nodes": [node("d-0", used=50), node("d-1")],
        "gone": ["p-0"],
        "events": [{"seq": 2, "kind": "node-lost"}],
        "requests": {"live": [], "num_live": 0, "ended": [ended("e-2")]},
    }
    after = merged(before, delta)
    assert {each["id"]: each["kv_used"] for each in after["nodes"]} == {"d-0": 50, "d-1": 10}
    assert [event["seq"] for event in after["events"]] == [1, 2]
    assert [each["request_id"] for each in after["requests"]["ended"]] == ["e-2", "e-1"]
    assert after["requests"]["live"] == []
    assert after["totals"] == before["totals"]
    assert before == snapshot()


def test_what_is_kept_is_bounded() -> None:
    state = snapshot()
    for seq in range(2, 400):
        state = merged(state, {"seq": seq, "events": [{"seq": seq, "kind": "retry"}]})
    assert [event["seq"] for event in state["events"]] == list(range(200, 400))
    assert len(state["events"]) == MOST_KEPT["events"]


@pytest.mark.parametrize(
    ("given", "key", "origin", "found"),
    [
        ("http://h:1/console#key=abc", None, "http://h:1", "abc"),
        ("https://h:1", "k", "https://h:1", "k"),
        ("h:1/console", "k", "http://h:1", "k"),
        ("http://h:1/console#key=abc", "k", "http://h:1", "abc"),
    ],
)
def test_an_address_that_is_given(given: str, key: str | None, origin: str, found: str) -> None:
    address = console_address(given, key, {})
    assert (address.origin, address.key) == (origin, found)
    assert address.page == f"{origin}/console#key={found}"


def test_the_address_of_the_newest_run(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    with pytest.raises(ConfigError, match="baton up"):
        console_address(None, None, environ)
    for name, port in (("20260101-1", 1), ("20260102-1", 2)):
        folder = tmp_path / "baton" / "runs" / name
        folder.mkdir(parents=True)
        (folder / URL_FILE).write_text(f"http://127.0.0.1:{port}/console#key=k{port}\n")
    address = console_address(None, None, environ)
    assert (address.origin, address.key) == ("http://127.0.0.1:2", "k2")


@pytest.mark.parametrize("given", ["ftp://h:1", "http://"])
def test_no_address(given: str) -> None:
    with pytest.raises(ConfigError):
        console_address(given, None, {})


# ---- what is shown ----


def test_the_head_tells_totals_and_the_store() -> None:
    text = text_of(head_of(snapshot(store={"kind": "redis", "ok": False, "text": "no answer"})))
    assert "3 running, 1 waiting" in text
    assert "TTFT p50 12 ms p99 40 ms" in text
    assert "no answer" in text
    assert "up 2 min" in text


def test_a_row_of_a_node() -> None:
    cells = [str(cell) for cell in node_row(node("d", used=95))]
    assert cells == ["d", "decode", "serving", "1", "2", "95/100  95%", "50%", "-", "123",
                     "127.0.0.1:1"]  # fmt: skip
    assert node_row(node("d", used=95))[5].style == "red"  # type: ignore[union-attr]
    assert "0%" in str(node_row(node("d", used=0, kv_total=0))[5])


def test_requests_under_way_come_first_then_the_newest() -> None:
    requests = {"live": [live("l")], "ended": [ended("new", "node_lost"), ended("old")]}
    rows = [[str(cell) for cell in row] for row in request_rows({"requests": requests})]
    assert [row[:2] for row in rows] == [["l", "decode"], ["new", "node_lost"], ["old", "finished"]]


def test_a_map_shows_every_run_of_blocks() -> None:
    total = 10 * MAP_CELLS
    states = [["free", 5, None], ["used", 1, "r"], ["free", total - 7, None], ["cached", 1, None]]
    drawn = block_map(states, total)
    assert len(drawn.plain) == MAP_CELLS
    assert drawn.plain == "█" + "·" * (MAP_CELLS - 2) + "█"
    assert [str(span.style) for span in drawn.spans if span.start in (0, MAP_CELLS - 1)] == [
        "green",
        "blue",
    ]


def test_a_node_shows_blocks_steps_and_tiers() -> None:
    text = text_of(node_view(DETAIL))
    assert "8 KV blocks of 16 tokens" in text
    assert "██·····█" in text
    assert "used 2" in text
    assert "a, b" in text
    assert "tier disk: 1 of 2 MiB, 4 hits" in text


# ---- the screen ----


async def until(seen: Callable[[], bool]) -> None:
    async def look() -> bool:
        return seen()

    await eventually(look)


async def moved_down(pilot: Pilot[None], table: DataTable[Any]) -> None:
    """Its cursor, by one row; a key goes to what has the focus, and that comes when it comes."""
    await until(lambda: table.has_focus)
    row = table.cursor_row
    await pilot.press("down")
    await until(lambda: table.cursor_row == row + 1)


def shown(app: TopApp, name: str) -> str:
    return text_of(app.query_one(name, Static).content)


async def test_views_by_their_keys() -> None:
    feed = FakeFeed([snapshot()])
    app = TopApp(feed)
    async with app.run_test(size=(120, 40)) as pilot:
        nodes, requests = app.query_one("#nodes", DataTable), app.query_one("#list", DataTable)
        await until(lambda: nodes.row_count == 2 and requests.row_count == 2)
        await until(lambda: "away" in shown(app, "#away"))
        assert nodes.get_row_at(0)[0] == "p-0"  # prefill first
        await pilot.press("2")
        await until(lambda: app.query_one(TabbedContent).active == "requests")
        await until(lambda: requests.has_focus)
        await pilot.press("enter")
        await until(lambda: "nothing at /v1/requests/l-1/timeline" in shown(app, "#timeline"))
        await pilot.press("1")
        await moved_down(pilot, nodes)
        await pilot.press("3")
        await until(lambda: "8 KV blocks of 16 tokens" in shown(app, "#detail"))
        assert "/console/data/nodes/d-0" in feed.asked


async def test_two_requests_of_one_name() -> None:
    app = TopApp(FakeFeed([]))
    async with app.run_test(size=(120, 40)):
        requests = {"live": [live("same")], "num_live": 1, "ended": [ended("same"), ended("e")]}
        app.show(snapshot(requests=requests))
        table = app.query_one("#list", DataTable)
        assert [table.get_row_at(row)[0] for row in range(3)] == ["same", "same", "e"]


async def test_a_cursor_that_nobody_moved_stays_above_what_is_new() -> None:
    app = TopApp(FakeFeed([]))

    def of(*names: str) -> Snapshot:
        return snapshot(requests={"live": [live(n) for n in names], "num_live": 1, "ended": []})

    async with app.run_test(size=(120, 40)) as pilot:
        app.show(of("old"))
        await pilot.press("2")
        table = app.query_one("#list", DataTable)
        app.show(of("new", "old"))
        assert table.cursor_row == 0
        await moved_down(pilot, table)
        app.show(of("newer", "new", "old"))
        assert table.cursor_row == 2, "it was moved to a row, and stays there"


async def test_an_app_that_ends_while_the_router_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its screen is taken apart first: what is said then has no place, and harms nobody."""
    monkeypatch.setattr(top, "RETRY_S", 0.0)
    app = TopApp(FakeFeed([]))
    async with app.run_test():
        await until(lambda: "away" in shown(app, "#away"))
        await app.query_one("#away").remove()
        await until(lambda: all(worker.is_finished for worker in app.workers))


async def test_the_cursor_stays_on_its_row() -> None:
    app = TopApp(FakeFeed([]))
    async with app.run_test(size=(120, 40)) as pilot:
        app.show(snapshot())
        await pilot.press("1")
        table = app.query_one("#nodes", DataTable)
        await moved_down(pilot, table)
        app.show(snapshot(nodes=[node("d-0"), node("c-0", "prefill"), node("p-0", "prefill")]))
        key = table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value
        assert key == "d-0"
