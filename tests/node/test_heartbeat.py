"""The node's record in Redis, with Redis there, away and back; metrics; health."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import redis.asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.node.heartbeat import Heartbeat, RedisRegistry
from baton.protocol import wire
from baton.protocol.errors import ConfigError
from baton.protocol.handles import NodeRecord, Role
from baton.runtime.redis import keys as redis_keys
from baton.runtime.timing import Timing
from kv_transfer.lanes.memory import MemoryFabric
from tests.fakes import request
from tests.node.fakes import PATIENCE_S, PREFILL, TIMING, Setup, connected, running_node
from tests.router.fakes import make_record


@pytest.mark.redis
async def test_the_record_lives_in_redis_as_long_as_the_node(redis_url: str) -> None:
    setup = Setup(options={"redis_url": redis_url, "node_id": "p-test"})
    key = redis_keys.node_key("p-test")
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        async with running_node(PREFILL, MemoryFabric(), setup) as node, connected(node) as router:
            async with asyncio.timeout(PATIENCE_S):
                while (value := await client.get(key)) is None:
                    pass
            assert isinstance(value, bytes)
            record = wire.record_from_bytes(value)
            assert replace(record, load=router.record.load) == router.record
            assert record.address == node.node.address
            assert 0 < await client.pttl(key) <= TIMING.node_record_s * 1000
        assert await client.get(key) is None, "withdrawn at the stop"


async def test_a_redis_that_is_away_costs_one_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"unix://{tmp_path}/nobody.sock"
    setup = Setup(options={"redis_url": url})
    async with running_node(PREFILL, MemoryFabric(), setup) as node, connected(node) as router:
        await router.prefill(request("r"))
        await router.release(await router.handle_of("r"))
        await node.until_idle()
        registry = RedisRegistry(url, Timing(heartbeat_s=0.2))
        caplog.clear()
        for _ in range(3):
            await registry.announce(router.record)
        await registry.close()
    warnings = [r for r in caplog.records if r.message.startswith("Redis is away")]
    assert len(warnings) == 1


# ---- one name, one node ----

BRIEF = Timing(heartbeat_s=1.0, node_record_s=0.3)  # of one that dies
LASTING = Timing(heartbeat_s=1.0, node_record_s=600.0)  # of one whose heartbeat goes on


@asynccontextmanager
async def registries(url: str, *timings: Timing) -> AsyncIterator[list[RedisRegistry]]:
    made = [RedisRegistry(url, timing) for timing in timings]
    try:
        yield made
    finally:
        for each in made:
            await each.close()


def named(boot_id: str, port: int) -> NodeRecord:
    return make_record("d-test", Role.DECODE, boot_id=boot_id, address=f"127.0.0.1:{port}")


async def kept(url: str) -> str | None:
    """The boot whose record is there."""
    async with redis.asyncio.Redis.from_url(url) as client:
        value = await client.get(redis_keys.node_key("d-test"))
    return wire.record_from_bytes(value).boot_id if isinstance(value, bytes) else None


@pytest.mark.redis
async def test_a_name_is_one_living_node_s(redis_url: str) -> None:
    async with registries(redis_url, LASTING, BRIEF) as (one, two):
        await one.claim(named("a", 1))
        with pytest.raises(ConfigError, match=r"another node's, which lives, at 127\.0\.0\.1:1"):
            await two.claim(named("b", 2))
        await two.withdraw(named("b", 2))  # as a start that failed does
        assert await kept(redis_url) == "a"
        await one.withdraw(named("a", 1))
        assert await kept(redis_url) is None


@pytest.mark.redis
async def test_a_successor_waits_for_the_record_of_the_dead_one(redis_url: str) -> None:
    async with registries(redis_url, BRIEF, LASTING) as (one, two):
        await one.claim(named("a", 1))
        await two.claim(named("b", 2))
        assert await kept(redis_url) == "b"
        await two.withdraw(named("b", 2))


@pytest.mark.redis
async def test_who_has_its_port_need_not_wait(redis_url: str) -> None:
    async with registries(redis_url, LASTING, LASTING) as (one, two):
        await one.claim(named("a", 1))
        async with asyncio.timeout(PATIENCE_S):
            await two.claim(named("b", 1))
        assert await kept(redis_url) == "b"
        await two.withdraw(named("b", 1))


@pytest.mark.redis
async def test_a_node_that_was_replaced_while_it_slept_takes_nothing_back(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with registries(redis_url, BRIEF, LASTING) as (one, two):
        await one.claim(named("a", 1))
        await two.claim(named("b", 2))
        for _ in range(2):
            await one.announce(named("a", 1))
        await one.withdraw(named("a", 1))
        assert await kept(redis_url) == "b"
        errors = [r.message for r in caplog.records if r.levelname == "ERROR"]
        assert errors == ["node id d-test is taken by the node at 127.0.0.1:2"]
        await two.withdraw(named("b", 2))
        assert await kept(redis_url) is None


async def test_a_failing_beat_does_not_end_the_heartbeat(
    caplog: pytest.LogCaptureFixture,
) -> None:
    beats = 0
    enough = asyncio.Event()

    async def beat() -> None:
        nonlocal beats
        beats += 1
        if beats == 3:
            enough.set()
        raise ValueError("one bad beat")

    heartbeat = Heartbeat(beat, 0.001)
    heartbeat.start()
    async with asyncio.timeout(PATIENCE_S):
        await enough.wait()
    await heartbeat.stop()
    await heartbeat.stop()
    assert "a heartbeat failed" in caplog.text


async def health_of(address: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
        return reply.status


async def test_health_is_the_engines_own_progress() -> None:
    serving = health_pb2.HealthCheckResponse.SERVING
    setup = Setup(options={"stall_s": 0.0})  # any silence at all, once a beat has seen it
    async with running_node(PREFILL, MemoryFabric()) as node, connected(node) as router:
        node.runner.step_gate.close()
        await router.prefill(request("r"))
        await node.runner.step_gate.reached()
        assert await health_of(node.node.address) == serving, "a long step is not a stall yet"
    async with running_node(PREFILL, MemoryFabric(), setup) as node, connected(node) as router:
        node.runner.step_gate.close()
        await router.prefill(request("r"))
        await node.runner.step_gate.reached()
        async with asyncio.timeout(PATIENCE_S):
            while await health_of(node.node.address) == serving:
                pass


async def test_metrics_count_what_happened() -> None:
    setup = Setup(options={"metrics_port": 0})
    async with running_node(PREFILL, MemoryFabric(), setup) as node, connected(node) as router:
        await router.prefill(request("r", tuple(range(10, 29))))
        await router.until(lambda: router.events("r"))
        url = f"http://127.0.0.1:{node.node.ready()['metrics_port']}/metrics"

        def scrape() -> str:
            with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
                return answer.read().decode()

        text = await asyncio.to_thread(scrape)
        await router.release(await router.handle_of("r"))
    values = {
        line.split("{")[0]: float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if "{" in line and 'role="prefill"' in line
    }
    assert values["baton_node_prompt_tokens_total"] == 19
    assert values["baton_kv_transfer_exports_total"] == 1
    assert values["baton_kv_transfer_active_exports"] == 1
