"""Pooling over scripted nodes: who gets which prompts, and what happens when one fails."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from baton.protocol.clock import SystemClock
from baton.protocol.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InternalError,
    NodeLost,
    Overloaded,
    Unavailable,
)
from baton.protocol.events import Pooled, RequestFailed
from baton.protocol.messages import AbortRequest, SubmitPool
from baton.runtime.timing import Timing
from router.request.pool import GROUP_PROMPTS, GROUP_TOKENS, PoolAsk, PoolDispatcher, groups
from router.request.trace import RequestTrace
from tests.router.fakes import FAST, PATIENCE_S, FakeNode, FakeRouter, fake_nodes, running_router


def vector_of(prompt: Sequence[int]) -> bytes:
    return struct.pack("<2f", len(prompt), sum(prompt))


def answer(node: FakeNode, asked: SubmitPool, epoch: int | None = None) -> None:
    vectors = tuple(map(vector_of, asked.prompts))
    number = asked.request.epoch if epoch is None else epoch
    node.say(pooled=(Pooled(asked.request.id, number, vectors),))


async def serve(node: FakeNode) -> None:
    """Answer whatever comes, until cancelled."""
    while True:
        answer(node, await node.hear(SubmitPool))


def ask_of(prompts: Sequence[tuple[int, ...]], timeout_s: float = PATIENCE_S) -> PoolAsk:
    return PoolAsk("embd-1", prompts, SystemClock().monotonic() + timeout_s)


@asynccontextmanager
async def pools_of(
    nodes: Sequence[FakeNode], max_live: int = 10, timing: Timing = FAST
) -> AsyncIterator[tuple[FakeRouter, PoolDispatcher]]:
    async with running_router(nodes, timing=timing) as router:
        yield router, PoolDispatcher(router.registry, SystemClock(), max_live)


def test_groups_keep_the_order_and_their_bounds() -> None:
    prompts = [(n,) * 3 for n in range(2 * GROUP_PROMPTS + 1)]
    found = list(groups(prompts))
    assert [p for group in found for p in group] == prompts
    assert [len(group) for group in found] == [GROUP_PROMPTS, GROUP_PROMPTS, 1]
    long = (1,) * (GROUP_TOKENS - 1)
    assert [len(group) for group in groups([long, (1,), (2,), long])] == [2, 2]
    assert list(groups([])) == []


async def test_a_large_call_is_shared_by_the_prefill_nodes() -> None:
    async with fake_nodes("p1", "p2", "d") as nodes, pools_of(nodes) as (router, pools):
        servers = [asyncio.create_task(serve(node)) for node in nodes]
        prompts = [(n,) * (n % 5 + 1) for n in range(100)]
        trace = RequestTrace()
        assert await pools.vectors(ask_of(prompts), trace) == [vector_of(p) for p in prompts]
        heard = [node.heard_of(SubmitPool) for node in nodes]
        assert [len(asked) for asked in heard] == [2, 2, 0]
        assert len({asked.request.id for each in heard for asked in each}) == 4
        assert (pools.num_live, trace.retries) == (0, 0)
        for record in router.registry.records():
            session = router.registry.session(record.boot_id)
            assert session is not None
            assert (session.assigned, session.assigned_tokens) == (0, 0)
        for server in servers:
            server.cancel()


async def test_decode_nodes_do_it_where_there_is_no_other() -> None:
    async with fake_nodes("d") as (d,), pools_of([d]) as (_, pools):
        server = asyncio.create_task(serve(d))
        assert await pools.vectors(ask_of([(1, 2)])) == [vector_of((1, 2))]
        server.cancel()


async def test_another_node_does_it_when_one_dies() -> None:
    async with fake_nodes("p1", "p2") as nodes, pools_of(nodes) as (_, pools):
        trace = RequestTrace()
        work = asyncio.create_task(pools.vectors(ask_of([(1, 2), (3,)]), trace))
        hearing = [asyncio.create_task(node.has_heard(SubmitPool)) for node in nodes]
        done, _ = await asyncio.wait(hearing, return_when=asyncio.FIRST_COMPLETED)
        first = done.pop().result()
        (other,) = [node for node in nodes if node is not first]
        assert not other.heard_of(SubmitPool)
        first.cut()
        again = await other.hear(SubmitPool)
        assert again.request.epoch == 2
        answer(other, again, epoch=1)  # of an older epoch: not for it
        answer(other, again)
        assert await work == [vector_of((1, 2)), vector_of((3,))]
        assert trace.retries == 1
        for task in hearing:
            task.cancel()


async def test_a_node_that_is_full_is_passed_over_and_the_last_refusal_is_told() -> None:
    async with fake_nodes("p1", "p2") as nodes, pools_of(nodes) as (_, pools):
        for failing in (1, 2):
            work = asyncio.create_task(pools.vectors(ask_of([(1,)])))
            for count in range(2):
                hearing = {asyncio.create_task(node.hear(SubmitPool)): node for node in nodes}
                done, left = await asyncio.wait(hearing, return_when=asyncio.FIRST_COMPLETED)
                for task in left:
                    task.cancel()
                (task,) = done
                if count < failing:
                    hearing[task].fail(task.result().request, "overloaded", retryable=True)
                else:
                    answer(hearing[task], task.result())
            if failing == 1:
                assert await work == [vector_of((1,))]
            else:
                with pytest.raises(Overloaded):
                    await work


async def test_a_faulty_prompt_is_told_by_field_and_tried_once() -> None:
    async with fake_nodes("p1", "p2") as nodes, pools_of(nodes) as (_, pools):
        work = asyncio.create_task(pools.vectors(ask_of([(1,)])))
        hearing = {asyncio.create_task(node.hear(SubmitPool)): node for node in nodes}
        done, left = await asyncio.wait(hearing, return_when=asyncio.FIRST_COMPLETED)
        for other in left:
            other.cancel()
        (task,) = done
        request = task.result().request
        failed = RequestFailed(request.id, 1, "context_length_exceeded", "long", False, "prompt")
        hearing[task].say(failed=(failed,))
        with pytest.raises(ContextLengthExceeded) as caught:
            await work
        assert caught.value.field == "prompt"
        assert sum(len(node.heard_of(SubmitPool)) for node in nodes) == 1


async def test_prompts_that_kill_nodes_are_given_up() -> None:
    timing = replace(FAST, connect_s=0.3)  # for so long a node may come back
    async with (
        fake_nodes("p1", "p2", "p3", "p4") as nodes,
        pools_of(nodes, timing=timing) as (_, pools),
    ):
        work = asyncio.create_task(pools.vectors(ask_of([(1,)])))
        left = list(nodes)
        for _ in range(3):
            hearing = {asyncio.create_task(node.hear(SubmitPool)): node for node in left}
            done, others = await asyncio.wait(hearing, return_when=asyncio.FIRST_COMPLETED)
            for other in others:
                other.cancel()
            (task,) = done
            left.remove(hearing[task])
            await hearing[task].stop()
        with pytest.raises(NodeLost):
            await work
        assert not left[0].heard_of(SubmitPool)


async def test_whoever_leaves_or_runs_out_of_time_stops_the_node() -> None:
    async with fake_nodes("p") as (p,), pools_of([p]) as (_, pools):
        work = asyncio.create_task(pools.vectors(ask_of([(1,)])))
        asked = await p.hear(SubmitPool)
        work.cancel()
        aborted = await p.hear(AbortRequest)
        assert (aborted.request_id, aborted.epoch) == (asked.request.id, 1)
        with pytest.raises(DeadlineExceeded):
            await pools.vectors(ask_of([(1,)], timeout_s=0.05))
        await p.hear(AbortRequest)
        assert pools.num_live == 0


async def test_bounds_and_nodes_that_cannot() -> None:
    async with fake_nodes("p") as (p,), pools_of([p], max_live=1) as (_, pools):
        with pytest.raises(Unavailable):
            await pools.vectors(replace(ask_of([(1,)]), adapter="poet"))
        work = asyncio.create_task(pools.vectors(ask_of([(1,), (2,)])))
        asked = await p.hear(SubmitPool)
        with pytest.raises(Overloaded):
            await pools.vectors(ask_of([(1,)]))
        p.say(pooled=(Pooled(asked.request.id, 1, (vector_of((1,)),)),))
        with pytest.raises(InternalError, match="1 vectors for 2"):
            await work
