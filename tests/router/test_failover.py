"""Nodes that die or refuse on the way of a request: no gap, no duplicate, epochs that rise."""

from __future__ import annotations

from dataclasses import replace

from baton.protocol.errors import (
    ContextLengthExceeded,
    InternalError,
    NodeLost,
    Overloaded,
    Unavailable,
)
from baton.protocol.messages import (
    AbortRequest,
    Prefilled,
    ReleaseExport,
    RenewExport,
    SubmitDecode,
    SubmitPrefill,
)
from baton.protocol.request import RequestState
from tests.router.clients import Client, cluster, first_of, state_of
from tests.router.fakes import FAST, PATIENCE_S, make_request

# ---- nodes that die ----


async def test_prefill_lost_before_token_1() -> None:
    async with cluster("p1", "p2", "d") as (router, (p1, p2, d)):
        client = Client(router, make_request())
        victim = await first_of([p1, p2], SubmitPrefill)
        other = p2 if victim is p1 else p1
        victim.export((await victim.hear(SubmitPrefill)).request)
        first = await d.hear(SubmitDecode)
        await victim.stop()
        prefill = await other.hear(SubmitPrefill)
        assert prefill.request.epoch == 2
        assert prefill.request.output_ids == ((),)
        assert (await d.hear(AbortRequest)).epoch == first.request.epoch
        handle = other.export(prefill.request)
        decode = await d.hear(SubmitDecode)
        assert (decode.request.epoch, decode.handle) == (2, handle)
        d.tokens(first.request, 0, 99)  # the old epoch's: never shown
        other.tokens(prefill.request, 0, 41)
        await client.next()
        d.finish(decode.request, 0, 41, 42)
        assert await client.done() == [41, 42]
        assert await state_of(router) == (RequestState.FINISHED, 2)
        assert (client.trace.retries, client.trace.node_deaths) == (1, 1)
        assert client.trace.prefill_node == other.record.node_id


async def test_prefill_lost_after_token_1_while_kv_moves() -> None:
    """Its session breaks after D subscribed:
    D goes on, then reports KVLost; then prompt + token 1 are prefilled.
    """
    async with cluster("p1", "p2", "d") as (router, (p1, p2, d)):
        client = Client(router, make_request())
        victim = await first_of([p1, p2], SubmitPrefill)
        other = p2 if victim is p1 else p1
        prefill = await victim.hear(SubmitPrefill)
        victim.export(prefill.request)
        decode = await d.hear(SubmitDecode)
        d.subscribe(decode.request)
        victim.tokens(prefill.request, 0, 41)
        await client.next()
        await victim.stop()
        await router.until(lambda: len(router.registry.records()) == 2)
        assert not other.heard_of(SubmitPrefill)
        d.fail(decode.request, "kv_lost", retryable=True)
        again = await other.hear(SubmitPrefill)
        assert (again.request.epoch, again.request.output_ids) == (2, ((41,),))
        assert again.request.prompt_ids == prefill.request.prompt_ids
        assert other.export(again.request).num_tokens == 11
        decode = await d.hear(SubmitDecode)
        other.tokens(again.request, 1, 42)
        assert (await client.next()).position == 1
        d.finish(decode.request, 1, 42, 43)
        assert await client.done() == [41, 42, 43]
        assert client.trace.node_deaths == 1


async def test_prefill_session_lost_after_subscribed_is_no_failure() -> None:
    async with cluster("p", "d") as (router, (p, d)):
        client = Client(router, make_request())
        prefill = await p.hear(SubmitPrefill)
        p.export(prefill.request)
        decode = await d.hear(SubmitDecode)
        d.subscribe(decode.request)
        d.tokens(decode.request, 0, 41)
        await client.next()
        await p.stop()
        d.finish(decode.request, 1, 42)
        assert await client.done() == [41, 42]
        assert client.trace.retries == 0


