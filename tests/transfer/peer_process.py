"""A node of its own process, to be stopped or killed (test_processes.py).

export LANE PERCENT   offers a prompt of which PERCENT is computed, says how to fetch it
fetch LANE            reads a handle from stdin, fetches it, says what has arrived
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from baton.protocol.handles import Endpoint, KVHandle, LaneAddress
from baton.protocol.kv_spec import PoolFormat, layout_fingerprint
from baton.runtime.timing import Timing
from kv_transfer.lanes.grpc_stream import GrpcLane
from kv_transfer.lanes.stream import StreamLane
from kv_transfer.protocol.base import Lane
from kv_transfer.stats import TransferStats
from tests.transfer.cluster import FIRST
from tests.transfer.pools import LAYERS, Node, fill_random, request_of

NUM_TOKENS = 40
SEED = 11  # of the exporter's bytes


def new_lane(name: str) -> Lane:
    return GrpcLane(Timing()) if name == "grpc" else StreamLane(Timing())


def dump(handle: KVHandle) -> str:
    """A handle as a line of text."""
    lane = handle.endpoint.lanes[0]
    where = [lane.name, lane.address, lane.attributes]
    return json.dumps([handle.boot_id, handle.export_seq, handle.secret.hex(), where])


def load(line: str) -> KVHandle:
    boot_id, seq, secret, (name, address, attributes) = json.loads(line)
    lane = LaneAddress(name, address, tuple((key, value) for key, value in attributes))
    fingerprint = layout_fingerprint("model", "rope", LAYERS)
    endpoint = Endpoint(boot_id, fingerprint, PoolFormat(8, "bfloat16"), (lane,))
    return KVHandle(
        boot_id, seq, "r1", 1, NUM_TOKENS, bytes.fromhex(secret), endpoint, lease_ms=10_000
    )


def say(*words: Any) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def export(lane: str, percent: int) -> None:
    node = Node(new_lane(lane), boot_id="1a" * 16)
    fill_random(node.arena, SEED)
    await node.connector.start()
    handle = node.connector.export(request_of(), 0, node.pick(NUM_TOKENS), NUM_TOKENS)
    if percent > 100:
        node.finish(handle, FIRST)
    else:
        node.publish_all(handle, NUM_TOKENS * percent // 100)
    say(dump(handle))
    await asyncio.Event().wait()


async def fetch(lane: str) -> None:
    received = TransferStats.received

    def tell(stats: TransferStats, name: str, num_bytes: int) -> None:
        received(stats, name, num_bytes)
        say("received", num_bytes)

    TransferStats.received = tell  # type: ignore[method-assign]
    node = Node(new_lane(lane), boot_id="1d" * 16)
    await node.connector.start()
    say("ready")
    handle = load(await asyncio.to_thread(sys.stdin.readline))
    await node.connector.fetch(handle, 1, node.pick(NUM_TOKENS))
    say("fetched")


if __name__ == "__main__":
    what, lane_name, *rest = sys.argv[1:]
    if what == "export":
        asyncio.run(export(lane_name, int(rest[0])))
    else:
        asyncio.run(fetch(lane_name))
