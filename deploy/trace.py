"""`baton trace`: where the time of one request went, as bars in the terminal.

It reads `/v1/requests/{id}/timeline` of a router, which can also write it for Perfetto.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import httpx
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.protocol.errors import BatonError, Unavailable

TIMEOUT_S: Final = 10.0
NARROWEST_BAR: Final = 10  # cells
FIXED_COLUMNS: Final = 76  # what the other columns of the table need
MOST_KB: Final = 10_000  # more is told in MB
ID_COLUMNS: Final = 45  # a reply's id: `baton trace` needs all of it
COLORS: Final = {
    "intake": "white",
    "elsewhere": "bright_black",
    "gate": "bright_black",
    "placement": "yellow",
    "prefill": "green",
    "hand-over": "cyan",
    "decode": "blue",
    "migration": "magenta",
    "retry": "red",
    "pooling": "green",
    "reply": "white",
    "transfer": "bright_cyan",
}


@dataclass(frozen=True, slots=True)
class TimelineSource:
    """A router's HTTP address, the key to show, and how to check its certificate."""

    url: str
    key: str | None = None
    trust: ssl.SSLContext | None = None

    def get(self, path: str) -> Any:
        """Return the JSON that the router answers. Raises BatonError with its message."""
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            with httpx.Client(
                verify=self.trust or True, trust_env=False, timeout=TIMEOUT_S
            ) as client:
                reply = client.get(self.url.rstrip("/") + path, headers=headers)
        except httpx.HTTPError as error:
            raise Unavailable(f"no router answers at {self.url}: {error}") from error
        try:
            told = reply.json()
        except ValueError as error:
            raise Unavailable(f"{self.url} is not a Baton router") from error
        if not reply.is_success:
            text = told.get("error", {}).get("message") if isinstance(told, dict) else None
            raise BatonError(str(text or f"{self.url} answered {reply.status_code}"))
        return told

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


def requests_table(requests: list[dict[str, Any]]) -> Table:
    """Return one row per request: what to give to `baton trace`, and its figures."""
    table = Table(box=box.SIMPLE, padding=(0, 1))
    table.add_column("request", no_wrap=True, min_width=ID_COLUMNS)
    for name in ("total ms", "TTFT ms", "prompt", "output", "retries"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("outcome", "prefill", "decode"):
        table.add_column(name)
    for each in requests:
        first = each["ttft_ms"]
        table.add_row(
            each["request_id"],
            f"{each['total_ms']:.1f}",
            "-" if first is None else f"{first:.1f}",
            str(each["prompt_tokens"]),
            str(each["output_tokens"]),
            str(each["retries"]),
            each["error"] or each["outcome"].lower(),
            each["prefill_node"] or "-",
            each["decode_node"] or "-",
        )
    if not requests:
        table.add_row("no request has ended yet")
    return table


def view(timeline: dict[str, Any], width: int) -> RenderableType:
    """Return a request's head line and a bar per span, on a screen of `width` columns."""
    outcome = timeline["error"] or timeline["outcome"].lower()
    head = Text.assemble(
        (timeline["request_id"], "bold"),
        f"  {outcome} in {timeline['total_ms']:.1f} ms;"
        f" {timeline['prompt_tokens']} prompt tokens ({timeline['cached_tokens']} cached),"
        f" {timeline['output_tokens']} output tokens, {timeline['retries']} retries",
    )
    table = Table(box=box.SIMPLE, padding=(0, 1), pad_edge=False)
    for name in ("stage", "node"):
        table.add_column(name, no_wrap=True)
    for name in ("start ms", "took ms", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    cells = max(NARROWEST_BAR, width - FIXED_COLUMNS)
    spans = sorted(
        timeline["stages"] + timeline["transfers"],
        key=lambda span: (span["start_ms"], span["end_ms"]),
    )
    for span in spans:
        table.add_row(*_cells(span, timeline["total_ms"], cells))
        for part in span.get("parts", ()):
            table.add_row(*_cells(part, timeline["total_ms"], cells))
    reasons = [
        Text(f"epoch {span['epoch']} failed: {span['why']}", "red")
        for span in timeline["stages"]
        if span.get("why")
    ]
    return Group(head, table, *reasons)


def _cells(span: dict[str, Any], total_ms: float, cells: int) -> tuple[RenderableType, ...]:
    """Return a row of the table, for a stage or for a part of one."""
    first, last = span.get("tokens") or (0, 0)
    name = Text(span["stage"], _color(span)) if "stage" in span else Text("  " + part_name(span))
    return (
        name,
        span.get("node") or "",
        f"{span['start_ms']:.1f}",
        f"{span['end_ms'] - span['start_ms']:.1f}",
        f"{last - first}" if last > first else "",
        bar(span, total_ms, cells),
    )


def part_name(part: dict[str, Any]) -> str:
    """Return what a node did, with its figures: `fetch 15 MB shm`, `compute in 3 chunks`."""
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
    has at least one cell; a part of a stage is drawn thinner."""
    scale = cells / total_ms if total_ms > 0 else 0.0
    start = min(cells - 1, int(span["start_ms"] * scale))
    end = max(start + 1, min(cells, round(span["end_ms"] * scale)))
    mark = "▒" if "stage" not in span else "━" if span["stage"] == "transfer" else "█"
    return Text(" " * start + mark * (end - start), _color(span))
