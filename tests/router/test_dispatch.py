"""The journey of one request, against nodes scripted by each test over real gRPC sessions."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from baton.protocol.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from baton.protocol.events import TokenEvent
from baton.protocol.messages import (
    AbortRequest,
    DrainNode,
    Prefilled,
    ReleaseExport,
    RenewExport,
    SubmitDecode,
    SubmitPrefill,
)
from baton.protocol.request import FinishReason, Request, RequestState
from router.nodes.policy import PolicySettings
from router.request.trace import RequestTrace
from tests.router.clients import Client, cluster, state_of
from tests.router.fakes import (
    PATIENCE_S,
    make_request,
)


async def test_the_way_of_a_request() -> None:
    async with cluster("p", "d") as (router, (p, d)):
        request = make_request()
        client = Client(router, request)
        prefill = await p.hear(SubmitPrefill)
        assert (prefill.request.prompt_ids, prefill.request.epoch) == (request.prompt_ids, 1)
        assert await state_of(router) == (RequestState.PREFILL, 1)
        handle = p.export(prefill.request)
        decode = await d.hear(SubmitDecode)
        assert decode.handle == handle
        assert decode.request.prompt_ids == request.prompt_ids
        assert await state_of(router) == (RequestState.TRANSFER, 1)
        record = await router.store.read("r")
        assert record is not None
        # The store never gets the handle, whose secret is the right to fetch.
        assert not any(handle.secret.hex() in value for value in record.fields.values())
        # Token 1 is shown while the decode node has not even subscribed.
        p.tokens(prefill.request, 0, 41, num_cached_tokens=4)
        first = await client.next()
        assert (first.position, first.token_ids, first.num_cached_tokens) == (0, (41,), 4)
        assert await router.logged("r") == [41]
        d.subscribe(decode.request)
        d.tokens(decode.request, 0, 41, num_cached_tokens=9)  # END's token, repeated
        d.tokens(decode.request, 1, 42, 43)
        assert (await client.next()).token_ids == (42, 43)
        assert await state_of(router) == (RequestState.DECODE, 1)
        d.finish(decode.request, 3, 44)
        assert await client.done() == [41, 42, 43, 44]
        assert await state_of(router) == (RequestState.FINISHED, 1)
        assert not p.heard_of(AbortRequest)
        assert not d.heard_of(AbortRequest)
        assert not p.heard_of(ReleaseExport)
        trace = client.trace
        assert (trace.prefill_node, trace.decode_node, trace.retries) == ("p", "d", 0)
        assert (trace.cached_tokens, trace.output_tokens, trace.outcome) == (4, 4, "finished")
        assert trace.first_token_at is not None
        assert trace.handover_at is not None
        assert trace.first_token_at <= trace.handover_at
        assert router.dispatcher.num_live == 0


async def test_a_request_that_ends_is_freed_without_the_garbage_collector() -> None:
    async with cluster("p", "d") as (router, (p, d)):
        client = Client(router, make_request())
        prefill = await p.hear(SubmitPrefill)
        (journey,) = router.dispatcher._live.values()  # pyright: ignore[reportPrivateUsage]
        kept = weakref.ref(journey._attempts)  # pyright: ignore[reportPrivateUsage]
        del journey
        gc.disable()
        try:
            p.export(prefill.request)
            decode = await d.hear(SubmitDecode)
            p.tokens(prefill.request, 0, 41)
            d.subscribe(decode.request)
            d.tokens(decode.request, 0, 41)
            d.finish(decode.request, 1, 42)
            assert await client.done() == [41, 42]
            await asyncio.sleep(0)
            assert kept() is None
        finally:
            gc.enable()


async def test_the_decode_node_may_be_faster_than_token_1() -> None:
    async with cluster("p", "d") as (router, (p, d)):
        client = Client(router, make_request())
        prefill = await p.hear(SubmitPrefill)
        p.export(prefill.request)
        decode = await d.hear(SubmitDecode)
        d.subscribe(decode.request)
        d.tokens(decode.request, 0, 41, 42)
        assert (await client.next()).token_ids == (41, 42)
        p.tokens(prefill.request, 0, 41)
        d.finish(decode.request, 2, 43)
        assert await client.done() == [41, 42, 43]


async def test_partly_known_events_lose_their_known_part() -> None:
    async with cluster("p", "d") as (router, (p, d)):
        client = Client(router, make_request())
        prefill = await p.hear(SubmitPrefill)
        p.export(prefill.request)
        p.tokens(prefill.request, 0, 41)
        decode = await d.hear(SubmitDecode)
        await client.next()
        d.tokens(decode.request, 0, 41, 42)
        d.finish(decode.request, 1, 42, 43)
        assert await client.done() == [41, 42, 43]
        assert await router.logged("r") == [41, 42, 43]


async def test_the_decode_node_is_told_of_token_1() -> None:
    """Once, as soon as it is there: a small export is fetched only then."""
    async with cluster("p", "d") as (router, (p, d)):
        client = Client(router, make_request())
        prefill = await p.hear(SubmitPrefill)
        p.export(prefill.request)
        decode = await d.hear(SubmitDecode)
        assert decode.prefilling
        p.tokens(prefill.request, 0, 41)
        assert await d.hear(Prefilled) == Prefilled("r", 1)
        d.finish(decode.request, 0, 41, 42)
        assert await client.done() == [41, 42]
        assert len(d.heard_of(Prefilled)) == 1


async def test_a_request_that_ends_with_token_1() -> None:
    async with cluster("p", "d") as (router, (p, d)):
        client = Client(router, make_request(max_tokens=1))
        prefill = await p.hear(SubmitPrefill)
        handle = p.export(prefill.request)
        await d.hear(SubmitDecode)
        p.finish(prefill.request, 0, 41)
        assert await client.done() == [41]
        assert (await d.hear(AbortRequest)).request_id == "r"
        assert (await p.hear(ReleaseExport)).handle == handle
        assert await state_of(router) == (RequestState.FINISHED, 1)


async def test_without_prefill_nodes_the_decode_node_does_both() -> None:
    async with cluster("d") as (router, (d,)):
        client = Client(router, make_request())
        decode = await d.hear(SubmitDecode)
        assert decode.handle is None
        assert await state_of(router) == (RequestState.DECODE, 1)
        d.tokens(decode.request, 0, 41, num_cached_tokens=8)
        d.finish(decode.request, 1, 42)
        assert await client.done() == [41, 42]
        assert client.trace.local_prefill
        assert client.trace.cached_tokens == 8


async def test_a_short_prompt_may_be_prefilled_on_the_decode_node() -> None:
    settings = PolicySettings(local_prefill_tokens=10)
    async with cluster("p", "d", settings=settings) as (router, (p, d)):
        client = Client(router, make_request(prompt=10))
        decode = await d.hear(SubmitDecode)
        assert decode.handle is None
        d.finish(decode.request, 0, 41)
        assert await client.done() == [41]
        assert not p.heard_of(SubmitPrefill)


@pytest.mark.parametrize("names", [(), ("p",)])
async def test_no_decode_node_is_unavailable_at_once(names: tuple[str, ...]) -> None:
    async with cluster(*names) as (router, _):
        assert isinstance(await Client(router, make_request()).fails(), Unavailable)
        assert await router.store.counts() == {RequestState.QUEUED: 0, RequestState.FAILED: 1}
        assert await router.store.read("r") is None, "its id is free: nothing of it was shown"


# ---- clients and limits ----


async def test_a_client_that_leaves_is_aborted_on_every_hop() -> None:
    async with cluster("p", "d") as (router, (p, d)):
        client = Client(router, make_request())
        prefill = await p.hear(SubmitPrefill)
        handle = p.export(prefill.request)
        await d.hear(SubmitDecode)
        p.tokens(prefill.request, 0, 41)
        await client.next()
        client.task.cancel()
        assert (await p.hear(AbortRequest)).request_id == "r"
        assert (await p.hear(ReleaseExport)).handle == handle
        assert (await d.hear(AbortRequest)).request_id == "r"
        await asyncio.wait({client.task})
        assert await state_of(router) == (RequestState.CANCELLED, 1)
        assert client.trace.outcome == "cancelled"
        assert router.dispatcher.num_live == 0


async def test_a_stop_string_finishes_the_request() -> None:
    async with cluster("d") as (router, (d,)):
        trace = RequestTrace()
        stream = router.dispatcher.run(make_request(), trace)
        reading = asyncio.ensure_future(anext(stream))
        d.tokens((await d.hear(SubmitDecode)).request, 0, 41)
        assert (await reading).token_ids == (41,)
        trace.stopped_by_text()
        await stream.aclose()
        assert (await d.hear(AbortRequest)).request_id == "r"
        assert await state_of(router) == (RequestState.FINISHED, 1)


async def test_abort_from_outside() -> None:
    async with cluster("d") as (router, (d,)):
        client = Client(router, make_request())
        await d.hear(SubmitDecode)
        assert router.dispatcher.abort("r")
        assert isinstance(await client.fails(), Cancelled)
        assert (await d.hear(AbortRequest)).request_id == "r"
        assert not router.dispatcher.abort("r")


async def test_the_deadline_holds() -> None:
    async with cluster("d") as (router, (d,)):
        loop = asyncio.get_running_loop()
        base = make_request()
        request = Request(base.id, base.prompt_ids, base.params, deadline=loop.time() + 0.2)
        client = Client(router, request)
        heard = await d.hear(SubmitDecode)
        assert heard.request.deadline is not None
        failure = await client.fails()
        assert isinstance(failure, DeadlineExceeded)
        assert "--request-timeout-s" in failure.message, "most clients have given no deadline"
        assert (await d.hear(AbortRequest)).request_id == "r"
        assert await router.store.read("r") is None, "its id is free: nothing of it was shown"


async def test_live_requests_are_bounded() -> None:
    async with cluster("d", max_live=1) as (router, (d,)):
        client = Client(router, make_request("a"))
        request = (await d.hear(SubmitDecode)).request
        assert isinstance(await Client(router, make_request("b")).fails(), Overloaded)
        assert isinstance(await Client(router, make_request("a")).fails(), InvalidRequest)
        d.finish(request, 0, 41)
        assert await client.done() == [41]
        last = Client(router, make_request("b"))
        d.finish((await d.hear(SubmitDecode)).request, 0, 42)
        assert await last.done() == [42]


async def test_the_lease_is_renewed_until_the_decode_node_subscribes() -> None:
    async with cluster("p", "d") as (router, (p, d)):
        client = Client(router, make_request())
        handle = p.export((await p.hear(SubmitPrefill)).request, lease_ms=60)
        decode = await d.hear(SubmitDecode)
        for _ in range(3):
            assert (await p.hear(RenewExport)).handle == handle
        d.subscribe(decode.request)
        d.tokens(decode.request, 0, 41)
        await client.next()
        session = router.registry.session("boot-p")
        assert session is not None

        async def renewals() -> int:
            """How many were sent until now: what is sent next has been heard."""
            session.send(DrainNode())
            await p.hear(DrainNode)
            return len(p.heard_of(RenewExport))

        before = await renewals()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await p.hear(RenewExport)
        assert await renewals() == before
        d.finish(decode.request, 1, 42)
        assert await client.done() == [41, 42]


async def test_many_requests_share_a_step() -> None:
    async with cluster("d") as (router, (d,)):
        clients = [Client(router, make_request(f"r{i}")) for i in range(32)]
        requests = [(await d.hear(SubmitDecode)).request for _ in clients]
        for position in range(3):
            d.say(
                tokens=tuple(
                    TokenEvent(
                        r.id, 1, position, (int(r.id[1:]),),
                        finish_reason=FinishReason.LENGTH if position == 2 else None,
                    )
                    for r in requests
                )
            )  # fmt: skip
        for index, client in enumerate(clients):
            assert await client.done() == [index] * 3
        counts = await router.guard.counts()
        assert counts[RequestState.FINISHED] == 32


async def test_an_abort_before_it_began_ends_it_too() -> None:
    async with cluster("p", "d") as (router, nodes):
        trace = RequestTrace()
        first = asyncio.ensure_future(anext(router.dispatcher.run(make_request("r"), trace)))
        await asyncio.sleep(0)  # it is under way by now, but nothing of its journey has run
        assert [request.id for request, _ in router.dispatcher.live()] == ["r"]
        assert router.dispatcher.abort("r", by_operator=True)
        with pytest.raises(Cancelled):
            async with asyncio.timeout(PATIENCE_S):
                await first
        assert trace.aborted
        assert not router.dispatcher.live()
        assert not nodes[0].heard
