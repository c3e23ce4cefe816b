"""The gate: no wait with room, one slot per request on every way out, waits that end in time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from baton.protocol.clock import SystemClock
from baton.protocol.errors import Cancelled, InvalidRequest, Overloaded, Unavailable
from baton.protocol.handles import NodeLoad, Role
from baton.protocol.messages import SubmitDecode
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from router.metrics.parts import watch_gate
from router.metrics.router import RouterMetrics
from router.nodes.policy import NodeSnapshot, PolicySettings
from router.nodes.slo import Slo
from router.request.gate.admission import Bounds, Reason
from router.request.gate.gate import Gate, GateSettings
from router.request.terms import Terms
from router.request.trace import RequestTrace
from router.tenants.keys import Grant
from tests.router.clients import Client, cluster
from tests.router.fakes import PATIENCE_S, FakeClock, make_request


def node(role: Role, tokens: int = 0, **load: Any) -> NodeSnapshot:
    state = NodeLoad(free_blocks=100, total_blocks=100, prefill_tokens_per_s=1000.0, running=1)
    state = replace(state, **load)
    state = replace(state, own_prefill_tokens_per_s=state.prefill_tokens_per_s)
    return NodeSnapshot(
        role.value, role.value, role, "m", "layout", 16, "float32",
        load=state, assigned_tokens=tokens,
    )  # fmt: skip


class Visitor:
    """One request's way through a gate, in a task that stays inside until it is told to go."""

    def __init__(self, gate: Gate, name: str, terms: Terms | None = None, **changes: Any) -> None:
        self.trace = RequestTrace(terms or Terms())
        self.request = replace(make_request(name), arrival=1000.0, **changes)
        self.inside = asyncio.Event()
        self._go = asyncio.Event()
        self.task = asyncio.create_task(self._visit(gate))

    async def _visit(self, gate: Gate) -> None:
        ticket = await gate.enter(self.request, self.trace)
        try:
            self.trace.dispatched_at = 1000.0
            self.inside.set()
            await self._go.wait()
            self.trace.outcome = "finished"
        finally:
            gate.leave(ticket)

    async def leave(self) -> None:
        self._go.set()
        async with asyncio.timeout(PATIENCE_S):
            await self.task

    async def fails(self) -> BaseException:
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait({self.task})
        error = self.task.exception()
        assert error is not None
        return error

    async def cancelled(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task
        assert self.task.cancelled()

    async def enters(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.inside.wait()


def gate_of(
    live: int = 1,
    queued: int = 4,
    clock: FakeClock | None = None,
    nodes: Callable[[], list[NodeSnapshot]] | None = None,
) -> Gate:
    settings = GateSettings(Bounds(live, queued))
    return Gate(clock or FakeClock(), settings, nodes or list)


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_with_room_there_is_no_task_switch() -> None:
    gate = gate_of()
    entering = gate.enter(make_request("a"), RequestTrace())
    with pytest.raises(StopIteration) as entered:
        entering.send(None)  # it did not suspend
    assert gate.queue.num_live == 1
    gate.leave(entered.value.value)
    gate.leave(entered.value.value)
    assert (gate.queue.num_live, gate.holds("a")) == (0, False)


async def test_with_room_the_nodes_are_looked_at_once() -> None:
    """A snapshot of each node is most of what an admission costs."""
    looks = 0

    def nodes() -> list[NodeSnapshot]:
        nonlocal looks
        looks += 1
        return [node(Role.PREFILL), node(Role.DECODE)]

    gate = gate_of(nodes=nodes)
    for terms in (Terms(), Terms(slo=Slo(ttft_s=60.0, tpot_s=60.0), timeout_s=60.0)):
        request = replace(make_request("a"), arrival=1000.0, deadline=1060.0)
        gate.leave(await gate.enter(request, RequestTrace(terms)))
    assert looks == 2


async def test_nothing_is_kept_of_requests_that_have_left() -> None:
    """Their prompts may be long, and the next request may be far."""
    gate = gate_of(nodes=lambda: [node(Role.PREFILL), node(Role.DECODE)])
    first, second, third = (Visitor(gate, name, deadline=9000.0) for name in "abc")
    await settle()
    await first.leave()
    await settle()
    await third.cancelled()
    await second.leave()
    kept = gate._tickets, gate._turns, gate._starting, gate.queue._expiries  # pyright: ignore[reportPrivateUsage]
    assert not any(kept)


async def test_one_after_the_other() -> None:
    gate = gate_of()
    first, second, third = (Visitor(gate, name) for name in "abc")
    await settle()
    assert first.inside.is_set()
    assert not second.inside.is_set()
    assert gate.holds("b")
    await first.leave()
    await second.enters()
    assert not third.inside.is_set()
    await second.leave()
    await third.enters()
    await third.leave()
    assert (gate.queue.num_live, gate.queue.num_queued) == (0, 0)
    assert gate.queue.stats.queued == 2


async def test_a_client_that_leaves_while_it_waits_leaves_no_trace() -> None:
    gate = gate_of()
    first, second, third = (Visitor(gate, name) for name in "abc")
    await settle()
    await second.cancelled()
    assert not gate.holds("b")
    await first.leave()
    await third.enters()
    await third.leave()
    assert gate.queue.stats.cancelled == 1
    assert gate.queue.num_live == 0


async def test_a_client_that_leaves_as_it_is_let_in_gives_its_slot_back() -> None:
    gate = gate_of()
    first, second, third = (Visitor(gate, name) for name in "abc")
    await settle()
    first.task.cancel()
    await asyncio.sleep(0)  # the slot goes to the second, which has not run yet
    await second.cancelled()
    await third.enters()
    await third.leave()
    assert gate.queue.num_live == 0
    assert gate.queue.stats.admitted == 3


async def test_abort_from_outside() -> None:
    gate = gate_of()
    first, second = Visitor(gate, "a"), Visitor(gate, "b")
    await settle()
    assert not gate.cancel("a"), "it runs: that is the dispatcher's"
    assert not gate.cancel("unknown")
    assert gate.cancel("b")
    assert not gate.cancel("b")
    assert isinstance(await second.fails(), Cancelled)
    await first.leave()
    assert gate.queue.num_live == 0


async def test_ids_are_unique_while_they_wait_too() -> None:
    gate = gate_of()
    first, waiting = Visitor(gate, "a"), Visitor(gate, "b")
    await settle()
    for name in "ab":
        error = await Visitor(gate, name).fails()
        assert isinstance(error, InvalidRequest)
        assert error.field == "request_id"
    await first.leave()
    await waiting.leave()


async def test_a_full_queue_says_when_to_come_again() -> None:
    gate = gate_of(queued=0)
    first = Visitor(gate, "a")
    await settle()
    error = await Visitor(gate, "b").fails()
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 1
    await first.leave()


async def test_stopping_refuses_those_that_wait() -> None:
    gate = gate_of()
    first, second = Visitor(gate, "a"), Visitor(gate, "b", deadline=2000.0)
    await settle()
    gate.stop()
    gate.stop()
    assert isinstance(await second.fails(), Unavailable)
    await first.leave()


async def test_a_request_is_bounded_before_anything_is_taken() -> None:
    gate = Gate(FakeClock(), GateSettings(Bounds(4), max_request_tokens=100))
    small = Visitor(gate, "a", params=SamplingParams(seed=1, max_tokens=90))
    await settle()
    assert small.inside.is_set()
    for field, params in (
        ("max_tokens", SamplingParams(seed=1, max_tokens=91)),
        ("n", SamplingParams(seed=1, max_tokens=41, n=2)),
    ):
        error = await Visitor(gate, field, params=params).fails()
        assert isinstance(error, InvalidRequest)
        assert error.field == field
        assert "100" in error.message
    assert gate.queue.stats.refused[Reason.TOO_LARGE] == 2
    assert gate.queue.num_live == 1
    await small.leave()


async def test_a_deadline_passes_while_waiting() -> None:
    """The timer alone: nobody ends, no node reports."""
    loop = asyncio.get_running_loop()
    gate = Gate(SystemClock(), GateSettings(Bounds(1, 4)))
    first = Visitor(gate, "a")
    await settle()
    began = loop.time()
    late = Visitor(gate, "b", deadline=began + 0.05)
    error = await late.fails()
    assert isinstance(error, Unavailable)
    assert loop.time() - began >= 0.05
    assert gate.queue.stats.refused[Reason.DEADLINE] == 1
    await first.leave()


async def test_a_service_level_that_no_node_can_keep() -> None:
    decode = node(Role.DECODE, step_seconds=0.05, prefill_tokens_per_s=0.0)
    nodes = [node(Role.PREFILL, tokens=900), decode]
    gate = gate_of(live=9, nodes=lambda: nodes)
    hopeless = (
        Terms(slo=Slo(ttft_s=0.5)),
        Terms(slo=Slo(tpot_s=0.04)),
    )
    for index, terms in enumerate(hopeless):
        error = await Visitor(gate, str(index), terms).fails()
        assert isinstance(error, Unavailable)
        assert error.retry_after_s == 1
    assert gate.queue.stats.refused[Reason.SLO] == 2
    assert (gate.stats.ttft.refused, gate.stats.tpot.refused) == (1, 1)
    nodes[0] = node(Role.PREFILL)
    fine = Visitor(gate, "fine", Terms(slo=Slo(ttft_s=0.5, tpot_s=0.06)))
    await fine.enters()
    fine.trace.first_token_at, fine.trace.finished_at = 1000.4, 1002.4
    fine.trace.output_tokens = 21
    await fine.leave()
    assert (gate.stats.ttft.met, gate.stats.ttft.missed) == (1, 0)
    assert (gate.stats.tpot.met, gate.stats.tpot.missed) == (0, 1), "0.1 s per token"


async def test_nodes_reports_let_the_waiting_in() -> None:
    nodes = [node(Role.PREFILL, tokens=495), node(Role.DECODE)]
    gate = gate_of(live=9, nodes=lambda: nodes)
    waiting = Visitor(gate, "a")
    await settle()
    gate.poke()
    await settle()
    assert not waiting.inside.is_set()
    nodes[0] = node(Role.PREFILL, tokens=100)
    gate.poke()
    await waiting.enters()
    await waiting.leave()


async def test_a_burst_counts_before_any_node_has_heard_of_it() -> None:
    """600 tokens of window: 60 requests of 10 tokens, not a hundred, in one pass of the loop."""
    nodes = [node(Role.PREFILL, tokens=1), node(Role.DECODE)]
    gate = Gate(FakeClock(), GateSettings(Bounds(200, 200), prefill_window_s=0.601), lambda: nodes)
    entered: list[RequestTrace] = []

    async def visit(number: int) -> None:
        trace = RequestTrace()
        ticket = await gate.enter(make_request(str(number)), trace)
        try:
            entered.append(trace)
            await asyncio.Event().wait()
        finally:
            gate.leave(ticket)

    tasks = [asyncio.create_task(visit(number)) for number in range(100)]
    await settle()
    assert (len(entered), gate.queue.num_queued) == (60, 40)
    for trace in entered[:30]:
        trace.dispatched_at = 1000.0  # with their nodes, which have computed them already
    gate.poke()
    await settle()
    assert (len(entered), gate.queue.num_queued) == (90, 10)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert (gate.queue.num_live, gate.queue.num_queued) == (0, 0)


async def test_when_enough_wait_the_next_one_is_for_the_decode_node() -> None:
    nodes = [node(Role.PREFILL, tokens=495), node(Role.DECODE)]
    settings = GateSettings(Bounds(9, 9), policy=PolicySettings(placement="auto"))
    gate = Gate(FakeClock(), settings, lambda: nodes)
    visitors: list[Visitor] = []
    for name in "abcd":
        visitors.append(Visitor(gate, name, prompt_ids=(1,) * 600))
        await settle()
    assert gate.queue.num_queued == 4, "a stream would stand still for 0.6 s, P has 0.5 s to do"
    visitors.append(Visitor(gate, "e", prompt_ids=(1,) * 600))
    await visitors[0].enters()
    assert [each.trace.behind for each in visitors] == [4, 0, 0, 0, 0]
    nodes[0] = node(Role.PREFILL)
    gate.poke()
    await visitors[1].enters()
    assert visitors[1].trace.behind == 0, "a prefill node has room for it"
    for each in visitors:
        each.task.cancel()
    await asyncio.wait([each.task for each in visitors])


async def test_what_was_used_is_settled() -> None:
    grant = Grant("alice", "research", tokens_per_minute=100)
    gate = gate_of(live=9)
    params = SamplingParams(seed=1, max_tokens=90)
    first = Visitor(gate, "a", Terms(grant), params=params)
    await first.enters()
    error = await Visitor(gate, "b", Terms(grant), params=params).fails()
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 60
    first.trace.output_tokens = 5
    await first.leave()
    assert gate.stats.served == {"research": 15.0}
    second = Visitor(gate, "c", Terms(grant), params=params)  # 10 + 5 of 85 left
    await second.enters()
    await second.leave()


async def test_the_dispatcher_keeps_to_it() -> None:
    """Real dispatcher, scripted node: a slot from the first message to the recorded end."""
    async with cluster("d", max_live=1) as (router, (d,)):
        gate = router.dispatcher.gate
        client = Client(router, make_request("a"))
        request: Request = (await d.hear(SubmitDecode)).request
        assert gate.queue.num_live == 1
        assert isinstance(await Client(router, make_request("b")).fails(), Overloaded)
        d.finish(request, 0, 41)
        assert await client.done() == [41]
        assert (gate.queue.num_live, gate.holds("a")) == (0, False)
        leaving = Client(router, make_request("c"))
        await d.hear(SubmitDecode)
        leaving.task.cancel()
        await asyncio.wait({leaving.task})
        assert gate.queue.num_live == 0
        assert leaving.trace.outcome == "cancelled"


async def test_metrics() -> None:
    metrics, gate = RouterMetrics(), gate_of()
    watch_gate(metrics.registry, gate)
    first = Visitor(gate, "a", Terms(Grant("k", "research"), Slo(ttft_s=0.5)))
    second = Visitor(gate, "b", Terms(Grant("k", "research")))
    await settle()
    text = metrics.render().decode()
    for line in (
        "baton_admission_live 1.0",
        'baton_admission_queue_length{tenant="research"} 1.0',
        "baton_admission_queued_tokens 18.0",
        "baton_admission_wait_seconds_count 1.0",
        "baton_admission_admitted_total 1.0",
        'baton_admission_refused_total{reason="queue_full"} 0.0',
    ):
        assert line in text
    first.trace.first_token_at = 1000.1
    await first.leave()
    await second.enters()
    await second.leave()
    text = metrics.render().decode()
    for line in (
        "baton_admission_live 0.0",
        "baton_admission_waited_total 1.0",
        "baton_admission_wait_seconds_count 2.0",
        'baton_slo_requests_total{outcome="met",slo="ttft"} 1.0',
        'baton_tenant_tokens_total{tenant="research"} 20.0',
    ):
        assert line in text


async def test_more_sequences_than_any_node_runs_at_once_are_refused_at_the_door() -> None:
    """Not after token 1, when a decode node would say so."""
    decoders = [
        replace(node(Role.DECODE), max_num_seqs=4, boot_id="a"),
        replace(node(Role.DECODE), max_num_seqs=8, boot_id="b"),
    ]
    nodes = [replace(node(Role.PREFILL), max_num_seqs=1), *decoders]  # it only makes token 1
    gate = gate_of(live=4, nodes=lambda: nodes)

    def asking(**params: Any) -> Request:
        return replace(make_request("a"), params=SamplingParams(max_tokens=8, **params))

    for params, field in (
        ({"n": 9}, "n"),
        ({"n": 2, "best_of": 9}, "best_of"),
        ({"beam_width": 9, "n": 2}, "n"),
    ):
        with pytest.raises(InvalidRequest, match="9 sequences") as caught:
            await gate.enter(asking(**params), RequestTrace())
        assert caught.value.field == field
        assert not gate.holds("a")
    for params in ({"n": 8}, {"n": 2, "best_of": 8}, {"beam_width": 8}):
        gate.leave(await gate.enter(asking(**params), RequestTrace()))
    decoders[0] = replace(decoders[0], max_num_seqs=0)  # an older node does not tell
    nodes[1:] = decoders
    gate.leave(await gate.enter(asking(n=9), RequestTrace()))


async def test_who_waits_is_told_in_the_order_of_arrival() -> None:
    gate = gate_of()
    first, *others = (Visitor(gate, name) for name in "abc")
    await first.enters()
    await settle()
    assert [request.id for request, _ in gate.waiting()] == ["b", "c"]
    await others[0].cancelled()
    assert [request.id for request, _ in gate.waiting()] == ["c"]
    await first.leave()
    await others[1].enters()
    assert gate.waiting() == []
    await others[1].leave()
