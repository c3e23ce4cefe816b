"""Lanes that read the exporter's memory: what happens when that memory is no longer what it was."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from baton.protocol.errors import KVError, KVLost, KVRefused, KVStale
from baton.protocol.handles import KVHandle
from baton.protocol.kv_spec import LayerSpec
from tests.transfer.cluster import FIRST, Cluster, transfer
from tests.transfer.conftest import DIRECT
from tests.transfer.direct_lanes import LateLane
from tests.transfer.pools import (
    BOOT_D,
    PATIENCE_S,
    Node,
    fill_random,
    fill_untouched,
    outcome,
    request_of,
    snapshot,
)

pytestmark = pytest.mark.parametrize("cluster", DIRECT, indirect=True)


class Gate:
    """Holds the fetching thread where it is about to pull."""

    def __init__(self, node: Node) -> None:
        self.reached = threading.Event()
        self.go_on = threading.Event()
        memory = node.connector.memory
        views = memory.views

        def gated(*arguments: object) -> object:
            self.reached.set()
            assert self.go_on.wait(PATIENCE_S)
            return views(*arguments)  # type: ignore[arg-type]

        memory.views = gated  # type: ignore[method-assign]

    async def pull_begins(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, PATIENCE_S)


async def begin(p: Node, d: Node) -> tuple[KVHandle, asyncio.Task, Gate]:
    gate = Gate(d)
    handle = p.connector.export(request_of(), 0, p.pick(40), 40)
    p.finish(handle, FIRST)
    fetch = asyncio.create_task(d.connector.fetch(handle, 1, d.pick(40)))
    await gate.pull_begins()
    return handle, fetch, gate


async def released(p: Node, handle: KVHandle) -> None:
    await p.connector.release(handle, "aborted")


async def lapsed(p: Node, handle: KVHandle) -> None:
    p.clock.advance(p.timing.kv_lease_s)
    p.connector.expire(p.clock.monotonic())


async def lapsed_unswept(p: Node, handle: KVHandle) -> None:
    p.clock.advance(p.timing.kv_lease_s)


async def fenced(p: Node, handle: KVHandle) -> None:
    p.connector._table.renew(handle.export_seq, handle.secret, 2)


@pytest.mark.parametrize("blow", [released, lapsed, lapsed_unswept, fenced])
async def test_blocks_that_are_reused_while_they_are_read_are_never_used(
    cluster: Cluster, blow: Callable
) -> None:
    """The field's worst bug: the bytes that arrive are another prompt's. CONFIRM finds out."""
    p, d = await cluster.pair()
    handle, fetch, gate = await begin(p, d)
    await blow(p, handle)
    fill_random(p.arena, 99)
    gate.go_on.set()
    assert isinstance(await outcome(fetch), KVStale)
    assert d.connector.stats.fetches == 0


async def test_the_exporter_is_gone_when_the_bytes_are_there(cluster: Cluster) -> None:
    p, d = await cluster.pair()
    _, fetch, gate = await begin(p, d)
    assert isinstance(p.lane, LateLane)
    await asyncio.to_thread(p.lane.inner.stop)  # the frames' lane: memory stays as it is
    gate.go_on.set()
    assert isinstance(await outcome(fetch), KVLost)


async def test_a_cancelled_pull_leaves_the_blocks_alone(cluster: Cluster) -> None:
    p, d = await cluster.pair()
    _, fetch, gate = await begin(p, d)
    fetch.cancel()
    done, _ = await asyncio.wait([fetch], timeout=0.05)
    assert not done
    before = snapshot(d.arena)
    gate.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await fetch
    assert snapshot(d.arena) == before
    assert p.connector.active_exports == 1


@pytest.mark.parametrize(("p_dtype", "d_dtype"), [("float32", "bfloat16"), ("bfloat16", "float32")])
async def test_another_dtype_is_converted(cluster: Cluster, p_dtype: str, d_dtype: str) -> None:
    p = await cluster.node(dtype=p_dtype, block_size=5)
    d = await cluster.node(dtype=d_dtype, boot_id=BOOT_D)
    for layer in range(len(p.layers)):
        for tensor in p.arena.layer(layer):
            tensor.copy_(tensor.new_tensor(1.5).expand_as(tensor))
    fill_untouched(d.arena)
    source, target = p.pick(33), d.pick(33, 2)
    handle = p.connector.export(request_of(), 0, source, 33)
    p.finish(handle, FIRST)
    await d.connector.fetch(handle, 1, target)
    for layer in range(len(d.layers)):
        k = d.arena.layer(layer)[0]
        rows = k[list(target[0].ids)].flatten(0, 1)[:33]
        assert (rows == 1.5).all()


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 2), (2, 2)])
async def test_a_slice_of_the_heads(cluster: Cluster, p_tp: int, d_tp: int) -> None:
    layers = (LayerSpec(4, 8, 8), LayerSpec(4, 16, 4))
    p = await cluster.node(layers=layers, tp=(p_tp, p_tp - 1), block_size=5)
    d = await cluster.node(layers=layers, tp=(d_tp, d_tp - 1), boot_id=BOOT_D)
    fill_random(p.arena, 7)
    source, target = p.pick(33), d.pick(33, 2)
    handle = p.connector.export(request_of(), 0, source, 33)
    p.finish(handle, FIRST)
    await d.connector.fetch(handle, 1, target)
    for layer in range(len(layers)):
        for ours, theirs in zip(d.arena.layer(layer), p.arena.layer(layer), strict=True):
            rows = theirs[list(source[0].ids)].flatten(0, 1)[:33, -ours.shape[2] :]
            got = ours[list(target[0].ids)].flatten(0, 1)[:33]
            assert torch.equal(got.view(torch.int16), rows.contiguous().view(torch.int16))


@pytest.mark.parametrize("change", ["map", "file", "inode", "metadata", "base"])
async def test_attributes_that_are_none(cluster: Cluster, change: str) -> None:
    """A lane that cannot be reached is no common lane; nothing is opened or mapped."""
    p, d = await cluster.pair()
    handle = p.connector.export(request_of(), 0, p.pick(16), 16)
    address = handle.endpoint.lanes[0]
    names = [name for name, _ in address.attributes]
    if change not in names:
        change = "map"
    attributes = tuple((n, "!" if n == change else v) for n, v in address.attributes)
    wrong = replace(address, attributes=attributes)
    assert d.lane.reaches(address)
    assert not d.lane.reaches(wrong)
    elsewhere = replace(handle, endpoint=replace(handle.endpoint, lanes=(wrong,)))
    error = await outcome(d.connector.fetch(elsewhere, 1, d.pick(16)))
    assert isinstance(error, KVRefused | KVLost)
    assert d.connector.stats.fetches == 0


async def test_a_map_of_another_pool_is_refused(cluster: Cluster) -> None:
    p, d = await cluster.pair()
    other = await cluster.node(boot_id="0f" * 16, block_size=4)
    handle = p.connector.export(request_of(), 0, p.pick(16), 16)
    p.finish(handle, FIRST)
    own, foreign = dict(handle.endpoint.lanes[0].attributes), other.connector.endpoint().lanes[0]
    mixed = own | {"map": dict(foreign.attributes)["map"]}
    address = replace(handle.endpoint.lanes[0], attributes=tuple(mixed.items()))
    wrong = replace(handle, endpoint=replace(handle.endpoint, lanes=(address,)))
    assert isinstance(await outcome(d.connector.fetch(wrong, 1, d.pick(16))), KVError)
    assert d.connector.stats.fetches == 0


async def test_two_nodes_each_way_share_their_mappings(cluster: Cluster) -> None:
    p, d = await cluster.pair()
    for _ in range(3):
        await transfer(p, d, 30)
    fill_random(d.arena, 9)
    await transfer(d, p, 30)
