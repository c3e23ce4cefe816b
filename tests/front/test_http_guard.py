"""The guard over raw sockets: slow heads and bodies, oversized and ambiguous heads, garbage."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import pytest

from router.server.http_guard import HttpLimits
from tests.front.fakes import Front, serving

PATIENCE_S = 30.0
FAST = HttpLimits(head_s=0.2, body_s=0.2)
HEAD = b"GET /health HTTP/1.1\r\nhost: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@dataclass
class Wire:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def rest(self) -> bytes:
        """All bytes until the server closes; fails if it does not."""
        return await asyncio.wait_for(self.reader.read(), PATIENCE_S)

    async def reply(self) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(b"}"), PATIENCE_S)


@asynccontextmanager
async def wire(front: Front, limits: HttpLimits) -> AsyncIterator[Wire]:
    async with serving(front, limits) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            yield Wire(reader, writer)
        finally:
            writer.close()


@pytest.mark.parametrize(
    "start",
    [b"", HEAD, b"GET /he", POST + b"content-length: 10\r\n\r\nabc", b"\x16\x03\x01garbage"],
)
async def test_unfinished_requests_are_closed(start: bytes) -> None:
    async with wire(Front(), FAST) as it:
        it.writer.write(start)
        answer = await it.rest()
    assert answer == b"" or answer.startswith((b"HTTP/1.1 408", b"HTTP/1.1 400"))


async def test_a_drip_does_not_extend_the_deadline() -> None:
    async with wire(Front(), FAST) as it:
        it.writer.write(HEAD)

        closed = asyncio.Event()

        async def drip() -> None:
            while not closed.is_set():
                it.writer.write(b"a: b\r\n")
                with suppress(TimeoutError):
                    await asyncio.wait_for(closed.wait(), 0.02)

        dripping = asyncio.create_task(drip())
        answer = await it.rest()
        closed.set()
        await dripping
    assert answer.startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    ("sent", "code"), [(b"GARBAGE\r\n\r\n", "http_error"), (b"GET /he", "request_timeout")]
)
async def test_what_is_no_request_gets_an_error_object(sent: bytes, code: str) -> None:
    async with wire(Front(), FAST) as it:
        it.writer.write(sent)
        head, _, body = (await it.rest()).partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    assert b"content-type: application/json" in lines
    assert b"connection: close" in lines
    assert f"content-length: {len(body)}".encode() in lines
    assert json.loads(body)["error"]["code"] == code


async def test_a_second_slow_request_on_the_same_connection_is_closed_too() -> None:
    async with wire(Front(), FAST) as it:
        it.writer.write(HEAD + b"\r\n")
        assert b"200 OK" in await it.reply()
        it.writer.write(HEAD)
        assert (await it.rest()).startswith(b"HTTP/1.1 408")


async def test_a_long_answer_is_not_cut_by_the_deadlines() -> None:
    front = Front()
    front.dispatcher.stall_at = 1
    async with wire(front, FAST) as it:
        body = b'{"prompt": "a", "stream": true}'
        it.writer.write(POST + b"content-length: %d\r\n\r\n" % len(body) + body)
        await asyncio.wait_for(it.reader.readuntil(b"data: "), PATIENCE_S)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(it.reader.readuntil(b"[DONE]"), 0.5)
        assert front.dispatcher.closed == 0


BIG_LINE = b"a: " + b"b" * 1000 + b"\r\n"
Limit = Callable[[HttpLimits], bytes]
BAD_HEADS: list[tuple[str, Limit, tuple[bytes, ...]]] = [
    ("long target", lambda n: b"GET /" + b"a" * n.target_bytes + HEAD[11:] + b"\r\n", (b"414",)),
    ("many headers", lambda n: HEAD + b"a: b\r\n" * (n.num_headers + 1) + b"\r\n", (b"431",)),
    ("one big header", lambda n: HEAD + b"a: " + b"b" * n.header_bytes + b"\r\n\r\n", (b"431",)),
    ("big head at once", lambda n: HEAD + BIG_LINE * 40 + b"\r\n", (b"431", b"400")),
    ("1 MB head", lambda n: HEAD + b"a: " + b"b" * (1 << 20) + b"\r\n\r\n", (b"431", b"400")),
    ("two hosts", lambda n: HEAD + b"host: y\r\n\r\n", (b"400",)),
    ("no host", lambda n: b"GET /health HTTP/1.1\r\n\r\n", (b"400",)),
    ("two lengths", lambda n: POST + b"content-length: 1\r\ncontent-length: 2\r\n\r\na", (b"400",)),
    ("garbage", lambda n: b"\x00\x01\x02\r\n\r\n", (b"400",)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "codes"), [(m, c) for _, m, c in BAD_HEADS], ids=[name for name, _, _ in BAD_HEADS]
)
async def test_bad_heads_are_refused_and_the_connection_closed(
    make: Limit, codes: tuple[bytes, ...]
) -> None:
    limits = HttpLimits()
    async with wire(Front(), limits) as it:
        it.writer.write(make(limits))
        status = (await asyncio.wait_for(it.reader.readline(), PATIENCE_S)).split()[1]
        assert status in codes
        it.writer.close()


async def test_length_with_chunked_cannot_smuggle_a_second_request() -> None:
    body = b"0\r\n\r\n" + HEAD + b"\r\n"
    async with wire(Front(), HttpLimits()) as it:
        framing = b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n"
        it.writer.write(POST + framing + body)
        answer = await it.rest()
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1") == 1


async def test_kept_alive_requests_still_work() -> None:
    async with wire(Front(), HttpLimits()) as it:
        for _ in range(3):
            it.writer.write(HEAD + b"\r\n")
            assert b"200 OK" in await it.reply()


async def test_a_stream_of_http_1_0_is_not_chunked() -> None:
    """A proxy of that version knows no chunks: the body is all there is until the end."""
    body = b'{"prompt": "x", "stream": true}'
    head = POST.replace(b"HTTP/1.1", b"HTTP/1.0") + b"content-length: %d\r\n\r\n" % len(body)
    async with wire(Front(), HttpLimits()) as it:
        it.writer.write(head + body)
        answer, _, stream = (await it.rest()).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in answer
    assert b"connection: close" in answer
    assert stream.startswith(b"data: {")
    assert stream.endswith(b"}\n\ndata: [DONE]\n\n")
    async with wire(Front(), HttpLimits()) as it:
        it.writer.write(head.replace(b"/v1", b"/no") + body)
        answer, _, whole = (await it.rest()).partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(whole) in answer
