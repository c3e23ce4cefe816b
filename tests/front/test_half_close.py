"""Clients that end their side of the connection: who waits for an answer gets it, who left has."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from router.server import half_close
from router.server.half_close import COMMENT, INTERIM
from router.server.http_guard import HttpLimits
from tests.front.fakes import FakeDispatcher, Front, serving
from tests.front.test_http_guard import Wire

PATIENCE_S = 30.0
BODY = {"prompt": "hi", "max_tokens": 3}


def request(version: str = "1.1", **body: Any) -> bytes:
    content = json.dumps({**BODY, **body}).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nhost: x\r\ncontent-type: application/json\r\n"
    return head.encode() + f"content-length: {len(content)}\r\n\r\n".encode() + content


@asynccontextmanager
async def wire(front: Front) -> AsyncIterator[Wire]:
    async with serving(front, HttpLimits()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            yield Wire(reader, writer)
        finally:
            writer.close()


def parsed(answer: bytes) -> http.client.HTTPResponse:
    """As Python's own client reads it: past interim responses."""

    class Socket:
        def makefile(self, *_: object) -> io.BytesIO:
            return io.BytesIO(answer)

    response = http.client.HTTPResponse(Socket())  # pyright: ignore[reportArgumentType]
    response.begin()
    return response


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_who_half_closes_after_its_request_gets_its_answer(
    stream: bool, version: str
) -> None:
    async with wire(Front()) as it:
        it.writer.write(request(version, stream=stream))
        it.writer.write_eof()
        answer = await it.rest()  # and the connection is closed behind it
    response = parsed(answer)
    text = response.read().decode()
    assert response.status == 200
    assert (text.rstrip().endswith("data: [DONE]")) if stream else json.loads(text)["choices"]
    assert version == "1.1" or b"100 Continue" not in answer


async def test_several_requests_in_one_go_are_all_answered() -> None:
    async with wire(Front()) as it:
        it.writer.write(request() + request() + request())
        it.writer.write_eof()
        answer = await it.rest()
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert answer.count(b"connection: close") == 1, "with the last"


async def test_half_a_request_is_no_request() -> None:
    async with wire(Front()) as it:
        it.writer.write(request()[:-5])
        it.writer.write_eof()
        assert await it.rest() == b""


@pytest.mark.parametrize(("stream", "at"), [(False, 0), (True, 0), (True, 2)])
async def test_who_has_left_is_noticed(stream: bool, at: int) -> None:
    """Before the answer begins, and in the middle of a stream that has nothing to say."""
    front = Front(FakeDispatcher(stall_at=at))
    async with wire(front) as it:
        it.writer.write(request(stream=stream))
        async with asyncio.timeout(PATIENCE_S):
            await front.dispatcher.stalled.wait()
            it.writer.close()  # both sides: its kernel resets what is sent to it
            await front.dispatcher.aborted.wait()


@pytest.mark.parametrize(
    ("stream", "at", "probe"),
    [(False, 0, INTERIM), (True, 0, INTERIM), (True, 1, b"\r\n" + COMMENT + b"\r\n")],
)
async def test_who_leaves_later_is_noticed_too(
    stream: bool, at: int, probe: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half_close, "EVERY_S", 0.05)
    front = Front(FakeDispatcher(stall_at=at))
    async with wire(front) as it, asyncio.timeout(PATIENCE_S):
        it.writer.write(request(stream=stream))
        await front.dispatcher.stalled.wait()
        it.writer.write_eof()
        for _ in range(2):  # again and again
            await it.reader.readuntil(probe)
        assert not front.dispatcher.aborted.is_set()
        it.writer.transport.abort()
        await front.dispatcher.aborted.wait()


async def test_a_stream_with_comments_is_read_as_one_without() -> None:
    front = Front(FakeDispatcher(stall_at=2, answer="abc"))
    async with wire(front) as it, asyncio.timeout(PATIENCE_S):
        it.writer.write(request(stream=True))
        await front.dispatcher.stalled.wait()
        it.writer.write_eof()
        begun = await it.reader.readuntil(b"\r\n" + COMMENT + b"\r\n")
        text = parsed(begun + b"0\r\n\r\n").read().decode()
        events = [line for line in text.split("\n\n") if line]
        assert events[-1] == ":", "a comment by itself"
        assert all(event.startswith("data: {") for event in events[:-1])
