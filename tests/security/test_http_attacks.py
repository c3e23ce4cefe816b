"""Attacks on the HTTP front door, over real sockets: what each is answered, and that the connection
ends; that no second request is smuggled in; that others are served meanwhile.

Deadlines, drips and the sizes just beyond each limit: tests/front/test_http_guard.py. Clients that
do not read: tests/front/test_slow_readers.py.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import httpx
import pytest

from router.config import RouterConfig
from router.server.http_guard import SPARE_CONNECTIONS, HttpLimits
from tests.front.fakes import Front, serving

PATIENCE_S = 30.0
FAST = HttpLimits(head_s=0.3, body_s=0.3)
GET = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
SECOND = GET + b"\r\n"  # would answer 200 if it were read as a request
KEY = "the-key"
CHUNKED = b"transfer-encoding: chunked"
END = b"0\r\n\r\n"


@dataclass(frozen=True)
class Attack:
    """What is sent, and the status of the one answer."""

    name: str
    raw: bytes
    codes: tuple[int, ...] = (400,)


def framed(headers: bytes, body: bytes = b"") -> bytes:
    return POST + headers + b"\r\n\r\n" + body + SECOND


ATTACKS = [
    # ---- framing: two parsers could disagree about where the request ends
    Attack("length and chunks", framed(b"content-length: 5\r\n" + CHUNKED, END)),
    Attack("chunks and length", framed(CHUNKED + b"\r\ncontent-length: 5", END)),
    Attack("chunked, identity", framed(b"transfer-encoding: chunked, identity", END)),
    Attack("chunked twice", framed(CHUNKED + b"\r\n" + CHUNKED, END)),
    Attack("an unknown encoding", framed(b"transfer-encoding: xchunked", END)),
    Attack("a space before the colon", framed(b"transfer-encoding : chunked", END)),
    Attack("a tab before the colon", framed(b"content-length\t: 5", b"abcde")),
    Attack("two lengths", framed(b"content-length: 5\r\ncontent-length: 6", b"abcde")),
    Attack("a list of lengths", framed(b"content-length: 5, 6", b"abcde")),
    Attack("a signed length", framed(b"content-length: +5", b"abcde")),
    Attack("a negative length", framed(b"content-length: -5", b"abcde")),
    Attack("a hexadecimal length", framed(b"content-length: 0x5", b"abcde")),
    Attack("a length of 30 digits", framed(b"content-length: " + b"9" * 30)),
    Attack("no chunk size", framed(CHUNKED, b"\r\nabc\r\n0\r\n\r\n")),
    Attack("a bad chunk size", framed(CHUNKED, b"zz\r\nab\r\n0\r\n\r\n")),
    Attack("a signed chunk size", framed(CHUNKED, b"-1\r\nab\r\n0\r\n\r\n")),
    Attack("a chunk size of 30 digits", framed(CHUNKED, b"f" * 30 + b"\r\n")),
    Attack("200 KB of chunk extension", framed(CHUNKED, b"1;" + b"a" * 200_000)),
    Attack("50,000 trailers", framed(CHUNKED, b"0\r\n" + b"a: b\r\n" * 50_000)),
    # ---- heads
    Attack("1 MB in one header", GET + b"a: " + b"b" * (1 << 20) + b"\r\n\r\n", (400, 431)),
    Attack("100,000 headers", GET + b"a: b\r\n" * 100_000 + b"\r\n", (400, 431)),
    Attack("101 headers", GET + b"a: b\r\n" * 101 + b"\r\n", (431,)),
    Attack("a name of 9 KB", GET + b"a" * 9000 + b": b\r\n\r\n", (431,)),
    Attack("a target of 5 KB", b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", (414,)),
    Attack("a method of 5 KB", b"A" * 5000 + b" / HTTP/1.1\r\nhost: x\r\n\r\n"),
    Attack("no Host", b"GET /v1/models HTTP/1.1\r\n\r\n"),
    Attack("two Hosts", GET + b"host: y\r\n\r\n"),
    Attack("two equal Hosts", GET + b"host: x\r\n\r\n"),
    Attack("two keys", GET + b"authorization: Bearer a\r\nauthorization: Bearer b\r\n\r\n"),
    Attack("two content types", framed(b"content-type: text/plain\r\ncontent-length: 0")),
    Attack("a lone CR", GET + b"a: b\rc: d\r\n\r\n"),
    Attack("a NUL", GET + b"a: b\x00c\r\n\r\n"),
    Attack("a control character in a name", GET + b"a\x01: b\r\n\r\n"),
    Attack("a header without a colon", GET + b"abc\r\n\r\n"),
    Attack("a header without a name", GET + b": b\r\n\r\n"),
    # ---- other protocols
    Attack("HTTP/0.9", b"GET /v1/models\r\n\r\n", (505,)),
    Attack("HTTP/3.0", b"GET /v1/models HTTP/3.0\r\nhost: x\r\n\r\n", (505,)),
    Attack("HTTP/2's preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    Attack("a TLS hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" + b"\x00" * 40, (400, 408)),
    Attack("random bytes", bytes(range(256)) * 4),
    Attack("an SSH client", b"SSH-2.0-OpenSSH_9.2\r\n\r\n"),
    # ---- unfinished: ended by the deadline
    Attack("nothing at all", b"", (408,)),
    Attack("half a request line", b"GET /he", (408,)),
    Attack("half a head", GET, (408,)),
    Attack("half a body", POST + b"content-length: 100\r\n\r\n{", (408,)),
    Attack("half a chunk", POST + b"transfer-encoding: chunked\r\n\r\n5\r\nab", (408,)),
    Attack("chunks without an end", POST + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n", (408,)),
]  # fmt: skip


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    """All that the server says; fails if it does not close."""
    answer = bytearray()
    async with asyncio.timeout(PATIENCE_S):
        # Reset: it has closed with bytes of ours unread.
        with suppress(ConnectionError):
            while piece := await reader.read(1 << 16):
                answer += piece
    return bytes(answer)


@asynccontextmanager
async def opened(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()


@pytest.mark.parametrize("attack", ATTACKS, ids=[attack.name for attack in ATTACKS])
async def test_one_answer_at_most_and_the_connection_ends(attack: Attack) -> None:
    front = Front()
    limits = FAST if 408 in attack.codes else HttpLimits()
    async with serving(front, limits) as port, opened(port) as (reader, writer):
        writer.write(attack.raw)
        answer = await until_closed(reader)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            assert (await client.get("/v1/models")).status_code == 200, "others are served"
    statuses = [int(line.split()[1]) for line in answer.split(b"\r\n") if line[:7] == b"HTTP/1."]
    assert len(statuses) == 1
    assert statuses[0] in attack.codes
    assert front.dispatcher.requests == []


async def test_requests_in_a_row_are_answered_in_order_and_none_is_hidden_in_a_body() -> None:
    hidden = b'{"prompt": "' + b"GET /v1/models HTTP/1.1 host: x" + b'"}'
    async with serving(Front(), HttpLimits()) as port, opened(port) as (reader, writer):
        writer.write(POST + b"content-length: %d\r\n\r\n" % len(hidden) + hidden)
        writer.write(GET.replace(b"/v1/models", b"/version") + b"connection: close\r\n\r\n")
        answer = await until_closed(reader)
    assert answer.count(b"HTTP/1.1 ") == 2
    assert answer.index(b'"object":"text_completion"') < answer.index(b'"version"')


@pytest.mark.parametrize("upgrade", [b"websocket", b"h2c", b"TLS/1.0"])
async def test_an_upgrade_is_no_way_around_the_key(upgrade: bytes) -> None:
    front = Front(config=RouterConfig(api_key=(KEY,)))
    async with serving(front, HttpLimits()) as port, opened(port) as (reader, writer):
        writer.write(GET + b"connection: upgrade, close\r\nupgrade: " + upgrade)
        writer.write(b"\r\nsec-websocket-key: eA==\r\nsec-websocket-version: 13\r\n\r\n")
        answer = await until_closed(reader)
    assert answer.startswith(b"HTTP/1.1 401")
    assert b"101" not in answer.split(b"\r\n", 1)[0]


TARGETS = [
    b"GET http://x/v1/models", b"GET http://x/health", b"GET //v1/models", b"GET /v1/%6dodels",
    b"GET /v1%2fmodels", b"GET /health/..;/v1/models", b"GET /./v1/models", b"HEAD /v1/models",
    b"OPTIONS *", b"OPTIONS /v1/models", b"CONNECT x:80", b"TRACE /v1/models", b"POST /ready",
    b"GET /v1/models#/health", b"GET /v1/models?/health", b"GET \\v1\\models", b"DELETE /health",
]  # fmt: skip


@pytest.mark.parametrize("host", [b"x", b"x/health?", b"x#", b"localhost\x5c/health"])
async def test_no_target_and_no_host_is_a_way_around_the_key(host: bytes) -> None:
    front = Front(config=RouterConfig(api_key=(KEY,)))
    async with serving(front, HttpLimits()) as port:
        for line in TARGETS:
            async with opened(port) as (reader, writer):
                writer.write(
                    line + b" HTTP/1.1\r\nhost: " + host + b"\r\nconnection: close\r\n\r\n"
                )
                answer = await until_closed(reader)
            assert int(answer.split()[1]) in (400, 401), line


async def test_connections_beyond_the_limit_are_not_talked_to() -> None:
    limits = HttpLimits(connections=2)
    async with serving(Front(), limits) as port:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        try:
            async with opened(port) as (reader, writer):
                writer.write(GET + b"connection: close\r\n\r\n")
                assert (await until_closed(reader)).startswith(b"HTTP/1.1 503")
            spare = [
                await asyncio.open_connection("127.0.0.1", port) for _ in range(SPARE_CONNECTIONS)
            ]
            held += spare
            async with opened(port) as (reader, writer):
                assert await until_closed(reader) == b"", "closed without a word"
        finally:
            for _, writer in held:
                writer.close()
        async with asyncio.timeout(PATIENCE_S):
            while True:  # until the server has seen them go
                async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                    with suppress(httpx.TransportError):
                        if (await client.get("/v1/models")).status_code == 200:
                            return


async def test_a_thousand_slow_heads_cost_little_and_all_end() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with serving(Front(), HttpLimits(head_s=1.0)) as port:
        slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(300)]
        for _, writer in slow:
            writer.write(GET + b"a: " + b"b" * 4000)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            assert (await client.get("/v1/models")).status_code == 200
        answers = await asyncio.gather(*(until_closed(reader) for reader, _ in slow))
        for _, writer in slow:
            writer.close()
    assert all(answer.startswith(b"HTTP/1.1 408") for answer in answers)
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kb < 100 << 10
