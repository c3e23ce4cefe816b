"""What the dispatch tests share: a client that checks its stream, a cluster of scripted nodes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from baton.protocol.events import TokenEvent
from baton.protocol.messages import (
    SubmitDecode,
    SubmitPrefill,
)
from baton.protocol.request import Request, RequestState
from router.request.terms import STANDARD, Terms
from router.request.trace import RequestTrace
from tests.router.fakes import (
    PATIENCE_S,
    FakeNode,
    FakeRouter,
    fake_nodes,
    running_router,
)


class Client:
    """Reads one request's stream in a task and keeps what it was shown."""

    def __init__(self, router: FakeRouter, request: Request, terms: Terms = STANDARD) -> None:
        self.trace = RequestTrace(terms)
        self.events: list[TokenEvent] = []
        self.seen = asyncio.Queue[TokenEvent]()
        self._router = router
        self._request = request
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async with contextlib.aclosing(self._router.dispatcher.run(self._request, self.trace)) as s:
            async for event in s:
                self.events.append(event)
                self.seen.put_nowait(event)

    async def next(self) -> TokenEvent:
        async with asyncio.timeout(PATIENCE_S):
            return await self.seen.get()

    async def hears(self, count: int) -> None:
        """Until it was shown so many tokens: a slow reader gets several in one event."""
        while sum(len(event.token_ids) for event in self.events) < count:
            await self.next()

    async def done(self) -> list[int]:
        """All tokens, checked: positions 0..n-1 once each, one end."""
        async with asyncio.timeout(PATIENCE_S):
            await self.task
        ids: list[int] = []
        for event in self.events:
            assert event.position == len(ids), "a gap or a duplicate"
            ids += event.token_ids
        assert [e.finish_reason is not None for e in self.events].count(True) == 1
        assert self.events[-1].finish_reason is not None
        return ids

    async def fails(self) -> BaseException:
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait({self.task})
        error = self.task.exception()
        assert error is not None
        return error


@contextlib.asynccontextmanager
async def cluster(*names: str, **options: Any) -> AsyncIterator[tuple[FakeRouter, list[FakeNode]]]:
    async with fake_nodes(*names) as nodes, running_router(nodes, **options) as router:
        yield router, nodes


async def first_of(
    nodes: list[FakeNode], kind: type[SubmitPrefill] | type[SubmitDecode]
) -> FakeNode:
    """The node that is the first to hear a message of this kind (the message stays unread)."""
    async with asyncio.timeout(PATIENCE_S):
        waiting = [asyncio.create_task(node.has_heard(kind)) for node in nodes]
        done, late = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in late:
        task.cancel()
    return done.pop().result()


async def state_of(router: FakeRouter, request_id: str = "r") -> tuple[RequestState, int]:
    record = await router.store.read(request_id)
    assert record is not None
    return record.state, record.epoch
