"""Work while its client is there: the connection tells of its end, or must be asked."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.protocol.errors import Cancelled
from router.api.http.connection import HANG_UP, HangUp, while_connected


async def never() -> Any:
    await asyncio.Event().wait()


class Client:
    """A client's connection as ASGI shows it; `told`: with a HangUp in its scope."""

    def __init__(self, told: bool) -> None:
        self.hang_up = HangUp()
        self.scope: dict[str, Any] = {"state": {HANG_UP: self.hang_up}} if told else {}
        self._gone = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    def leave(self) -> None:
        self.hang_up.happened()
        self._gone.set()


class Work:
    """Waits for `done`; notes how it ended."""

    def __init__(self) -> None:
        self.done = asyncio.Event()
        self.began = asyncio.Event()
        self.cancelled = False

    async def run(self) -> int:
        self.began.set()
        try:
            await self.done.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # it may take a while, and is waited for
            self.cancelled = True
            raise
        return 42


@pytest.mark.parametrize("told", [True, False])
async def test_it_ends_with_its_result(told: bool) -> None:
    client, work = Client(told), Work()
    work.done.set()
    assert await while_connected(client.receive, work.run(), client.scope, 5.0) == 42
    client.leave()  # concerns nobody any more
    await asyncio.sleep(0)
    assert not work.cancelled


@pytest.mark.parametrize("told", [True, False])
async def test_it_is_cancelled_when_the_client_leaves(told: bool) -> None:
    client, work = Client(told), Work()
    task = asyncio.create_task(while_connected(client.receive, work.run(), client.scope))
    await work.began.wait()
    client.leave()
    with pytest.raises(Cancelled):
        await task
    assert work.cancelled


@pytest.mark.parametrize("told", [True, False])
async def test_it_is_cancelled_when_its_time_is_over(told: bool) -> None:
    client, work = Client(told), Work()
    with pytest.raises(TimeoutError):
        await while_connected(client.receive, work.run(), client.scope, 0.01)
    assert work.cancelled


@pytest.mark.parametrize("told", [True, False])
async def test_whoever_cancels_from_outside_is_obeyed(told: bool) -> None:
    client, work = Client(told), Work()
    task = asyncio.create_task(while_connected(client.receive, work.run(), client.scope, 5.0))
    await work.began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.cancelled


async def test_a_cancellation_together_with_a_hang_up_stays_one() -> None:
    client, work = Client(told=True), Work()
    task = asyncio.create_task(while_connected(client.receive, work.run(), client.scope, 5.0))
    await work.began.wait()
    client.leave()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_nothing_begins_for_a_client_that_has_left() -> None:
    client, work = Client(told=True), Work()
    client.leave()
    with pytest.raises(Cancelled):
        await while_connected(client.receive, work.run(), client.scope)
    assert not work.began.is_set()


async def test_failures_are_its_own() -> None:
    async def fails() -> None:
        raise ValueError("as told")

    client = Client(told=True)
    with pytest.raises(ValueError, match="as told"):
        await while_connected(client.receive, fails(), client.scope, 5.0)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
