"""The contract of every lane, third part: pairs that store KV differently, and who holds on."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from baton.protocol.errors import KVRefused, KVStale
from baton.protocol.kv_spec import DTYPE_BYTES, LayerSpec
from baton.runtime.config import AUTO
from kv_transfer.connector import TransferOptions
from kv_transfer.pool.codec import Rows, unpack
from kv_transfer.protocol.base import Blocks, Payload
from kv_transfer.protocol.messages import INT8
from tests.block_lists import held
from tests.transfer.cluster import FIRST, Cluster, frames_received, transfer
from tests.transfer.conftest import KINDS, WAYS
from tests.transfer.pools import BOOT_D, UNTOUCHED, Node, fill_untouched, outcome, request_of

NUM_TOKENS = 45
LAYERS = (
    LayerSpec(2, 8, 8),
    LayerSpec(3, 4, 8, window=16, kind="sliding"),
    LayerSpec(1, 24, 0, kind="mla"),
)


def fill_numbers(node: Node) -> None:
    """Numbers of every size, not just any bits: they are to be converted."""
    generator = torch.Generator().manual_seed(11)
    blocks, block = held(range(node.num_blocks)), node.block_size
    for layer, spec in enumerate(node.layers):
        dims = [dim for dim in (spec.k_dim, spec.v_dim) if dim]
        heads = node.connector.memory.heads(layer)
        tokens = node.num_blocks * block
        rows = [
            torch.randn(tokens, len(heads), dim, generator=generator)
            * torch.exp(torch.randn(tokens, len(heads), 1, generator=generator))
            for dim in dims
        ]
        data = b"".join(row.numpy().tobytes() for row in rows)
        payload = Payload(memoryview(data), "float32", heads)
        node.connector.memory.write(layer, blocks, 0, tokens, payload)


def rows_of(node: Node, layer: int, blocks: Blocks) -> list[Rows]:
    memory = node.connector.memory
    data = b"".join(memory.read(layer, blocks, 0, NUM_TOKENS))
    payload = Payload(memoryview(data), node.dtype, memory.heads(layer))
    return unpack(node.layers[layer], payload)


def expect_close(p: Node, source: Blocks, d: Node, target: Blocks, lossy: bool) -> None:
    """What D stores is P's, converted once; with int8 on the way, within its bound on top."""
    for layer in range(len(p.layers)):
        for ours, theirs in zip(rows_of(d, layer, target), rows_of(p, layer, source), strict=True):
            exact = theirs.exact()
            if not lossy:
                expected = theirs.to(d.dtype)
                assert torch.equal(ours.exact(), expected.exact())
                continue
            bound = exact.abs().amax(-1, keepdim=True) / 254
            rounding = {"float32": 0, "bfloat16": 2**-8, "float16": 2**-10, "int8": 1, "fp8": 2**-3}
            slack = exact.abs() * rounding[d.dtype] + bound * (rounding[d.dtype] + 0.01)
            assert ((ours.exact() - exact).abs() <= bound + slack).all()


async def fetch(p: Node, d: Node) -> tuple[Blocks, Blocks]:
    source, target = p.pick(NUM_TOKENS, 1), d.pick(NUM_TOKENS, 2)
    handle = p.connector.export(request_of(), 0, source, NUM_TOKENS)
    p.finish(handle, FIRST)
    assert (await d.connector.fetch(handle, 1, target)).first_tokens == FIRST
    await p.freed(p.connector.stats.exports)
    return source, target


@pytest.mark.parametrize("cluster", ["memory", "shm", "nixl"], indirect=True)
@pytest.mark.parametrize("source", DTYPE_BYTES)
@pytest.mark.parametrize("target", DTYPE_BYTES)
async def test_any_two_precisions(cluster: Cluster, source: str, target: str) -> None:
    p = await cluster.node(dtype=source)
    d = await cluster.node(dtype=target, boot_id=BOOT_D, block_size=16)
    fill_numbers(p)
    fill_untouched(d.arena)
    expect_close(p, (blocks := await fetch(p, d))[0], d, blocks[1], lossy=False)


