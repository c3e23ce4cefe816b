"""`baton trace`: where the time of one request went, as bars in the terminal.

It reads `/v1/requests/{id}/timeline` of a router, which can also write it for Perfetto.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import httpx
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.protocol.errors import BatonError, Unavailable
from deploy.console_feed import answer_of

TIMEOUT_S: Final = 10.0
NARROWEST_BAR: Final = 10  # cells
GAP: Final = 2  # between columns
BESIDE: Final = ("transfer", "log-append")
MOST_KB: Final = 10_000  # more is told in MB
# Of a list: its name, whether it is aligned to the right, its text.
COLUMNS: Final[tuple[tuple[str, bool, Callable[[dict[str, Any]], str]], ...]] = (
    ("total ms", True, lambda it: f"{it['total_ms']:.1f}"),
    ("TTFT ms", True, lambda it: "-" if it["ttft_ms"] is None else f"{it['ttft_ms']:.1f}"),
    ("prompt", True, lambda it: str(it["prompt_tokens"])),
    ("output", True, lambda it: str(it["output_tokens"])),
    ("retries", True, lambda it: str(it["retries"])),
    ("outcome", False, lambda it: it["error"] or it["outcome"].lower()),
    ("prefill", False, lambda it: it["prefill_node"] or "-"),
    ("decode", False, lambda it: it["decode_node"] or "-"),
)
FIRST: Final = ("total ms", "TTFT ms", "outcome", "output")  # where there is little room
COLORS: Final = {
    "intake": "white",
    "elsewhere": "bright_black",
    "gate": "bright_black",
    "placement": "yellow",
    "encoding": "green",
    "prefill": "green",
    "hand-over": "cyan",
    "decode": "blue",
    "migration": "magenta",
    "retry": "red",
    "pooling": "green",
    "reply": "white",
    "transfer": "bright_cyan",
    "log-append": "yellow",
}


@dataclass(frozen=True, slots=True)
class TimelineSource:
    """A router's HTTP address, the key to show, and how to check its certificate."""

    url: str
    key: str | None = None
    trust: ssl.SSLContext | None = None

    def get(self, path: str) -> Any:
        """Return the JSON that the router answers. Raises BatonError with its message and which
        router was asked."""
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            with httpx.Client(
                verify=self.trust or True, trust_env=False, timeout=TIMEOUT_S
            ) as client:
                reply = client.get(self.url.rstrip("/") + path, headers=headers)
        except httpx.HTTPError as error:
            raise Unavailable(f"no router answers at {self.url}: {error}") from error
        try:
            return answer_of(reply)
        except Unavailable:
            raise
        except BatonError as error:
            text = f"{error.message} (asked {self.url}; --url names another router)"
            raise BatonError(text) from error

    def timeline(self, name: str) -> dict[str, Any]:
        return self.get(f"/v1/requests/{quote(name, safe='')}/timeline")

    def perfetto(self, name: str) -> dict[str, Any]:
        """Return a timeline for ui.perfetto.dev and chrome://tracing."""
        return self.get(f"/v1/requests/{quote(name, safe='')}/timeline?format=perfetto")

    def slowest(self) -> str:
        """Return the id of the slowest request. Raises BatonError if none has ended."""
        found = self.requests(slowest=True, count=1)
        if not found:
            raise BatonError("no request has ended yet")
        return str(found[0]["request_id"])

    def requests(self, slowest: bool, count: int) -> list[dict[str, Any]]:
        return self.get(f"/v1/requests?slowest={str(slowest).lower()}&limit={count}")["data"]


def requests_table(requests: list[dict[str, Any]], width: int) -> Table:
    """Return one row per request: what to give to `baton trace`, and as many of its figures as
    `width` columns have room for."""
    if not requests:
        return _table([("request", False, ["no request has ended yet"])])
    wanted = (*(column for column in COLUMNS if column[0] in FIRST), *COLUMNS)
    names, left = {"request"}, width - max(map(len, _ids(requests)))
    for name, _, value in dict.fromkeys(wanted):
        need = GAP + max(len(name), *(len(value(each)) for each in requests))
        if name not in names and need <= left:
            names.add(name)
            left -= need
    shown = [(name, right, [value(each) for each in requests])
             for name, right, value in COLUMNS if name in names]  # fmt: skip
    return _table([("request", False, _ids(requests)), *shown])


