"""What a decode node does while a hand-over waits: its place in line, and the lease it keeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from baton.engine.state.interface import Reservation
from baton.engine.thread import EngineThread
from baton.node.config import NodeConfig
from baton.node.role import RoleContext
from baton.protocol.errors import KVLost, KVStale, KVTimeout, Overloaded
from baton.protocol.handles import Endpoint, KVHandle
from baton.protocol.kv_spec import PoolFormat
from baton.protocol.messages import RenewExport
from baton.runtime.timing import Timing
from decode_node.admission import FetchAdmission
from decode_node.role import DecodeRole
from kv_transfer.connector import Connector
from kv_transfer.lanes.memory import MemoryFabric
from kv_transfer.pool.rows import RowMemory
from kv_transfer.row_fetches import RowFetches
from tests.block_lists import held
from tests.fakes import FakeClock, fake_engine, request
from tests.node.fakes import PATIENCE_S, PREFILL, connected, running_node

RESERVATION = Reservation("r", held((0,)), 4, 0)


async def nothing_free() -> Reservation | None:
    return None


async def room() -> Reservation | None:
    return RESERVATION


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
    admission = FetchAdmission(max_queued=4, max_ready=1)
    tickets = [admission.ticket(ready=False) for _ in range(3)]
    for ticket in tickets:
        assert await ticket.admit(room) is RESERVATION
    assert admission.num_active == 3
    assert not admission.slots.locked()
    for ticket in tickets:
        ticket.release()
        ticket.release()
    assert admission.num_active == 0


async def test_fetches_whose_bytes_are_ready_are_capped() -> None:
    admission = FetchAdmission(max_queued=4, max_ready=1)
    first, second = (admission.ticket(ready=True) for _ in range(2))
    await first.admit(room)
    async with started(second.admit(room)) as (waiting,):
        await settle()
        assert not waiting.done(), "the only slot is taken"
        first.release()
        assert await waiting is RESERVATION


async def test_the_line_is_served_in_order_and_tries_again_when_blocks_are_freed() -> None:
    admission = FetchAdmission(max_queued=4, max_ready=4)
    tries: list[str] = []
    free = 0

    def trying(name: str) -> Any:
        async def attempt() -> Reservation | None:
            nonlocal free
            tries.append(name)
            if free == 0:
                return None
            free -= 1
            return RESERVATION

        return attempt

    a, b = (admission.ticket(ready=False) for _ in range(2))
    async with started(a.admit(trying("a")), b.admit(trying("b"))) as (first, second):
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


async def test_leaving_the_line_moves_it_and_the_line_is_bounded() -> None:
    admission = FetchAdmission(max_queued=2, max_ready=4)
    first, second = (admission.ticket(ready=False) for _ in range(2))
    with pytest.raises(Overloaded):
        admission.ticket(ready=False)
    async with started(first.admit(nothing_free), second.admit(room)) as (one, two):
        await settle()
        one.cancel()
        await asyncio.wait([one])
        first.release()
        assert await two is RESERVATION
    second.release()
    assert (admission.num_active, admission.num_waiting) == (0, 0)


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