@pytest.mark.parametrize("cluster", ["memory", "stream-unix", "shm"], indirect=True)
@pytest.mark.parametrize("source", ["float32", "bfloat16"])
@pytest.mark.parametrize("target", ["float32", "bfloat16", "int8"])
async def test_int8_on_the_wire(cluster: Cluster, source: str, target: str) -> None:
    """Fewer bytes, an error within the bound, and never without being asked for."""
    p = await cluster.node(dtype=source)
    options = TransferOptions(wire_codec=INT8, burst_bytes=0)
    d = await cluster.node(dtype=target, boot_id=BOOT_D, options=options)
    fill_numbers(p)
    blocks = await fetch(p, d)
    expect_close(p, blocks[0], d, blocks[1], lossy=not d.lane.direct)
    raw = NUM_TOKENS * sum(spec.token_bytes(source) for spec in p.layers)
    packed = NUM_TOKENS * sum(spec.token_bytes(INT8) + spec.scale_bytes(INT8) for spec in p.layers)
    assert d.connector.stats.total_received == (raw if d.lane.direct else packed)


@pytest.mark.parametrize("cluster", WAYS, indirect=True)
@pytest.mark.parametrize(
    ("source", "target", "codec", "tag"),
    [
        ("bfloat16", "bfloat16", "raw", None),
        ("int8", "int8", "raw", None),
        ("int8", "int8", "int8", None),
        ("float32", "bfloat16", "raw", "float32>bfloat16"),
        ("int8", "bfloat16", "int8", "int8>bfloat16"),
        ("bfloat16", "int8", "int8", "bfloat16>int8"),
        ("bfloat16", "bfloat16", "int8", "bfloat16>int8>bfloat16"),
        ("bfloat16", "bfloat16", AUTO, None),
    ],
)
async def test_the_precision_is_known_before_the_fetch(
    cluster: Cluster, source: str, target: str, codec: str, tag: str | None
) -> None:
    p = await cluster.node(dtype=source)
    options = TransferOptions(wire_codec=codec, burst_bytes=0)
    d = await cluster.node(dtype=target, boot_id=BOOT_D, options=options)
    handle = p.connector.export(request_of(), 0, p.pick(8), 8)
    if d.lane.direct and codec == INT8:  # nothing travels, so nothing is made smaller
        tag = None if source == target else f"{source}>{target}"
    assert d.connector.precision_of(handle) == tag


@pytest.mark.parametrize("cluster", WAYS, indirect=True)
async def test_a_slow_link_is_given_less_to_carry(cluster: Cluster) -> None:
    """`auto`: once the link has shown to be slow; what was promised for a fetch is kept."""
    p, d = await cluster.pair(options=TransferOptions(wire_codec=AUTO, burst_bytes=0))
    fill_numbers(p)
    handle = p.connector.export(request_of(), 0, p.pick(NUM_TOKENS), NUM_TOKENS)
    assert d.connector.precision_of(handle) is None
    d.connector.links.observe(p.boot_id, 100 << 20, 1.0)
    p.finish(handle)
    await d.connector.fetch(handle, 1, d.pick(NUM_TOKENS))
    raw = NUM_TOKENS * sum(spec.token_bytes("bfloat16") for spec in p.layers)
    assert d.connector.stats.total_received == raw
    await fetch(p, d)
    assert d.lane.direct or d.connector.stats.total_received < 2 * raw


# ---- windows -----------------------------------------------------------------------------------
@pytest.mark.parametrize("cluster", KINDS, indirect=True)
@pytest.mark.parametrize("start", [0, 35])
async def test_only_what_a_window_still_sees(cluster: Cluster, start: int) -> None:
    p = await cluster.node(layers=LAYERS, windowed=True)
    d = await cluster.node(layers=LAYERS, windowed=True, boot_id=BOOT_D)
    fill_numbers(p)
    fill_untouched(d.arena)
    source, target = p.pick(NUM_TOKENS, 1), d.pick(NUM_TOKENS, 2)
    handle = p.connector.export(request_of(), 0, source, NUM_TOKENS)
    p.finish(handle)
    await d.connector.fetch(handle, 1, target, start)
    seen_from = [start, max(start, NUM_TOKENS - 16), start]
    for layer, first in enumerate(seen_from):
        memories = (p.connector.memory, source), (d.connector.memory, target)
        theirs, ours = (b"".join(m.read(layer, b, first, NUM_TOKENS)) for m, b in memories)
        assert ours == theirs
        untouched = b"".join(d.connector.memory.read(layer, target, 0, first))
        assert set(untouched) <= {UNTOUCHED}
    saved = (seen_from[1] - start) * LAYERS[1].token_bytes("bfloat16")
    assert d.connector.stats.window_bytes == saved
    await p.freed()


