"""What a node's session brings: its steps as they come, and the order of what is in one."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio

from baton.protocol import wire
from baton.protocol.errors import InvalidRequest
from baton.protocol.events import NodeStep
from router.nodes.attachments import RequestEvent


def in_order(step: NodeStep) -> tuple[RequestEvent, ...]:
    """A request's handle comes before its tokens, its failure after them."""
    return (*step.handles, *step.subscribed, *step.pooled, *step.tokens, *step.failed)


async def read_steps(call: Any, steps: asyncio.Queue[NodeStep | BaseException | None]) -> None:
    """Steps as they come, then None at the stream's end, or what broke it."""
    try:
        while (message := await call.read()) is not grpc.aio.EOF:
            step = wire.node_message_from_wire(message)
            if not isinstance(step, NodeStep):
                raise InvalidRequest("a second hello", field="hello")
            await steps.put(step)
    except Exception as error:  # noqa: BLE001  raised where the steps are taken
        await steps.put(error)
    else:
        await steps.put(None)
