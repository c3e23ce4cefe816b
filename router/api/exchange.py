"""One HTTP exchange of a generating route, as its ASGI answer: streamed or whole.

Each API has an `Exchange` of its own (router/api/openai/exchange.py, router/api/dialect.py,
router/api/generate_ids.py), which knows its completions and the words of its answer. Here is what
all of them share: the client that leaves aborts the requests, a deadline is kept, and a failure of
any kind becomes the answer, or its end.

A stream's life: nothing is sent before the first token, so that a failure until then is a plain
HTTP error with its status. Then: 200, per choice opening frame, its deltas' frames, finish frame;
what the exchange ends with. A failure in the middle is an error event and the end. A client that
leaves, or does not read for WRITE_TIMEOUT_S, aborts its requests on every hop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import aclosing, suppress
from typing import Final, Protocol

from starlette.types import Receive, Scope, Send

from baton.protocol.errors import BatonError, Cancelled
from router.api.http.connection import while_connected
from router.api.http.web_errors import error_response
from router.api.receipt import with_receipt
from router.request.completion import CallRunner, Completion, Delta
from router.request.failures import as_baton_error, log_failure
from router.request.together import together

GRACE_S: Final = 5.0  # the dispatcher keeps the deadline itself; this one catches its failure to
WRITE_TIMEOUT_S: Final = 30.0
_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold tokens back
)


class Frames(Protocol):
    """SSE frames of one choice: the opening, then what each delta adds; the last has the finish."""

    def opening(self) -> bytes: ...
    def delta(self, delta: Delta) -> bytes: ...


class Exchange(Protocol):
    """A checked call with its completions (one per prompt, each with its choices), and its answer.

    Called with ASGI's arguments it runs the completions and answers. `frames(prompt)`: the writers
    of that prompt's choices; `tail`: what a stream ends with, `broken`: instead, after a failure;
    `whole(runner)`: runs the completions for the JSON of the whole answer.
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
    """Run the completions of an exchange and send its answer; raises nothing of what they raise."""
    if not exchange.stream:
        await respond_whole(exchange, runner, scope, receive, send)
        return
    writer = FrameWriter(send)
    try:
        limit_s = exchange.timeout_s + GRACE_S
        await while_connected(receive, _stream(exchange, runner, writer), scope, limit_s)
    except Cancelled as error:
        log_failure(error, error)
    except Exception as error:  # noqa: BLE001  every failure becomes the stream's end
        found = as_baton_error(error)
        log_failure(found, error)
        if writer.started:
            with suppress(Cancelled):  # gone by now: the failure is in the log
                await writer.write(exchange.broken(found), more=False)
        else:
            await error_response(found)(scope, receive, send)
    finally:
        writer.close()


async def _stream(exchange: Exchange, runner: CallRunner, writer: FrameWriter) -> None:
    """Frames of all prompts' choices, interleaved as they come."""
    if len(exchange.completions) == 1:
        await _choices(exchange, 0, runner, writer)
    else:
        prompts = range(len(exchange.completions))
        await together([_choices(exchange, prompt, runner, writer) for prompt in prompts])
    await writer.write(await exchange.tail(), more=False)


async def _choices(
    exchange: Exchange, prompt: int, runner: CallRunner, writer: FrameWriter
) -> None:
    """The choices of one prompt, each opened by its first delta."""
    frames = exchange.frames(prompt)
    openings = [each.opening() for each in frames]
    async with aclosing(exchange.completions[prompt].deltas(runner)) as deltas:
        async for delta in deltas:
            data = openings[delta.sample] + frames[delta.sample].delta(delta)
            openings[delta.sample] = b""
            if data:
                await writer.write(data)


async def respond_whole(
    exchange: Exchange, runner: CallRunner, scope: Scope, receive: Receive, send: Send
) -> None:
    """One JSON body when all has been computed, or the failure."""
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
    # Not Starlette's Response: a tenth of what it does is needed here.
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def on_one_line(frames: bytes) -> bytes:
    """Frames without what Unicode calls a line's end: JSON and SSE allow it, but clients that read
    by httpx's `iter_lines` (litellm, guidellm) take it for one."""
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
        """Send frames, the last ones without `more`. Raises Cancelled if the client does not take
        them."""
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
                body = data if data.isascii() else on_one_line(data)
                await self._send({"type": "http.response.body", "body": body, "more_body": more})
            except asyncio.CancelledError as error:
                if not self._unread or self._task is None or self._task.uncancel():
                    raise
                raise Cancelled("the client does not read") from error
            finally:
                self._since = self._task = None

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
