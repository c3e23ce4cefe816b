"""Runs a generating HTTP call and sends its ASGI answer, streaming or non-streaming.

Each API has its own `Exchange` (router/api/openai/exchange.py, router/api/dialect.py,
router/api/generate_ids.py), which knows its completions and the format of its answer. This file
has what all of them share: if the client leaves, its requests are aborted; the deadline is kept;
any failure becomes the answer, or the end of the stream.

The life of a stream: nothing is sent before the first token, so a failure until then is a plain
HTTP error with its status. Then: status 200; for each choice an opening frame, the frames of its
deltas and a finish frame; the exchange's tail. A failure in the middle becomes an error event, and
the stream ends. If the client leaves, or does not read for WRITE_TIMEOUT_S, its requests are
aborted on all nodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Final, Protocol

from starlette.types import Receive, Scope, Send

from baton.protocol.errors import BatonError, Cancelled
from baton.runtime.concurrency import together
from router.api.http.connection import HANG_UP, HangUp, WriteChunk, while_connected
from router.api.http.web_errors import error_response
from router.api.receipt import with_receipt
from router.request.completion import CallRunner, Completion, Delta
from router.request.failures import as_baton_error, log_failure
from router.request.trace import TRACES_KEY

GRACE_S: Final = 5.0  # the dispatcher keeps the deadline; so much later this file does, if it fails
WRITE_TIMEOUT_S: Final = 30.0
_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold tokens back
)


class Frames(Protocol):
    """Writes the SSE frames of one choice. `opening`: the frames before the first delta. `delta`:
    the frames for a delta; the last delta's include the finish reason."""

    def opening(self) -> bytes: ...
    def delta(self, delta: Delta) -> bytes: ...


class Exchange(Protocol):
    """A checked call, its completions (one per prompt, with one or several choices) and its answer.

    Called with ASGI's arguments it runs the completions and answers. `frames(prompt)`: one writer
    per choice of that prompt. `tail`: the end of a stream. `broken`: the end of a stream after a
    failure. `whole(runner)`: runs the completions and returns the JSON of a non-streaming answer.
    """

    @property
    def completions(self) -> Sequence[Completion]: ...
    @property
    def stream(self) -> bool: ...
    @property
    def timeout_s(self) -> float: ...
    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]: ...
    def frames(self, prompt: int) -> Sequence[Frames]: ...
    async def tail(self) -> bytes: ...
    def broken(self, error: BatonError) -> bytes: ...
    async def whole(self, runner: CallRunner) -> bytes: ...


async def respond(
    exchange: Exchange, runner: CallRunner, scope: Scope, receive: Receive, send: Send
) -> None:
    """Run the completions of an exchange and send its answer. An error of a completion becomes the
    answer, or the end of the stream; it is not raised."""
    scope[TRACES_KEY] = [each.trace for each in exchange.completions]
    if not exchange.stream:
        await respond_whole(exchange, runner, scope, receive, send)
        return
    writer = FrameWriter(send)
    if len(exchange.completions) == 1:
        hang_up = scope.get("state", {}).get(HANG_UP)
        writer.chunk = hang_up.chunk if isinstance(hang_up, HangUp) else None
    try:
        limit_s = exchange.timeout_s + GRACE_S
        await while_connected(receive, _stream(exchange, runner, writer), scope, limit_s)
    except Cancelled as error:
        log_failure(error, error)
    except Exception as error:  # noqa: BLE001  every failure becomes the stream's end
        found = as_baton_error(error)
        log_failure(found, error)
        if writer.started:
            with suppress(Cancelled):  # the client is gone by now; the failure is in the log
                await writer.write(exchange.broken(found), more=False)
        else:
            await error_response(found)(scope, receive, send)
    finally:
        writer.close()


