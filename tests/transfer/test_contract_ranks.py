"""The contract of every lane, fourth part: tensor-parallel groups of any two sizes.

Each rank is a node of its own; what lies on all of them together must be the whole model's KV.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from baton.engine.memory.kv_cache import KVArena
from baton.protocol.errors import KVLost, KVStale
from baton.protocol.handles import KVHandle
from baton.protocol.kv_spec import LayerSpec
from kv_transfer.pool.layout import ArenaMemory
from kv_transfer.protocol.base import Blocks, KVReady, Payload
from kv_transfer.protocol.frames import Kind
from kv_transfer.protocol.messages import INT8
from tests.block_lists import held
from tests.transfer import faults
from tests.transfer.cluster import FIRST, Cluster, frames_received
from tests.transfer.conftest import KINDS
from tests.transfer.faults import FaultyLane
from tests.transfer.pools import PATIENCE_S, Node, fill_untouched, outcome, request_of

# Heads enough for every rank; fewer than ranks (GQA replication); one latent; a window.
LAYERS = (
    LayerSpec(8, 4, 4),
    LayerSpec(2, 8, 4),
    LayerSpec(1, 24, 0, kind="mla"),
    LayerSpec(4, 4, 4, window=16, kind="sliding"),
)
pytestmark = pytest.mark.parametrize("cluster", KINDS, indirect=True)
NUM_TOKENS = 45


@dataclass
class Group:
    """The ranks of one node, the leader first, and the sequence's blocks on all of them."""

    ranks: list[Node]
    blocks: Blocks

    @property
    def leader(self) -> Node:
        return self.ranks[0]

    def export(self) -> KVHandle:
        handle = self.leader.connector.export(request_of(), 0, self.blocks, NUM_TOKENS)
        for rank in self.ranks[1:]:
            rank.connector.export_share(handle, self.blocks)
        return handle

    def finish(self, handle: KVHandle) -> None:
        for rank in self.ranks:
            rank.finish(handle, FIRST if rank is self.leader else ())

    async def fetch(self, handle: KVHandle, epoch: int = 1) -> list[KVReady]:
        fetches = (r.connector.fetch(handle, epoch, self.blocks) for r in self.ranks)
        return list(await asyncio.gather(*fetches))

    async def freed(self) -> None:
        for rank in self.ranks:
            await rank.freed()

    def fill(self, whole: ArenaMemory, blocks: Blocks) -> None:
        for rank in self.ranks:
            memory = rank.connector.memory
            for layer in range(len(LAYERS)):
                heads = memory.heads(layer)
                data = b"".join(whole.read(layer, blocks, 0, NUM_TOKENS, heads))
                payload = Payload(memoryview(data), whole.format.dtype, heads)
                memory.write(layer, self.blocks, 0, NUM_TOKENS, payload)

    def expect(self, whole: ArenaMemory, blocks: Blocks) -> None:
        for rank in self.ranks:
            memory = rank.connector.memory
            for layer in range(len(LAYERS)):
                wanted = whole.read(layer, blocks, 0, NUM_TOKENS, memory.heads(layer))
                assert b"".join(memory.read(layer, self.blocks, 0, NUM_TOKENS)) == b"".join(wanted)


async def group(cluster: Cluster, size: int, letter: str, **settings: Any) -> Group:
    ranks = []
    for rank in range(size):
        node = await cluster.node(
            boot_id=f"{rank:x}{letter}" * 16, tp=(size, rank), layers=LAYERS, **settings
        )
        fill_untouched(node.arena)
        ranks.append(node)
    if size > 1:
        ranks[0].connector.join_group([rank.connector.endpoint() for rank in ranks])
    return Group(ranks, ranks[0].pick(NUM_TOKENS, size))


@pytest.fixture
def whole() -> ArenaMemory:
    """The sequence in a pool of the whole model, blocks 0, 1, ..."""
    arena = KVArena(LAYERS, 8, 8, "bfloat16")
    generator = torch.Generator().manual_seed(5)
    for layer in range(len(LAYERS)):
        for tensor in arena.layer(layer):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return ArenaMemory(arena)


IN_WHOLE = held(range(6))


@pytest.mark.parametrize(("p_size", "d_size"), [(2, 1), (1, 2), (4, 2), (2, 4), (4, 4)])
async def test_any_two_sizes(
    cluster: Cluster, whole: ArenaMemory, p_size: int, d_size: int
) -> None:
    p = await group(cluster, p_size, "a")
    d = await group(cluster, d_size, "d", block_size=16)
    p.fill(whole, IN_WHOLE)
    handle = p.export()
    p.finish(handle)
    ready = await d.fetch(handle)
    assert all(each.first_tokens == FIRST for each in ready if d_size == 1 or p_size == 1)
    assert any(each.first_tokens == FIRST for each in ready)
    d.expect(whole, IN_WHOLE)
    await p.freed()
    # Nothing twice: every rank has fetched exactly the bytes that it holds.
    for rank, each in zip(d.ranks, ready, strict=True):
        assert each.num_bytes == rank.connector.bytes_of(NUM_TOKENS)


