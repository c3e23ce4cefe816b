"""The contract of every lane, first half: what arrives is right and complete; fences hold."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from baton.protocol.errors import KVError, KVRefused, KVStale
from baton.protocol.events import layers_came
from baton.protocol.handles import KVHandle
from baton.protocol.kv_spec import LayerSpec
from tests.block_lists import held
from tests.transfer.cluster import (
    FIRST,
    Cluster,
    frames_received,
    transfer,
)
from tests.transfer.conftest import KINDS, WAYS
from tests.transfer.pools import (
    BOOT_D,
    BOOT_E,
    Node,
    expect_bytes,
    fill_random,
    fill_untouched,
    outcome,
    request_of,
    snapshot,
)


# ---- what arrives ------------------------------------------------------------------------------
@pytest.mark.parametrize("num_tokens", [1, 8, 101])
async def test_whole_prompt_after_the_prefill(cluster: Cluster, num_tokens: int) -> None:
    p, d = await cluster.pair()
    await transfer(p, d, num_tokens)
    assert d.connector.stats.fetches == 1
    assert list(d.connector.stats.bytes_received) == [d.lane.name]
    assert p.connector.stats.exposed_tails == 1


@pytest.mark.parametrize("cluster", KINDS, indirect=True)
@pytest.mark.parametrize(
    ("p_block", "d_block", "start"), [(8, 32, 3), (32, 8, 40), (8, 8, 40), (5, 7, 0), (5, 7, 3)]
)
async def test_any_two_block_sizes(
    cluster: Cluster, p_block: int, d_block: int, start: int
) -> None:
    p = await cluster.node(block_size=p_block)
    d = await cluster.node(block_size=d_block, boot_id=BOOT_D)
    fill_random(p.arena, 3)
    fill_untouched(d.arena)
    await transfer(p, d, 77, start)


async def test_a_prefix_of_everything_moves_no_bytes(cluster: Cluster) -> None:
    p, d = await cluster.pair()
    await transfer(p, d, 24, start=24)
    assert d.connector.stats.bytes_received == {}


@pytest.mark.parametrize("cluster", ["stream-unix", "shm"], indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
async def test_every_dtype(cluster: Cluster, dtype: str) -> None:
    p = await cluster.node(dtype=dtype)
    d = await cluster.node(dtype=dtype, boot_id=BOOT_D)
    fill_random(p.arena, 4)
    fill_untouched(d.arena)
    await transfer(p, d, 20)


@pytest.mark.parametrize("cluster", KINDS, indirect=True)
async def test_frames_of_a_megabyte(cluster: Cluster) -> None:
    layers = (LayerSpec(8, 128, 128),)
    p = await cluster.node(layers=layers, num_blocks=96)
    d = await cluster.node(layers=layers, num_blocks=24, block_size=32, boot_id=BOOT_D)
    fill_random(p.arena, 5)
    fill_untouched(d.arena)
    await transfer(p, d, 700)
    # 256 tokens of 4 KiB each fill one; where nothing travels, nothing is cut
    assert d.connector.stats.frames_received == (1 if d.lane.direct else 3)


async def test_layer_by_layer_while_the_prefill_computes(cluster: Cluster) -> None:
    """An early subscriber gets each (layer, chunk) before the next one exists."""
    p, d = await cluster.pair()
    source, target = p.pick(50), d.pick(50, 2)
    handle = p.connector.export(request_of(), 0, source, 50)
    before = snapshot(d.arena)
    fetch = asyncio.create_task(d.connector.fetch(handle, 1, target))
    arrived = 0
    for upto in (16, 17, 50):
        for layer in range(len(p.layers)):
            assert p.connector.publish(handle, layer, upto)
            arrived += 1
            await frames_received(d, arrived)
            assert not fetch.done()
    p.connector.complete(handle, FIRST)
    ready = await fetch
    assert ready.first_tokens == FIRST
    expect_bytes((p, source), (d, target), 0, 50, before)
    await p.freed()
    came = layers_came(ready.layers)
    assert [(each.first, each.last) for each in came] == [(n, n) for n in range(len(p.layers))]
    starts, ends = [each.start_us for each in came], [each.end_us for each in came]
    assert (starts, ends) == (sorted(starts), sorted(ends))
    assert starts[-1] <= ends[0], "the last layer's first chunk came before the first one's last"


async def test_a_late_subscriber_gets_what_is_there_and_then_the_rest(cluster: Cluster) -> None:
    p, d = await cluster.pair()
    source, target = p.pick(40), d.pick(40, 2)
    handle = p.connector.export(request_of(), 0, source, 40)
    assert all(p.publish_all(handle, 30))
    before = snapshot(d.arena)
    fetch = asyncio.create_task(d.connector.fetch(handle, 1, target, 8))
    await frames_received(d, len(p.layers))
    p.finish(handle)
    await fetch
    expect_bytes((p, source), (d, target), 8, 40, before)
    await p.freed()


async def test_many_at_once_do_not_mix(cluster: Cluster) -> None:
    p = await cluster.node(num_blocks=96)
    d = await cluster.node(num_blocks=96, boot_id=BOOT_D)
    fill_random(p.arena, 6)
    fill_untouched(d.arena)
    before = snapshot(d.arena)
    exports = []
    for i in range(12):
        blocks = held(range(8 * i, 8 * i + 8))
        exports.append((p.connector.export(request_of(f"r{i}"), 0, blocks, 60), blocks))
    targets = [held(blocks[0].ids[::-1]) for _, blocks in exports]
    fetches = [
        asyncio.create_task(d.connector.fetch(handle, 1, target))
        for (handle, _), target in zip(exports, targets, strict=True)
    ]
    for handle, _ in reversed(exports):
        p.finish(handle)
    await asyncio.gather(*fetches)
    for i in (0, 5, 11):
        d_blocks, p_blocks = targets[i], exports[i][1]
        for layer in range(len(p.layers)):
            read = [b"".join(n.connector.memory.read(layer, blocks, 0, 60))
                    for n, blocks in ((p, p_blocks), (d, d_blocks))]  # fmt: skip
            assert read[0] == read[1]
    assert snapshot(d.arena) != before
    await p.freed(12)


async def test_both_ways_between_two_nodes(cluster: Cluster) -> None:
    """A decode node exports too: drain and migration are D -> D."""
    p, d = await cluster.pair()
    await transfer(p, d, 30)
    fill_random(d.arena, 9)
    await transfer(d, p, 30)


# ---- fences ------------------------------------------------------------------------------------
async def test_an_acknowledged_export_is_stale(cluster: Cluster) -> None:
    p, d = await cluster.pair()
    handle, target = await transfer(p, d, 16)
    assert isinstance(await outcome(d.connector.fetch(handle, 1, target)), KVStale)
    assert isinstance(await outcome(d.connector.renew(handle)), KVStale)
    assert not p.connector.publish(handle, 0, 16)


@pytest.mark.parametrize("cluster", WAYS, indirect=True)
async def test_an_old_epoch_after_a_newer_one(cluster: Cluster) -> None:
    p, d = await cluster.pair()
    target = d.pick(16)
    handle = p.connector.export(request_of(), 0, p.pick(16), 16)
    newer = asyncio.create_task(d.connector.fetch(handle, 3, target))
    await p_has_seen(p, handle, 3)
    assert isinstance(await outcome(d.connector.fetch(handle, 2, d.pick(16, 3))), KVStale)
    await d.connector.release(handle, "late", epoch=2)  # has no say any more
    p.finish(handle)
    await newer
    await p.freed()


async def p_has_seen(p: Node, handle: KVHandle, epoch: int) -> None:
    """A renewal by the same epoch raises the same fence."""
    p.connector._table.renew(handle.export_seq, handle.secret, epoch)


@pytest.mark.parametrize("cluster", WAYS, indirect=True)
async def test_a_newer_epoch_stops_the_older_ones_transfer(cluster: Cluster) -> None:
    p, d = await cluster.pair()
    handle = p.connector.export(request_of(), 0, p.pick(16), 16)
    old = asyncio.create_task(d.connector.fetch(handle, 1, d.pick(16, 2)))
    assert p.connector.publish(handle, 0, 16)
    await frames_received(d, 1)
    new = asyncio.create_task(d.connector.fetch(handle, 2, d.pick(16, 3)))
    assert isinstance(await outcome(old), KVStale)
    p.finish(handle)
    assert (await new).num_tokens == 16
    await p.freed()


@pytest.mark.parametrize("cluster", WAYS, indirect=True)
@pytest.mark.parametrize(
    "change",
    [{"secret": b"x" * 16}, {"request_id": "other"}, {"export_seq": 99}, {"boot_id": BOOT_E}],
    ids=["secret", "request", "sequence", "boot"],
)
async def test_a_wrong_handle_gets_nothing(cluster: Cluster, change: dict[str, object]) -> None:
    p, d = await cluster.pair()
    handle = p.connector.export(request_of(), 0, p.pick(16), 16)
    p.finish(handle)
    before = snapshot(d.arena)
    wrong = replace(handle, **change)  # type: ignore[arg-type]
    assert isinstance(await outcome(d.connector.fetch(wrong, 1, d.pick(16))), KVError)
    if wrong.request_id == handle.request_id:  # a release names no request: its secret is enough
        await d.connector.release(wrong, "not mine")
    assert snapshot(d.arena) == before
    assert p.connector.active_exports == 1


@pytest.mark.parametrize("cluster", KINDS, indirect=True)
@pytest.mark.parametrize(
    "settings",
    [
        {"secret": "another deployment"},
        {"digest": "another model"},
        {"layers": (LayerSpec(2, 8, 8),)},
    ],
    ids=["deployment secret", "model", "layers"],
)
async def test_who_does_not_fit_is_refused(cluster: Cluster, settings: dict[str, Any]) -> None:
    p, d = await cluster.pair(**settings)
    handle = p.connector.export(request_of(), 0, p.pick(16), 16)
    p.finish(handle)
    before = snapshot(d.arena)
    assert isinstance(await outcome(d.connector.fetch(handle, 1, d.pick(16))), KVRefused)
    assert isinstance(await outcome(d.connector.renew(handle)), KVRefused)
    assert snapshot(d.arena) == before
    assert d.connector.stats.failures == {"kv_refused": 1}


@pytest.mark.parametrize("cluster", WAYS, indirect=True)
async def test_no_common_lane(cluster: Cluster) -> None:
    p, d = await cluster.pair()
    handle = p.connector.export(request_of(), 0, p.pick(16), 16)
    elsewhere = replace(handle, endpoint=replace(handle.endpoint, lanes=()))
    assert isinstance(await outcome(d.connector.fetch(elsewhere, 1, d.pick(16))), KVRefused)
