"""A process that exports a whole prompt twice over a direct lane and waits to be killed
(test_direct_processes.py). Arguments: lane, directory of the arenas."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from baton.runtime.timing import Timing
from kv_transfer.lanes.grpc_stream import GrpcLane
from kv_transfer.lanes.shm_arena import ShmArena
from tests.transfer.cluster import FIRST
from tests.transfer.direct_lanes import LateLane, nixl_lane, shm_lane
from tests.transfer.pools import Node, fill_random, request_of

NUM_TOKENS = 40
SEED = 11  # of the pool's bytes


def new_lane(name: str, directory: Path, arenas: list[ShmArena]) -> LateLane:
    def inner() -> GrpcLane:
        return GrpcLane(Timing())

    return shm_lane(inner, directory, arenas) if name == "shm" else nixl_lane(inner, Timing())


async def export_and_wait(name: str, directory: Path) -> None:
    arenas: list[ShmArena] = []
    node = Node(new_lane(name, directory, arenas))
    await node.connector.start()
    fill_random(node.arena, SEED)
    lane = node.connector.endpoint().lanes[0]
    says: list[object] = [lane.address, lane.attributes]
    for _ in range(2):
        handle = node.connector.export(request_of(), 0, node.pick(NUM_TOKENS), NUM_TOKENS)
        node.finish(handle, FIRST)
        says.append([handle.export_seq, handle.secret.hex()])
    sys.stdout.write(json.dumps(says) + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(export_and_wait(sys.argv[1], Path(sys.argv[2])))