async def _stream(exchange: Exchange, runner: CallRunner, writer: FrameWriter) -> None:
    """Write the frames of all prompts as they come, then the tail."""
    if len(exchange.completions) == 1:
        await _choices(exchange, 0, runner, writer.write, writer.chunk)
    else:
        turn = asyncio.Lock()

        async def write(data: bytes) -> None:
            async with turn:
                await writer.write(data)

        prompts = range(len(exchange.completions))
        await together([_choices(exchange, prompt, runner, write) for prompt in prompts])
    await writer.write(await exchange.tail(), more=False)


async def _choices(
    exchange: Exchange,
    prompt: int,
    runner: CallRunner,
    write: Callable[[bytes], Awaitable[None]],
    chunk: WriteChunk | None = None,
) -> None:
    """Write the frames of one prompt's choices. A choice's opening is sent with its first delta.

    `chunk` (HangUp's): writes frames of later deltas without a switch to this task."""
    completion, frames = exchange.completions[prompt], exchange.frames(prompt)
    openings = [each.opening() for each in frames]

    def at_once(delta: Callable[[], Delta]) -> bool:
        assert chunk is not None, "else it is not set"
        return not openings[0] and chunk(lambda: on_one_line(frames[0].delta(delta())))

    if chunk is not None:
        completion.at_once = at_once
    async with aclosing(completion.deltas(runner)) as deltas:
        async for delta in deltas:
            sample = delta.sample
            data = frames[sample].delta(delta)
            if openings[sample]:
                data, openings[sample] = openings[sample] + data, b""
            if data:
                await write(data)


async def respond_whole(
    exchange: Exchange, runner: CallRunner, scope: Scope, receive: Receive, send: Send
) -> None:
    """Run an exchange and send its non-streaming answer: one JSON body, or the error."""
    for completion in exchange.completions:
        completion.trace.gathers = True
    try:
        limit_s = exchange.timeout_s + GRACE_S
        body = await while_connected(receive, exchange.whole(runner), scope, limit_s)
    except Cancelled as error:
        log_failure(error, error)  # nobody is left to read an answer
        return
    except Exception as error:  # noqa: BLE001  every failure becomes the one answer
        found = as_baton_error(error)
        log_failure(found, error)
        await error_response(found)(scope, receive, send)
        return
    body, more = with_receipt(body, exchange.completions)
    headers = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
    headers += [(name.encode(), value.encode()) for name, value in more.items()]
    # Starlette's Response would do ten times the work that is needed here.
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def on_one_line(frames: bytes) -> bytes:
    """Return frames with Unicode's line separators written as JSON escapes. JSON and SSE allow them
    raw, but httpx's `iter_lines` (litellm, guidellm) would break a line there."""
    if frames.isascii():
        return frames
    for character in "\x85\u2028\u2029":
        frames = frames.replace(character.encode(), f"\\u{ord(character):04x}".encode())
    return frames


class FrameWriter:
    """Writes one streaming response. A call of `write` must end before the next one begins.

    One timer per stream checks that the client reads. A timeout around every write would cost as
    much as the rest of the write.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None  # loop time at which the present write began; None: none
        self._task: asyncio.Task[object] | None = None  # the task that writes now; None: none
        self._timer: asyncio.TimerHandle | None = None
        self._unread = False
        self.started = False
        self.chunk: WriteChunk | None = None  # HangUp's, for one writer at a time

    async def write(self, data: bytes, more: bool = True) -> None:
        """Send frames; `more` is false for the last ones. Raises Cancelled if the client has not
        read for WRITE_TIMEOUT_S."""
        self._task = asyncio.current_task(self._loop)
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

    def close(self) -> None:
        """Stop the timer; call it after the last write."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        """Cancel the present write if it has taken WRITE_TIMEOUT_S; else look again at the time at
        which it will have taken that."""
        self._timer = None
        if self._since is None:
            return
        rest = self._since + WRITE_TIMEOUT_S - self._loop.time()
        if rest > 0:
            self._timer = self._loop.call_later(rest, self._look)
        elif self._task is not None:
            self._unread = True
            self._task.cancel()
