"""A client that does not read its stream: it is given up in time, and holds nobody up meanwhile."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import pytest

from baton.protocol.events import TokenEvent
from baton.protocol.request import Request
from router.api import exchange
from tests.front.fakes import TOKENIZER, FakeDispatcher, Front, serving

PATIENCE_S = 20.0
BODY = {"prompt": "hello", "stream": True, "max_tokens": 100}
WORD = tuple(TOKENIZER.encode("hello ", add_special_tokens=False))


@dataclass
class Endless(FakeDispatcher):
    """Tokens for the prompt "hello" as fast as they are taken; other prompts end as usual."""

    shown: int = 0

    async def _events(self, request: Request) -> AsyncIterator[TokenEvent]:
        if request.prompt_ids != tuple(TOKENIZER.encode("hello")):
            async for event in super()._events(request):
                yield event
            return
        while True:
            yield TokenEvent(request.id, 1, self.shown, WORD)
            self.shown += len(WORD)
            await asyncio.sleep(0)


async def open_stream(port: int) -> asyncio.StreamWriter:
    """Ask for an endless stream over small buffers, and read nothing of it."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=raw, limit=1024)
    assert not reader.at_eof()
    body = json.dumps(BODY).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
    writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + body)
    return writer


async def test_a_client_that_does_not_read_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "WRITE_TIMEOUT_S", 0.3)
    dispatcher = Endless()
    async with serving(Front(dispatcher=dispatcher)) as port:
        writer = await open_stream(port)
        async with asyncio.timeout(PATIENCE_S):
            await dispatcher.aborted.wait()
        assert dispatcher.closed == 1
        writer.close()


async def test_it_holds_nobody_up_and_costs_a_bounded_buffer() -> None:
    dispatcher = Endless()
    async with serving(Front(dispatcher=dispatcher)) as port:
        writer = await open_stream(port)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            before = -1
            while before != dispatcher.shown:  # until nothing more is taken from the dispatcher
                before = dispatcher.shown
                answer = await client.post("/v1/completions", json={**BODY, "prompt": "other"})
                assert answer.status_code == 200
                assert answer.text.endswith("data: [DONE]\n\n")
        assert 0 < dispatcher.shown < 100_000
        writer.close()
        async with asyncio.timeout(PATIENCE_S):
            await dispatcher.aborted.wait()


async def test_a_slow_client_is_not_given_up_as_long_as_it_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchange, "WRITE_TIMEOUT_S", 0.2)
    dispatcher = Endless()
    async with (
        serving(Front(dispatcher=dispatcher)) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
        client.stream("POST", "/v1/completions", json=BODY) as answer,
    ):
        ends_at = asyncio.get_running_loop().time() + 0.7
        read = 0
        async for piece in answer.aiter_raw():
            read += len(piece)
            if asyncio.get_running_loop().time() > ends_at:
                break
        assert read > 0
        assert dispatcher.closed == 0
