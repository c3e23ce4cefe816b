"""Timelines beside their clients' clocks: `python -m bench.client_clock [--requests N]`.

`baton up` serves the demo model in processes of its own. Requests of many kinds are sent, some at a
time, over raw sockets: the clock of a request starts when its head is written, reads the first byte
of the answer's body, and stops at its last. Before each, the same client asks for /health, for
which the router does next to nothing: the floor. Then each timeline is asked for.

Printed per kind: the client's time less the timeline's, of the whole request and to the first token
of a stream; median, 99th percentile and most. What is left is the way through the kernel, and how
long client and router wait for a core; the floor has the same. A timeline with a hole or an overlap
is an error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

from baton.protocol.errors import ConfigError
from bench.cluster import cluster

CHAT: Final = "/v1/chat/completions"
TEXT: Final = "/v1/completions"
TOKENS: Final = 24
WORDS: Final = ("prefill", "decode", "cache", "block", "token", "request", "node", "step", "lane")
MOST_HOLE_MS: Final = 1.0
RESUMABLE: Final = "x-baton-resumable: 60\r\n"


@dataclass(frozen=True, slots=True)
class ClockKind:
    """One kind of request: the path, the fields of its body beside the prompt, more headers."""

    name: str
    path: str
    fields: dict[str, Any]
    words: int = 40
    headers: str = ""

    def body(self, index: int) -> bytes:
        """Return the body of the request number `index`; no two prompts begin alike."""
        steps = range(index, index + self.words * (1 + index % 7), 1 + index % 7)
        text = " ".join([str(index), *(WORDS[step % len(WORDS)] for step in steps)])
        given: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
        if self.path == TEXT:
            given = {"prompt": text}
        elif self.path == "/v1/embeddings":
            given = {"input": [text, text[::-1]]}
        limits = {} if self.path == "/v1/embeddings" else {"max_tokens": TOKENS}
        return json.dumps({**given, **limits, **self.fields}).encode()


KINDS: Final = (
    ClockKind("chat, streamed", CHAT, {"stream": True}),
    ClockKind("chat, not streamed", CHAT, {}),
    ClockKind("text, streamed", TEXT, {"stream": True, "ignore_eos": True}),
    ClockKind("8 KB of text, streamed", TEXT, {"stream": True}, words=1200),
    ClockKind("n = 3", TEXT, {"n": 3, "temperature": 0.9}),
    ClockKind("beams", TEXT, {"n": 2, "best_of": 2, "use_beam_search": True, "temperature": 0}),
    ClockKind("one token", TEXT, {"max_tokens": 1}),
    ClockKind("stop text, streamed", TEXT, {"stream": True, "stop": ["e ", "a "]}),
    ClockKind("embeddings", "/v1/embeddings", {}),
    ClockKind("resumable, streamed", TEXT, {"stream": True}, headers=RESUMABLE),
)


@dataclass(frozen=True, slots=True)
class ClientTimes:
    """What a client saw of one request, in milliseconds. `name`: the request's id. `floor_ms`: how
    long /health took just before."""

    kind: ClockKind
    name: str
    status: int
    first_ms: float
    total_ms: float
    floor_ms: float


async def ask(host: str, port: int, kind: ClockKind, index: int) -> ClientTimes:
    """Send one request on a connection of its own, which is open before the clock starts."""
    reader, writer = await asyncio.open_connection(host, port)
    began = perf_counter()
    writer.write(f"GET /health HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
    await reader.readuntil(b"}")
    floor_ms = (perf_counter() - began) * 1000
    name, body = f"clock-{index}", kind.body(index)
    head = (
        f"POST {kind.path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"x-request-id: {name}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
    )
    began = perf_counter()
    writer.write(f"{head}{kind.headers}\r\n".encode() + body)
    answer = await reader.readuntil(b"\r\n\r\n")
    first = await reader.read(1)
    first_ms = (perf_counter() - began) * 1000
    while first:
        first = await reader.read(1 << 16)
    total_ms = (perf_counter() - began) * 1000
    writer.close()
    return ClientTimes(kind, name, int(answer.split()[1]), first_ms, total_ms, floor_ms)


async def timeline(host: str, port: int, name: str) -> dict[str, Any] | None:
    """Return the timeline of a request; None if it has none."""
    reader, writer = await asyncio.open_connection(host, port)
    path = f"/v1/requests/{name}/timeline"
    writer.write(f"GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
    answer = await reader.read(-1)
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return json.loads(body) if head.split()[1] == b"200" else None


def check_whole(told: dict[str, Any]) -> None:
    """Raise ConfigError if the stages leave a hole, overlap, or do not reach the end."""
    at = 0.0
    for stage in told["stages"]:
        if abs(stage["start_ms"] - at) > MOST_HOLE_MS:
            raise ConfigError(f"{told['request_id']}: a hole before {stage}")
        at = stage["end_ms"]
    if abs(told["total_ms"] - at) > MOST_HOLE_MS:
        raise ConfigError(f"{told['request_id']}: its stages end at {at} of {told['total_ms']} ms")


async def measure(
    url: str, requests: int, at_once: int
) -> list[tuple[ClientTimes, dict[str, Any]]]:
    """Ask for `requests` in turns of all kinds; return what clients and timelines say of them."""
    host, _, port = url.removeprefix("http://").partition("/")[0].partition(":")
    room = asyncio.Semaphore(at_once)

    async def one(index: int) -> ClientTimes:
        async with room:
            return await ask(host, int(port), KINDS[index % len(KINDS)], index)

    for index in range(len(KINDS)):  # nothing is compiled or imported for the first time later
        await ask(host, int(port), KINDS[index], requests + index)
    found = await asyncio.gather(*(one(index) for index in range(requests)))
    pairs: list[tuple[ClientTimes, dict[str, Any]]] = []
    for each in found:
        told = await timeline(host, int(port), each.name)
        if told is None and each.status == 200:
            raise ConfigError(f"{each.name}, {each.kind.name}: it has no timeline")
        if told is not None:
            check_whole(told)
            pairs.append((each, told))
    return pairs


def show(pairs: Sequence[tuple[ClientTimes, dict[str, Any]]], console: Console) -> None:
    columns = ("requests", "whole: p50", "p99", "most", "first token: p50", "p99", "most")
    table = Table("client less timeline, ms", *columns, box=box.SIMPLE)
    for kind in (*KINDS, None):
        mine = [pair for pair in pairs if kind in (None, pair[0].kind)]
        whole = [seen.total_ms - told["total_ms"] for seen, told in mine]
        first = [
            seen.first_ms - told["ttft_ms"]
            for seen, told in mine
            if seen.kind.fields.get("stream") and told["ttft_ms"] is not None
        ]
        name = "all" if kind is None else kind.name
        table.add_row(name, str(len(mine)), *_figures(whole), *_figures(first))
    floor = [seen.floor_ms for seen, _ in pairs]
    table.add_row("/health, all of it", str(len(floor)), *_figures(floor))
    console.print(table)


def _figures(values: Sequence[float]) -> list[str]:
    ranked = sorted(values)
    if not ranked:
        return ["", "", ""]
    places = (len(ranked) // 2, min(len(ranked) - 1, round(0.99 * len(ranked))), -1)
    return [f"{ranked[place]:.2f}" for place in places]


async def run(given: argparse.Namespace) -> list[tuple[ClientTimes, dict[str, Any]]]:
    flags = ("--model", str(given.model), "--log-level", "warning", *given.flags)
    async with cluster(flags) as ready:
        return await measure(ready["url"], given.requests, given.at_once)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.client_clock", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--model", type=Path, default=Path("demo_model"))
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("flags", nargs="*", help="further flags of `baton up`, after --")
    show(asyncio.run(run(parser.parse_args(arguments))), Console(width=120))
    return 0


if __name__ == "__main__":
    sys.exit(main())
