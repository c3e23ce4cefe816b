"""`baton top`: the console's first three views in the terminal, renewed every second.

    1 Cluster    totals, and a row per node
    2 Requests   under way and ended; Enter shows where the time of one went
    3 Node       KV blocks, last steps and tiers of the node under the cursor of view 1

TopApp holds the widgets; what a row shows is made by the pure functions below it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, ClassVar, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.css.query import NoMatches
from textual.widgets import DataTable, Footer, Static, TabbedContent, TabPane

from baton.protocol.errors import BatonError
from deploy.console_feed import ConsoleFeed, Snapshot
from deploy.trace import view

RETRY_S: Final = 1.0
NODE_COLUMNS: Final = (
    "node", "role", "state", "running", "waiting", "KV", "MBU", "MFU", "tokens/s", "address",
)  # fmt: skip
REQUEST_COLUMNS: Final = (
    "request", "state", "ms", "TTFT ms", "prompt", "output", "prefill", "decode", "retries",
)  # fmt: skip
FOCUSED: Final = {"cluster": "#nodes", "requests": "#list", "node": "#scroll"}
BLOCK_COLORS: Final = {
    "free": "grey37", "used": "green", "cached": "blue", "exported": "yellow", "adopted": "cyan",
    "hole": "red",
}  # fmt: skip
MAP_CELLS: Final = 600  # most characters of a map of KV blocks
HIGH, FULL = 0.7, 0.9  # shares of the KV pool that are shown in yellow, in red


class TopApp(App[None]):
    """The whole screen."""

    TITLE = "baton top"
    CSS = """
    #head, #away { height: auto; padding: 0 1; }
    #away { color: $error; }
    TabbedContent, DataTable, VerticalScroll { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("1", "show('cluster')", "Cluster"),
        ("2", "show('requests')", "Requests"),
        ("3", "show('node')", "Node"),
        ("q", "quit", "Quit"),
    ]

    def __init__(self, feed: ConsoleFeed) -> None:
        super().__init__()
        self._feed = feed

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield Static(id="away")
        with TabbedContent(id="views"):
            with TabPane("1 Cluster", id="cluster"):
                yield DataTable(id="nodes", cursor_type="row", zebra_stripes=True)
            with TabPane("2 Requests", id="requests"):
                yield DataTable(id="list", cursor_type="row", zebra_stripes=True)
                with VerticalScroll():
                    yield Static("Enter shows where the time of a request went.", id="timeline")
            with TabPane("3 Node", id="node"), VerticalScroll(id="scroll"):
                yield Static("Choose a node in view 1.", id="detail")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#nodes", DataTable).add_columns(*NODE_COLUMNS)
        self.query_one("#list", DataTable).add_columns(*REQUEST_COLUMNS)
        self.query_one("#nodes", DataTable).focus()
        self.follow()

    def action_show(self, name: str) -> None:
        """Show one of the three views."""
        self.query_one(TabbedContent).active = name
        # A pane whose widget gets the focus becomes the active one, so the last key wins.
        self.query_one(FOCUSED[name]).focus()
        if name == "node":
            self.ask_node()

    @work(exclusive=True, group="stream")
    async def follow(self) -> None:
        """Show every state that the router tells, and come back after it was away."""
        with suppress(NoMatches):  # when the app ends the screen goes before this does
            while True:
                try:
                    async for snapshot in self._feed.snapshots():
                        self._say("")
                        self.show(snapshot)
                except BatonError as error:
                    self._say(str(error))
                await asyncio.sleep(RETRY_S)

    def show(self, snapshot: Snapshot) -> None:
        """Put a state of the system on the screen."""
        self.query_one("#head", Static).update(head_of(snapshot))
        _fill(self.query_one("#nodes", DataTable), [node_row(n) for n in nodes_of(snapshot)])
        _fill(self.query_one("#list", DataTable), request_rows(snapshot))
        if self.query_one(TabbedContent).active == "node":
            self.ask_node()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Enter: the node of the row, or the timeline of the request."""
        if event.data_table.id == "nodes":
            self.action_show("node")
        elif event.row_key.value is not None:
            self.ask_timeline(event.row_key.value)

    @work(exclusive=True, group="timeline")
    async def ask_timeline(self, name: str) -> None:
        """Show where the time of one request went."""
        shown = self.query_one("#timeline", Static)
        try:
            told = await self._feed.get(f"/v1/requests/{name}/timeline")
        except BatonError as error:
            shown.update(Text(str(error), "yellow"))
        else:
            shown.update(view(told, max(60, self.size.width - 4)))

    @work(exclusive=True, group="node")
    async def ask_node(self) -> None:
        """Show the node under the cursor of view 1."""
        table, shown = self.query_one("#nodes", DataTable), self.query_one("#detail", Static)
        if not table.row_count:
            shown.update("no node is registered")
            return
        name = table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value
        try:
            shown.update(node_view(await self._feed.get(f"/console/data/nodes/{name}")))
        except BatonError as error:
            shown.update(Text(f"{name}: {error}", "yellow"))

    def _say(self, text: str) -> None:
        away = self.query_one("#away", Static)
        away.update(text)
        away.display = bool(text)


def head_of(snapshot: Snapshot) -> RenderableType:
    """Return the two lines above all views: the router, and the totals."""
    router, totals, store = snapshot["router"], snapshot["totals"], snapshot["store"]
    first = Text.assemble(
        ("baton ", "bold"),
        f"{router['version']}  {', '.join(router['models']) or 'no model'}",
        f"  router {router['id']}  up {_duration(router['uptime_s'])}  store {store['kind']} ",
        ("ok", "green") if store["ok"] else (store["text"] or "away", "red"),
        ("  draining", "yellow") if router["draining"] else "",
    )
    second = Text(
        f"{totals['running']} running, {totals['waiting']} waiting;"
        f" {totals['requests_per_s']:.1f} requests/s, {totals['output_tokens_per_s']:.0f} tokens/s;"
        f" TTFT p50 {_ms(totals['ttft_ms']['p50'])} p99 {_ms(totals['ttft_ms']['p99'])},"
        f" TPOT p50 {_ms(totals['tpot_ms']['p50'])} p99 {_ms(totals['tpot_ms']['p99'])};"
        f" {totals['refused_per_s']:.1f} refused/s, {totals['retried_per_s']:.1f} retried/s"
    )
    return Group(first, second)


def nodes_of(snapshot: Snapshot) -> list[dict[str, Any]]:
    """Return the nodes in the order of the table: prefill first, then by name."""
    return sorted(snapshot["nodes"], key=lambda node: (node["role"] != "prefill", node["id"]))


def node_row(node: dict[str, Any]) -> list[str | Text]:
    """Return the cells of a node; the first one is its name."""
    state = node["state"]
    total = node["kv_total"]
    share = node["kv_used"] / total if total else 0.0
    color = "red" if share > FULL else "yellow" if share > HIGH else "green"
    return [
        node["id"],
        node["role"] or "-",
        Text(state, "green" if state == "serving" else "yellow"),
        str(node["running"]),
        str(node["waiting"]),
        Text(f"{node['kv_used']}/{total} {share:4.0%}", color),
        _share(node["mbu"]),
        _share(node["mfu"]),
        f"{node['tokens_per_s']:.0f}",
        node["address"],
    ]


def request_rows(snapshot: Snapshot) -> list[list[str | Text]]:
    """Return the rows of requests: those under way, the oldest first; then the newest ended."""
    requests = snapshot["requests"]
    live = [
        [
            each["request_id"],
            Text(each["stage"], "cyan"),
            f"{each['age_ms']:.0f}",
            "",
            *_counts(each),
        ]
        for each in requests.get("live", ())
    ]
    ended = [
        [
            each["request_id"],
            Text(each["error"] or each["outcome"].lower(), "red" if each["error"] else ""),
            f"{each['total_ms']:.0f}",
            "" if each["ttft_ms"] is None else f"{each['ttft_ms']:.0f}",
            *_counts(each),
        ]
        for each in requests.get("ended", ())
    ]
    return live + ended


def _counts(request: dict[str, Any]) -> list[str | Text]:
    return [
        str(request["prompt_tokens"]),
        str(request["output_tokens"]),
        request["prefill_node"] or "-",
        request["decode_node"] or "-",
        str(request["retries"]),
    ]


def node_view(node: dict[str, Any]) -> RenderableType:
    """Return all that view 3 shows of a node."""
    blocks = node["blocks"]
    told = f"  {node['role']}, {blocks['total']} KV blocks of {blocks['size']} tokens"
    parts: list[RenderableType] = [
        Text.assemble((node["id"], "bold"), told),
        block_map(blocks["states"], blocks["total"]),
        _legend(blocks["states"]),
    ]
    if node["steps"]:
        parts.append(steps_table(node["steps"]))
    for tier in node["tiers"]:
        used, total = tier["used_bytes"] / 2**20, tier["total_bytes"] / 2**20
        parts.append(
            Text(f"tier {tier['name']}: {used:.0f} of {total:.0f} MiB, {tier['hits']} hits")
        )
    return Group(*parts)


def block_map(states: list[list[Any]], total: int) -> Text:
    """Return the pool as a line of characters in block order, each for so many blocks that the map
    has at most MAP_CELLS. A character has the state of the first of its blocks that is not free."""
    per_cell = max(1, -(-total // MAP_CELLS))
    cells = ["free"] * -(-total // per_cell)
    block = 0
    for state, count, *_ in states:
        if state != "free":
            for cell in range(block // per_cell, (block + count - 1) // per_cell + 1):
                cells[cell] = state if cells[cell] == "free" else cells[cell]
        block += count
    return Text.assemble(*(("·" if c == "free" else "█", BLOCK_COLORS.get(c, "")) for c in cells))


def _legend(states: list[list[Any]]) -> Text:
    counts: dict[str, int] = {}
    for state, count, *_ in states:
        counts[state] = counts.get(state, 0) + count
    known = [state for state in BLOCK_COLORS if state in counts]
    parts = [(f"█ {state} {counts[state]}   ", BLOCK_COLORS[state]) for state in known]
    return Text.assemble(*parts)


def steps_table(steps: list[dict[str, Any]]) -> Table:
    """Return a node's last steps, the newest first."""
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    for name in ("step ms", "prompt tokens", "decode rows"):
        table.add_column(name, justify="right")
    table.add_column("requests", overflow="ellipsis", no_wrap=True)
    for step in reversed(steps):
        table.add_row(
            f"{step['ms']:.1f}",
            str(step["prefill_tokens"]),
            str(step["decode_rows"]),
            ", ".join(step["requests"]),
        )
    return table


def _fill(table: DataTable[str | Text], rows: list[list[str | Text]]) -> None:
    """Put `rows` into the table; the first cell is the row's key. The cursor stays on its row; but
    in the first row it stays there, whatever comes: who has not moved it sees the newest."""
    at = None
    if table.row_count and table.cursor_row > 0:
        at = table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value
    table.clear()
    keys: list[str] = []
    for row in rows:
        name = str(row[0])  # two requests may have the same: the first row answers to it
        table.add_row(*row, key=None if name in keys else name)
        keys.append(name)
    if at in keys:
        table.move_cursor(row=keys.index(at))


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
