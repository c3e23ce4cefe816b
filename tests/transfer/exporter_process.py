"""A process that exports half of a prompt over gRPC and waits to be killed (test_connector.py)."""

from __future__ import annotations

import asyncio
import sys

from baton.timing import Timing
from kv_transfer.grpc_stream import GrpcLane
from tests.transfer.pools import Node, request_of

NUM_TOKENS = 16


async def export_and_wait() -> None:
    node = Node(GrpcLane(Timing()))
    await node.connector.start()
    handle = node.connector.export(request_of(), 0, node.pick(NUM_TOKENS), NUM_TOKENS)
    node.connector.publish(handle, 0, NUM_TOKENS)
    address = node.connector.endpoint().lanes[0].address
    sys.stdout.write(f"{handle.boot_id} {handle.export_seq} {handle.secret.hex()} {address}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(export_and_wait())
