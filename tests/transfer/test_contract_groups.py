"""The contract of every lane, sixth part: layer groups with blocks, and holes, of their own."""

from __future__ import annotations

import asyncio

import pytest

from baton.protocol.errors import KVCorrupt, KVLost, KVRefused
from baton.protocol.kv_spec import HeldBlocks, LayerSpec, PoolFormat
from kv_transfer.lanes.memory import MemoryFabric, MemoryLane
from kv_transfer.pool.layout import HOLE
from kv_transfer.protocol.base import Blocks, Remote
from tests.transfer.cluster import FIRST, Cluster, frames_received, transfer
from tests.transfer.conftest import DIRECT, KINDS
from tests.transfer.pools import (
    BOOT_D,
    Node,
    expect_bytes,
    fill_random,
    fill_untouched,
    outcome,
    request_of,
    snapshot,
)

WINDOW = 16
# Three groups of two layers: one that sees everything, two that slide.
MIXED = tuple(
    LayerSpec(2, 8, 8, window=WINDOW if layer % 3 else 0, kind="sliding" if layer % 3 else "full")
    for layer in range(6)
)
NUM_TOKENS = 77
FIRST_SEEN = NUM_TOKENS - WINDOW
TOKEN_BYTES = MIXED[0].token_bytes("bfloat16")


async def pair(cluster: Cluster, *, p_windowed: bool = True) -> tuple[Node, Node]:
    """Pools of three groups, of different block sizes."""
    p = await cluster.node(layers=MIXED, windowed=p_windowed, num_blocks=40)
    d = await cluster.node(
        layers=MIXED, windowed=True, num_blocks=40, block_size=16, boot_id=BOOT_D
    )
    fill_random(p.arena, 1)
    fill_untouched(d.arena)
    assert p.arena.groups.windows == d.arena.groups.windows == (0, WINDOW, WINDOW)
    return p, d


def holes(blocks: Blocks) -> list[int]:
    return [each.first for each in blocks]


@pytest.mark.parametrize("start", [0, 70])
async def test_each_group_comes_from_its_blocks_into_its_blocks(
    cluster: Cluster, start: int
) -> None:
    """Holes on both sides, of different sizes; every byte elsewhere is as before."""
    p, d = await pair(cluster)
    assert holes(p.pick(NUM_TOKENS)) == [0, 7, 7]
    assert holes(d.pick(NUM_TOKENS)) == [0, 3, 3]
    await transfer(p, d, NUM_TOKENS, start)
    out_of_sight = 4 * TOKEN_BYTES * max(FIRST_SEEN - start, 0)
    assert d.connector.stats.window_bytes == out_of_sight


@pytest.mark.parametrize("cluster", KINDS, indirect=True)
async def test_who_keeps_everything_gives_what_a_window_sees(cluster: Cluster) -> None:
    p, d = await pair(cluster, p_windowed=False)
    assert holes(p.pick(NUM_TOKENS)) == [0, 0, 0]
    await transfer(p, d, NUM_TOKENS)


@pytest.mark.parametrize("cluster", KINDS, indirect=True)
async def test_while_the_prefill_computes_what_passes_out_of_sight(cluster: Cluster) -> None:
    """Tokens that the windows have passed by the end are published, and travel for nobody."""
    p, d = await pair(cluster)
    source, target = p.pick(NUM_TOKENS), d.pick(NUM_TOKENS, 2)
    handle = p.connector.export(request_of(), 0, source, NUM_TOKENS)
    before = snapshot(d.arena)
    fetch = asyncio.create_task(d.connector.fetch(handle, 1, target))
    arrived = 0
    for upto in (FIRST_SEEN - 1, FIRST_SEEN + 2, NUM_TOKENS):
        for layer, spec in enumerate(MIXED):
            assert p.connector.publish(handle, layer, upto)
            arrived += not spec.window or upto > FIRST_SEEN
            await frames_received(d, arrived)
    assert not fetch.done()
    p.connector.complete(handle, FIRST)
    ready = await fetch
    assert d.connector.stats.frames_received == arrived
    assert ready.num_bytes == TOKEN_BYTES * (2 * NUM_TOKENS + 4 * WINDOW)
    expect_bytes((p, source), (d, target), 0, NUM_TOKENS, before)
    await p.freed()


# As many bytes a token, but not in int8 with its scales: there both layers share their blocks.
UNEQUAL = (LayerSpec(2, 8, 8), LayerSpec(4, 4, 4, window=WINDOW, kind="sliding"))