async def test_decode_lost_in_mid_stream() -> None:
    async with cluster("p", "d1", "d2") as (router, (p, d1, d2)):
        client = Client(router, make_request())
        prefill = await p.hear(SubmitPrefill)
        p.export(prefill.request)
        victim = await first_of([d1, d2], SubmitDecode)
        other = d2 if victim is d1 else d1
        decode = await victim.hear(SubmitDecode)
        p.tokens(prefill.request, 0, 41)
        victim.subscribe(decode.request)
        victim.tokens(decode.request, 0, 41)
        victim.tokens(decode.request, 1, 42)
        await client.hears(2)
        await victim.stop()
        again = await p.hear(SubmitPrefill)
        assert (again.request.epoch, again.request.output_ids) == (2, ((41, 42),))
        p.export(again.request, seq=2)
        decode = await other.hear(SubmitDecode)
        assert decode.handle is not None
        assert (decode.handle.export_seq, decode.handle.num_tokens) == (2, 12)
        other.subscribe(decode.request)
        p.tokens(again.request, 2, 43)
        other.finish(decode.request, 2, 43, 44)
        assert await client.done() == [41, 42, 43, 44]
        assert await state_of(router) == (RequestState.FINISHED, 2)
        assert await router.logged("r") == [41, 42, 43, 44]


async def test_decode_lost_before_it_spoke_keeps_the_export() -> None:
    """The handle goes to the other decode node; token 1 still comes from P, prefilled once."""
    async with cluster("p", "d1", "d2") as (router, (p, d1, d2)):
        client = Client(router, make_request())
        prefill = await p.hear(SubmitPrefill)
        handle = p.export(prefill.request)
        victim = await first_of([d1, d2], SubmitDecode)
        other = d2 if victim is d1 else d1
        victim.subscribe((await victim.hear(SubmitDecode)).request)
        await victim.stop()
        decode = await other.hear(SubmitDecode)
        assert (decode.request.epoch, decode.handle) == (2, handle)
        assert await state_of(router) == (RequestState.TRANSFER, 2)
        await p.hear(RenewExport)  # ours again until the new one subscribes
        p.tokens(prefill.request, 0, 41)  # under the epoch that P knows
        assert (await client.next()).token_ids == (41,)
        other.subscribe(decode.request)
        other.finish(decode.request, 0, 41, 42)
        assert await client.done() == [41, 42]
        assert len(p.heard_of(SubmitPrefill)) == 1
        assert not p.heard_of(AbortRequest)
        assert await router.logged("r") == [41, 42]


async def test_the_next_decode_node_knows_of_token_1() -> None:
    """Token 1 is read while its first decode node is given up, or before: nobody is to wait."""
    async with cluster("p", "d1", "d2") as (router, (p, d1, d2)):
        client = Client(router, make_request())
        prefill = await p.hear(SubmitPrefill)
        p.export(prefill.request)
        victim = await first_of([d1, d2], SubmitDecode)
        other = d2 if victim is d1 else d1
        assert (await victim.hear(SubmitDecode)).prefilling
        p.tokens(prefill.request, 0, 41)
        await client.next()
        await victim.stop()
        decode = await other.hear(SubmitDecode)
        assert not decode.prefilling
        other.finish(decode.request, 0, 41, 42)
        assert await client.done() == [41, 42]
        assert not other.heard_of(Prefilled)


async def test_a_stale_export_is_prefilled_again_on_the_only_node() -> None:
    async with cluster("p", "d") as (router, (p, d)):
        client = Client(router, make_request())
        prefill = await p.hear(SubmitPrefill)
        handle = p.export(prefill.request)
        decode = await d.hear(SubmitDecode)
        p.tokens(prefill.request, 0, 41)
        await client.next()
        d.fail(decode.request, "kv_stale", retryable=True)
        assert (await p.hear(ReleaseExport)).handle == handle
        again = await p.hear(SubmitPrefill)
        assert (again.request.epoch, again.request.output_ids) == (2, ((41,),))
        p.export(again.request, seq=2)
        decode = await d.hear(SubmitDecode)
        d.finish(decode.request, 1, 42)
        assert await client.done() == [41, 42]
        assert client.trace.node_deaths == 0


