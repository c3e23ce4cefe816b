"""What a decode node does while a hand-over waits: its place in line, and the lease it keeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.core.engine import Engine
from baton.engine.state.interface import Reservation
from baton.engine.thread import EngineThread
from baton.node.config import NodeConfig
from baton.node.role import RoleContext
from baton.protocol.errors import KVLost, KVStale, KVTimeout, Overloaded, Unavailable
from baton.protocol.handles import Endpoint, KVHandle
from baton.protocol.kv_spec import PoolFormat
from baton.protocol.messages import RenewExport
from baton.runtime.timing import Timing
from decode_node.admission import MOST_AT_ONCE, FetchAdmission, FetchTicket
from decode_node.role import DecodeRole
from kv_transfer.connector import Connector
from kv_transfer.lanes.memory import MemoryFabric
from kv_transfer.pool.rows import RowMemory
from kv_transfer.row_fetches import RowFetches
from tests.block_lists import held
from tests.fakes import FakeClock, fake_engine, request
from tests.node.fakes import PATIENCE_S, PREFILL, connected, running_node

T = TypeVar("T")
RESERVATION = Reservation("r", held((0,)), 4, 0)
ENGINE = fake_engine()[0]


def nothing_free(_: Engine) -> Reservation | None:
    return None


def room(_: Engine) -> Reservation | None:
    return RESERVATION


class StepByStep:
    """An engine thread between whose steps calls run; a step ends when a test says so."""

    def __init__(self) -> None:
        self.steps: asyncio.Queue[None] = asyncio.Queue()
        self._in_order = asyncio.Lock()
        self.num_calls = 0

    async def call(self, function: Callable[[Engine], T], /) -> T:
        self.num_calls += 1
        async with self._in_order:
            await self.steps.get()
            return function(ENGINE)


async def at_once(function: Callable[[Engine], T], /) -> T:
    return function(ENGINE)


def line(max_queued: int = 4, max_ready: int = 4, call: Any = at_once) -> FetchAdmission:
    return FetchAdmission(max_queued, max_ready, call)


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(10):
        await asyncio.sleep(0)


@asynccontextmanager
async def started(*work: Any) -> AsyncIterator[list[asyncio.Task[Any]]]:
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# ---- admission ----


async def test_a_fetch_that_begins_at_once_takes_no_slot() -> None:
    admission = line(max_ready=1)
    tickets = [admission.ticket(ready=False) for _ in range(3)]
    for ticket in tickets:
        assert await admission.admit(ticket, room) is RESERVATION
    assert admission.num_active == 3
    assert await admission.admit(admission.ticket(ready=True), room) is RESERVATION, (
        "the slot is free"
    )
    for ticket in tickets:
        admission.release(ticket)
        admission.release(ticket)
    assert admission.num_active == 1


async def gets_the_slot_of(
    admission: FetchAdmission, first: FetchTicket, waiting: asyncio.Task[Any]
) -> None:
    await settle()
    assert not waiting.done(), "the only slot is taken"
    admission.release(first)
    assert await waiting is RESERVATION


async def test_fetches_whose_bytes_are_ready_are_capped() -> None:
    admission = line(max_ready=1)
    first, second = (admission.ticket(ready=True) for _ in range(2))
    await admission.admit(first, room)
    async with started(admission.admit(second, room)) as (waiting,):
        await gets_the_slot_of(admission, first, waiting)


async def test_a_burst_reserves_between_two_steps() -> None:
    engine = StepByStep()
    admission = line(100, 1, engine.call)
    tickets = [admission.ticket(ready=False) for _ in range(MOST_AT_ONCE + 3)]
    async with started(*(admission.admit(ticket, room) for ticket in tickets)) as waiting:
        await settle()
        engine.steps.put_nowait(None)
        assert await waiting[MOST_AT_ONCE - 1] is RESERVATION
        assert not waiting[MOST_AT_ONCE].done(), "so many at once, streams wait meanwhile"
        engine.steps.put_nowait(None)
        assert set(await asyncio.gather(*waiting)) == {RESERVATION}, "none needed the slot"
    assert engine.num_calls == 2


async def test_who_comes_during_a_step_has_not_waited() -> None:
    engine = StepByStep()
    admission = line(4, 0, engine.call)
    async with started(admission.admit(admission.ticket(ready=False), room)) as (one,):
        await settle()
        async with started(admission.admit(admission.ticket(ready=False), room)) as (two,):
            await settle()
            engine.steps.put_nowait(None)
            engine.steps.put_nowait(None)
            assert await one is await two is RESERVATION


async def test_the_line_is_served_in_order_and_tries_again_when_blocks_are_freed() -> None:
    admission = line()
    tries: list[str] = []
    free = 0

    def trying(name: str) -> Any:
        def attempt(_: Engine) -> Reservation | None:
            nonlocal free
            tries.append(name)
            if free == 0:
                return None
            free -= 1
            return RESERVATION

        return attempt

    a, b = (admission.ticket(ready=False) for _ in range(2))
    async with started(admission.admit(a, trying("a")), admission.admit(b, trying("b"))) as (
        first,
        second,
    ):
        await settle()
        assert set(tries) == {"a"}, "only the first in line tries"
        free = 1
        admission.wake()
        assert await first is RESERVATION
        await settle()
        assert not second.done()
        free = 1
        admission.wake()
        assert await second is RESERVATION


async def test_who_waited_for_room_takes_a_slot_of_the_few() -> None:
    admission = line(max_ready=1)
    free = False
    first, second = (admission.ticket(ready=False) for _ in range(2))

    def soon(_: Engine) -> Reservation | None:
        return RESERVATION if free else None

    async with started(admission.admit(first, soon), admission.admit(second, soon)) as (one, two):
        await settle()
        free = True
        admission.wake()
        assert await one is RESERVATION
        await gets_the_slot_of(admission, first, two)


async def test_an_error_of_one_is_not_the_others() -> None:
    engine = StepByStep()
    admission = line(4, 4, engine.call)

    def broken(_: Engine) -> Reservation | None:
        raise KVStale("gone")

    tickets = [admission.ticket(ready=False) for _ in range(3)]
    work = (
        admission.admit(tickets[0], room),
        admission.admit(tickets[1], broken),
        admission.admit(tickets[2], room),
    )
    async with started(*work) as (one, two, three):
        await settle()
        engine.steps.put_nowait(None)
        assert await one is await three is RESERVATION
        with pytest.raises(KVStale):
            await two


async def test_an_engine_that_has_stopped_refuses_all() -> None:
    async def stopped(_: object) -> None:
        raise Unavailable("the engine is stopped")

    admission = line(call=stopped)
    tickets = [admission.ticket(ready=False) for _ in range(2)]
    async with started(*(admission.admit(ticket, room) for ticket in tickets)) as waiting:
        for each in waiting:
            with pytest.raises(Unavailable):
                await each
    assert admission.num_waiting == 0


async def test_leaving_the_line_moves_it_and_the_line_is_bounded() -> None:
    admission = line(max_queued=2)
    first, second = (admission.ticket(ready=False) for _ in range(2))
    with pytest.raises(Overloaded):
        admission.ticket(ready=False)
    async with started(admission.admit(first, nothing_free), admission.admit(second, room)) as (
        one,
        two,
    ):
        await settle()
        one.cancel()
        await asyncio.wait([one])
        admission.release(first)
        assert await two is RESERVATION
    admission.release(second)
    assert (admission.num_active, admission.num_waiting) == (0, 0)


async def test_who_is_cancelled_does_not_reserve_again_before_it_releases() -> None:
    engine = StepByStep()
    admission = line(4, 4, engine.call)
    reserved: list[str] = []

    def reserving(name: str) -> Any:
        def reserve(_: Engine) -> Reservation | None:
            reserved.append(name)
            return RESERVATION

        return reserve

    first, second, third = (admission.ticket(ready=False) for _ in range(3))
    async with started(admission.admit(first, reserving("first"))) as (one,):
        await settle()  # its call is under way
        one.cancel()
        async with started(admission.admit(second, reserving("second"))) as (two,):
            async with started(admission.admit(third, reserving("third"))):
                await settle()  # it has asked, and leaves before its call
            engine.steps.put_nowait(None)
            engine.steps.put_nowait(None)
            assert await two is RESERVATION
    for ticket in (first, second, third):
        admission.release(ticket)
    assert reserved == ["first", "second"]
    assert (admission.num_active, admission.num_waiting) == (0, 0)


async def test_who_leaves_during_the_call_takes_no_slot() -> None:
    engine = StepByStep()
    admission = line(4, 1, engine.call)
    first, second = (admission.ticket(ready=True) for _ in range(2))
    async with started(admission.admit(first, room)) as (one,):
        await settle()
        one.cancel()
        await asyncio.wait([one])
        admission.release(first)
        async with started(admission.admit(second, room)) as (two,):
            engine.steps.put_nowait(None)
            engine.steps.put_nowait(None)
            assert await two is RESERVATION
    admission.release(second)
    assert (admission.num_active, admission.num_waiting) == (0, 0)


class Rush:
    """Hand-overs that come and go at an engine with 4 blocks, 2 slots and slow steps."""

    def __init__(self) -> None:
        self.engine = StepByStep()
        self.admission = line(100, 2, self.engine.call)
        self.free = 4
        self.held: dict[int, int] = {}
        self.reserved: list[int] = []
        self.granted: list[int] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.posted: list[asyncio.Task[None]] = []
        self.ends: list[asyncio.Event] = []

    def come(self, size: int, ready: bool) -> None:
        self.ends.append(asyncio.Event())
        self.tasks.append(asyncio.ensure_future(self._hand_over(len(self.tasks), size, ready)))

    def cancel(self, number: int) -> None:
        if number < len(self.tasks):
            self.tasks[number].cancel()

    def end(self, number: int) -> None:
        if number < len(self.ends):
            self.ends[number].set()

    def step(self) -> None:
        self.engine.steps.put_nowait(None)

    def wake(self) -> None:
        self.admission.wake()

    async def over(self) -> None:
        for end in self.ends:
            end.set()
        for _ in range(400):
            self.step()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*self.tasks, return_exceptions=True)
            await asyncio.gather(*self.posted)
        await settle()

    async def _hand_over(self, number: int, size: int, ready: bool) -> None:
        def reserve(_: Engine) -> Reservation | None:
            if size > self.free:
                return None
            self.free -= size
            self.held[number] = size
            self.reserved.append(number)
            return RESERVATION

        def give_back(_: Engine) -> None:
            self.free += self.held.pop(number, 0)
            self.wake()

        ticket = self.admission.ticket(ready=ready)
        try:
            await self._fetch(ticket, reserve, number)
        finally:
            self.admission.release(ticket)
            # Behind the call that may reserve for it, as EngineThread.post does it.
            self.posted.append(asyncio.ensure_future(self.engine.call(give_back)))

    async def _fetch(self, ticket: FetchTicket, reserve: Any, number: int) -> None:
        try:
            await self.admission.admit(ticket, reserve)
            self.granted.append(number)
            await self.ends[number].wait()
        finally:
            await asyncio.sleep(0)  # tasks around a fetch need turns to end


NUMBERS = st.integers(0, 5)
OPERATIONS = st.one_of(
    st.tuples(st.just("come"), st.integers(1, 3), st.booleans()),
    st.tuples(st.just("cancel"), NUMBERS),
    st.tuples(st.just("end"), NUMBERS),
    st.tuples(st.sampled_from(("step", "wake"))),
)


@settings(max_examples=300)
@given(st.lists(st.tuples(OPERATIONS, st.integers(0, 3)), min_size=3, max_size=30))
async def test_whatever_comes_and_goes_blocks_are_given_once_in_order_and_come_back(
    operations: list[tuple[tuple[Any, ...], int]],
) -> None:
    rush = Rush()
    for (name, *more), num_turns in operations:
        getattr(rush, name)(*more)
        for _ in range(num_turns):
            await asyncio.sleep(0)
    await rush.over()
    assert rush.granted == sorted(rush.granted), "first come, first served"
    assert rush.reserved == sorted({*rush.reserved}), "once each"
    assert {i for i, task in enumerate(rush.tasks) if not task.cancelled()} <= {*rush.granted}
    assert (rush.free, rush.held) == (4, {})
    assert (rush.admission.num_active, rush.admission.num_waiting) == (0, 0)


# ---- leases ----

LEASE_MS = 30


@dataclass
class FakeConnector:
    """Counts renewals; `errors` are raised one after the other, then renewals succeed. Its clock
    moves by a third of a lease with each."""

    errors: list[Exception] = field(default_factory=list[Exception])
    clock: FakeClock = field(default_factory=FakeClock)
    renewals: int = 0
    renewed_often: asyncio.Event = field(default_factory=asyncio.Event)

    async def renew(self, handle: KVHandle, epoch: int | None = None) -> None:
        assert epoch == 3
        self.renewals += 1
        self.clock.advance(LEASE_MS / 3000)
        if self.renewals >= 4:
            self.renewed_often.set()
        if self.errors:
            raise self.errors.pop(0)


def no_connector(memory: RowMemory, fingerprint: str) -> Connector:
    raise AssertionError("there are no images")


def role_over(connector: FakeConnector) -> DecodeRole:
    engine, _ = fake_engine()
    context = RoleContext(
        connector=connector,  # type: ignore[arg-type]
        loop=asyncio.get_running_loop(),
        config=NodeConfig(),
        timing=Timing(),
        clock=connector.clock,
        spawn=lambda work: None,
        observe_fetch=lambda seconds: None,
        rows=RowFetches(no_connector),
    )
    return DecodeRole(context, lambda hooks: EngineThread(engine, lambda report: None))


def leased() -> KVHandle:
    endpoint = Endpoint("boot", "print", PoolFormat(4, "float32"), ())
    return KVHandle("boot", 1, "r", 3, 5, b"secret", endpoint, LEASE_MS)


async def test_the_lease_is_renewed_while_a_request_waits() -> None:
    connector = FakeConnector()
    role = role_over(connector)
    async with asyncio.timeout(PATIENCE_S):
        await role._while_leased(leased(), 3, connector.renewed_often.wait())
    assert connector.renewals == 4


async def test_waiting_ends_when_the_lease_is_lost() -> None:
    for lost in (KVStale("gone"), KVLost("dead")):
        connector = FakeConnector(errors=[lost])
        with pytest.raises(type(lost)):
            await role_over(connector)._while_leased(leased(), 3, asyncio.Event().wait())


async def test_one_unanswered_renewal_is_no_loss_but_a_silent_lease_time_is() -> None:
    connector = FakeConnector(errors=[KVTimeout("busy")])
    role = role_over(connector)
    async with asyncio.timeout(PATIENCE_S):
        await role._while_leased(leased(), 3, connector.renewed_often.wait())
    silent = FakeConnector(errors=[KVTimeout("silent") for _ in range(100)])
    with pytest.raises(KVTimeout):
        await role_over(silent)._while_leased(leased(), 3, asyncio.Event().wait())


async def test_an_error_of_the_work_itself_comes_through() -> None:
    async def broken() -> None:
        raise Overloaded("full")

    with pytest.raises(Overloaded):
        await role_over(FakeConnector())._while_leased(leased(), 3, broken())


async def test_routers_renew_and_release_through_the_prefill_node() -> None:
    async with running_node(PREFILL, MemoryFabric()) as node, connected(node) as router:
        await router.prefill(request("r"))
        handle = await router.handle_of("r")
        await router.until(lambda: router.events("r"))
        await router.send(RenewExport(handle))
        await router.release(handle)
        await router.release(handle)  # idempotent
        await router.send(RenewExport(handle))  # stale: nobody is told, nothing breaks
        await router.prefill(request("next"))
        await router.release(await router.handle_of("next"))
        await node.until_idle()