@pytest.mark.parametrize("cluster", KINDS, indirect=True)
@pytest.mark.parametrize(("source", "target"), [("int8", "bfloat16"), ("bfloat16", "int8")])
async def test_one_side_has_groups_and_the_other_none(
    cluster: Cluster, source: str, target: str
) -> None:
    p = await cluster.node(layers=UNEQUAL, dtype=source, windowed=True)
    d = await cluster.node(layers=UNEQUAL, dtype=target, windowed=True, boot_id=BOOT_D)
    assert {p.arena.groups.num_groups, d.arena.groups.num_groups} == {1, 2}
    blocks, theirs = d.pick(40, 2), p.pick(40, 1)
    for layer in range(2):
        own = list(theirs[p.arena.group_of[layer]].ids)  # layers of two groups share their slots
        for tensor in p.arena.layer(layer):
            tensor[own] = 100 + layer
        if source == "int8":
            for scales in p.arena.scales(layer):
                scales[own] = 1.0
    handle = p.connector.export(request_of(), 0, theirs, 40)
    p.finish(handle)
    await d.connector.fetch(handle, 1, blocks)
    for layer, first in enumerate((0, 40 - WINDOW)):
        rows = rows_of(d, layer, blocks, first, 40)
        assert rows == [100.0 + layer] * (40 - first)
    await p.freed()


def rows_of(node: Node, layer: int, blocks: Blocks, start: int, end: int) -> list[float]:
    """The first number of each token's K, rounded."""
    own, size = blocks[node.arena.group_of[layer]], node.block_size
    values = node.arena.layer(layer)[0].float()
    if node.dtype == "int8":
        values = values * node.arena.scales(layer)[0][..., None]
    places = [(own.ids[token // size - own.first], token % size) for token in range(start, end)]
    return [round(float(values[block, row, 0, 0]), 3) for block, row in places]


@pytest.mark.parametrize("cluster", DIRECT, indirect=True)
async def test_what_an_exporter_does_not_hold_is_not_read(cluster: Cluster) -> None:
    """Its hole is larger than the windows allow: whoever reads for himself is told, too."""
    p, d = await pair(cluster)
    full, *sliding = p.pick(NUM_TOKENS)
    lacking = (full, *(HeldBlocks(each.ids[1:], each.first + 1) for each in sliding))
    handle = p.connector.export(request_of(), 0, lacking, NUM_TOKENS)
    p.finish(handle)
    assert isinstance(await outcome(d.connector.fetch(handle, 1, d.pick(NUM_TOKENS))), KVCorrupt)
    assert d.connector.stats.fetches == 0


@pytest.mark.parametrize("cluster", [each for each in KINDS if each not in DIRECT], indirect=True)
async def test_an_exporter_that_lacks_blocks_says_so_and_serves_on(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """The same hole where the exporter reads: its own fault, told as such, by a thread that ends
    well (an exception that leaves one fails the test)."""
    p, d = await pair(cluster)
    full, *sliding = p.pick(NUM_TOKENS)
    lacking = (full, *(HeldBlocks(each.ids[1:], each.first + 1) for each in sliding))
    handle = p.connector.export(request_of(), 0, lacking, NUM_TOKENS)
    p.finish(handle)
    error = await outcome(d.connector.fetch(handle, 1, d.pick(NUM_TOKENS)))
    assert isinstance(error, KVLost)
    # Over a pair of torch.distributed, the end of the connection may overtake the last word.
    told = ("the exporter has failed", "the pair is closed", "pair broken")
    assert any(each in error.message for each in told), error.message
    assert "is not held any more" in caplog.text
    assert d.connector.stats.fetches == 0
    await p.connector.release(handle, "of no use")
    await p.freed()
    whole = p.connector.export(request_of(epoch=2), 0, p.pick(NUM_TOKENS), NUM_TOKENS)
    p.finish(whole)
    await d.connector.fetch(whole, 2, d.pick(NUM_TOKENS))
    await p.freed(2)


async def test_tables_are_told_apart_by_the_exporters_format() -> None:
    """Grouped as the exporter's pool is; a number of tables that cannot be is refused."""
    node = Node(MemoryLane(MemoryFabric()), layers=MIXED)
    ours, pool = node.connector.memory, PoolFormat(8, "float16")
    three = Remote(pool, ((1,), (2,), (HOLE, 3)))
    assert [three.table(layer, ours) for layer in range(6)] == [
        (1,), (2,), (2,), (1,), (HOLE, 3), (HOLE, 3)
    ]  # fmt: skip
    assert Remote(pool, ((7,),)).table(5, ours) == (7,)
    with pytest.raises(KVRefused, match="2 block tables, not 3"):
        Remote(pool, ((1,), (2,))).table(0, ours)
    await node.connector.stop()
