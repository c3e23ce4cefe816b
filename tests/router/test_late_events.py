"""What an owner said before it lost a request is part of it; what it says afterwards is dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import pytest

from baton.protocol.clock import SystemClock
from baton.protocol.events import TokenEvent
from baton.protocol.messages import SubmitDecode, SubmitPrefill
from baton.protocol.request import FinishReason, RequestState
from baton.runtime.metrics import render
from router.metrics.parts import WatchedParts, watch_failures
from router.metrics.router import RouterMetrics
from router.request.retry_budget import RetryBudget
from router.resumable.replay import Told
from router.resumable.run_log import RunLog
from router.store.base import LOGGED, Claimed, LogEntry, WriteStatus
from router.store.memory_store import MemoryStore
from tests.router.clients import Client, cluster, first_of, state_of
from tests.router.fakes import (
    FAST,
    PATIENCE_S,
    FakeRouter,
    fake_nodes,
    make_request,
    running_router,
)
from tests.waiting import eventually


class SlowStore(MemoryStore):
    """Appends at once, answers when it is told to."""

    def __init__(self) -> None:
        super().__init__("router", FAST, SystemClock())
        self.answers = asyncio.Event()
        self.appended = asyncio.Event()

    async def append(self, entries: Sequence[LogEntry], *, safe: bool = False) -> list[WriteStatus]:
        statuses = await super().append(entries, safe=safe)
        self.appended.set()
        await self.answers.wait()
        return statuses


class SlowRecords(MemoryStore):
    """Records at once, says so when it is told to."""

    def __init__(self) -> None:
        super().__init__("router", FAST, SystemClock())
        self.answers: list[Callable[[], None]] = []

    def post_claim(self, request_id: str, fields: Mapping[str, str], on_answer: Claimed) -> None:
        super().post_claim(
            request_id, fields, lambda answer: self.answers.append(lambda: on_answer(answer))
        )


async def test_a_prefill_begins_before_the_record_is_there_and_shows_nothing() -> None:
    store = SlowRecords()
    async with fake_nodes("p", "d") as (p, d), running_router([p, d], store) as router:
        client = Client(router, make_request())
        prefill = await p.hear(SubmitPrefill)
        p.export(prefill.request)
        p.tokens(prefill.request, 0, 41)
        await eventually(lambda: logged_is(router, [41]), PATIENCE_S)
        assert client.trace.first_token_at is None
        assert not d.heard_of(SubmitDecode)
        store.answers[0]()
        assert (await client.next()).token_ids == (41,)
        decode = await d.hear(SubmitDecode)
        d.subscribe(decode.request)
        d.finish(decode.request, 1, 42)
        assert await client.done() == [41, 42]


async def logged_is(router: FakeRouter, tokens: list[int]) -> bool:
    return await router.logged("r") == tokens


async def late_events(router: FakeRouter, count: int) -> bool:
    return router.registry.health.stats.stale_events >= count


@pytest.mark.parametrize("ended", [False, True])
async def test_what_was_on_its_way_into_the_log_is_known_to_the_next_owner(ended: bool) -> None:
    """The decode node's tokens are appended, the store has not answered; then the prefill node is
    lost. They are in the log under the old epoch, so the next owner goes on behind them."""
    store = SlowStore()
    async with fake_nodes("p1", "p2", "d") as (p1, p2, d), running_router([p1, p2, d], store) as r:
        r.guard.expect("r", RunLog(Told(1), SystemClock()))  # it is resumable
        client = Client(r, make_request())
        victim = await first_of([p1, p2], SubmitPrefill)
        other = p2 if victim is p1 else p1
        victim.export((await victim.hear(SubmitPrefill)).request)
        decode = await d.hear(SubmitDecode)
        reason = FinishReason.LENGTH if ended else None
        d.tokens(decode.request, 0, 41, 42, finish_reason=reason)
        async with asyncio.timeout(PATIENCE_S):
            await store.appended.wait()
        await victim.stop()
        await r.until(lambda: len(r.registry.records()) == 2)
        assert not client.events, "what is not logged is not shown"
        store.answers.set()
        if not ended:
            again = (await other.hear(SubmitPrefill)).request
            assert (again.epoch, again.output_ids) == (2, ((41, 42),))
            other.export(again)
            decode = await d.hear(SubmitDecode)
            d.finish(decode.request, 2, 43)
        assert await client.done() == await r.logged("r")
        assert await state_of(r) == (RequestState.FINISHED, 1 if ended else 2)
        assert len(other.heard_of(SubmitPrefill)) == (0 if ended else 1)


async def test_a_fenced_owner_is_not_heard_and_not_logged() -> None:
    async with cluster("d1", "d2") as (router, (d1, d2)):
        client = Client(router, make_request())
        zombie = await first_of([d1, d2], SubmitDecode)
        other = d2 if zombie is d1 else d1
        old = (await zombie.hear(SubmitDecode)).request
        zombie.tokens(old, 0, 41)
        await client.next()
        zombie.fail(old, "overloaded", retryable=True)
        new = (await other.hear(SubmitDecode)).request
        assert (new.epoch, new.output_ids) == (2, ((41,),))
        zombie.tokens(old, 1, 98, 99)
        zombie.finish(old, 3, 97)
        await eventually(lambda: late_events(router, 2))
        other.finish(new, 1, 42)
        assert await client.done() == [41, 42] == await router.logged("r")
        other.tokens(new, 2, 96)  # after the end
        other.say(tokens=(TokenEvent("nobody", 1, 0, (95,)),))
        await eventually(lambda: late_events(router, 4))
        assert router.registry.health.stats.stale_events == 4
        record = await router.store.read("r")
        assert record is not None
        assert (record.state, record.fields[LOGGED]) == (RequestState.FINISHED, "2")
        assert record.fields["output_tokens"] == "2"
        assert router.guard.stats.refused == 0
        text = _exported(router)
        assert "baton_stale_events_total 4.0" in text
        assert "baton_store_refused_total 0.0" in text


def _exported(router: FakeRouter) -> str:
    metrics = RouterMetrics()
    watched = WatchedParts(router.guard, router.registry, RetryBudget(SystemClock()))
    watch_failures(metrics.registry, watched)
    return render(metrics.registry).decode()