async def test_kv_that_is_lost_on_every_way_is_computed_where_it_decodes() -> None:
    async with cluster("p1", "p2", "d") as (router, (*prefillers, d)):
        client = Client(router, make_request())
        for epoch in (1, 2):
            p = await first_of(prefillers, SubmitPrefill)
            prefillers.remove(p)
            prefill = await p.hear(SubmitPrefill)
            assert prefill.request.epoch == epoch
            p.export(prefill.request, seq=epoch)
            decode = await d.hear(SubmitDecode)
            p.tokens(prefill.request, epoch - 1, 40 + epoch)
            await client.next()
            d.fail(decode.request, "kv_lost", retryable=True)
        decode = await d.hear(SubmitDecode)
        assert (decode.request.epoch, decode.handle) == (3, None)
        d.finish(decode.request, 2, 43)
        assert await client.done() == [41, 42, 43]


async def test_a_fetch_that_timed_out_is_made_again_and_computes_nothing_anew() -> None:
    """The exporter is slow, not dead: it goes on, and another decode node fetches from it."""
    async with cluster("p", "d1", "d2") as (router, (p, d1, d2)):
        client = Client(router, make_request())
        prefill = await p.hear(SubmitPrefill)
        handle = p.export(prefill.request)
        first = await first_of([d1, d2], SubmitDecode)
        other = d2 if first is d1 else d1
        late = (await first.hear(SubmitDecode)).request
        first.subscribe(late)
        first.fail(late, "kv_timeout", retryable=True)
        decode = await other.hear(SubmitDecode)
        assert (decode.request.epoch, decode.handle) == (2, handle)
        p.tokens(prefill.request, 0, 41)
        assert (await client.next()).token_ids == (41,)
        other.finish(decode.request, 0, 41, 42)
        assert await client.done() == [41, 42]
        assert len(p.heard_of(SubmitPrefill)) == 1
        assert not p.heard_of(AbortRequest)
        assert not p.heard_of(ReleaseExport)
        assert client.trace.node_deaths == 0
        assert router.dispatcher.retries.granted == 0


async def test_fetches_that_time_out_again_and_again_end_where_it_decodes() -> None:
    """Twice from each of two exporters; then the decode node computes the prompt."""
    async with cluster("p1", "p2", "d") as (router, (*prefillers, d)):
        client = Client(router, make_request())
        epoch = 0
        for seq in (1, 2):
            p = await first_of(prefillers, SubmitPrefill)
            prefillers.remove(p)
            handle = p.export((await p.hear(SubmitPrefill)).request, seq=seq)
            for _ in range(2):
                decode = await d.hear(SubmitDecode)
                epoch += 1
                assert (decode.request.epoch, decode.handle) == (epoch, handle)
                d.fail(decode.request, "kv_timeout", retryable=True)
        decode = await d.hear(SubmitDecode)
        assert (decode.request.epoch, decode.handle) == (5, None)
        d.finish(decode.request, 0, 41)
        assert await client.done() == [41]


async def test_a_request_that_kills_three_nodes_has_failed() -> None:
    timing = replace(FAST, connect_s=0.3)  # for so long a node may come back
    async with cluster("d1", "d2", "d3", "d4", timing=timing) as (router, nodes):
        client = Client(router, make_request())
        living = list(nodes)
        for epoch in (1, 2, 3):
            victim = await first_of(living, SubmitDecode)
            assert (await victim.hear(SubmitDecode)).request.epoch == epoch
            living.remove(victim)
            await victim.stop()
        assert isinstance(await client.fails(), NodeLost)
        assert not living[0].heard_of(SubmitDecode)
        assert await state_of(router) == (RequestState.FAILED, 3)


