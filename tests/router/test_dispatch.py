"""The journey of one request, against nodes scripted by each test over real gRPC sessions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NodeLost,
    Overloaded,
    Unavailable,
)
from baton.events import TokenEvent
from baton.messages import (
    AbortRequest,
    ReleaseExport,
    RenewExport,
    SubmitDecode,
    SubmitPrefill,
)
from baton.request import FinishReason, Request, RequestState
from router.policy import PolicySettings
from router.trace import RequestTrace
from tests.router.fakes import (
    PATIENCE_S,
    FakeNode,
    FakeRouter,
    fake_nodes,
    make_request,
    running_router,
)


class Client:
    """Reads one request's stream in a task and keeps what it was shown."""

    def __init__(self, router: FakeRouter, request: Request) -> None:
        self.trace = RequestTrace()
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
        # Token 1 is shown while the decode node has not even subscribed.
        p.tokens(prefill.request, 0, 41, num_cached_tokens=4)
        first = await client.next()
        assert (first.position, first.token_ids, first.num_cached_tokens) == (0, (41,), 4)
        assert [e.token_ids for e in await router.store.read_log("r")] == [(41,)]
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
        assert [e.token_ids for e in await router.store.read_log("r")] == [(41,), (42,), (43,)]


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
        assert await state_of(router) == (RequestState.FAILED, 1)


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
    """Its session breaks after D subscribed: D goes on, then reports KVLost; then prompt + token 1
    are prefilled.
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
        await client.next()
        await client.next()
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
        log = await router.store.read_log("r")
        assert [token for entry in log for token in entry.token_ids] == [41, 42, 43, 44]


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
        assert p.heard_of(RenewExport)  # ours again until the new one subscribes
        p.tokens(prefill.request, 0, 41)  # under the epoch that P knows
        assert (await client.next()).token_ids == (41,)
        other.subscribe(decode.request)
        other.finish(decode.request, 0, 41, 42)
        assert await client.done() == [41, 42]
        assert len(p.heard_of(SubmitPrefill)) == 1
        assert not p.heard_of(AbortRequest)
        assert [e.token_ids for e in await router.store.read_log("r")] == [(41,), (42,)]


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


async def test_a_request_that_kills_three_nodes_has_failed() -> None:
    async with cluster("d1", "d2", "d3", "d4") as (router, nodes):
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


async def test_the_last_node_lost_is_unavailable() -> None:
    async with cluster("d") as (router, (d,)):
        client = Client(router, make_request())
        await d.hear(SubmitDecode)
        await d.stop()
        assert isinstance(await client.fails(), Unavailable)
        assert await state_of(router) == (RequestState.FAILED, 2)


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
        assert isinstance(await client.fails(), DeadlineExceeded)
        assert (await d.hear(AbortRequest)).request_id == "r"
        assert await state_of(router) == (RequestState.FAILED, 1)


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
        renewals = len(p.heard_of(RenewExport))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await p.hear(RenewExport)
        assert len(p.heard_of(RenewExport)) <= renewals + 1  # one may have been on its way
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
