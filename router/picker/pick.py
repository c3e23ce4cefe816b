"""Picker: which router a gateway should send a request to, and which nodes that router should use.

The request is read by the same handlers that would answer it (router/api), which tokenize it and
find its model; then the dispatcher chooses nodes as for a request of its own (choose_route of
router/nodes/policy.py). Nothing is sent to a node. The destination is a router, because nodes do
not speak HTTP: one on the decode node's host if there is any, else always the same one for the
same decode node, so that a node's steps go to few routers. How gateways ask is in service.py.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request as HttpRequest
from starlette.types import Message, Scope

from baton.protocol.errors import Unauthenticated, Unavailable
from router.api.exchange import Exchange
from router.api.http.reading import with_body_limit
from router.api.http_api import HttpApi
from router.images.limits import MAX_BODY_BYTES as MAX_IMAGE_BODY_BYTES
from router.models import PromptReaders
from router.nodes.policy import NodeSnapshot, Route
from router.request.terms import GRANT_KEY
from router.services import RouterServices
from router.tenants.keys import keys_of

# Paths whose requests have a prefill and a decode node. Other paths get a router alone.
GENERATING: Final = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}
)
Handler = Callable[[HttpRequest], Awaitable[Any]]
Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class ProxiedRequest:
    """A request as the gateway has it. `headers`: with names in lower case. `subset`: the endpoints
    of which the gateway wants one; None: any of the routers."""

    method: str
    path: str
    headers: Headers
    body: bytes = b""
    subset: Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class Picked:
    """`endpoint`: HOST:PORT of a router. `nodes`: the ids of the nodes that it should use, the
    prefill node first, if there is one. `prefill`: the address of that node, "" for none."""

    endpoint: str
    nodes: tuple[str, ...] = ()
    prefill: str = ""


class Picker:
    """Picks for one router's models and nodes. `routers`: HOST:PORT of each router of the pool."""

    def __init__(
        self, services: RouterServices, prompts: PromptReaders, routers: Sequence[str]
    ) -> None:
        self._services = services
        self._routers = routers
        self._keys = services.config.key_ring()
        routes = [each for each in HttpApi(services, prompts).routes() if each.path in GENERATING]
        if any(model.images is not None for model in services.models.all):
            routes = [with_body_limit(each, MAX_IMAGE_BODY_BYTES) for each in routes]
        self._handlers: dict[str, Handler] = {each.path: each.endpoint for each in routes}

    async def pick(self, asked: ProxiedRequest) -> Picked:
        """Return where a request should go.

        Raises BatonError or HTTPException for one that the router would refuse, and Unavailable if
        no node, or no router of the subset, can serve it."""
        path = asked.path.partition("?")[0].removeprefix(self._services.config.root_path)
        handler = self._handlers.get(path) if asked.method == "POST" else None
        if handler is None:
            return Picked(self._router(asked, secrets.token_hex(4)))
        exchange: Exchange = await handler(self._request(asked, path))
        completion = exchange.completions[0]
        route = self._services.dispatcher.preview(completion.request, completion.trace)
        return self._picked(asked, route)

    def _picked(self, asked: ProxiedRequest, route: Route) -> Picked:
        decode, prefill = route.decode, route.prefill
        endpoint = self._router(asked, decode.node_id, self._address(decode))
        if prefill is None:
            return Picked(endpoint, (decode.node_id,))
        nodes = (prefill.node_id, decode.node_id)
        return Picked(endpoint, nodes, self._address(prefill))

    def _address(self, node: NodeSnapshot) -> str:
        """Return a node's address; "" if it has just gone."""
        records = self._services.registry.records(node.model)
        found = (record.address for record in records if record.boot_id == node.boot_id)
        return next(found, "")

    def _router(self, asked: ProxiedRequest, key: str, near: str = "") -> str:
        """Return a router: on the host of the address `near` if there is one, else by `key`.

        Raises Unavailable if the gateway's subset has none of the routers."""
        subset = asked.subset
        routers = [each for each in self._routers if subset is None or each in subset]
        if not routers:
            raise Unavailable("no router of the gateway's subset is known here (--picker-router)")
        host = near.rpartition(":")[0]
        here = [each for each in routers if host and each.rpartition(":")[0] == host]
        # Rendezvous hashing: when a router goes, only its own keys move.
        return max(
            here or routers, key=lambda each: hashlib.sha256(f"{key} {each}".encode()).digest()
        )

    def _request(self, asked: ProxiedRequest, path: str) -> HttpRequest:
        """Return the request as the router's HTTP server would see it."""
        headers = [(name, value) for name, value in asked.headers if not name.startswith(b":")]
        scope: Scope = {
            "type": "http", "method": asked.method, "path": path, "query_string": b"",
            "headers": headers,
        }  # fmt: skip
        if len(self._keys):  # as the router's guard, before any work is done
            grants = [self._keys.match(key) for key in keys_of(headers)]
            if not grants or None in grants or any(each != grants[0] for each in grants):
                raise Unauthenticated("missing or wrong API key")
            scope[GRANT_KEY] = grants[0]

        async def receive() -> Message:
            return {"type": "http.request", "body": asked.body, "more_body": False}

        return HttpRequest(scope, receive)