async def test_what_has_begun_waits_for_a_node_to_come_back() -> None:
    """Its last session broke, by a stall of the whole machine say: the node itself is there."""
    async with cluster("d", node_wait_s=PATIENCE_S) as (router, (d,)):
        client = Client(router, make_request())
        decode = await d.hear(SubmitDecode)
        d.tokens(decode.request, 0, 41)
        await client.next()
        d.cut()
        again = await d.hear(SubmitDecode)
        assert (again.request.epoch, again.request.output_ids) == (2, ((41,),))
        d.finish(again.request, 1, 42)
        assert await client.done() == [41, 42]
        assert client.trace.retries == 1


async def test_an_end_that_cannot_be_recorded_is_left_to_the_lease() -> None:
    async with cluster("d") as (router, (d,)):
        client = Client(router, make_request())
        decode = await d.hear(SubmitDecode)
        ledger = router.guard.ledgers.get("r")
        assert ledger is not None
        ledger.state = RequestState.FINISHED  # an illegal transition will be noticed at the end
        d.finish(decode.request, 0, 41)
        assert await client.done() == [41]
        assert router.guard.ledgers.get("r") is None, "its lease would be renewed for ever"


async def test_the_last_node_lost_is_unavailable() -> None:
    async with cluster("d") as (router, (d,)):
        client = Client(router, make_request())
        await d.hear(SubmitDecode)
        await d.stop()
        assert isinstance(await client.fails(), Unavailable)
        assert await router.store.read("r") is None, "its id is free: nothing of it was shown"


# ---- nodes that refuse ----


async def test_a_full_decode_node_is_passed_over() -> None:
    async with cluster("p", "d1", "d2") as (router, (p, d1, d2)):
        client = Client(router, make_request())
        handle = p.export((await p.hear(SubmitPrefill)).request)
        full = await first_of([d1, d2], SubmitDecode)
        other = d2 if full is d1 else d1
        full.fail((await full.hear(SubmitDecode)).request, "overloaded", retryable=True)
        decode = await other.hear(SubmitDecode)
        assert decode.handle == handle
        other.finish(decode.request, 0, 41)
        assert await client.done() == [41]
        assert client.trace.node_deaths == 0


async def test_all_full_is_overloaded() -> None:
    async with cluster("d") as (router, (d,)):
        client = Client(router, make_request())
        d.fail((await d.hear(SubmitDecode)).request, "overloaded", retryable=True)
        assert isinstance(await client.fails(), Overloaded)


async def test_a_refusal_that_no_other_node_would_change() -> None:
    async with cluster("p1", "p2", "d") as (router, (p1, p2, d)):
        client = Client(router, make_request())
        node = await first_of([p1, p2], SubmitPrefill)
        request = (await node.hear(SubmitPrefill)).request
        # Refused before its epoch could be read.
        node.fail(request, "context_length_exceeded", retryable=False, epoch=0)
        assert isinstance(await client.fails(), ContextLengthExceeded)
        assert len(p1.heard_of(SubmitPrefill) + p2.heard_of(SubmitPrefill)) == 1
        assert not d.heard_of(SubmitDecode)
        assert await state_of(router) == (RequestState.FAILED, 1)


async def test_a_gap_is_never_shown() -> None:
    async with cluster("d") as (router, (d,)):
        client = Client(router, make_request())
        request = (await d.hear(SubmitDecode)).request
        d.tokens(request, 0, 41)
        d.tokens(request, 2, 43)
        assert isinstance(await client.fails(), InternalError)
        assert [event.token_ids for event in client.events] == [(41,)]
        assert (await d.hear(AbortRequest)).request_id == "r"


async def test_a_contradiction_is_never_shown() -> None:
    async with cluster("d") as (router, (d,)):
        client = Client(router, make_request())
        request = (await d.hear(SubmitDecode)).request
        d.tokens(request, 0, 41)
        d.tokens(request, 0, 40, 42)
        assert isinstance(await client.fails(), InternalError)
        assert [event.token_ids for event in client.events] == [(41,)]
