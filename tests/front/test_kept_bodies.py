"""One key cannot fill the store with resumable requests, and takes nothing from another."""

from __future__ import annotations

import httpx
import pytest

from baton.protocol.errors import Overloaded
from router.resumable.kept import KeptBodies
from router.store.base import TERMINAL_TTL_S
from router.store.memory_store import MemoryTables
from tests.fakes import FakeClock
from tests.front.resumable import held_router


def test_a_key_has_room_again_when_the_store_has_forgotten() -> None:
    clock = FakeClock()
    kept = KeptBodies(clock, 100)
    kept.begin("a", 60)
    with pytest.raises(Overloaded) as running:
        kept.begin("a", 41)
    assert running.value.retry_after_s == TERMINAL_TTL_S
    kept.begin("b", 100)
    kept.end("a", 60)
    clock.advance(TERMINAL_TTL_S - 10)
    with pytest.raises(Overloaded) as ended:
        kept.begin("a", 41)
    assert ended.value.retry_after_s == 10
    clock.advance(10)
    kept.begin("a", 41)
    with pytest.raises(Overloaded):
        kept.begin("b", 1)


def test_one_that_is_larger_than_all_room_is_taken_alone() -> None:
    kept = KeptBodies(FakeClock(), 100)
    kept.begin("a", 101)
    with pytest.raises(Overloaded):
        kept.begin("a", 1)


async def test_beyond_its_room_a_key_is_told_when_to_come_back() -> None:
    body = {"prompt": "a" * 300_000, "max_tokens": 4, "truncate_prompt_tokens": 8}
    async with held_router("one", MemoryTables(), max_resumable_mb=1) as router:

        async def ask(name: str) -> httpx.Response:
            head = {"x-baton-resumable": "5", "x-request-id": name}
            return await router.http.post("/v1/completions", json=body, headers=head)

        replies = [await ask(f"r{index}") for index in range(5)]
        assert [reply.status_code for reply in replies] == [200, 200, 200, 429, 429]
        assert int(replies[-1].headers["retry-after"]) > 0
        plain = await router.http.post("/v1/completions", json=body)
        assert plain.status_code == 200
