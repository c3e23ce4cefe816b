"""Direct lanes between two processes, and an exporter that is killed while it is being read."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from baton.protocol.errors import KVLost
from baton.protocol.handles import Endpoint, KVHandle, LaneAddress
from baton.protocol.kv_spec import PoolFormat, layout_fingerprint
from kv_transfer.lanes.memory import MemoryFabric, MemoryLane
from kv_transfer.lanes.nixl_agent import load
from kv_transfer.lanes.shm_arena import ShmArena
from tests.transfer import direct_process
from tests.transfer.cluster import FIRST
from tests.transfer.direct_process import NUM_TOKENS, SEED, new_lane
from tests.transfer.pools import (
    BOOT_D,
    BOOT_P,
    LAYERS,
    Node,
    expect_bytes,
    fill_random,
    fill_untouched,
    outcome,
    snapshot,
)
from tests.transfer.test_direct import Gate


@pytest.fixture(params=["shm", "nixl"])
def lane(request: pytest.FixtureRequest) -> str:
    if request.param == "nixl" and load() is None:
        pytest.skip("the extra `nixl` is not installed")
    return request.param


@pytest.fixture
def exporter(lane: str, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[KVHandle]]]:
    command = [sys.executable, "-m", direct_process.__name__, lane, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        where, attributes, *exports = json.loads(line)
        address = LaneAddress(lane, where, tuple((name, value) for name, value in attributes))
        fingerprint = layout_fingerprint("model", "rope", LAYERS)
        endpoint = Endpoint(BOOT_P, fingerprint, PoolFormat(8, "bfloat16"), (address,))
        handles = [
            KVHandle(BOOT_P, seq, "r1", 1, NUM_TOKENS, bytes.fromhex(secret), endpoint, 10_000)
            for seq, secret in exports
        ]
        yield process, handles
        process.kill()


@pytest.fixture
async def fetcher(lane: str, tmp_path: Path) -> AsyncIterator[Node]:
    arenas: list[ShmArena] = []
    node = Node(new_lane(lane, tmp_path, arenas), boot_id=BOOT_D)
    fill_untouched(node.arena)
    await node.connector.start()
    yield node
    await node.connector.stop()
    for arena in arenas:
        arena.close()


def twin() -> Node:
    """What lies in the exporter's pool, by its seed."""
    node = Node(MemoryLane(MemoryFabric()))
    fill_random(node.arena, SEED)
    return node


async def test_the_bytes_of_another_process_until_it_is_killed_in_mid_read(
    exporter: tuple[subprocess.Popen[str], list[KVHandle]], fetcher: Node, lane: str
) -> None:
    """shm: every byte still arrives, and is still not used: nobody confirms the lease."""
    process, (handle, second) = exporter
    before, target = snapshot(fetcher.arena), fetcher.pick(NUM_TOKENS, 3)
    ready = await fetcher.connector.fetch(handle, 1, target)
    assert ready.first_tokens == FIRST
    p = twin()
    expect_bytes((p, p.pick(NUM_TOKENS)), (fetcher, target), 0, NUM_TOKENS, before)
    fill_untouched(fetcher.arena)
    before = snapshot(fetcher.arena)
    gate = Gate(fetcher)
    fetch = asyncio.create_task(fetcher.connector.fetch(second, 1, target))
    await gate.pull_begins()
    process.kill()
    await asyncio.to_thread(process.wait)
    gate.go_on.set()
    assert isinstance(await outcome(fetch), KVLost)
    assert fetcher.connector.stats.fetches == 1
    if lane == "shm":  # the first layer was pulled after the death
        own = p.connector.memory.read(0, p.pick(NUM_TOKENS), 0, NUM_TOKENS)
        got = fetcher.connector.memory.read(0, target, 0, NUM_TOKENS)
        assert b"".join(got) == b"".join(own)
        assert snapshot(fetcher.arena) != before
    await p.connector.stop()
