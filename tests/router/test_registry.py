"""Which nodes a router uses: by address or by record, after their Hello, of one model."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import redis.asyncio
from prometheus_client import CollectorRegistry

from baton.protocol import wire
from baton.protocol.clock import SystemClock
from baton.protocol.errors import ConfigError, StoreUnavailable
from baton.protocol.handles import NodeLoad, Role
from baton.runtime.redis.connections import connect
from baton.runtime.redis.keys import node_key
from router.metrics.parts import WatchedParts, watch_failures
from router.nodes import registry as registry_file
from router.nodes.directory import RedisDirectory
from router.request.retry_budget import RetryBudget
from tests.router.fakes import (
    FAST,
    PATIENCE_S,
    FakeDirectory,
    FakeNode,
    fake_nodes,
    make_record,
    running_router,
)


async def test_nodes_by_address_count_after_their_hello() -> None:
    async with fake_nodes("p", "d") as nodes, running_router(nodes) as router:
        registry = router.registry
        assert {record.node_id for record in registry.records()} == {"p", "d"}
        model = registry.model()
        assert model is not None
        assert (model.name, model.max_model_len, model.vocab_size) == ("tiny", 256, 100)
        assert registry.can_serve()
        roles = {snapshot.node_id: snapshot.role for snapshot in registry.snapshots()}
        assert roles == {"p": Role.PREFILL, "d": Role.DECODE}
        await nodes[1].stop()
        await router.until(lambda: not registry.can_serve())
        assert registry.model() == model, "the last known model stays known"
        states = {status.address: status.connected for status in registry.statuses()}
        assert states == {nodes[0].address: True, nodes[1].address: False}


async def test_of_a_group_that_loses_a_rank_no_rank_is_used() -> None:
    """Its other ranks end in the next moment: requests that were lost must not go there."""
    ranks = [FakeNode(make_record(f"d{n}", Role.DECODE, group="g", rank=n)) for n in range(3)]
    for each in ranks:
        await each.start()
    async with fake_nodes("p", "d") as others, running_router([*others, *ranks]) as router:
        await router.until(lambda: len(router.registry.records()) == 5)
        assert not any(node.shunned for node in router.registry.snapshots())
        await ranks[1].stop()
        await router.until(lambda: len(router.registry.records()) == 4)
        shunned = {node.node_id for node in router.registry.snapshots() if node.shunned}
        assert shunned == {"d0", "d2"}
        assert router.registry.can_serve()
    for each in (ranks[0], ranks[2]):
        await each.stop()


async def test_before_any_hello_there_is_no_model() -> None:
    async with running_router([]) as router:
        assert router.registry.model() is None
        assert not router.registry.can_serve()


async def test_a_draining_decode_node_is_not_ready() -> None:
    node = FakeNode(make_record("d", Role.DECODE, load=NodeLoad(draining=True)))
    await node.start()
    try:
        async with running_router([node]) as router:
            assert not router.registry.can_serve()
    finally:
        await node.stop()


async def test_nodes_come_and_go_with_their_records() -> None:
    directory = FakeDirectory()
    async with (
        fake_nodes("d1", "d2") as (d1, d2),
        running_router([], directory=directory) as router,
    ):
        registry = router.registry
        directory.known = [d1.record, d2.record]
        await registry.refresh()
        await router.until(lambda: len(registry.records()) == 2)
        directory.known = [d1.record]
        await registry.refresh()
        assert len(registry.records()) == 2, "its session lives, whatever the record says"
        await d2.stop()
        await router.until(lambda: len(registry.records()) == 1)
        assert len(registry.statuses()) == 2
        await registry.refresh()
        assert [status.address for status in registry.statuses()] == [d1.address]


@pytest.mark.parametrize(("restless", "looks"), [(1e6, registry_file.LOOKS), (0, 1)])
async def test_while_nodes_may_be_starting_the_directory_is_read_more_often(
    monkeypatch: pytest.MonkeyPatch, restless: float, looks: int
) -> None:
    monkeypatch.setattr(registry_file, "RESTLESS", restless)
    directory, often_s = FakeDirectory(), FAST.heartbeat_s / registry_file.LOOKS
    async with fake_nodes("d") as (d,), running_router([], directory=directory) as router:
        registry = router.registry
        assert registry._pause_s() == often_s, "no node can serve"
        directory.known = [d.record]
        await registry.refresh()
        await router.until(registry.can_serve)
        assert registry._pause_s() == FAST.heartbeat_s / looks
        directory.away = True
        await registry.refresh()
        assert registry._pause_s() == FAST.heartbeat_s, "a directory that is away is let alone"


async def test_a_node_may_go_while_the_router_stops() -> None:
    """The directory is read until the very end."""
    directory = FakeDirectory()
    async with fake_nodes("d") as (d,), running_router([], directory=directory) as router:
        directory.known = [d.record]
        await router.registry.refresh()
        await router.until(lambda: len(router.registry.records()) == 1)
        await d.stop()
        await router.until(lambda: len(router.registry.records()) == 0)
        await router.registry.stop()
        directory.known = []
        await router.registry.refresh()
        assert router.registry.statuses() == []
        await router.registry.stop()


async def test_without_the_directory_what_is_known_stays() -> None:
    directory = FakeDirectory()
    async with fake_nodes("d") as (d,), running_router([], directory=directory) as router:
        directory.known = [d.record]
        await router.registry.refresh()
        await router.until(router.registry.can_serve)
        directory.away = True
        directory.known = []
        await router.registry.refresh()
        assert router.registry.can_serve()
        assert len(router.registry.statuses()) == 1


async def test_a_node_of_another_model_is_refused() -> None:
    alien = FakeNode(make_record("p", Role.PREFILL, model_digest="other"))
    await alien.start()
    try:
        async with fake_nodes("d") as (d,), running_router([d]) as router:
            registry = router.registry
            with pytest.raises(ConfigError) as caught:
                registry.admit(alien.address, alien.record)
            assert caught.value.field == "model_digest"
            registry.admit(
                d.address, replace(d.record, model_digest="other")
            )  # a restart of its own
    finally:
        await alien.stop()


async def test_refusals_by_protocol_and_by_role() -> None:
    async with fake_nodes("d") as (d,), running_router([d]) as router:
        admit = router.registry.admit
        old = replace(d.record, endpoint=replace(d.record.endpoint, protocol_version=99))
        with pytest.raises(ConfigError) as caught:
            admit("127.0.0.1:9", old)
        assert caught.value.field == "protocol_version"
        with pytest.raises(ConfigError) as caught:
            admit(d.address, replace(d.record, role=Role.PREFILL))
        assert caught.value.field == "role"
        # Layouts may differ: the policy never pairs such nodes.
        other = replace(d.record, endpoint=replace(d.record.endpoint, layout_fingerprint="x"))
        admit("127.0.0.1:9", other)


async def test_a_second_node_of_the_same_name_is_refused() -> None:
    async with fake_nodes("d") as (d,), running_router([d]) as router:
        admit = router.registry.admit
        second = replace(d.record, boot_id="another", address="127.0.0.1:9")
        with pytest.raises(ConfigError) as caught:
            admit("127.0.0.1:9", second)
        assert caught.value.field == "node_id"
        assert d.address in caught.value.message
        admit(d.address, second)  # started again
        admit("localhost:9", d.record)  # the same one, by another address
        await d.stop()
        await router.until(lambda: not router.registry.records())
        admit("127.0.0.1:9", second)


async def test_nodes_of_a_role_compute_in_one_precision(caplog: pytest.LogCaptureFixture) -> None:
    """A decode node in bfloat16 among those in float32: a failover would change tokens."""
    node = FakeNode(make_record("d", Role.DECODE, precision="float32"))
    await node.start()
    short = make_record("d2", Role.DECODE, precision="bfloat16")
    exact = replace(short, precision="float32", deterministic=True)
    try:
        async with running_router([node]) as router:
            router.registry.admit("127.0.0.1:9", short)
            assert "d2 computes in bfloat16, node d in float32: a failover" in caplog.text
            caplog.clear()
            router.registry.admit("127.0.0.1:9", replace(short, precision="float32"))
            router.registry.admit("127.0.0.1:9", replace(short, role=Role.PREFILL))
            router.registry.admit("127.0.0.1:9", replace(short, precision=""))
            assert not caplog.messages, "roles may differ, and older nodes do not tell"
            with pytest.raises(ConfigError, match="float32, deterministic"):
                router.registry.admit("127.0.0.1:9", exact)
        async with running_router([node], exact=True) as router:
            with pytest.raises(ConfigError, match="bfloat16") as caught:
                router.registry.admit("127.0.0.1:9", short)
            assert caught.value.field == "dtype"
            assert router.registry.expected_s(lambda node: node.node_id == "d2") == 0
    finally:
        await node.stop()


async def test_the_precisions_of_each_role_are_a_metric() -> None:
    nodes = [
        FakeNode(make_record("d1", Role.DECODE, precision="float32")),
        FakeNode(make_record("d2", Role.DECODE, precision="bfloat16")),
        FakeNode(make_record("p", Role.PREFILL, precision="float32")),
    ]
    for node in nodes:
        await node.start()
    try:
        async with running_router(nodes) as router:
            metrics = CollectorRegistry()
            retries = RetryBudget(SystemClock())
            watch_failures(metrics, WatchedParts(router.guard, router.registry, retries))
            for role, count in (("decode", 2), ("prefill", 1)):
                assert metrics.get_sample_value("baton_node_precisions", {"role": role}) == count
    finally:
        for node in nodes:
            await node.stop()


async def test_a_refused_node_is_seen_as_such() -> None:
    alien = FakeNode(make_record("p", Role.PREFILL, model_digest="other"))
    await alien.start()
    directory = FakeDirectory()
    try:
        async with fake_nodes("d") as (d,), running_router([d], directory=directory) as router:
            directory.known = [alien.record]
            await router.registry.refresh()
            async with asyncio.timeout(PATIENCE_S):
                await alien.left.wait()
            status = {s.address: s for s in router.registry.statuses()}[alien.address]
            assert not status.connected
            assert "serves model" in status.refused
            assert "draft head" in status.refused
            assert len(router.registry.snapshots()) == 1
    finally:
        await alien.stop()


@pytest.mark.redis
async def test_records_in_redis(empty_redis: str) -> None:
    client = connect(empty_redis, 2.0)
    directory = RedisDirectory(client, 2.0)
    try:
        assert await directory.records() == []
        records = [make_record("p", Role.PREFILL), make_record("d", Role.DECODE)]
        for record in records:
            await client.set(node_key(record.node_id), wire.record_to_bytes(record), px=60_000)
        await client.set(node_key("broken"), b"\xff\xff not a record")
        found = await directory.records()
        assert sorted(found, key=lambda r: r.node_id) == sorted(records, key=lambda r: r.node_id)
    finally:
        await client.aclose()


async def test_a_redis_that_is_not_there() -> None:
    client = redis.asyncio.Redis.from_url("unix:///nowhere/redis.sock")
    with pytest.raises(StoreUnavailable):
        await RedisDirectory(client, 1.0).records()
    await client.aclose()
