"""The contract of every lane, for layers that keep recurrent state: it arrives behind the last
token, byte for byte, and nothing else does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from baton.protocol.errors import InternalError, KVCorrupt, KVLost, KVRefused
from baton.protocol.kv_spec import LayerSpec, StateSpec
from kv_transfer.protocol.base import KVConnector
from kv_transfer.protocol.frames import Kind, decode_header
from tests.transfer import faults
from tests.transfer.cluster import FIRST, Cluster, frames_received, transfer
from tests.transfer.conftest import KINDS, WAYS
from tests.transfer.faults import FaultyLane
from tests.transfer.pools import (
    BOOT_D,
    HYBRID,
    Node,
    expect_bytes,
    fill_random,
    fill_untouched,
    outcome,
    request_of,
    snapshot,
)

STATE_BYTES = sum(spec.state_bytes for spec in HYBRID)
STATES_ALONE = tuple(replace(spec, kv_heads=0, k_dim=0, v_dim=0) for spec in HYBRID)
DAMAGE: dict[str, Callable[[bytes], list[bytes]]] = {
    "bit flip": faults.flip_bit,
    "truncation": faults.truncate,
    "replay": faults.repeat,
    "loss": faults.lose,
}


async def pair(
    cluster: Cluster,
    lane: FaultyLane | None = None,
    layers: tuple[LayerSpec, ...] = HYBRID,
    **settings: Any,
) -> tuple[Node, Node]:
    """P with random bytes and D with untouched ones; `settings` are D's."""
    p = await cluster.node(layers=layers)
    d = await cluster.node(lane, layers=layers, boot_id=BOOT_D, **settings)
    fill_random(p.arena, 1)
    fill_untouched(d.arena)
    return p, d


@pytest.mark.parametrize("num_tokens", [1, 101])
async def test_whole_prompt_with_its_state(cluster: Cluster, num_tokens: int) -> None:
    p, d = await pair(cluster)
    await transfer(p, d, num_tokens)
    assert d.connector.stats.lanes[d.lane.name].state_bytes == STATE_BYTES
    await transfer(p, d, num_tokens)  # on the kept connection


@pytest.mark.parametrize("cluster", KINDS, indirect=True)
async def test_states_without_any_kv(cluster: Cluster) -> None:
    p, d = await pair(cluster, layers=STATES_ALONE)
    await transfer(p, d, 20)
    assert d.connector.stats.bytes_received == {d.lane.name: STATE_BYTES}


@pytest.mark.parametrize("cluster", WAYS, indirect=True)
@pytest.mark.parametrize("settings", [{"block_size": 5}, {"dtype": "float32"}, {"dtype": "int8"}])
async def test_pools_that_store_kv_differently(cluster: Cluster, settings: dict[str, Any]) -> None:
    """KV is cut anew or converted; states are the exporter's, to the bit."""
    p, d = await pair(cluster, **settings)
    await transfer(p, d, 33)


@pytest.mark.parametrize("cluster", KINDS, indirect=True)
async def test_a_prefix_of_everything_still_brings_the_state(cluster: Cluster) -> None:
    p, d = await pair(cluster)
    await transfer(p, d, 24, start=24)
    assert d.connector.stats.total_received == STATE_BYTES


@pytest.mark.parametrize("cluster", WAYS, indirect=True)
async def test_a_state_leaves_behind_the_last_token_only(cluster: Cluster) -> None:
    """Each layer's when that layer is done: not behind an earlier chunk, nor after all layers."""
    p, d = await pair(cluster)
    source, target = p.pick(40), d.pick(40, 2)
    handle = p.connector.export(request_of(), 0, source, 40)
    before = snapshot(d.arena)
    fetch = asyncio.create_task(d.connector.fetch(handle, 1, target))
    for layer in range(len(p.layers)):
        assert p.connector.publish(handle, layer, 16)
    await frames_received(d, 2)  # KV of two layers
    assert d.connector.stats.lanes[d.lane.name].state_bytes == 0
    assert p.arena.states is not None
    p.arena.states._rows.random_(generator=torch.Generator().manual_seed(7))  # by later chunks
    assert p.connector.publish(handle, 1, 40)
    await frames_received(d, 4)
    assert d.connector.stats.lanes[d.lane.name].state_bytes == HYBRID[1].state_bytes
    assert not fetch.done()
    p.finish(handle, FIRST)
    assert (await fetch).first_tokens == FIRST
    expect_bytes((p, source), (d, target), 0, 40, before)
    await p.freed()


@pytest.mark.parametrize("cluster", KINDS, indirect=True)
@pytest.mark.parametrize("damage", DAMAGE)
async def test_one_damaged_state_frame(cluster: Cluster, damage: str) -> None:
    """It is noticed, and the second try brings the right bytes."""
    lane = FaultyLane(cluster.new_lane(), faults.on_nth(Kind.STATE, 1, DAMAGE[damage]))
    p, d = await pair(cluster, lane)
    await transfer(p, d, 20)
    stats = d.connector.stats
    assert (stats.retries, stats.fetches, stats.failures) == (1, 1, {})


