"""Hand-overs between real processes, one of which is killed or stopped in the middle.

What a single process can prove is proven in test_contract_faults.py, on every lane and at every
point; here two lanes see a real SIGKILL, shm and nixl do in test_direct_processes.py, dist in
test_dist.py.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.protocol.errors import KVLost, KVTimeout
from baton.runtime.timing import Timing
from kv_transfer.lanes.memory import MemoryFabric, MemoryLane
from tests.transfer import peer_process
from tests.transfer.cluster import FIRST, frames_received
from tests.transfer.peer_process import NUM_TOKENS, SEED, dump, load, new_lane
from tests.transfer.pools import (
    BOOT_D,
    BOOT_E,
    PATIENCE_S,
    Node,
    expect_bytes,
    fill_random,
    outcome,
    request_of,
    snapshot,
)

START_S = 60.0  # a Python with torch, on a machine that does other things too
ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def process(*arguments: object) -> AsyncIterator[asyncio.subprocess.Process]:
    """A peer_process; killed at the end if it has not been before."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        peer_process.__name__,
        *map(str, arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


async def line_of(child: asyncio.subprocess.Process, patience_s: float = START_S) -> str:
    assert child.stdout is not None
    line = await asyncio.wait_for(child.stdout.readline(), patience_s)
    assert line, "the process has ended"
    return line.decode().strip()


@asynccontextmanager
async def node(lane: str, **settings: object) -> AsyncIterator[Node]:
    made = Node(new_lane(lane), **settings)  # type: ignore[arg-type]
    await made.connector.start()
    try:
        yield made
    finally:
        await made.connector.stop()


@pytest.mark.parametrize(
    ("lane", "percent"),
    [
        ("stream", 25),
        ("grpc", 100),
        pytest.param("grpc", 50, marks=pytest.mark.long),
        pytest.param("stream", 75, marks=pytest.mark.long),
    ],
)
async def test_p_is_killed(lane: str, percent: int) -> None:
    """KVLost at once, not at a deadline; nothing of it is used."""
    async with (
        node(lane, boot_id=BOOT_D, timing=Timing(kv_progress_s=30)) as d,
        process("export", lane, percent) as p,
    ):
        handle = load(await line_of(p))
        fetch = asyncio.create_task(d.connector.fetch(handle, 1, d.pick(NUM_TOKENS)))
        await frames_received(d, len(d.layers))
        p.kill()
        loop = asyncio.get_running_loop()
        killed = loop.time()
        assert isinstance(await outcome(fetch), KVLost)
        assert loop.time() - killed < PATIENCE_S
        assert d.connector.stats.fetches == 0


async def test_d_is_killed_and_another_fetches() -> None:
    """The dead one held nothing but a connection: P's blocks wait for the next one, as computed."""
    async with (
        node("stream", num_blocks=16) as p,
        node("stream", boot_id=BOOT_E) as heir,
        process("fetch", "stream") as d,
    ):
        fill_random(p.arena, 3)
        source, target = p.pick(NUM_TOKENS), heir.pick(NUM_TOKENS, 2)
        handle = p.connector.export(request_of(), 0, source, NUM_TOKENS)
        assert p.connector.publish(handle, 0, NUM_TOKENS)
        assert await line_of(d) == "ready"
        assert d.stdin is not None
        d.stdin.write(dump(handle).encode() + b"\n")
        await d.stdin.drain()
        assert (await line_of(d)).startswith("received")
        d.kill()
        await d.wait()
        p.finish(handle, FIRST)
        assert p.released == []
        before = snapshot(heir.arena)
        ready = await heir.connector.fetch(handle, 2, target)
        assert ready.first_tokens == FIRST
        expect_bytes((p, source), (heir, target), 0, NUM_TOKENS, before)
        await p.freed()


async def test_p_is_stopped_and_goes_on() -> None:
    """SIGSTOP: the socket lives, nobody speaks: KVTimeout by our deadline, not by the kernel's."""
    timing = Timing(kv_progress_s=1.0)
    async with (
        node("stream", boot_id=BOOT_D, timing=timing) as d,
        process("export", "stream", 101) as p,
    ):
        handle = load(await line_of(p))
        p.send_signal(signal.SIGSTOP)
        assert isinstance(
            await outcome(d.connector.fetch(handle, 1, d.pick(NUM_TOKENS))), KVTimeout
        )
        p.send_signal(signal.SIGCONT)
        before, target = snapshot(d.arena), d.pick(NUM_TOKENS, 2)
        assert (await d.connector.fetch(handle, 1, target)).first_tokens == FIRST
        twin = Node(MemoryLane(MemoryFabric()))
        fill_random(twin.arena, SEED)
        expect_bytes((twin, twin.pick(NUM_TOKENS)), (d, target), 0, NUM_TOKENS, before)
        await twin.connector.stop()
