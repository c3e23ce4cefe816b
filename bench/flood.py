"""What one key's flood of expensive requests does to another key's chats.

    python -m bench.flood [--seconds 10] [--routes tokenize,body] [--json]

There is one router, `baton up` with two keys. A client with the second key asks for short chats,
one after another: first alone, then while eight connections of the first key send the same
expensive request as fast as they are answered. Every flood is measured against the quiet seconds
just before it, in the same run. Times are those to the first token. The memory that the router
holds after the flood is measured, too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from bench.children import ended
from bench.cluster import cluster
from bench.measure import percentile
from bench.sse import parse_lines_async

KEYS: Final = """
[[keys]]
name = "flood"
key = "flood"
max_concurrency = 6

[[keys]]
name = "victim"
key = "victim"
"""
CONNECTIONS: Final = 8
SETTLE_S: Final = 1.0  # from the flood's start to the first chat that counts
PAUSE_S: Final = 0.02  # between two chats
_TOOL: Final = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def _words(num_bytes: int) -> str:
    return ("the quick brown fox jumps over the lazy dog. " * (num_bytes // 45 + 1))[:num_bytes]


def _chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1, **fields}


def _many_messages(_: int) -> dict[str, Any]:
    return _chat(messages=[{"role": "user", "content": "a < b"}] * 20_000, tools=[_TOOL] * 200)


def _grammar(turn: int) -> dict[str, Any]:
    schema = {"type": "integer", "multipleOf": 9_000_011 + turn}
    return _chat(response_format={"type": "json_schema", "json_schema": {"schema": schema}})


# Route -> path, and a function that returns the body of its n-th request.
FLOODS: Final[dict[str, tuple[str, Callable[[int], dict[str, Any]]]]] = {
    "tokenize": ("/tokenize", lambda _: {"prompt": _words(4 << 20)}),
    "tokenize_fitting": ("/tokenize", lambda _: {"prompt": _words(150 << 10)}),
    "detokenize": ("/detokenize", lambda _: {"tokens": [70] * 1_000_000}),
    "template": ("/v1/chat/completions", _many_messages),
    "count_tokens": ("/v1/messages/count_tokens", _many_messages),
    "grammar": ("/v1/chat/completions", _grammar),
    "embeddings": ("/v1/embeddings", lambda _: {"input": [_words(1000)] * 2048}),
    "text_body": ("/v1/completions", lambda _: {"prompt": _words((8 << 20) - 64)}),
    "body": ("/v1/chat/completions", lambda _: _chat(metadata=[{"a": [1]}] * 32_000)),
}


@dataclass(frozen=True, slots=True)
class FloodRow:
    """The row of one route.

    `failed`: chats that were refused; milliseconds are those of the other chats. `answered`: the
    flood's requests by status. Memory is the router's, in MiB.
    """

    route: str
    failed: int
    quiet_p50: float
    quiet_p99: float
    flood_p50: float
    flood_p99: float
    answered: dict[str, int]
    router_before: float
    router_after: float

    @property
    def ratio(self) -> float:
        return self.flood_p99 / self.quiet_p99


async def measure(routes: list[str], seconds: float, flags: list[str]) -> list[FloodRow]:
    """Measure each route's flood against the quiet time before it."""
    rows: list[FloodRow] = []
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.toml"
        keys.write_text(KEYS)
        async with cluster(["--api-keys", str(keys), *flags]) as ready:
            router = _router_pid(os.getpid())
            async with httpx.AsyncClient(timeout=120.0) as client:
                await _chats(client, ready["url"], 2.0)  # warm
                for route in routes:
                    rows.append(await _row(client, ready["url"], route, seconds, router))
                    sys.stderr.write(_line(rows[-1]) + "\n")
    return rows


async def _row(
    client: httpx.AsyncClient, url: str, route: str, seconds: float, router: int
) -> FloodRow:
    before = _rss_mib(router)
    quiet = await _chats(client, url, seconds)
    async with _flood(route, url) as answered:
        await asyncio.sleep(SETTLE_S)
        flooded = await _chats(client, url, seconds)
    await asyncio.sleep(SETTLE_S)
    served = [each for each in flooded if each is not None]
    (q50, q99), (f50, f99) = _milliseconds([it for it in quiet if it]), _milliseconds(served)
    failed = len(flooded) - len(served)
    return FloodRow(route, failed, q50, q99, f50, f99, answered, before, _rss_mib(router))


