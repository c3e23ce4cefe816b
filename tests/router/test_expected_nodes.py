"""While a node is known that could serve, requests wait for it; else they are refused at once."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.protocol.clock import SystemClock
from baton.protocol.errors import NodeLost, Overloaded, Unavailable
from baton.protocol.events import Pooled, RequestFailed
from baton.protocol.handles import NodeLoad, Role
from baton.protocol.messages import Migrate, RenewExport, SubmitDecode, SubmitPool, SubmitPrefill
from baton.protocol.request import RequestState
from router.nodes.directory import ExpectedNodes
from router.nodes.policy import NodeSnapshot
from router.request.dispatch import MAX_TRIES
from router.request.gate.admission import Bounds
from router.request.gate.gate import Gate, GateSettings
from router.request.gate.rates import DrainRate
from router.request.pool import PoolAsk, PoolDispatcher
from tests.router.clients import Client, cluster, first_of, state_of
from tests.router.fakes import (
    PATIENCE_S,
    FakeClock,
    FakeDirectory,
    FakeNode,
    FakeRouter,
    fake_nodes,
    make_record,
    make_request,
    running_router,
)
from tests.router.test_gate import Visitor, settle

WAIT_S = 30.0
DECODE = make_record("d", Role.DECODE)


def decodes(node: NodeSnapshot) -> bool:
    return node.role is Role.DECODE


async def back(node: FakeNode) -> FakeNode:
    """The same node, started again: another boot at its address."""
    record = replace(
        node.record,
        boot_id="again",
        endpoint=replace(node.record.endpoint, boot_id="again"),
    )
    again = FakeNode(record)
    await again.start(int(node.address.rpartition(":")[2]))
    return again


def pool_ask() -> PoolAsk:
    return PoolAsk("embd", [(1, 2)], SystemClock().monotonic() + PATIENCE_S)


async def gone(router: FakeRouter) -> None:
    await router.until(lambda: not router.registry.can_serve())


# ---- who is expected ----


def test_a_node_is_expected_for_a_while_after_it_was_here() -> None:
    clock = FakeClock()
    expected = ExpectedNodes(clock, WAIT_S)
    assert expected.left_s(decodes) == 0
    expected.here([DECODE])
    clock.advance(10)
    assert expected.left_s(decodes) == WAIT_S - 10
    expected.here([DECODE])
    assert expected.left_s(decodes) == WAIT_S
    assert expected.left_s(lambda node: node.role is Role.PREFILL) == 0
    clock.advance(WAIT_S)
    assert expected.left_s(decodes) == 0


def test_a_node_is_judged_as_if_it_were_idle_and_connected() -> None:
    expected = ExpectedNodes(FakeClock(), WAIT_S)
    expected.here([replace(DECODE, load=NodeLoad(draining=True))])
    assert expected.left_s(lambda node: node.takes_requests) == WAIT_S


def test_who_is_refused_is_not_waited_for() -> None:
    expected = ExpectedNodes(FakeClock(), WAIT_S)
    expected.here([DECODE])
    expected.refused(DECODE)
    assert expected.left_s(decodes) == 0


def test_without_a_wait_nobody_is_expected() -> None:
    expected = ExpectedNodes(FakeClock(), 0.0)
    expected.here([DECODE])
    assert expected.left_s(decodes) == 0


async def test_a_living_record_is_enough() -> None:
    """A router that has just been started, or was paused, has not dialled the node yet."""
    record = replace(DECODE, address="127.0.0.1:1")  # nobody answers there
    directory = FakeDirectory([record])
    async with running_router([], directory=directory, node_wait_s=WAIT_S) as router:
        assert router.registry.expected_s(decodes) == pytest.approx(WAIT_S, abs=5)
        model = router.registry.model()
        assert model is not None, "a request can be read before the first hello"
        assert model.name == record.model


async def test_a_refused_record_is_not() -> None:
    alien = FakeNode(make_record("d2", Role.DECODE, model_digest="other"))
    await alien.start()
    directory = FakeDirectory()
    try:
        async with (
            fake_nodes("p") as (p,),
            running_router([p], directory=directory, node_wait_s=WAIT_S) as router,
        ):
            directory.known = [alien.record]
            await router.registry.refresh()
            async with asyncio.timeout(PATIENCE_S):
                await alien.left.wait()
            await router.registry.refresh()
            assert router.registry.expected_s(decodes) == 0
    finally:
        await alien.stop()


# ---- requests ----


async def test_a_running_request_waits_for_its_node_to_be_started_again() -> None:
    async with cluster("p", "d", node_wait_s=WAIT_S) as (router, (p, d)):
        client = Client(router, make_request())
        p.export((await p.hear(SubmitPrefill)).request)
        decode = await d.hear(SubmitDecode)
        d.tokens(decode.request, 0, 41)
        await client.next()
        await d.stop()
        await gone(router)
        again = await back(d)
        try:
            prefill = await p.hear(SubmitPrefill)
            assert (prefill.request.epoch, prefill.request.output_ids) == (2, ((41,),))
            p.export(prefill.request, seq=2)
            decode = await again.hear(SubmitDecode)
            again.finish(decode.request, 1, 42)
            assert await client.done() == [41, 42]
            assert client.trace.node_deaths == 1
        finally:
            await again.stop()


async def test_a_new_request_waits_too() -> None:
    async with cluster("d", node_wait_s=WAIT_S) as (router, (d,)):
        await d.stop()
        await gone(router)
        client = Client(router, make_request())
        again = await back(d)
        try:
            decode = await again.hear(SubmitDecode)
            assert decode.request.epoch == 1, "nobody had it before"
            again.finish(decode.request, 0, 41)
            assert await client.done() == [41]
            assert client.trace.retries == 0
        finally:
            await again.stop()


async def test_an_export_waits_for_a_decode_node() -> None:
    """Its only decode node dies before it has fetched: nothing is computed again."""
    async with cluster("p", "d", node_wait_s=WAIT_S) as (router, (p, d)):
        client = Client(router, make_request())
        handle = p.export((await p.hear(SubmitPrefill)).request)
        await d.hear(SubmitDecode)
        await d.stop()
        await gone(router)
        again = await back(d)
        try:
            decode = await again.hear(SubmitDecode)
            assert (decode.request.epoch, decode.handle) == (2, handle)
            again.finish(decode.request, 0, 41)
            assert await client.done() == [41]
            assert len(p.heard_of(SubmitPrefill)) == 1
        finally:
            await again.stop()


async def test_an_export_that_nobody_else_can_fetch_is_not_waited_with() -> None:
    """The node that let go of the request is the only one left, and may compute it again."""
    async with cluster("d1", "d2", node_wait_s=WAIT_S) as (router, nodes):
        client = Client(router, make_request())
        source = await first_of(nodes, SubmitDecode)
        other = nodes[source is nodes[0]]
        decode = await source.hear(SubmitDecode)
        source.tokens(decode.request, 0, 41)
        await client.next()
        moving = asyncio.create_task(router.dispatcher.migrate("r"))
        await source.hear(Migrate)
        await other.stop()
        await router.until(lambda: len(router.registry.records()) == 1)
        source.export(decode.request)
        again = (await source.hear(SubmitDecode)).request
        assert again.output_ids == ((41,),)
        source.finish(again, 1, 42)
        assert await client.done() == [41, 42]
        assert not await moving


async def test_an_export_that_goes_while_nobody_can_fetch_it_is_forgotten() -> None:
    """Both decode nodes drain at once: what one let go of ends with it, before a third comes."""
    async with cluster("p", "d1", "d2", node_wait_s=WAIT_S) as (router, (p, *nodes)):
        client = Client(router, make_request())
        p.export((await p.hear(SubmitPrefill)).request)
        source = await first_of(nodes, SubmitDecode)
        other = nodes[source is nodes[0]]
        decode = await source.hear(SubmitDecode)
        source.tokens(decode.request, 0, 41)
        await client.next()
        moving = asyncio.create_task(router.dispatcher.migrate("r"))
        await source.hear(Migrate)
        await other.stop()
        source.say(load=NodeLoad(draining=True))
        await gone(router)
        source.export(replace(decode.request, output_ids=((41,),)), seq=7, lease_ms=30)
        await source.hear(RenewExport)  # the router has it
        await source.stop()
        await router.until(lambda: len(router.registry.records()) == 1)
        again = await back(source)
        try:
            prefill = await p.hear(SubmitPrefill)
            assert prefill.request.output_ids == ((41,),)
            handle = p.export(prefill.request, seq=2)
            decode = await again.hear(SubmitDecode)
            assert decode.handle == handle
            again.finish(decode.request, 1, 42)
            assert await client.done() == [41, 42]
            assert not await moving
            assert router.dispatcher.migrations.failed == 1
        finally:
            await again.stop()


async def test_news_of_other_nodes_are_no_attempts() -> None:
    """However often nodes come and go meanwhile, whoever waits has tried nothing."""
    async with cluster("p", "d", node_wait_s=WAIT_S) as (router, (p, d)):
        client = Client(router, make_request())
        await p.hear(SubmitPrefill)
        await d.stop()
        await gone(router)
        for _ in range(MAX_TRIES + 1):
            p.cut()
            await router.until(lambda: not router.registry.records())
            await router.until(lambda: bool(router.registry.records()))
        again = await back(d)
        try:
            for epoch in (2, 3):
                prefill = await p.hear(SubmitPrefill)
                assert prefill.request.epoch == epoch
                p.export(prefill.request, seq=epoch)
                decode = await again.hear(SubmitDecode)
                if epoch == 2:  # one more failure is not one too many
                    again.fail(decode.request, "kv_stale", retryable=True)
            again.finish(decode.request, 0, 41)
            assert await client.done() == [41]
        finally:
            await again.stop()


async def test_a_drained_node_is_waited_for_as_well() -> None:
    """As when a container is made anew: it drains, goes, and its successor comes."""
    async with cluster("d", node_wait_s=WAIT_S) as (router, (d,)):
        d.say(load=NodeLoad(draining=True))
        await gone(router)
        client = Client(router, make_request())
        d.say(last=True)
        await d.stop()
        again = await back(d)
        try:
            decode = await again.hear(SubmitDecode)
            again.finish(decode.request, 0, 41)
            assert await client.done() == [41]
        finally:
            await again.stop()


async def test_when_its_time_is_over_nobody_is_waited_for() -> None:
    async with cluster("d", node_wait_s=0.05) as (router, (d,)):
        client = Client(router, make_request())
        await d.hear(SubmitDecode)
        await d.stop()
        assert isinstance(await client.fails(), Unavailable)


async def test_a_request_waits_within_its_own_deadline() -> None:
    async with cluster("d", node_wait_s=WAIT_S) as (router, (d,)):
        await d.stop()
        await gone(router)
        request = replace(make_request(), deadline=asyncio.get_running_loop().time() + 0.05)
        error = await Client(router, request).fails()
        assert getattr(error, "code", "") == "deadline_exceeded"


async def test_a_node_of_another_model_is_not_what_it_waits_for() -> None:
    """It has begun with one model, so only that one can go on with it."""
    async with cluster("d", node_wait_s=0.2) as (router, (d,)):
        client = Client(router, make_request())
        d.tokens((await d.hear(SubmitDecode)).request, 0, 41)
        await client.next()
        await d.stop()
        await gone(router)
        other = FakeNode(replace(d.record, model_digest="other", boot_id="again"))
        await other.start(int(d.address.rpartition(":")[2]))
        try:
            assert isinstance(await client.fails(), Unavailable | NodeLost)
            assert await state_of(router) == (RequestState.FAILED, 2)
            assert not other.heard_of(SubmitDecode)
        finally:
            await other.stop()


async def test_vectors_wait_for_a_node_as_tokens_do() -> None:
    async with fake_nodes("p") as (p,), running_router([p], node_wait_s=WAIT_S) as router:
        pools = PoolDispatcher(router.registry, SystemClock(), 4)
        work = asyncio.create_task(pools.vectors(pool_ask()))
        await p.hear(SubmitPool)
        await p.stop()
        await router.until(lambda: not router.registry.records())
        late = asyncio.create_task(pools.vectors(replace(pool_ask(), id="late")))
        again = await back(p)
        try:
            asked = {(await again.hear(SubmitPool)).request for _ in range(2)}
            assert {(one.id, one.epoch) for one in asked} == {("embd-0", 2), ("late-0", 1)}
            vector = Pooled("embd-0", 2, (b"1234",)), Pooled("late-0", 1, (b"5678",))
            again.say(pooled=vector)
            assert (await work, await late) == ([b"1234"], [b"5678"])
        finally:
            await again.stop()


async def test_vectors_come_from_the_same_boot_again_if_there_is_no_other() -> None:
    """Only its session broke: this router was paused, say."""
    async with fake_nodes("p") as (p,), running_router([p], node_wait_s=WAIT_S) as router:
        pools = PoolDispatcher(router.registry, SystemClock(), 4)
        work = asyncio.create_task(pools.vectors(pool_ask()))
        await p.hear(SubmitPool)
        p.cut()
        assert (await p.hear(SubmitPool)).request.epoch == 2
        p.say(pooled=(Pooled("embd-0", 2, (b"1234",)),))
        assert await work == [b"1234"]


async def test_a_full_node_is_no_missing_node() -> None:
    async with fake_nodes("p") as (p,), running_router([p], node_wait_s=WAIT_S) as router:
        pools = PoolDispatcher(router.registry, SystemClock(), 4)
        work = asyncio.create_task(pools.vectors(pool_ask()))
        await p.hear(SubmitPool)
        p.say(failed=(RequestFailed("embd-0", 1, "overloaded", "full", True),))
        with pytest.raises(Overloaded):
            await work


# ---- the gate ----


class Nodes:
    """What a gate is told: snapshots, and for how long more are expected."""

    def __init__(self, clock: FakeClock) -> None:
        self.now: list[NodeSnapshot] = []
        self.until = clock.now + WAIT_S
        self.clock = clock
        bounds = Bounds(max_live=9, max_queued=9)
        settings = GateSettings(bounds)
        self.gate = Gate(clock, settings, lambda: self.now, lambda *_: self.expected_s)

    @property
    def expected_s(self) -> float:
        return max(0.0, self.until - self.clock.now)

    def come(self) -> None:
        self.now = [NodeSnapshot.of(DECODE)]
        self.gate.poke()


async def test_the_gate_keeps_new_requests_until_a_node_is_there() -> None:
    nodes = Nodes(FakeClock())
    first, second = (Visitor(nodes.gate, name, deadline=1600.0) for name in "ab")
    await settle()
    assert [request.id for request, _ in nodes.gate.waiting()] == ["a", "b"]
    nodes.clock.advance(20)
    nodes.come()
    await first.enters()
    await second.enters()
    for visitor in (first, second):
        await visitor.leave()


async def test_the_gate_lets_them_pass_when_nobody_is_expected_any_more() -> None:
    """Their journey tells them so, with the reason."""
    clock = FakeClock()
    nodes = Nodes(clock)
    nodes.until = clock.now + 0.02  # the gate's timer is real
    visitor = Visitor(nodes.gate, "a")
    await settle()
    assert nodes.gate.waiting()
    clock.advance(1.0)
    await visitor.enters()
    await visitor.leave()


async def test_time_without_a_node_does_not_slow_the_queue_down() -> None:
    """Else everybody would be refused for a queue that seems to stand still."""
    clock = FakeClock()
    nodes = Nodes(clock)
    queue = nodes.gate.queue
    nodes.now = [replace(NodeSnapshot.of(DECODE), load=NodeLoad(running=1, swapped=1))]  # full
    early = Visitor(nodes.gate, "early", deadline=clock.now + 600)
    await settle()
    clock.advance(1.0)
    nodes.come()
    await early.enters()
    before = queue.tokens_per_s
    assert before is not None, "it was seen to drain"
    nodes.now = []
    late = Visitor(nodes.gate, "late", deadline=clock.now + 600)
    await settle()
    for _ in range(int(WAIT_S) - 2):
        clock.advance(1.0)
        nodes.gate.poke()
    assert queue.tokens_per_s == before
    assert [request.id for request, _ in nodes.gate.waiting()] == ["late"]
    nodes.come()
    for visitor in (early, late):
        await visitor.enters()
        await visitor.leave()


def test_a_pause_of_the_whole_router_does_not_either() -> None:
    rate = DrainRate()
    rate.tick(0.0, queued=True)
    rate.tick(1.0, queued=True)
    rate.add(1000.0)
    before = rate.tokens_per_s
    rate.tick(21.0, queued=True)  # SIGSTOP, a VM's pause
    assert before is not None
    assert rate.tokens_per_s is not None
    assert rate.tokens_per_s > before / 5
