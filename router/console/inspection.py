"""GET /console/data/nodes/{id}: what one node holds now, asked from it at that moment."""

from __future__ import annotations

from typing import Final

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from baton.protocol.errors import DeadlineExceeded, NodeLost, RequestNotFound
from baton.protocol.handles import NodeRecord
from baton.protocol.messages import ControlNode
from router.nodes.registry import NodeRegistry
from router.nodes.session import NodeSession

PATH: Final = "/console/data/nodes/{id}"
ASK_S: Final = 5.0  # a node answers between two steps
NO_STORE: Final = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class NodeInspection:
    """The route. The node's answer is bounded there (baton/engine/core/inspection.py)."""

    def __init__(self, registry: NodeRegistry, ask_s: float = ASK_S) -> None:
        self._registry = registry
        self._ask_s = ask_s

    def routes(self) -> list[Route]:
        return [Route(PATH, self.node, methods=["GET"])]

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
