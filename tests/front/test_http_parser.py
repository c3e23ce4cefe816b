"""What stands between a connection's bytes and uvicorn's protocol, without a socket."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import httptools
import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from router.server.http_parser import MAX_FRAMING, MAX_PIPELINED, BoundedParser, ParserPhase

EXTRA = 1000
GET = b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST /a HTTP/1.1\r\nhost: x\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"


class Pipe(asyncio.Transport):
    """Keeps what is written before it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        if not self.closed:
            self.written += bytes(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


@dataclass
class Handler:
    """Answers each request when it is let go; keeps scopes, and bodies that were whole."""

    go: asyncio.Event = field(default_factory=asyncio.Event)
    scopes: list[Scope] = field(default_factory=list[Scope])
    bodies: list[bytes] = field(default_factory=list[bytes])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            more = message["more_body"]
        self.bodies.append(body)
        await self.go.wait()
        head = {
            "type": "http.response.start",
            "status": 200,
            "headers": [(b"content-length", b"0")],
        }
        await send(head)
        await send({"type": "http.response.body", "body": b""})


class Wire:
    """A connection to `handler`: bytes in by `feed`."""

    def __init__(self) -> None:
        self.handler, self.pipe = Handler(), Pipe()
        config = Config(self.handler, ws="none", lifespan="off", log_config=None, access_log=False)
        self.state = ServerState()
        self.protocol = HttpToolsProtocol(config, self.state, {})
        self.parser = BoundedParser(self.protocol, EXTRA)
        self.protocol.parser = cast("httptools.HttpRequestParser", self.parser)
        self.protocol.connection_made(self.pipe)

    def feed(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.protocol.data_received(piece)

    async def answered(self) -> bytes:
        """Everything that is written once the handler may answer."""
        self.handler.go.set()
        while self.state.tasks:
            await asyncio.gather(*self.state.tasks)
        return self.pipe.written

    async def dropped(self) -> bytes:
        """Likewise, the connection having ended before."""
        self.protocol.connection_lost(None)
        return await self.answered()


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_a_request_is_the_same_however_it_is_cut(size: int) -> None:
    wire, raw = Wire(), CHUNKED + b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\na: b\r\n\r\n"
    wire.feed(*(raw[at : at + size] for at in range(0, len(raw), size)))
    assert wire.parser.phase is ParserPhase.NOTHING
    assert (await wire.answered()).startswith(b"HTTP/1.1 200")
    assert wire.handler.bodies == [b"abcde"]


async def test_phases_follow_the_bytes() -> None:
    wire = Wire()
    assert wire.parser.phase is ParserPhase.HEAD
    wire.feed(POST + b"content-length: 2\r\n")
    assert wire.parser.phase is ParserPhase.HEAD
    wire.feed(b"\r\na")
    assert wire.parser.phase is ParserPhase.BODY
    assert wire.parser.may_answer
    wire.feed(b"b")
    assert wire.parser.phase is ParserPhase.NOTHING
    assert wire.parser.is_behind
    await wire.answered()
    assert not wire.parser.is_behind


async def test_trailers_are_no_headers() -> None:
    wire = Wire()
    wire.feed(CHUNKED, b"0\r\nauthorization: Bearer k\r\n\r\n")
    await wire.answered()
    assert [name for name, _ in wire.handler.scopes[0]["headers"]] == [
        b"host",
        b"transfer-encoding",
    ]


@pytest.mark.parametrize("target", [b"http://x/health", b"//v1/models", b"/a?b#c", b"/%61/b"])
async def test_a_target_is_what_was_sent(target: bytes) -> None:
    wire = Wire()
    wire.feed(b"GET " + target + b" HTTP/1.1\r\nhost: x\r\n\r\n")
    await wire.answered()
    scope = wire.handler.scopes[0]
    path, _, query = target.partition(b"?")
    assert (scope["raw_path"], scope["query_string"]) == (path, query)
    assert scope["path"] == path.decode().replace("%61", "a")


@pytest.mark.parametrize(
    "raw",
    [
        CHUNKED + b"1;" + b"a" * 2 * EXTRA,
        CHUNKED + b"0\r\n" + b"a: b\r\n" * EXTRA,
        POST + b"a: " + b"b" * 2 * EXTRA,
        b"\r\n" * EXTRA,
    ],
    ids=["extension", "trailers", "head", "empty lines"],
)
async def test_what_is_no_body_is_bounded(raw: bytes) -> None:
    wire = Wire()
    for at in range(0, len(raw), 100):
        if wire.pipe.closed:
            break
        wire.feed(raw[at : at + 100])
    assert wire.pipe.closed
    assert (await wire.dropped()).startswith(b"HTTP/1.1 400")
    assert wire.handler.bodies == []


async def test_a_body_in_the_smallest_chunks_is_taken() -> None:
    wire, count = Wire(), EXTRA
    wire.feed(CHUNKED, b"1\r\na\r\n" * count, b"0\r\n\r\n")
    assert count * MAX_FRAMING > EXTRA
    assert (await wire.answered()).startswith(b"HTTP/1.1 200")
    assert wire.handler.bodies == [b"a" * count]


async def test_what_cannot_be_read_is_not_answered_in_the_place_of_another() -> None:
    wire = Wire()
    wire.feed(GET + b"\x00garbage")
    assert wire.pipe.closed
    assert await wire.dropped() == b""


async def test_a_refused_request_gets_no_second_answer() -> None:
    wire = Wire()
    wire.feed(CHUNKED + b"zz\r\n")
    assert (await wire.answered()).count(b"HTTP/1.1") == 1
    assert wire.pipe.written.startswith(b"HTTP/1.1 400")


async def test_requests_in_a_row_are_answered_in_order_and_bounded() -> None:
    wire = Wire()
    wire.feed(GET * 3)
    assert (await wire.answered()).count(b"HTTP/1.1 200") == 3
    wire = Wire()
    wire.feed(GET * (MAX_PIPELINED + 3))
    assert wire.pipe.closed
    assert await wire.dropped() == b""


async def test_an_upgrade_is_answered_as_any_other_request_and_the_last() -> None:
    wire = Wire()
    wire.feed(GET[:-2] + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n" + GET)
    answer = await wire.answered()
    assert answer.count(b"HTTP/1.1 200") == 1
    assert b"connection: close" in answer
    assert wire.pipe.closed
