"""Metrics of resumable requests: each way to begin, read, take over or give up one is counted."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from router.metrics.resumable import watch_runs
from router.store.memory_store import MemoryTables
from tests.front.resumable import HeldRouter, held_router
from tests.front.test_resumable_api import ANSWER, again, post
from tests.waiting import end, eventually

CHAT = "/v1/chat/completions"


@pytest.fixture
async def pair() -> AsyncIterator[tuple[HeldRouter, HeldRouter]]:
    tables = MemoryTables()
    async with held_router("one", tables) as one, held_router("two", tables) as two:
        yield one, two


def told(router: HeldRouter) -> dict[str, float]:
    """What a scrape says, without the common prefix."""
    registry = CollectorRegistry()
    watch_runs(registry, router.runs)
    lines = generate_latest(registry).decode().splitlines()
    pairs = [line.split() for line in lines if not line.startswith("#")]
    return {name.removeprefix("baton_resumable_"): float(value) for name, value in pairs}


async def test_readers_are_counted_by_their_start(pair: tuple[HeldRouter, HeldRouter]) -> None:
    one, two = pair
    one.dispatcher.held_at = 3
    first = post(one, CHAT)
    await first.at_least(4)
    assert (told(one)["live"], told(one)["readers"]) == (1, 1)
    one.dispatcher.go.set()
    events = await first.done()
    await again(one).done()
    for router in (one, two):
        await again(router, events[4][0]).done()
    for router in (one, two):
        await eventually(lambda router=router: _quiet(router))
    page = told(one)
    starts = {name: page[f'readings_total{{start="{name}"}}'] for name in ("first", "replay")}
    assert starts == {"first": 1, "replay": 1}
    for router, begun in ((one, 1), (two, 0)):
        page = told(router)
        assert page['readings_total{start="resumed"}'] == 1
        assert (page["begun_total"], page["adopted_total"]) == (begun, 0)


async def _quiet(router: HeldRouter) -> bool:
    page = told(router)
    return (page["live"], page["readers"]) == (0, 0)


async def test_a_request_is_lost_also_if_it_ends_before_the_next_heartbeat(
    pair: tuple[HeldRouter, HeldRouter],
) -> None:
    one, two = pair
    one.dispatcher.held_at = 5
    first = post(one, CHAT)
    await first.at_least(6)
    await end(one.beats)  # it stands still
    await one.store.lapse()
    await again(two, first.events[-1][0]).done()
    assert (told(one)["lost_total"], told(two)["adopted_total"]) == (0, 1)
    one.dispatcher.go.set()  # it goes on; the log is another router's now
    await first.done()
    await eventually(lambda: _quiet(one))
    assert told(one)["lost_total"] == 1


async def test_adoptions_and_what_their_logs_had(pair: tuple[HeldRouter, HeldRouter]) -> None:
    one, two = pair
    one.dispatcher.held_at = 5
    first = post(one, CHAT)
    await first.at_least(6)
    await one.die()
    await first.leave()
    await again(two, first.events[-1][0]).done()
    page = told(two)
    assert (page["adopted_total"], page["adopted_tokens_total"]) == (1, 5)
    assert (page["begun_total"], page["not_adopted_total"]) == (0, 0)
    assert len(two.dispatcher.steps) == len(ANSWER) + 1 - 5
