"""What resumable requests ask of both stores: details in the log, following, leases of orphans."""

from __future__ import annotations

import asyncio
import time

from baton.protocol.request import RequestState
from router.store.base import END_MARK, MAX_TRIES, LogEntry, Move, RequestStore, Swept, WriteStatus
from tests.router.conftest import StoreMaker
from tests.router.fakes import PATIENCE_S, FakeClock

S = RequestState
W = WriteStatus
LEASE_S = 0.02
RESUMABLE = {"resumable": "1"}


async def sweep_until(store: RequestStore, clock: FakeClock) -> list[Swept]:
    """Redis counts leases by its own TIME, so their end is waited for; the fake clock jumps."""
    clock.advance(2.5 * LEASE_S)
    give_up = time.monotonic() + PATIENCE_S
    while not (swept := await store.sweep()):
        assert time.monotonic() < give_up
    return swept


async def test_details_are_kept_and_an_end_once(make_store: StoreMaker) -> None:
    store = make_store("r1")
    assert await store.claim("a", RESUMABLE) is not None
    end = END_MARK + '{"f":"stop"}'
    entries = [
        LogEntry("a", 1, 0, (1, 2), more='{"w":5}'),
        LogEntry("a", 1, 1, (2, 3), more='{"p":1}'),  # its second token is new
        LogEntry("a", 1, 3, (), more=end),
        LogEntry("a", 1, 3, (), more=end),  # said again
        LogEntry("a", 1, 2, (3,), more=end),
        LogEntry("a", 1, 0, (9,), sample=1, more=end),
    ]
    assert await store.append(entries) == [W.OK] * 6
    log = [
        LogEntry("a", 1, 0, (1, 2), more='{"w":5}'),
        LogEntry("a", 1, 2, (3,), more='{"p":1}'),
        LogEntry("a", 1, 3, (), more=end),
        LogEntry("a", 1, 0, (9,), sample=1, more=end),
    ]
    assert await store.read_log("a") == log
    entries, cursor = await store.tail("a", "", 0)
    assert entries == log
    assert await store.tail("a", cursor, 0) == ([], cursor)


async def test_a_tail_waits_for_what_comes(make_store: StoreMaker) -> None:
    one, two = make_store("r1"), make_store("r2")
    assert await one.claim("a", RESUMABLE) is not None
    assert await one.append([LogEntry("a", 1, 0, (1,))]) == [W.OK]
    _, cursor = await two.tail("a", "", 0)
    waiting = asyncio.create_task(two.tail("a", cursor, 0.9))
    await asyncio.sleep(0)
    assert await one.append([LogEntry("a", 1, 1, (2,))]) == [W.OK]
    entries, _ = await waiting
    assert entries == [LogEntry("a", 1, 1, (2,))]
    assert await two.tail("a", cursor, 0.9) == (entries, _)
    assert await two.tail("none", "", 0) == ([], "")


async def test_who_follows_is_seen(make_store: StoreMaker) -> None:
    one, two = make_store("r1"), make_store("r2")
    record = await one.claim("a", RESUMABLE)
    assert record is not None
    assert record.idle_s is None
    await two.follow("a")
    await two.follow("none")
    record = await one.read("a")
    assert record is not None
    assert record.idle_s is not None
    assert 0 <= record.idle_s <= record.age_s + 0.001 < 5
    assert await one.read("none") is None


async def test_whoever_sweeps_and_dies_leaves_it_to_others(
    make_store: StoreMaker, clock: FakeClock
) -> None:
    dead, first, second = (make_store(name, LEASE_S) for name in ("dead", "first", "second"))
    await second.start()
    await first.start()
    assert await dead.claim("a", RESUMABLE) is not None
    assert await sweep_until(first, clock) == [Swept("a", S.QUEUED, 2)]
    # ... and `first` dies before it claims.
    assert await second.beat([]) == []
    clock.advance(2.5 * LEASE_S)
    assert await sweep_until(second, clock) == [Swept("a", S.QUEUED, 3)]
    record = await second.claim("a")
    assert record is not None
    assert (record.epoch, record.tries, record.owner) == (3, 2, "second")
    assert await first.claim("a") is None


async def test_one_adopts_of_many_that_try_at_once(
    make_store: StoreMaker, clock: FakeClock
) -> None:
    dead = make_store("dead", LEASE_S)
    stores = [make_store(f"r{i}", LEASE_S) for i in range(8)]
    await stores[0].start()
    for number in range(10):
        assert await dead.claim(f"a{number}", RESUMABLE) is not None
    swept: list[Swept] = []
    while len(swept) < 10:
        swept += await sweep_until(stores[0], clock)
        swept = [each for each in swept if each.epoch == 2]
    for number in range(10):
        claims = await asyncio.gather(*(store.claim(f"a{number}") for store in stores))
        assert sum(claim is not None for claim in claims) == 1


async def test_a_request_that_outlives_too_many_routers_is_cancelled(
    make_store: StoreMaker, clock: FakeClock
) -> None:
    sweeper = make_store("sweeper", LEASE_S)
    await sweeper.start()
    for tries in range(MAX_TRIES):
        assert await make_store(f"r{tries}", LEASE_S).claim("a", RESUMABLE) is not None
        assert await sweep_until(sweeper, clock) == [Swept("a", S.QUEUED, tries + 2)]
    assert await make_store("last", LEASE_S).claim("a") is not None
    assert await sweep_until(sweeper, clock) == [Swept("a", S.CANCELLED, MAX_TRIES + 2)]


async def test_released_requests_are_swept_at_once(
    make_store: StoreMaker, clock: FakeClock
) -> None:
    leaving, other, sweeper = make_store("a", 60.0), make_store("b", 60.0), make_store("c", LEASE_S)
    await sweeper.start()
    assert await leaving.claim("mine", RESUMABLE) is not None
    assert await other.claim("theirs", RESUMABLE) is not None
    assert await leaving.move(Move("mine", 1, S.DECODE)) is W.OK
    await leaving.release(["mine", "theirs", "none"])
    await leaving.release([])
    assert await sweep_until(sweeper, clock) == [Swept("mine", S.QUEUED, 2)]
    assert await leaving.append([LogEntry("mine", 1, 0, (1,))]) == [W.FENCED]