async def test_between_precisions_too(cluster: Cluster, whole: ArenaMemory) -> None:
    """An int8 pool on two ranks, with its scales, to an int8 pool on four."""
    p = await group(cluster, 2, "a", dtype=INT8)
    d = await group(cluster, 4, "d", dtype=INT8)
    p.fill(whole, IN_WHOLE)
    handle = p.export()
    p.finish(handle)
    await d.fetch(handle)
    there = await group(cluster, 1, "b", dtype=INT8)
    there.fill(whole, IN_WHOLE)
    d.expect(there.leader.connector.memory, there.blocks)  # type: ignore[arg-type]
    await p.freed()


async def test_layer_by_layer_from_every_rank(cluster: Cluster, whole: ArenaMemory) -> None:
    """The ranks get on at different speeds; nothing is complete before the last one is."""
    p = await group(cluster, 2, "a")
    d = await group(cluster, 1, "d")
    p.fill(whole, IN_WHOLE)
    handle = p.export()
    fetch = asyncio.create_task(d.fetch(handle))
    arrived = 0
    for upto in (16, NUM_TOKENS):
        for rank in reversed(p.ranks):
            rank.publish_all(handle, upto)
            arrived += len(LAYERS) - (rank is not p.leader)  # the latent comes from one of them
            await frames_received(d.leader, arrived)
    p.ranks[1].connector.complete(handle, ())
    done, _ = await asyncio.wait([fetch], timeout=0.05)
    assert not done
    p.leader.connector.complete(handle, FIRST)
    await fetch
    d.expect(whole, IN_WHOLE)
    await p.freed()


async def test_one_rank_fails_and_all_are_broken_off(cluster: Cluster, whole: ArenaMemory) -> None:
    """The other rank's export stays as it was: the next fetch finds both."""
    p = await group(cluster, 2, "a")
    d = await group(cluster, 1, "d")
    p.fill(whole, IN_WHOLE)
    handle = p.export()
    p.leader.finish(handle, FIRST)
    p.ranks[1].publish_all(handle, 16)
    fetch = asyncio.create_task(d.fetch(handle))
    await frames_received(d.leader, 2 * len(LAYERS) - 1)
    await asyncio.to_thread(p.ranks[1].lane.stop)
    assert isinstance(await outcome(fetch), KVLost)
    assert p.leader.released == []
    assert p.ranks[1].released == []
    heir = await group(cluster, 1, "e")
    assert isinstance(await outcome(heir.fetch(handle, 2)), KVLost)
    assert p.leader.connector.active_exports == 1


async def test_a_rank_of_d_that_fails_holds_nobody_up(cluster: Cluster, whole: ArenaMemory) -> None:
    """One rank has fetched and said so; the other tries again: P waits for both."""
    p = await group(cluster, 1, "a")
    d = await group(cluster, 2, "d")
    p.fill(whole, IN_WHOLE)
    handle = p.export()
    p.finish(handle)
    await d.ranks[1].connector.fetch(handle, 1, d.blocks)
    await d.ranks[1].connector.fetch(handle, 1, d.blocks)  # twice is still one rank
    assert p.leader.released == []
    await d.leader.connector.fetch(handle, 1, d.blocks)
    d.expect(whole, IN_WHOLE)
    await p.freed()


async def test_a_newer_epoch_starts_the_count_again(cluster: Cluster, whole: ArenaMemory) -> None:
    p = await group(cluster, 1, "a")
    d = await group(cluster, 2, "d")
    p.fill(whole, IN_WHOLE)
    handle = p.export()
    p.finish(handle)
    await d.leader.connector.fetch(handle, 1, d.blocks)
    await d.ranks[1].connector.fetch(handle, 2, d.blocks)
    assert p.leader.released == []
    await d.leader.connector.fetch(handle, 2, d.blocks)
    await p.freed()


async def test_renewals_and_releases_reach_every_rank(cluster: Cluster) -> None:
    p = await group(cluster, 4, "a")
    d = await group(cluster, 1, "d")
    handle = p.export()
    for rank in p.ranks:
        rank.clock.advance(0.9 * rank.timing.kv_lease_s)
    await d.leader.connector.renew(handle)
    for rank in p.ranks:
        rank.clock.advance(0.9 * rank.timing.kv_lease_s)
        assert rank.connector.expire(rank.clock.monotonic()) == 0
    await d.leader.connector.release(handle, "cancelled")
    await p.freed()
    assert isinstance(await outcome(d.leader.connector.renew(handle)), KVStale)


async def test_a_lost_acknowledgement_is_made_good_by_the_lease(
    cluster: Cluster, whole: ArenaMemory
) -> None:
    p = await group(cluster, 2, "a")
    lane = FaultyLane(cluster.new_lane(), sending=faults.on_every(Kind.ACK, faults.lose))
    d = Group([await cluster.node(lane, boot_id="0d" * 16, layers=LAYERS)], held(range(6)))
    p.fill(whole, IN_WHOLE)
    handle = p.export()
    p.finish(handle)
    await d.fetch(handle)
    d.expect(whole, IN_WHOLE)
    for rank in p.ranks:
        assert rank.released == []
        rank.clock.advance(rank.timing.kv_lease_s)
        rank.connector.expire(rank.clock.monotonic())
    async with asyncio.timeout(PATIENCE_S):
        await p.freed()
