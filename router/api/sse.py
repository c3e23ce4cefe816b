"""The hot route: a streamed answer as server-sent events, written straight to ASGI's `send`.

Life: nothing is sent before the first token, so that a failure until then is a plain HTTP error
with its status. Then: 200, per choice opening frame, its deltas' frames, finish frame; the usage
frame if asked for; `data: [DONE]`. A failure in the middle is an error event and `[DONE]`. A client
that leaves, or does not read for WRITE_TIMEOUT_S, aborts its requests on every hop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing, suppress
from typing import Final, Protocol

from starlette.types import Receive, Scope, Send

from baton.protocol.errors import BatonError, Cancelled
from router.api.calls import GRACE_S, CallRunner
from router.api.http.connection import while_connected
from router.api.http.web_errors import error_response
from router.api.openai.replies import Frames
from router.request.completion import Completion
from router.request.failures import as_baton_error, log_failure
from router.request.together import together

WRITE_TIMEOUT_S: Final = 30.0
_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold tokens back
)


class StreamedCall(Protocol):
    """What a stream needs to know of its call: router/api/calls.py's, or a dialect's own."""

    @property
    def completions(self) -> tuple[Completion, ...]: ...
    @property
    def timeout_s(self) -> float: ...
    def frames(self, prompt: int) -> Sequence[Frames]: ...
    async def tail(self) -> bytes: ...
    def broken(self, error: BatonError) -> bytes: ...


class StreamReply:
    """ASGI answer that streams the completions of a call, their frames interleaved as they come."""

    def __init__(self, call: StreamedCall, runner: CallRunner) -> None:
        self._call = call
        self._runner = runner

    @property
    def call(self) -> StreamedCall:
        return self._call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = FrameWriter(send)
        try:
            limit_s = self._call.timeout_s + GRACE_S
            await while_connected(receive, self._run(writer), scope, limit_s)
        except Cancelled as error:
            log_failure(error, error)
        except Exception as error:  # noqa: BLE001  every failure becomes the stream's end
            found = as_baton_error(error)
            log_failure(found, error)
            if writer.started:
                with suppress(Cancelled):  # gone by now: the failure is in the log
                    await writer.end(self._call.broken(found))
            else:
                await error_response(found)(scope, receive, send)
        finally:
            writer.close()

    async def _run(self, writer: FrameWriter) -> None:
        prompts = range(len(self._call.completions))
        await together([self._choices(prompt, writer) for prompt in prompts])
        await writer.end(await self._call.tail())

    async def _choices(self, prompt: int, writer: FrameWriter) -> None:
        """The choices of one prompt, each opened by its first delta."""
        frames = self._call.frames(prompt)
        openings = [each.opening() for each in frames]
        async with aclosing(self._runner.deltas(self._call.completions[prompt])) as deltas:
            async for delta in deltas:
                data = openings[delta.sample] + frames[delta.sample].delta(delta)
                openings[delta.sample] = b""
                if data:
                    await writer.write(data)


def on_one_line(frames: bytes) -> bytes:
    """Frames without what Unicode calls a line's end: JSON and SSE allow it, but clients that read
    by httpx's `iter_lines` (litellm, guidellm) take it for one."""
    if frames.isascii():
        return frames
    for character in "\x85\u2028\u2029":
        frames = frames.replace(character.encode(), f"\\u{ord(character):04x}".encode())
    return frames


class FrameWriter:
    """One response body, written by several tasks in whole frames.

    One timer per stream watches that its client reads: a timeout around every write would cost as
    much as the token in it.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._turn = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None  # loop time; the write under way began then
        self._task: asyncio.Task[object] | None = None  # that writes
        self._timer: asyncio.TimerHandle | None = None
        self._unread = False
        self.started = False

    async def write(self, data: bytes, more: bool = True) -> None:
        """Send frames. Raises Cancelled if the client does not take them."""
        async with self._turn:
            self._task = asyncio.current_task()
            self._since = self._loop.time()
            if self._timer is None:
                self._timer = self._loop.call_later(WRITE_TIMEOUT_S, self._look)
            try:
                if not self.started:
                    self.started = True
                    await self._send(
                        {"type": "http.response.start", "status": 200, "headers": list(_HEADERS)}
                    )
                body = on_one_line(data)
                await self._send({"type": "http.response.body", "body": body, "more_body": more})
            except asyncio.CancelledError as error:
                if not self._unread or self._task is None or self._task.uncancel():
                    raise
                raise Cancelled("the client does not read") from error
            finally:
                self._since = self._task = None

    async def end(self, data: bytes) -> None:
        await self.write(data, more=False)

    def close(self) -> None:
        """Nothing more is written."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        """End a write that has taken too long; else look again when the next one could have."""
        self._timer = None
        if self._since is None:
            return
        rest = self._since + WRITE_TIMEOUT_S - self._loop.time()
        if rest > 0:
            self._timer = self._loop.call_later(rest, self._look)
        elif self._task is not None:
            self._unread = True
            self._task.cancel()
