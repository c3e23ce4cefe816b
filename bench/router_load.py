"""The clients of bench/router.py: `python -m bench.router_load MODE`, in their own process.

They use raw HTTP/1.1 over asyncio protocols that look for marks instead of parsing, because they
share a core with the fake nodes and must not be what is measured. Modes:

    whole     keep-alive connections; each sends its next request when the answer has come
    streams   one streamed request per connection, to its end; `--slow` adds some that never read
    first     streamed requests at a fixed rate over kept connections: time to the first byte

Tokens are counted as spaces: every token of the fake nodes and of the yardstick is a word after a
space, and a frame has no other space than the one after `data:`.

Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import orjson
import uvloop

from bench.measure import distribution

DONE: Final = b"data: [DONE]"
ERROR: Final = b'{"error":'  # in the middle of a stream
NUMBER: Final = b"00000000"  # of the request, in its prompt: no two are alike, so none is known
WORDS: Final = "the quick brown fox jumps over the lazy dog and runs away from it "
_NUMBERS: Final = itertools.count(1)
_LENGTH: Final = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_ID: Final = re.compile(rb'"id":"([^"]+)"')


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What to ask, and whom. Prompts have `words` words, answers `tokens` tokens."""

    host: str
    port: int
    path: str
    connections: int
    seconds: float
    words: int
    tokens: int
    model: str = ""  # its name, if the server wants one

    def request(self, stream: bool) -> bytes:
        words = (WORDS * (self.words // 13 + 1)).split()[: self.words - 1]
        prompt = " ".join([NUMBER.decode(), *words])
        body = orjson.dumps(
            {
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": self.tokens,
                "ignore_eos": True,
                "stream": stream,
                **({"model": self.model} if self.model else {}),
            }
        )
        head = f"POST {self.path} HTTP/1.1\r\nhost: {self.host}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        return head.encode() + body


@dataclass(slots=True)
class RouterFigures:
    """What all connections have seen. Times are in seconds."""

    answers: int = 0
    failures: int = 0
    tokens: int = 0
    frames: int = 0
    latency_s: list[float] = field(default_factory=list[float])
    first_s: list[float] = field(default_factory=list[float])
    arrivals: dict[str, list[float]] = field(default_factory=dict[str, list[float]])


class Connection(asyncio.Protocol):
    """The base of both kinds: sends `request`, notes what comes, and calls `answered` at its
    end.
    """

    def __init__(self, request: bytes, found: RouterFigures) -> None:
        self._parts = request.partition(NUMBER)
        self._found = found
        self._transport: asyncio.Transport | None = None
        self.began = 0.0
        self.ended = asyncio.Event()
        self.gone = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def send(self) -> None:
        """Send the next request; the answer to the last one has come."""
        assert self._transport is not None, "connected"
        self.ended.clear()
        self.began = time.monotonic()
        before, number, after = self._parts
        if number:
            number = b"%08d" % next(_NUMBERS)
        self._transport.write(before + number + after)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.gone and not self.ended.is_set():
            self._found.failures += 1
        self.gone = True
        self.ended.set()

    def pause(self) -> None:
        assert self._transport is not None, "connected"
        self._transport.pause_reading()

    def close(self) -> None:
        self.gone = True
        if self._transport is not None:
            self._transport.close()


class WholeAnswer(Connection):
    """Reads answers with a content-length; at the end of each sends the next, until `stop_at`."""

    def __init__(self, request: bytes, found: RouterFigures, stop_at: float) -> None:
        super().__init__(request, found)
        self._stop_at = stop_at
        self._data = b""

    def data_received(self, data: bytes) -> None:
        self._data += data
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            return
        length = _LENGTH.search(self._data, 0, end)
        if length is None or len(self._data) < end + 4 + int(length[1]):
            return
        now = time.monotonic()
        good = self._data.startswith(b"HTTP/1.1 200")
        self._data = b""
        if good:
            self._found.answers += 1
            self._found.latency_s.append(now - self.began)
        else:
            self._found.failures += 1
        if now < self._stop_at:
            self.send()
        else:
            self.ended.set()


class Stream(Connection):
    """Reads a streamed answer: counts frames, and ends at [DONE]."""

    def __init__(self, request: bytes, found: RouterFigures, with_times: bool = False) -> None:
        super().__init__(request, found)
        self._with_times = with_times
        self._start()

    def _start(self) -> None:
        self._tail = b""
        self._tokens = 0
        self._frames = 0
        self._times: list[float] = []
        self._id = ""
        self._told = False
        self._broken = False

    def send(self) -> None:
        self._start()
        super().send()

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        if self.ended.is_set():
            return  # the end of the body, after [DONE]
        if not self._told:
            self._told = True
            self._found.first_s.append(now - self.began)
            if not data.startswith(b"HTTP/1.1 200"):
                self._found.failures += 1
                self.gone = True
                self.ended.set()
                return
            data = data[data.find(b"\r\n\r\n") :]
        text = self._tail + data
        before = self._tail[-1:]  # only that byte may be one half of a mark
        frames = (before + data).count(b": ")
        count = data.count(b" ") - frames
        self._tail = text[-len(DONE) :]  # longer than any mark
        self._frames += frames
        self._tokens += count
        if self._with_times:
            self._times += [now] * count
            if not self._id and (found := _ID.search(text)):
                self._id = found[1].decode()
        self._broken = self._broken or ERROR in text
        if DONE in text[-64:]:
            self._found.answers += not self._broken
            self._found.failures += self._broken
            self._found.tokens += self._tokens
            self._found.frames += self._frames
            self._found.latency_s.append(now - self.began)
            if self._with_times:
                self._found.arrivals[self._id] = self._times
            self.ended.set()


async def connect(plan: LoadPlan, connection: Connection) -> None:
    await asyncio.get_running_loop().create_connection(lambda: connection, plan.host, plan.port)


async def whole(plan: LoadPlan) -> dict[str, Any]:
    """Run a closed loop: as many requests at once as connections."""
    found = RouterFigures()
    stop_at = time.monotonic() + plan.seconds
    connections = [
        WholeAnswer(plan.request(False), found, stop_at) for _ in range(plan.connections)
    ]
    for connection in connections:
        await connect(plan, connection)
    began = time.monotonic()
    for connection in connections:
        connection.send()
    await asyncio.gather(*(connection.ended.wait() for connection in connections))
    lasted = time.monotonic() - began
    for connection in connections:
        connection.close()
    return {"rate": found.answers / lasted, **report(found, lasted)}


@dataclass(frozen=True, slots=True)
class Crowd:
    """How streams come: all within `ramp_s`, beside `slow` that came before and never read."""

    with_times: bool
    slow: int
    ramp_s: float


async def streams(plan: LoadPlan, crowd: Crowd) -> dict[str, Any]:
    """Run all streams to their end; each begins after its share of the ramp."""
    found, ignored = RouterFigures(), RouterFigures()
    idle = [Stream(plan.request(True), ignored) for _ in range(crowd.slow)]
    for connection in idle:
        await connect(plan, connection)
        connection.pause()
        connection.send()
    connections = [
        Stream(plan.request(True), found, crowd.with_times) for _ in range(plan.connections)
    ]
    for connection in connections:
        await connect(plan, connection)
    began = time.monotonic()
    for number, connection in enumerate(connections):
        due = began + crowd.ramp_s * number / len(connections)
        if due > time.monotonic():
            await asyncio.sleep(due - time.monotonic())
        connection.send()
    await asyncio.gather(*(connection.ended.wait() for connection in connections))
    lasted = time.monotonic() - began
    for connection in (*connections, *idle):
        connection.close()
    arrivals = {"arrivals": found.arrivals} if crowd.with_times else {}
    return {"rate": found.tokens / lasted, **report(found, lasted), **arrivals}


async def first(plan: LoadPlan, rate: float) -> dict[str, Any]:
    """Send requests at `rate` per second in all; each connection has one at a time."""
    found = RouterFigures()
    connections = [Stream(plan.request(True), found) for _ in range(plan.connections)]
    for connection in connections:
        await connect(plan, connection)
    began = time.monotonic()
    loop = asyncio.get_running_loop()

    async def drive(number: int, connection: Stream) -> None:
        due = loop.time() + number / rate
        while not connection.gone and time.monotonic() < began + plan.seconds:
            await asyncio.sleep(max(0.0, due - loop.time()))
            connection.send()
            await connection.ended.wait()
            due += len(connections) / rate

    await asyncio.gather(*(drive(i, one) for i, one in enumerate(connections)))
    lasted = time.monotonic() - began
    for connection in connections:
        connection.close()
    return report(found, lasted)


def report(found: RouterFigures, lasted_s: float) -> dict[str, Any]:
    """Return the counts, and the distributions in milliseconds."""
    result: dict[str, Any] = {
        "seconds": lasted_s,
        "answers": found.answers,
        "failures": found.failures,
        "tokens": found.tokens,
        "frames": found.frames,
    }
    for name, values in (("latency_ms", found.latency_s), ("first_ms", found.first_s)):
        known = distribution(values)
        if known is not None:
            result[name] = {"p50": known.p50, "p90": known.p90, "p99": known.p99}
    return result


async def run(given: argparse.Namespace) -> dict[str, Any]:
    plan = LoadPlan(
        given.host, given.port, given.path, given.connections, given.seconds, given.words,
        given.tokens, given.model,
    )  # fmt: skip
    if given.mode == "whole":
        return await whole(plan)
    if given.mode == "first":
        return await first(plan, given.rate)
    return await streams(plan, Crowd(given.with_times, given.slow, given.ramp_s))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.router_load")
    parser.add_argument("mode", choices=("whole", "streams", "first"))
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--path", default="/v1/chat/completions")
    parser.add_argument("--model", default="", help="the name in each body")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--words", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--slow", type=int, default=0, help="connections that never read")
    parser.add_argument("--ramp-s", type=float, default=0.0, help="all streams begin within it")
    parser.add_argument("--with-times", action="store_true", help="note when each token came")
    parser.add_argument("--out", type=Path, help="file for the result, instead of stdout")
    given = parser.parse_args(arguments)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        text = json.dumps(runner.run(run(given)))
    if given.out is not None:
        given.out.write_text(text)
    else:
        sys.stdout.write(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
