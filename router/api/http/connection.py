"""Work that is worth doing only while its client is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from starlette.types import Receive, Scope

from baton.protocol.errors import Cancelled

T = TypeVar("T")
HANG_UP: Final = "baton.hang_up"  # where a connection's HangUp stands in the scope's state


class HangUp:
    """The end of one client's connection, for whoever works for it. One request at a time.

    `told`: what to call when the connection ends; None: nobody is interested.
    """

    __slots__ = ("over", "told")

    def __init__(self) -> None:
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
    """Run `work`; cancel it and raise Cancelled when the client goes away first, TimeoutError after
    `limit_s`.

    `receive` is ASGI's, after the whole body was read; where the `scope` has a HangUp it is not
    asked, and there is no task beside this one. On return nothing of `work` runs any more.
    """
    hang_up: object = None if scope is None else scope.get("state", {}).get(HANG_UP)
    if not isinstance(hang_up, HangUp):
        async with asyncio.timeout(limit_s):
            return await _beside(receive, work)
    # Like asyncio.timeout, for two reasons at once and at a third of its costs.
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
        # Somebody else may have cancelled it as well: theirs goes on.
        if reason is None or task.uncancel() > 0:
            raise
        raise reason from error
    finally:
        hang_up.told = None
        if timer is not None:
            timer.cancel()


async def _beside(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """For servers that tell of a client's end only when they are asked."""
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
