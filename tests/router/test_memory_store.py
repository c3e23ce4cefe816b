"""What MemoryStore alone must see to: it has no server that forgets for it."""

from __future__ import annotations

from baton.protocol.request import RequestState
from baton.runtime.timing import Timing
from router.store.base import TERMINAL_TTL_S, Move
from router.store.memory_store import MAX_PLAIN, MemoryStore, MemoryTables
from tests.fakes import FakeClock


async def end(store: MemoryStore, request_id: str, **fields: str) -> None:
    assert await store.claim(request_id, fields) is not None
    await store.finish(Move(request_id, 1, RequestState.CANCELLED, {}))


async def test_ended_requests_take_bounded_memory() -> None:
    clock, tables = FakeClock(), MemoryTables()
    store = MemoryStore("r", Timing(), clock, tables)
    await end(store, "kept", resumable="1")
    assert await store.claim("live") is not None
    for index in range(MAX_PLAIN + 500):
        await end(store, f"plain {index}")
    assert len(tables.rows) == MAX_PLAIN + 2
    assert await store.read("plain 499") is None
    assert await store.read("plain 500") is not None
    assert await store.read("kept") is not None, "whoever asks again finds it"
    assert await store.read("live") is not None
    counts = await store.counts()
    assert counts[RequestState.CANCELLED] == MAX_PLAIN + 501, "they are counted all the same"
    clock.advance(TERMINAL_TTL_S + 1)
    await store.sweep()
    assert await store.read("kept") is None


async def test_an_id_that_is_used_again_is_not_forgotten_with_its_first_use() -> None:
    clock, tables = FakeClock(), MemoryTables()
    store = MemoryStore("r", Timing(), clock, tables)
    await end(store, "again")
    clock.advance(TERMINAL_TTL_S + 1)
    assert await store.claim("again") is not None
    for index in range(MAX_PLAIN):
        await end(store, f"plain {index}")
    found = await store.read("again")
    assert found is not None
    assert found.state is RequestState.QUEUED
