"""A node whose pool its peers read themselves: --kv-lanes shm, nixl."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from baton.engine.memory.kv_cache import KVArena
from baton.node.lanes import MAKERS, LaneSettings, PoolPlace, make_lanes
from baton.protocol.errors import ConfigError
from baton.protocol.handles import KVHandle
from baton.protocol.kv_spec import LayerSpec, layout_fingerprint
from baton.runtime.rotation.deployment_secret import fixed
from baton.runtime.timing import Timing
from kv_transfer.connector import Connector
from kv_transfer.lanes.nixl_agent import load
from kv_transfer.pool.layout import ArenaMemory
from kv_transfer.protocol.base import Blocks
from tests.block_lists import held
from tests.fakes import FakeClock
from tests.node.test_process import START_S, process
from tests.tiny_models import make_tiny_model
from tests.transfer.pools import fill_random, request_of, snapshot

LAYERS = (LayerSpec(2, 8, 8), LayerSpec(2, 8, 8))
TIMING = Timing()


def connector(name: str, boot_id: str, place: PoolPlace) -> tuple[KVArena, Connector]:
    """What a node makes of its configuration."""
    arena = KVArena(LAYERS, 8, 8, "bfloat16", memory=place.memory)
    settings = LaneSettings(TIMING, pool=arena, shared=place.shared)

    def freed(handle: KVHandle, blocks: Blocks, why: str) -> None:
        assert why == "acknowledged"

    made = Connector(
        memory=ArenaMemory(arena),
        boot_id=boot_id,
        fingerprint=layout_fingerprint("model", "rope", LAYERS),
        secrets=fixed("s"),
        lanes=make_lanes((name, "grpc"), settings),
        timing=TIMING,
        clock=FakeClock(),
        on_released=freed,
    )
    return arena, made


@pytest.mark.parametrize("name", ["shm", "nixl"])
@pytest.mark.parametrize("shared", [True, False])
async def test_two_nodes_of_one_host(name: str, shared: bool, tmp_path: Path) -> None:
    if name == "nixl" and load() is None:
        pytest.skip("the extra `nixl` is not installed")
    if name == "shm" and not shared:
        place = PoolPlace(("stream",), tmp_path)
        with pytest.raises(ConfigError, match=r"lane shm .*tensor_parallel_size"):
            connector(name, "0a" * 16, place)
        return
    places = [PoolPlace(("shm",) if shared else (), tmp_path) for _ in range(2)]
    (p_arena, p), (d_arena, d) = (
        connector(name, boot * 16, place) for boot, place in zip(("0a", "0d"), places, strict=True)
    )
    assert len(os.listdir(tmp_path)) == 2 * shared
    fill_random(p_arena, 1)
    for each in (p, d):
        await each.start()
    handle = p.export(request_of(), 0, held(range(8)), 64)
    for layer in range(len(LAYERS)):
        assert p.publish(handle, layer, 64)
    p.complete(handle, ())
    await d.fetch(handle, 1, held(range(8)))
    assert snapshot(d_arena) == snapshot(p_arena)
    assert d.stats.lanes[name].fetches == 1
    for each in (d, p):
        await each.stop()
    for place in places:
        place.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["shm", "nixl"])
def test_without_a_pool_there_is_no_such_lane(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MAKERS[name](LaneSettings(TIMING))
    assert caught.value.field == "kv_lanes"


@pytest.mark.slow
async def test_a_node_with_a_shared_pool_leaves_nothing_behind(tmp_path: Path) -> None:
    model, shared = make_tiny_model("llama", tmp_path / "model"), tmp_path / "shm"
    shared.mkdir()
    flags = ("--model", str(model), "--num-kv-blocks", "16", "--kv-lanes", "shm,stream,grpc")
    async with process("prefill_node", *flags, "--kv-shm-dir", str(shared)) as running:
        assert running.stdout is not None
        async with asyncio.timeout(START_S):
            assert json.loads(await running.stdout.readline())["ready"] is True
            (pool,) = shared.iterdir()
            assert pool.stat().st_mode & 0o777 == 0o600
            running.send_signal(signal.SIGTERM)
            assert await running.wait() == 0
    assert os.listdir(shared) == []
