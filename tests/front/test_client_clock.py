"""A timeline begins with the first byte of a request and ends with the last byte of its answer.

Time passes only where a test lets it pass: between the pieces of a request, and at each write.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any, cast

import httptools
import pytest
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from baton.protocol.clock import SystemClock
from baton.protocol.events import TokenEvent
from baton.protocol.request import Request
from router.request.trace import RequestTrace
from router.server.http_parser import BoundedParser
from tests.front.fakes import FakeDispatcher, Front
from tests.front.test_http_parser import Pipe
from tests.router.fakes import FakeClock

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
BODY = b'{"prompt": "a", "max_tokens": 4, "stream": %s}'
WRITE_S = 0.25


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    stands = FakeClock(1000.0)
    monkeypatch.setattr(SystemClock, "monotonic", staticmethod(stands.monotonic))
    return stands


class SlowPipe(Pipe):
    """Takes WRITE_S for each write, and keeps when the last one was over."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.clock = clock

    def write(self, data: Any) -> None:
        super().write(data)
        self.clock.advance(WRITE_S)


class Line:
    """A connection to a front door, without a socket."""

    def __init__(self, front: Front, clock: FakeClock) -> None:
        self.pipe, self.state = SlowPipe(clock), ServerState()
        config = Config(front.app(), ws="none", lifespan="off", log_config=None, access_log=False)
        self._protocol = HttpToolsProtocol(config, self.state, {})
        parser = BoundedParser(self._protocol, 1000)
        self._protocol.parser = cast("httptools.HttpRequestParser", parser)
        self._protocol.connection_made(self.pipe)

    async def send(self, data: bytes) -> None:
        """Send bytes; return when they are read, and answered as far as they can be."""
        self._protocol.data_received(data)
        for _ in range(100):
            await asyncio.sleep(0)

    async def answered(self) -> bytes:
        while self.state.tasks:
            await asyncio.gather(*self.state.tasks)
        return self.pipe.written


class Ended(FakeDispatcher):
    """Notes the end, as a real one does: before the answer's last bytes are written."""

    async def run(self, request: Request, trace: RequestTrace) -> AsyncGenerator[TokenEvent, None]:
        trace.entered_at = SystemClock.monotonic()
        async for event in super().run(request, trace):
            yield event
        trace.finished_at = SystemClock.monotonic()


@pytest.mark.parametrize("stream", [b"false", b"true"])
async def test_from_the_first_byte_to_the_last(
    clock: FakeClock, caplog: pytest.LogCaptureFixture, stream: bytes
) -> None:
    caplog.set_level(logging.INFO, "router.server.exchanges")
    front = Front(dispatcher=Ended())
    line, body = Line(front, clock), BODY % stream
    head = HEAD + b"content-length: %d\r\n\r\n" % len(body)
    for piece in (head[:1], head[1:], body[:10]):
        await line.send(piece)
        clock.advance(1.0)
    assert not front.dispatcher.requests
    await line.send(body[10:])
    reply = await line.answered()
    assert reply.startswith(b"HTTP/1.1 200")
    (request,), (trace,) = front.dispatcher.requests, front.dispatcher.traces
    assert (request.arrival, trace.entered_at) == (1000.0, 1003.0)
    assert trace.finished_at is not None
    assert trace.answered_at == clock.monotonic() > trace.finished_at
    assert request.deadline == 1000.0 + front.config.request_timeout_s
    took_ms = 1000 * (clock.monotonic() - 1000.0)
    (access,) = (each.getMessage() for each in caplog.records if "/v1/" in each.getMessage())
    assert access == f"POST /v1/completions 200 in {took_ms:.1f} ms"


async def test_each_request_of_a_connection_begins_with_its_own_byte(clock: FakeClock) -> None:
    front = Front()
    line, body = Line(front, clock), BODY % b"false"
    whole = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
    await line.send(whole)
    await line.answered()
    clock.advance(7.0)  # keep-alive: nobody's time
    began = clock.monotonic()
    await line.send(whole)
    await line.answered()
    assert [each.arrival for each in front.dispatcher.requests] == [1000.0, began]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}),
        ("/v1/responses", {"input": "a"}),
        ("/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": {"max_tokens": 4}}),
    ],
)
async def test_every_api_ends_its_timeline(path: str, body: dict[str, Any]) -> None:
    front = Front(dispatcher=Ended())
    async with front.client() as client:
        reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    (trace,) = front.dispatcher.traces
    assert trace.finished_at is not None
    assert trace.answered_at is not None
    assert trace.answered_at >= trace.finished_at
