"""The console's routes about one node: what it holds, and, in a demo, hurting it.

GET  /console/data/nodes/{id}   asked from the node at that moment
POST /console/data/break        asked of the launcher, deploy/breaking.py. Only a router that
                                `baton up --demo` has started knows the launcher's socket
                                (--break-socket); without it there is no such route
"""

from __future__ import annotations

import asyncio
from typing import Final, Literal

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from baton.protocol.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NodeLost,
    RequestNotFound,
    Unavailable,
)
from baton.protocol.handles import NodeRecord
from baton.protocol.messages import ControlNode
from router.api.http.reading import read_body
from router.api.openai.bodies import object_of, struct_of
from router.events import EventRing
from router.nodes.registry import NodeRegistry
from router.nodes.session import NodeSession

NODE_PATH: Final = "/console/data/nodes/{id}"
BREAK_PATH: Final = "/console/data/break"
ASK_S: Final = 5.0  # a node answers between two steps
NO_STORE: Final = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class NodeInspection:
    """The route. The node's answer is bounded there (baton/engine/core/inspection.py)."""

    def __init__(self, registry: NodeRegistry, ask_s: float = ASK_S) -> None:
        self._registry = registry
        self._ask_s = ask_s

    def routes(self) -> list[Route]:
        return [Route(NODE_PATH, self.node, methods=["GET"])]

    async def node(self, request: HttpRequest) -> Response:
        """Return a node's detail. Raises RequestNotFound for a node that is not connected, and
        DeadlineExceeded if it does not answer."""
        record, session = self._find(str(request.path_params["id"]))
        try:
            told = await session.orders.give(ControlNode(0, "inspect"), self._ask_s)
        except NodeLost as error:
            raise DeadlineExceeded(f"node {record.node_id}: {error.message}") from error
        head = {"id": msgspec.Raw(msgspec.json.encode(record.node_id)),
                "role": msgspec.Raw(msgspec.json.encode(record.role.value))}  # fmt: skip
        detail = head | msgspec.json.decode(told, type=dict[str, msgspec.Raw])
        body = msgspec.json.encode(detail)
        return Response(body, headers=NO_STORE, media_type="application/json")

    def _find(self, name: str) -> tuple[NodeRecord, NodeSession]:
        for record in self._registry.records():
            session = self._registry.session(record.boot_id)
            if record.node_id == name and session is not None:
                return record, session
        raise RequestNotFound(f"node {name[:200]!r} is not connected", field="id")


class BreakBody(msgspec.Struct, kw_only=True):
    """What to do to which node."""

    node: str
    action: Literal["kill", "stop", "resume", "slow", "slow-lane"]


class BreakAnswer(msgspec.Struct):
    done: str = ""
    error: str = ""


class BreakApi:
    """The route. `address`: the launcher's Unix socket; None: there is no route."""

    def __init__(self, address: str | None, events: EventRing) -> None:
        self._address = address
        self._events = events

    def routes(self) -> list[Route]:
        if self._address is None:
            return []
        return [Route(BREAK_PATH, self.hurt, methods=["POST"])]

    async def hurt(self, request: HttpRequest) -> Response:
        """Hurt a node. Raises InvalidRequest for a node that the launcher does not run."""
        body = struct_of(object_of(await read_body(request)), BreakBody)
        try:
            async with asyncio.timeout(ASK_S):
                answer = await self._ask(body)
        except (OSError, TimeoutError, msgspec.DecodeError) as error:
            raise Unavailable("the launcher does not answer") from error
        if answer.error:
            raise InvalidRequest(answer.error[:200], field="node")
        self._events.note("broken", answer.done, node=body.node)
        done = msgspec.json.encode({"done": answer.done})
        return Response(done, media_type="application/json")

    async def _ask(self, body: BreakBody) -> BreakAnswer:
        reader, writer = await asyncio.open_unix_connection(self._address)
        try:
            writer.write(msgspec.json.encode(body) + b"\n")
            await writer.drain()
            return msgspec.json.decode(await reader.readline(), type=BreakAnswer)
        finally:
            writer.close()
