"""How long a router waits for its store: a slow one is not away."""

from __future__ import annotations

import asyncio
import time

import pytest
import redis as blocking
import uvloop
from redis.exceptions import RedisError

from baton.protocol.clock import SystemClock
from baton.runtime.redis.connections import connect
from baton.runtime.timing import Timing
from router.store.guard import StoreGuard
from router.store.patience import HALF_LIFE_S, Patience
from router.store.redis_links import RedisServers
from router.store.redis_queue import ScriptQueue
from router.store.redis_store import RedisStore, longest_s
from tests.router.fakes import FakeClock

PUSH = "return redis.call('RPUSH', KEYS[1], ARGV[1])"
LEAST_S, MOST_S = 0.5, 2.5


def patience() -> tuple[Patience, FakeClock]:
    clock = FakeClock()
    return Patience(clock, LEAST_S, MOST_S), clock


def test_a_quick_store_gets_the_least() -> None:
    patient, _ = patience()
    for _ in range(100):
        patient.took(0.01)
    assert patient.seconds == LEAST_S


def test_a_slow_one_gets_twice_what_it_took_for_a_while() -> None:
    patient, clock = patience()
    patient.took(0.6)
    patient.took(0.01)
    assert patient.seconds == pytest.approx(1.2)
    clock.advance(HALF_LIFE_S)
    assert patient.seconds == pytest.approx(0.6)
    patient.took(0.4)  # longer than what is left of the first
    assert patient.seconds == pytest.approx(0.8)
    clock.advance(10 * HALF_LIFE_S)
    assert patient.seconds == LEAST_S


def test_who_waits_in_vain_waits_longer_the_next_time_within_bounds() -> None:
    patient, _ = patience()
    waits: list[float] = []
    for _ in range(5):
        waits.append(patient.seconds)
        patient.took(patient.seconds)
    assert waits == pytest.approx([0.5, 1.0, 2.0, MOST_S, MOST_S])


def test_a_heartbeat_is_told_within_a_lease() -> None:
    timing = Timing()
    assert timing.heartbeat_s + longest_s(timing, 0.5) < timing.router_lease_s
    assert longest_s(timing, 3.0) == 3.0, "as the operator says"


@pytest.mark.redis
async def test_a_store_that_is_slow_again_and_again_goes_away_less_often(
    empty_redis: str,
) -> None:
    pause_s, num_pauses = 0.25, 4
    store = RedisStore(RedisServers.of(empty_redis, 5.0), "r", Timing(), SystemClock(), 0.1)
    guard = StoreGuard(store, Timing())
    await guard.start()
    with blocking.Redis.from_url(empty_redis) as other:
        for _ in range(num_pauses):
            other.execute_command("CLIENT", "PAUSE", str(int(pause_s * 1000)), "ALL")
            await guard.counts()
            await guard.call(lambda store: store.read("nobody"))
            while guard.stats.away:
                await guard.beat()
    # Another outage takes a wait that is longer than twice the last one.
    assert guard.stats.outages < num_pauses
    await guard.stop()


@pytest.mark.redis
def test_who_did_not_run_reads_what_is_there_before_he_gives_up(empty_redis: str) -> None:
    """uvloop runs timers before it reads; a stopped router has both to do when it goes on."""

    async def ask() -> int:
        client = connect(empty_redis, 5.0)
        queue = ScriptQueue(client, Patience(SystemClock(), 0.2, 0.2))
        push = client.register_script(PUSH)
        await queue.run(push, ["list"], ["warm"])
        asked = queue.run(push, ["list"], ["late"])
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # it is sent
        time.sleep(0.5)  # noqa: ASYNC251  the process stands still
        try:
            return await asked
        finally:
            await queue.stop()
            await client.aclose()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(ask()) == 2


@pytest.mark.redis
async def test_a_store_that_does_not_answer_at_all_is_given_up_each_time(empty_redis: str) -> None:
    client = connect(empty_redis, 5.0)
    patient = Patience(SystemClock(), 0.1, 0.4)
    queue, push = ScriptQueue(client, patient), client.register_script(PUSH)
    await queue.run(push, ["list"], ["warm"])
    with blocking.Redis.from_url(empty_redis) as other:
        other.execute_command("CLIENT", "PAUSE", "60000", "WRITE")
        patiences: list[float] = []
        for _ in range(4):
            with pytest.raises((RedisError, OSError, TimeoutError)):
                await queue.run(push, ["list"], ["x"])
            patiences.append(patient.seconds)
        other.execute_command("CLIENT", "UNPAUSE")
    assert patiences == sorted(patiences), "patience grows"
    assert patiences[-1] == 0.4, "within its bounds"
    await queue.stop()
    await client.aclose()
