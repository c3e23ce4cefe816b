"""The node behind `/relay` (bench/router_yardsticks.py): `python -m bench.router_relay`.

It sends every message of a stream back unchanged, in one event loop. Prints one JSON line when
ready; SIGTERM ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
import uvloop

from bench.children import say_ready

SERVICE: Final = "baton.bench.Relay"
STEP: Final = f"/{SERVICE}/Step"  # a stream of bytes both ways


async def step(messages: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
    async for message in messages:
        yield message


async def serve() -> None:
    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(step)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {STEP.rpartition("/")[2]: handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    say_ready(address=f"127.0.0.1:{port}")
    await server.wait_for_termination()


def main() -> int:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