@pytest.mark.parametrize("cluster", WAYS, indirect=True)
async def test_who_wants_all_of_a_window_does_not_get_a_part(cluster: Cluster) -> None:
    p = await cluster.node(layers=LAYERS, windowed=True)
    d = await cluster.node(layers=LAYERS, boot_id=BOOT_D)
    handle = p.connector.export(request_of(), 0, p.pick(16), 16)
    p.finish(handle)
    error = await outcome(d.connector.fetch(handle, 1, d.pick(16)))
    assert isinstance(error, KVRefused)
    # The other way there is no harm: who keeps everything can give what a window sees.
    await transfer(d, await cluster.node(layers=LAYERS, boot_id="1e" * 16), 16)


# ---- holding on --------------------------------------------------------------------------------
@pytest.mark.parametrize("cluster", KINDS, indirect=True)
async def test_a_held_export_outlives_the_fetch_and_its_lease(cluster: Cluster) -> None:
    """Nothing is freed until the holder lets go: the lease is renewed behind the scenes."""
    p, d = await cluster.pair()
    handle = p.connector.export(request_of(), 0, p.pick(16), 16)
    p.finish(handle, FIRST)
    ready = await d.connector.fetch(handle, 1, d.pick(16), hold=True)
    assert ready.first_tokens == FIRST
    assert ready.held is not None
    assert p.released == []
    await d.connector.renew(handle)
    await ready.held.release()
    await ready.held.release()
    assert [why for _, _, why in p.released] == ["acknowledged"]


@pytest.mark.parametrize("cluster", KINDS, indirect=True)
async def test_who_holds_learns_that_it_is_over(cluster: Cluster) -> None:
    p, d = await cluster.pair()
    handle = p.connector.export(request_of(), 0, p.pick(16), 16)
    p.finish(handle)
    handle = replace(handle, lease_ms=60)
    ready = await d.connector.fetch(handle, 1, d.pick(16), hold=True)
    assert ready.held is not None
    await p.connector.release(handle, "drained")
    async with asyncio.timeout(10):
        await ready.held.lost()
    await ready.held.release()


# ---- connections -------------------------------------------------------------------------------
@pytest.mark.parametrize("cluster", KINDS, indirect=True)
async def test_the_next_conversation_needs_no_handshake(cluster: Cluster) -> None:
    p, d = await cluster.pair()
    await transfer(p, d, 16)
    lane = d.connector.stats.lanes[d.lane.name]
    for count in range(2, 4):
        await transfer(p, d, 16)
        assert (lane.connections, lane.reused) == (1, count - 1)
    handle = p.connector.export(request_of(), 0, p.pick(16), 16)
    await d.connector.renew(handle)
    await d.connector.release(handle, "not needed")
    await p.freed(4)
    assert (lane.connections, lane.reused) == (1, 4)


@pytest.mark.parametrize("cluster", KINDS, indirect=True)
async def test_a_failed_conversation_leaves_no_connection_behind(cluster: Cluster) -> None:
    p, d = await cluster.pair()
    handle, target = await transfer(p, d, 16)
    assert isinstance(await outcome(d.connector.fetch(handle, 1, target)), KVStale)
    await transfer(p, d, 16)
    lane = d.connector.stats.lanes[d.lane.name]
    assert (lane.connections, lane.reused) == (2, 1)


@pytest.mark.parametrize("cluster", KINDS, indirect=True)
async def test_a_cancelled_fetch_is_not_kept(cluster: Cluster) -> None:
    p, d = await cluster.pair()
    await transfer(p, d, 16)
    handle = p.connector.export(request_of(), 0, p.pick(16), 16)
    fetch = asyncio.create_task(d.connector.fetch(handle, 1, d.pick(16)))
    assert p.connector.publish(handle, 0, 16)
    await frames_received(d, d.connector.stats.frames_received + 1)
    fetch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetch
    p.finish(handle)
    await d.connector.fetch(handle, 2, d.pick(16))
    await p.freed(2)


# ---- back-pressure -----------------------------------------------------------------------------
@pytest.mark.parametrize("cluster", ["memory"], indirect=True)
async def test_the_byte_budget_of_exports(cluster: Cluster) -> None:
    p = await cluster.node(options=TransferOptions(max_export_bytes=15_000))
    big = p.connector.bytes_of(60)
    assert big < 15_000 < 2 * big
    assert not p.connector.room_for(15_001), "who calls lets one export alone exceed it"
    assert p.connector.room_for(15_000)
    handle = p.connector.export(request_of(), 0, p.pick(60), 60)
    assert not p.connector.room_for(big)
    assert p.connector.room_for(15_000 - big)
    assert p.connector.stats.held_back == 2
    await p.connector.release(handle, "done")
    assert p.connector.room_for(big)