@pytest.mark.parametrize("cluster", WAYS, indirect=True)
async def test_every_state_frame_damaged(cluster: Cluster) -> None:
    """Nothing is used, and another node may fetch the export."""
    lane = FaultyLane(cluster.new_lane(), faults.on_every(Kind.STATE, faults.flip_bit))
    p, d = await pair(cluster, lane)
    source = p.pick(20)
    handle = p.connector.export(request_of(), 0, source, 20)
    p.finish(handle, FIRST)
    assert isinstance(await outcome(d.connector.fetch(handle, 1, d.pick(20, 2))), KVCorrupt)
    lane.receiving = faults.intact
    before, target = snapshot(d.arena), d.pick(20, 3)
    await d.connector.fetch(handle, 2, target)
    expect_bytes((p, source), (d, target), 0, 20, before)
    await p.freed()


@pytest.mark.parametrize("cluster", WAYS, indirect=True)
async def test_each_frame_says_whose_state_it_is(cluster: Cluster) -> None:
    p, d = await pair(cluster, lane := FaultyLane(cluster.new_lane()))
    seen: list[int] = []

    def note(index: int, frame: bytes) -> list[bytes]:
        if faults.kind_of(frame) is Kind.STATE:
            header = decode_header(frame[:48], 0).header
            seen.append(header.layer)
        return [frame]

    lane.receiving = note
    await transfer(p, d, 20)
    assert seen == [1, 1, 2]


@pytest.mark.parametrize("cluster", KINDS, indirect=True)
async def test_a_stale_slot_after_an_abort(cluster: Cluster) -> None:
    """A fetch is broken off in the middle of a state. From then on nothing of it reaches the slot,
    which is somebody else's by now."""
    lane = FaultyLane(cluster.new_lane())
    p, d = await pair(cluster, lane)
    handle = p.connector.export(request_of(), 0, p.pick(20), 20)
    target = d.pick(20, 2)
    first = asyncio.create_task(d.connector.fetch(handle, 1, target))
    for layer in (0, 1):
        assert p.connector.publish(handle, layer, 20)
    await frames_received(d, 3)
    first.cancel()
    assert isinstance((await asyncio.gather(first, return_exceptions=True))[0], BaseException)
    fill_untouched(d.arena)
    before = snapshot(d.arena)
    p.finish(handle, FIRST)
    other = d.pick(20, 3)
    await d.connector.fetch(handle, 2, other)
    expect_bytes((p, p.pick(20)), (d, other), 0, 20, before)
    await p.freed()


@pytest.mark.parametrize("cluster", WAYS, indirect=True)
async def test_a_dead_exporter_in_the_middle_of_a_state(cluster: Cluster) -> None:
    p, d = await pair(cluster)
    handle = p.connector.export(request_of(), 0, p.pick(20), 20)
    fetch = asyncio.create_task(d.connector.fetch(handle, 1, d.pick(20, 2)))
    assert p.connector.publish(handle, 1, 20)
    await frames_received(d, 2)
    await p.connector.stop()
    assert isinstance(await outcome(fetch), KVLost)


@pytest.mark.parametrize("cluster", WAYS, indirect=True)
@pytest.mark.parametrize(
    "state",
    [
        StateSpec((6, 4), (2, 300, 500), "bfloat16"),
        StateSpec((6, 3), (2, 500, 300), "bfloat16"),
        StateSpec((6, 3), (2, 300, 500)),
        None,
    ],
    ids=["taps", "shape", "dtype", "none"],
)
async def test_unequal_states_are_refused_by_name(
    cluster: Cluster, state: StateSpec | None
) -> None:
    p = await cluster.node(layers=HYBRID)
    layers = (HYBRID[0], replace(HYBRID[1], state=state), *HYBRID[2:])
    d = await cluster.node(layers=layers, boot_id=BOOT_D)
    handle = p.connector.export(request_of(), 0, p.pick(16), 16)
    p.finish(handle)
    error = await outcome(d.connector.fetch(handle, 1, d.pick(16)))
    assert isinstance(error, KVRefused)
    assert "layout" in str(error)


@pytest.mark.parametrize("cluster", ["memory"], indirect=True)
async def test_no_export_and_no_fetch_without_a_slot(cluster: Cluster) -> None:
    p, d = await pair(cluster)
    without = (replace(p.pick(16)[0], state_slot=None),)
    with pytest.raises(InternalError, match="no slot"):
        p.connector.export(request_of(), 0, without, 16)
    handle = p.connector.export(request_of(), 0, p.pick(16), 16)
    connector: KVConnector = d.connector
    with pytest.raises(InternalError, match="no slot"):
        await connector.fetch(handle, 1, without)
    assert p.connector.bytes_of(16) - p.connector.bytes_of(15) == 3 * 2 * 2 * 8
    assert p.connector.export_bytes == p.connector.bytes_of(16) > STATE_BYTES