def _table(columns: Sequence[tuple[str, bool, Sequence[RenderableType]]]) -> Table:
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False)
    for name, right, _ in columns:
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    for row in zip(*(cells for _, _, cells in columns), strict=True):
        table.add_row(*row)
    return table


def _ids(requests: list[dict[str, Any]]) -> list[str]:
    """Return the shortest ids that name the requests: of replies, unless two have the same."""
    whole = [str(each["request_id"]) for each in requests]
    replies = [name.rpartition("-")[0] or name for name in whole]
    return replies if len(set(replies)) == len(replies) else whole


def view(timeline: dict[str, Any], width: int) -> RenderableType:
    """Return a request's head line and a bar per span, on a screen of `width` columns."""
    outcome = timeline["error"] or timeline["outcome"].lower()
    head = Text.assemble(
        (timeline["request_id"], "bold"),
        f"  {outcome} in {timeline['total_ms']:.1f} ms;"
        f" {timeline['prompt_tokens']} prompt tokens ({timeline['cached_tokens']} cached),"
        f" {timeline['output_tokens']} output tokens, {timeline['retries']} retries",
    )
    log = timeline.get("log")  # of a resumable request; older routers tell none
    if log:
        took = f"{log['total_ms']:.1f} ms, the longest {log['longest_ms']:.1f} ms"
        head.append(f"\n{log['appends']} log appends took {took}")
    spans = sorted(
        timeline["stages"] + timeline["transfers"] + (log["longest"] if log else []),
        key=lambda span: (span["start_ms"], span["end_ms"]),
    )
    rows: list[dict[str, Any]] = []
    for span in spans:
        rows.append(span)
        for part in span.get("parts", ()):
            rows += (part, *part.get("layers", ()))
    columns = [
        (name, right, [value(each) for each in rows])
        for name, right, value in (
            ("stage", False, _stage), ("node", False, lambda it: Text(it.get("node") or "")),
            ("start ms", True, lambda it: Text(f"{it['start_ms']:.1f}")),
            ("took ms", True, lambda it: Text(f"{it['end_ms'] - it['start_ms']:.1f}")),
            ("tokens", True, _tokens),
        )
    ]  # fmt: skip
    taken = sum(GAP + max(len(name), *map(len, cells)) for name, _, cells in columns)
    cells = max(NARROWEST_BAR, width - taken)
    bars = [bar(each, timeline["total_ms"], cells) for each in rows]
    table = _table([*columns, ("", False, bars)])
    reasons = [
        Text(f"epoch {span['epoch']} failed: {span['why']}", "red")
        for span in timeline["stages"]
        if span.get("why")
    ]
    return Group(head, Text(), table, *reasons)


def _stage(span: dict[str, Any]) -> Text:
    if "stage" in span:
        return Text(span["stage"], _color(span))
    return Text(("    " if "first" in span else "  ") + part_name(span))


def _tokens(span: dict[str, Any]) -> Text:
    first, last = span.get("tokens") or (0, 0)
    return Text(f"{last - first}" if last > first else "")


def part_name(part: dict[str, Any]) -> str:
    """Return what a node did, with its figures: `fetch 15 MB shm`, `layers 0-3 2 MB`, `compute in
    3 chunks`."""
    if part.get("kv_bytes"):
        kb = part["kv_bytes"] / 1000
        size = f"{kb:.0f} kB" if kb < MOST_KB else f"{kb / 1000:.0f} MB"
        return f"{part['name']} {size} {part.get('lane', '')}".rstrip()
    chunks = part.get("chunks", 0)
    return f"{part['name']} in {chunks} chunks" if chunks > 1 else str(part["name"])


def _color(span: dict[str, Any]) -> str:
    return COLORS.get(span.get("stage", ""), "")


def bar(span: dict[str, Any], total_ms: float, cells: int) -> Text:
    """Return a line of `cells` columns: the span as a bar, at its place. A span that took any time
    has at least one cell; a part of a stage is drawn thinner, and what lies beside the stages as a
    line."""
    scale = cells / total_ms if total_ms > 0 else 0.0
    start = min(cells - 1, int(span["start_ms"] * scale))
    end = max(start + 1, min(cells, round(span["end_ms"] * scale)))
    stage = span.get("stage", "")
    mark = "━" if stage in BESIDE else "█" if stage else "░" if "first" in span else "▒"
    return Text(" " * start + mark * (end - start), _color(span))
