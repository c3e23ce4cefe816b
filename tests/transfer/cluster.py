"""Nodes on one kind of lane, and whole hand-overs between them, for the contract suite."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack

from baton.protocol.events import FirstToken, TokenLogprob, layers_came
from baton.protocol.handles import KVHandle
from baton.protocol.request import FinishReason
from baton.runtime.timing import Timing
from kv_transfer.protocol.base import Blocks, Lane
from kv_transfer.protocol.shares import first_sent
from kv_transfer.stats import TransferStats
from tests.transfer.pools import (
    BOOT_D,
    PATIENCE_S,
    Node,
    expect_bytes,
    fill_random,
    fill_untouched,
    request_of,
    snapshot,
)

FRAME_ARRIVED = threading.Condition()
FIRST = (
    FirstToken(
        position=3,
        token_id=42,
        finish_reason=FinishReason.LENGTH,
        logprobs=(TokenLogprob(42, -0.5, 1), TokenLogprob(7, -1.5, 2)),
        cumulative_logprob=-0.5,
        drafts=(9, 300),
    ),
)
IMPATIENT = Timing(kv_progress_s=0.3)


class Cluster:
    """Starts nodes on one kind of lane and stops them; then every export was freed once."""

    def __init__(self, new_lane: Callable[[], Lane], stack: AsyncExitStack) -> None:
        self.new_lane = new_lane
        self._stack = stack

    async def node(self, lane: Lane | None = None, **settings: object) -> Node:
        node = Node(lane or self.new_lane(), **settings)  # type: ignore[arg-type]
        await node.connector.start()
        self._stack.push_async_callback(self._stop, node)
        return node

    async def pair(self, lane: Lane | None = None, **settings: object) -> tuple[Node, Node]:
        """P with random bytes and D with untouched ones; `settings` are D's."""
        p = await self.node()
        fill_random(p.arena, 1)
        d = await self.node(lane, **({"boot_id": BOOT_D} | settings))
        fill_untouched(d.arena)
        return p, d

    async def _stop(self, node: Node) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await node.connector.stop()
        sequences = [handle.export_seq for handle, _, _ in node.released]
        assert len(sequences) == len(set(sequences)) == node.connector.stats.exports
        assert (node.connector.active_exports, node.connector.export_bytes) == (0, 0)


async def transfer(
    p: Node, d: Node, num_tokens: int, start: int = 0, epoch: int = 1
) -> tuple[KVHandle, Blocks]:
    """A whole hand-over after the prefill, checked byte for byte and freed."""
    source, target = p.pick(num_tokens, 1), d.pick(num_tokens, 2)
    handle = p.connector.export(request_of(epoch=epoch), 0, source, num_tokens)
    p.finish(handle, FIRST)
    before = snapshot(d.arena)
    ready = await d.connector.fetch(handle, epoch, target, start)
    assert (ready.num_tokens, ready.first_tokens) == (num_tokens, FIRST)
    came = layers_came(ready.layers)
    assert sum(each.kv_bytes for each in came) == ready.num_bytes
    assert all(0 <= each.start_us <= each.end_us <= ready.seconds * 1e6 for each in came)
    if start < num_tokens:
        told = [layer for each in came for layer in range(each.first, each.last + 1)]
        kept = [n for n, spec in enumerate(d.layers) if spec.kv_heads or spec.state_bytes]
        assert told == kept
    assert ready.num_bytes == sum(
        (num_tokens - first_sent(spec, start, num_tokens, d.windowed))
        * (spec.token_bytes(p.dtype) + spec.scale_bytes(p.dtype))
        + spec.state_bytes
        for spec in d.layers
    )
    expect_bytes((p, source), (d, target), start, num_tokens, before)
    await p.freed(p.connector.stats.exports)
    assert p.released[-1][:2] == (handle, source)
    return handle, target


async def frames_received(node: Node, count: int) -> None:
    """Wait, without polling, until `node` has written `count` DATA frames."""
    loop, stats = asyncio.get_running_loop(), node.connector.stats
    async with asyncio.timeout(PATIENCE_S):
        await loop.run_in_executor(None, wait_until, stats, count)


def wait_until(stats: TransferStats, count: int) -> None:
    with FRAME_ARRIVED:
        assert FRAME_ARRIVED.wait_for(lambda: stats.frames_received >= count, PATIENCE_S)


async def transfer_despite(p: Node, d: Node) -> None:
    source, target = p.pick(40, 1), d.pick(40, 2)
    handle = p.connector.export(request_of(), 0, source, 40)
    p.finish(handle, FIRST)
    before = snapshot(d.arena)
    assert (await d.connector.fetch(handle, 1, target)).first_tokens == FIRST
    expect_bytes((p, source), (d, target), 0, 40, before)
    await p.freed()
