"""Run work for a client, and cancel it when the client's connection ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from starlette.types import Receive, Scope

from baton.protocol.errors import Cancelled

T = TypeVar("T")
HANG_UP: Final = "baton.hang_up"  # key of a connection's HangUp in the state of the ASGI scope


WriteChunk = Callable[[Callable[[], bytes]], bool]


class HangUp:
    """Tells the work for a connection's present request that the connection has ended.

    `over`: whether it has ended. `told`: the function to call when it ends, or None. `chunk`:
    writes what its argument returns as a chunk of the streamed answer; False, and the argument is
    not called, if it cannot go at once.
    """

    __slots__ = ("chunk", "over", "told")

    def __init__(self, chunk: WriteChunk = lambda _: False) -> None:
        self.chunk = chunk
        self.over = False
        self.told: Callable[[], None] | None = None

    def happened(self) -> None:
        self.over = True
        told, self.told = self.told, None
        if told is not None:
            told()


async def while_connected(
    receive: Receive,
    work: Coroutine[Any, Any, T],
    scope: Scope | None = None,
    limit_s: float | None = None,
) -> T:
    """Run `work` and return its result. Cancel it and raise Cancelled if the client goes away
    before, or TimeoutError after `limit_s`.

    `receive` is ASGI's; the whole body must have been read. If the `scope` has a HangUp, that tells
    of the client's end; otherwise a second task waits on `receive`. On return `work` has ended.
    """
    hang_up: object = None if scope is None else scope.get("state", {}).get(HANG_UP)
    if not isinstance(hang_up, HangUp):
        async with asyncio.timeout(limit_s):
            return await _beside(receive, work)
    # Like asyncio.timeout, with two causes (the client's end, the limit), at a third of the cost.
    task = asyncio.current_task()
    assert task is not None, "in a coroutine"
    reason: BaseException | None = None

    def end(why: BaseException) -> None:
        nonlocal reason
        if reason is None:
            reason = why
            task.cancel()

    if hang_up.over:
        work.close()
        raise Cancelled("the client went away")
    hang_up.told = lambda: end(Cancelled("the client went away"))
    timer: asyncio.TimerHandle | None = None
    if limit_s is not None:
        timer = asyncio.get_running_loop().call_later(limit_s, lambda: end(TimeoutError()))
    try:
        return await work
    except asyncio.CancelledError as error:
        # If somebody else has cancelled the task as well, their cancellation must go on.
        if reason is None or task.uncancel() > 0:
            raise
        raise reason from error
    finally:
        hang_up.told = None
        if timer is not None:
            timer.cancel()


async def _beside(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` beside a task that waits on `receive` for the client's end. Raises Cancelled."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Cancelled("the client went away")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