def _milliseconds(seconds: list[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile."""
    ordered = sorted(seconds)
    return percentile(ordered, 0.5) * 1e3, percentile(ordered, 0.99) * 1e3


async def _chats(client: httpx.AsyncClient, url: str, seconds: float) -> list[float | None]:
    """Return the times to the first token of chats, one after another; None for a refused chat."""
    found: list[float | None] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        body = _chat(max_tokens=2, stream=True)
        began = time.monotonic()
        headers = {"authorization": "Bearer victim"}
        path = f"{url}/v1/chat/completions"
        async with client.stream("POST", path, json=body, headers=headers) as reply:
            if reply.status_code != 200:
                found.append(None)
                continue
            async for chunk in parse_lines_async(reply.aiter_lines()):
                if any("content" in choice["delta"] for choice in chunk["choices"]):
                    found.append(time.monotonic() - began)
                    break
        await asyncio.sleep(PAUSE_S)
    return found


@contextlib.asynccontextmanager
async def _flood(route: str, url: str) -> AsyncGenerator[dict[str, int], None]:
    """Run a process that floods. Its counts are there after it has ended."""
    command = [sys.executable, "-m", "bench.flood", "--attack", route, "--url", url]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    answered: dict[str, int] = {}
    try:
        yield answered
    finally:
        try:
            told, _ = await process.communicate(b"")
            answered.update(json.loads(told or b"{}"))
        finally:
            await ended(process, 10.0)


async def attack(route: str, url: str) -> dict[str, int]:
    """Flood until the input ends; return how many answers had each status."""
    path, body_of = FLOODS[route]
    answered: Counter[str] = Counter()
    turn = 0
    same = json.dumps(body_of(0)).encode()
    headers = {"authorization": "Bearer flood", "content-type": "application/json"}

    async def send(client: httpx.AsyncClient) -> None:
        nonlocal turn
        while True:
            turn += 1
            body = json.dumps(body_of(turn)).encode() if route == "grammar" else same
            try:
                reply = await client.post(url + path, content=body, headers=headers)
                answered[str(reply.status_code)] += 1
                if reply.status_code == 429:
                    await asyncio.sleep(0.02)
            except httpx.HTTPError as error:
                answered[type(error).__name__] += 1

    async with httpx.AsyncClient(timeout=120.0) as client:
        senders = [asyncio.create_task(send(client)) for _ in range(CONNECTIONS)]
        await asyncio.to_thread(sys.stdin.buffer.read)
        for sender in senders:
            sender.cancel()
        await asyncio.gather(*senders, return_exceptions=True)
    return dict(answered)


def _router_pid(parent: int) -> int:
    """Return the pid of the router below the launcher that this process has started."""
    for task in Path(f"/proc/{parent}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            if b"router" in Path(f"/proc/{child}/cmdline").read_bytes():
                return child
            with contextlib.suppress(LookupError):
                return _router_pid(child)
    raise LookupError("no router")


def _rss_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def _line(row: FloodRow) -> str:
    return (
        f"{row.route:<17} quiet {row.quiet_p50:6.1f} / {row.quiet_p99:6.1f} ms   flood"
        f" {row.flood_p50:7.1f} / {row.flood_p99:7.1f} ms   {row.ratio:5.1f}x   router"
        f" {row.router_before:4.0f} -> {row.router_after:4.0f} MiB   {row.failed} refused  "
        f" {row.answered}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--routes", default=",".join(FLOODS))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    given, flags = parser.parse_known_args()
    if given.attack:
        sys.stdout.write(json.dumps(asyncio.run(attack(given.attack, given.url))))
        return
    rows = asyncio.run(measure(given.routes.split(","), given.seconds, flags))
    if given.json:
        sys.stdout.write(json.dumps([{**asdict(row), "ratio": row.ratio} for row in rows]) + "\n")
    worst = max(rows, key=lambda row: row.ratio)
    sys.stdout.write(f"worst: {worst.route}, {worst.ratio:.1f} times the quiet p99\n")


if __name__ == "__main__":
    main()
