"""Nodes that hang without dying: noticed by their silence or their own word, left, and fenced."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from baton.protocol.events import NodeStep, TokenEvent
from baton.protocol.handles import NodeLoad
from baton.protocol.messages import AbortRequest, SubmitDecode, SubmitPrefill
from router.nodes.health import NodeHealth, Watchdog
from tests.router.clients import Client, cluster, first_of
from tests.router.fakes import FAST, PATIENCE_S, FakeClock, FakeRouter, make_request

IMPATIENT = replace(FAST, stall_s=0.3)
FREE = NodeLoad(free_blocks=64, total_blocks=64)


def shunned(router: FakeRouter) -> set[str]:
    return {node.node_id for node in router.registry.snapshots() if node.shunned}


async def test_a_node_that_falls_silent_in_mid_stream_is_left() -> None:
    async with cluster("d1", "d2", timing=IMPATIENT) as (router, (d1, d2)):
        client = Client(router, make_request())
        victim = await first_of([d1, d2], SubmitDecode)
        other = d2 if victim is d1 else d1
        old = (await victim.hear(SubmitDecode)).request
        victim.tokens(old, 0, 41)
        await client.next()
        # Not another word: its engine thread hangs, its event loop does not.
        again = await other.hear(SubmitDecode)
        assert (again.request.epoch, again.request.output_ids) == (2, ((41,),))
        health = router.registry.health.stats
        assert (health.stalls, health.deaths) == (1, 1)
        other.finish(again.request, 1, 42)
        assert await client.done() == [41, 42]
        assert client.trace.node_deaths == 1
        # The node answers again: a new session, without requests, and not trusted with any before
        # its engine has said something.
        await router.until(lambda: victim.sessions == 2 and len(router.registry.records()) == 2)
        assert shunned(router) == {victim.record.node_id}
        assert all(status.assigned == 0 for status in router.registry.statuses())
        # What its engine computed for the request before it hung comes late, and is dropped.
        victim.tokens(old, 1, 99)
        victim.say(load=FREE)
        await router.until(lambda: not shunned(router))
        assert health.stale_events == 1
        assert await router.logged("r") == [41, 42]


async def test_a_node_that_says_that_it_hangs_is_left_at_once() -> None:
    async with cluster("p1", "p2", "d") as (router, (p1, p2, d)):
        client = Client(router, make_request())
        victim = await first_of([p1, p2], SubmitPrefill)
        other = p2 if victim is p1 else p1
        prefill = await victim.hear(SubmitPrefill)
        victim.export(prefill.request)
        first = await d.hear(SubmitDecode)
        # D fetches already, and P's lane tells it to be patient: D would wait for ever.
        d.subscribe(first.request)
        victim.record = replace(victim.record, load=replace(FREE, stalled=True))
        victim.say(load=victim.record.load)
        again = await other.hear(SubmitPrefill)
        assert again.request.epoch == 2
        assert (await d.hear(AbortRequest)).epoch == 1
        await router.until(lambda: victim.sessions == 2 and len(router.registry.records()) == 3)
        assert shunned(router) == {victim.record.node_id}
        other.export(again.request)
        decode = await d.hear(SubmitDecode)
        d.finish(decode.request, 0, 41)
        assert await client.done() == [41]
        victim.say(load=FREE)
        await router.until(lambda: not shunned(router))


async def test_a_prefill_node_that_is_silent_after_token_1_is_not_waited_for() -> None:
    """D waits for frames that will not come; of a node that was killed it would know at once."""
    async with cluster("p1", "p2", "d") as (router, (p1, p2, d)):
        client = Client(router, make_request())
        victim = await first_of([p1, p2], SubmitPrefill)
        other = p2 if victim is p1 else p1
        prefill = await victim.hear(SubmitPrefill)
        victim.export(prefill.request)
        d.subscribe((await d.hear(SubmitDecode)).request)
        victim.tokens(prefill.request, 0, 41)
        await client.next()
        victim.cut("Stream removed (ping timeout)")
        again = await other.hear(SubmitPrefill)
        assert (again.request.epoch, again.request.output_ids) == (2, ((41,),))
        other.export(again.request)
        d.finish((await d.hear(SubmitDecode)).request, 1, 42)
        assert await client.done() == [41, 42]
        # Once D has spoken, P may be as silent as it likes.
        p1.heard.clear()
        p2.heard.clear()
        client = Client(router, make_request("later"))
        node = await first_of([p1, p2], SubmitPrefill)
        prefill = await node.hear(SubmitPrefill)
        node.export(prefill.request)
        decode = await d.hear(SubmitDecode)
        d.tokens(decode.request, 0, 41)
        await client.next()
        node.cut("Stream removed (ping timeout)")
        await router.until(lambda: router.registry.health.stats.deaths == 2)
        d.finish(decode.request, 1, 42)
        assert await client.done() == [41, 42]
        assert client.trace.retries == 0


async def test_the_only_decode_node_hangs_so_the_router_is_not_ready() -> None:
    async with cluster("p", "d") as (router, (_, d)):
        assert router.registry.can_serve()
        d.say(load=replace(FREE, stalled=True))
        await router.until(lambda: not router.registry.can_serve())
        assert len(router.registry.records()) == 2, "it is connected all the same"
        d.say(load=FREE)
        await router.until(router.registry.can_serve)


async def test_a_slow_request_on_a_node_that_beats_is_left_alone() -> None:
    timing = replace(FAST, stall_s=1.0)
    async with cluster("d", timing=timing) as (router, (d,)):
        client = Client(router, make_request())
        request = (await d.hear(SubmitDecode)).request
        heard = asyncio.Event()
        router.registry.watch_reports(heard.set)
        loop = asyncio.get_running_loop()
        until = loop.time() + 1.5 * timing.stall_s
        while loop.time() < until:  # each beat is a round trip
            heard.clear()
            d.say(load=replace(FREE, running=1))
            async with asyncio.timeout(PATIENCE_S):
                await heard.wait()
        d.finish(request, 0, 41)
        assert await client.done() == [41]
        assert (router.registry.health.stats.stalls, d.sessions) == (0, 1)


async def test_an_idle_hour_is_no_silence() -> None:
    """Nothing is expected of a node without requests; the clock starts with the first one."""
    clock, busy = FakeClock(), False
    dog = Watchdog(clock, 0.05, lambda: busy)
    watching = asyncio.create_task(dog.bite())
    clock.advance(3600.0)
    dog.heard()
    busy = True
    clock.advance(0.04)
    done, _ = await asyncio.wait({watching}, timeout=0.2)
    assert not done, "bitten for the idle hour"
    clock.advance(0.02)
    async with asyncio.timeout(PATIENCE_S):
        await watching


def test_only_events_without_an_owner_are_stale() -> None:
    health = NodeHealth(FakeClock())
    health.heard(("d",), NodeStep(tokens=(TokenEvent("r", 1, 0, (41,)),)))
    assert health.stats.stale_events == 0
