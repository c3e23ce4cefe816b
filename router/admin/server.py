"""The admin server: operators' routes of a router, on a port of its own (by default on loopback).

    POST /abort_requests   {"request_ids": [...]}: end them; clients get the tokens so far
    POST /drain            {}: /ready says 503 from now on; {"node": id}: that node takes no new
                           requests
    GET  /debug            requests under way and waiting, nodes, lifecycle
    GET  /server_info      version, model, options (no secrets)
    GET  /metrics, /health
    GET  /v1/requests, /v1/requests/{id}/timeline   of all tenants: router/api/timelines.py
    GET  /console...        the console: router/console/api.py
    POST /pause, /sleep, /v1/load_lora_adapter and their like: router/admin/control.py

Every route but /health and the console's pages needs an operator's key (--admin-key, --admin-keys);
API keys are refused. /console/api alone takes API keys: it is the public app.
The public port serves /metrics as well, as vLLM's users expect, but none of the other routes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from baton import __version__
from baton.protocol.adapters import adapter_name
from baton.protocol.errors import BatonError, InvalidRequest
from baton.protocol.handles import NodeLoad
from baton.protocol.messages import DrainNode
from baton.protocol.request import Request
from baton.runtime.metrics import CONTENT_TYPE
from router.admin.control import ControlApi
from router.api.http.reading import read_body
from router.api.http.web_errors import on_baton_error, on_http_exception
from router.api.openai.bodies import object_of, struct_of
from router.api.timelines import TimelinesApi
from router.console.api import ConsoleApi, ConsoleDoors
from router.console.nodes import BreakApi, NodeInspection
from router.console.pages import ConsolePages
from router.console.stream import StateFeed
from router.nodes.registry import NodeStatus
from router.request.trace import RequestTrace
from router.server.auth import ApiKeyGuard
from router.server.http_guard import HeadGuard, HttpLimits
from router.services import RouterServices

MAX_ABORTS: Final = 1024


class AbortBody(msgspec.Struct, kw_only=True):
    """Which requests to abort: ids of replies, of `x-request-id` headers, or as /debug shows them.
    Without ids, all requests are aborted."""

    request_ids: list[str] | None = None


class DrainBody(msgspec.Struct, kw_only=True):
    """`node`: the id of the node that is to drain; None: this router is to drain."""

    node: str | None = None


class Aborted(msgspec.Struct):
    aborted: list[str]


class AdminApi:
    """The routes of the admin server."""

    def __init__(self, services: RouterServices) -> None:
        self._services = services

    def routes(self) -> list[Route]:
        return [
            Route("/abort_requests", self.abort_requests, methods=["POST"]),
            Route("/drain", self.drain, methods=["POST"]),
            Route("/debug", self.debug, methods=["GET"]),
            Route("/server_info", self.server_info, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
        ]

    async def abort_requests(self, request: HttpRequest) -> Response:
        """Abort requests; their clients get the tokens so far and `finish_reason: abort`."""
        body = struct_of(object_of(await read_body(request)), AbortBody)
        aborts, ids = self._services.aborts, body.request_ids
        if ids is not None and len(ids) > MAX_ABORTS:
            raise InvalidRequest(f"request_ids: at most {MAX_ABORTS}", field="request_ids")
        ended = await (aborts.everywhere(ids, by_operator=True) if ids else aborts.everything())
        return _json(Aborted(ended))

    async def drain(self, request: HttpRequest) -> Response:
        """Make this router, or one of its nodes, take no new requests."""
        body = struct_of(object_of(await read_body(request)), DrainBody)
        if body.node is None:
            self._services.lifecycle.draining = True
            return _json({"draining": "router"})
        registry = self._services.registry
        for record in registry.records():
            session = registry.session(record.boot_id)
            if record.node_id == body.node and session is not None:
                session.send(DrainNode())
                return _json({"draining": body.node})
        raise InvalidRequest(f"node: {body.node[:200]!r} is not connected", field="node")

    async def debug(self, _: HttpRequest) -> Response:
        services, now = self._services, self._services.clock.monotonic()
        loads = {record.boot_id: record.load for record in services.registry.records()}
        return _json(
            {
                "draining": services.lifecycle.draining,
                "ready": services.ready,
                "requests": [live_of(*each, now) for each in services.dispatcher.live()],
                "waiting": [waiting_of(*each, now) for each in services.dispatcher.waiting()],
                "nodes": [node_of(each, loads) for each in services.registry.statuses()],
            }
        )

    async def server_info(self, _: HttpRequest) -> Response:
        services = self._services
        infos = [services.registry.model(model.key) for model in services.models.all]
        models = [asdict(info) for info in infos if info is not None]
        config = services.config
        options = {
            spec.name: getattr(config, spec.name)
            for spec in fields(config)
            if "help" in spec.metadata
            and not spec.metadata["secret"]
            and spec.name not in ("admin_key", "api_key", "redis_url")  # a URL holds a password
        }
        served = models[0] if models else None
        told = {"version": __version__, "model": served, "models": models, "config": options}
        return _json(told)

    async def metrics(self, _: HttpRequest) -> Response:
        body = self._services.metrics.render()
        return Response(body, headers={"content-type": CONTENT_TYPE})

    async def health(self, _: HttpRequest) -> Response:
        return _json({"status": "ok"})


def create_admin_app(
    services: RouterServices,
    limits: HttpLimits | None = None,
    *,
    feed: StateFeed | None = None,
    public: ASGIApp | None = None,
) -> ASGIApp:
    """Return the ASGI app of the admin port: head guard > operators' keys > routes.

    `feed`: the console's, which somebody runs. `public`: the public app, for /console/api.
    Raises ConfigError if the keys cannot be used (RouterConfig.admin_ring)."""
    keys = services.config.console_ring()
    assert len(keys), "RouterConfig.check: no admin port without a key"
    feed = StateFeed(services) if feed is None else feed
    routes = _app(
        [
            *AdminApi(services).routes(),
            *ControlApi(services).routes(),
            *TimelinesApi(services, everyone=True).routes(),
            *ConsoleApi(feed).routes(),
            *NodeInspection(services.registry).routes(),
            *BreakApi(services.config.break_socket, services.events).routes(),
        ]
    )
    guarded = ApiKeyGuard(routes, keys, services.events)
    doors = ConsoleDoors(guarded, _app(ConsolePages().routes()), public)
    return HeadGuard(doors, limits if limits is not None else HttpLimits())


def _app(routes: Sequence[Route]) -> Starlette:
    app = Starlette(
        routes=routes,
        exception_handlers={
            BatonError: on_baton_error,
            HTTPException: on_http_exception,
            Exception: on_baton_error,
        },
    )
    app.router.redirect_slashes = False
    return app


def live_of(request: Request, trace: RequestTrace, now: float) -> dict[str, Any]:
    """Describe a running request for /debug: counts and ages, nothing of its content."""
    since = trace.queued_at
    return {
        "id": request.id,
        "epoch": request.epoch,
        "prompt_tokens": len(request.prompt_ids),
        "output_tokens": trace.output_tokens,
        "max_tokens": request.params.max_tokens,
        "adapter": adapter_name(request.adapter) or None,
        "priority": request.priority,
        "age_s": None if since is None else round(now - since, 3),
        "prefill_node": trace.prefill_node,
        "decode_node": trace.decode_node,
        "handed_over": trace.handover_at is not None,
        "retries": trace.retries,
        "migrations": trace.migrations,
    }


def waiting_of(request: Request, trace: RequestTrace, now: float) -> dict[str, Any]:
    """Describe a request that waits at the gate: counts and ages, nothing of its content."""
    deadline = request.deadline
    return {
        "id": request.id,
        "prompt_tokens": len(request.prompt_ids),
        "max_tokens": request.params.max_tokens,
        "adapter": adapter_name(request.adapter) or None,
        "priority": request.priority,
        "tenant": trace.terms.grant.tenant or None,
        "age_s": round(now - request.arrival, 3),
        "deadline_s": None if deadline is None else round(deadline - now, 3),
    }


def node_of(status: NodeStatus, loads: Mapping[str, NodeLoad]) -> dict[str, Any]:
    """Describe an address for /debug: its state and, once connected, its node and last load."""
    record = status.record
    found: dict[str, Any] = {
        "address": status.address,
        "connected": status.connected,
        "refused": status.refused or None,
        "assigned": status.assigned,
    }
    if record is None:
        return found
    return found | {
        "node_id": record.node_id,
        "role": record.role.value,
        "model": record.model,
        "adapters": record.adapters,
        "leaving_adapters": record.leaving_adapters,
        "version": record.version,
        "group": record.group or None,
        "rank": record.rank if record.group else None,
        "load": asdict(loads.get(record.boot_id, record.load)),
    }


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
