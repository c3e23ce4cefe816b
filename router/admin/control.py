"""Control of all nodes of a deployment through one router's admin port. Routes are named as vLLM's.

    POST /reset_prefix_cache                        every node drops its prefix cache
    POST /pause?mode=abort|wait|keep&clear_cache=   take no new requests; running ones are aborted
                                                    (abort), may end (wait), or stand still (keep:
                                                    new requests then queue)
    POST /resume, GET /is_paused
    POST /sleep?level=0|1|2&mode=abort|wait         pause, and free the nodes' memory of weights and
                                                    KV; level 0: pause only
    POST /wake_up?tags=weights&tags=kv_cache, GET /is_sleeping
    POST /v1/load_lora_adapter, /v1/unload_lora_adapter     on all nodes of `model`

Each POST sends an order to every connected node and returns when all nodes have obeyed. An adapter
is of one model, which the body must name if the router has several. The nodes
keep the state and report it with their load, so every router obeys it, also one that starts later.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from baton.protocol.adapters import adapter_name
from baton.protocol.errors import BatonError, InvalidRequest, ModelNotFound, Unavailable
from baton.protocol.handles import NodeLoad
from baton.protocol.messages import ControlAction, ControlNode
from router.api.http.reading import read_body
from router.api.openai.bodies import object_of, struct_of
from router.api.served import model_names, offered, served_model
from router.nodes.session import NodeSession
from router.services import RouterServices

log = logging.getLogger(__name__)
ORDER_S: Final = 600.0  # deadline of an order; enough to load weights of any size again
LOOK_S: Final = 0.1
MODES: Final = ("abort", "wait", "keep")
TAGS: Final = ("weights", "kv_cache")
MOST_NAME_CHARS: Final = 256


class LoadBody(msgspec.Struct, kw_only=True):
    lora_name: str
    lora_path: str
    load_inplace: bool = False
    model: str | None = None


class UnloadBody(msgspec.Struct, kw_only=True):
    lora_name: str
    lora_int_id: int | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The result of an order on one node; `error` is None if the node obeyed."""

    node_id: str
    session: NodeSession
    error: BatonError | None


class ControlApi:
    """The routes of this file, which router/admin/server.py serves."""

    def __init__(self, services: RouterServices) -> None:
        self._services = services
        self._reported = asyncio.Event()
        services.registry.watch_reports(self._reported.set)
        # One order at a time: two at once could leave nodes in different states.
        self._one = asyncio.Lock()

    def routes(self) -> list[Route]:
        acts = {
            "/reset_prefix_cache": self.reset_prefix_cache,
            "/pause": self.pause,
            "/resume": self.resume,
            "/sleep": self.sleep,
            "/wake_up": self.wake_up,
            "/v1/load_lora_adapter": self.load_adapter,
            "/v1/unload_lora_adapter": self.unload_adapter,
        }
        asks = {"/is_paused": self.is_paused, "/is_sleeping": self.is_sleeping}
        return [Route(path, act, methods=["POST"]) for path, act in acts.items()] + [
            Route(path, ask, methods=["GET"]) for path, ask in asks.items()
        ]

    async def reset_prefix_cache(self, request: HttpRequest) -> Response:
        # vLLM's parameters are accepted and ignored: running requests do not prevent a reset.
        _query(request, "reset_running_requests", "reset_external")
        async with self._one:
            await self._all("reset_prefix_cache")
        return _json({"success": True})

    async def pause(self, request: HttpRequest) -> Response:
        query = _query(request, "mode", "clear_cache")
        mode = _one_of(query.get("mode", "abort"), MODES, "mode")
        clear = _flag(query.get("clear_cache", "true"), "clear_cache")
        async with self._one:
            await self._pause(mode)
            if clear and mode != "keep":
                await self._all("reset_prefix_cache")
        return _json({"status": "paused"})

    async def resume(self, _: HttpRequest) -> Response:
        async with self._one:
            await self._all("resume")
        return _json({"status": "resumed"})

    async def is_paused(self, _: HttpRequest) -> Response:
        return _json({"is_paused": any(load.pause for load in self._loads())})

    async def sleep(self, request: HttpRequest) -> Response:
        query = _query(request, "level", "mode")
        level = int(_one_of(query.get("level", "1"), ("0", "1", "2"), "level"))
        mode = _one_of(query.get("mode", "abort"), MODES, "mode")
        if level and mode == "keep":
            raise InvalidRequest(
                "mode: requests cannot be kept in an engine without weights; abort or wait",
                field="mode",
            )
        async with self._one:
            await self._pause(mode)
            if level:
                await self._all("sleep")
        return _json({"status": "sleeping", "level": level})

    async def wake_up(self, request: HttpRequest) -> Response:
        _query(request, "tags")
        tags = tuple(_one_of(tag, TAGS, "tags") for tag in request.query_params.getlist("tags"))
        async with self._one:
            await self._all("wake", tags=tags)
            awake = not any(load.asleep for load in self._loads())
            if awake:
                await self._all("resume")
        return _json({"status": "awake" if awake else "sleeping", "tags": list(tags) or None})

    async def is_sleeping(self, _: HttpRequest) -> Response:
        return _json({"is_sleeping": any(load.asleep for load in self._loads())})

    async def load_adapter(self, request: HttpRequest) -> Response:
        body = struct_of(object_of(await read_body(request)), LoadBody)
        name = body.lora_name
        for field in ("lora_name", "lora_path"):
            if not getattr(body, field):
                raise InvalidRequest(f"{field} is missing", field=field)
        if len(name) > MOST_NAME_CHARS or adapter_name(name) != name:
            raise InvalidRequest("lora_name: too long, or like an id", field="lora_name")
        if name in model_names(self._services):
            raise InvalidRequest(f"{name!r} is the model itself", field="lora_name")
        model = self._model(body.model)
        async with self._one:
            if not body.load_inplace and name in self._offered(model):
                raise InvalidRequest(
                    f"the adapter {name!r} is loaded already: load_inplace replaces it",
                    field="lora_name",
                )
            # In place: if some nodes have the adapter already, the others load it, too.
            try:
                await self._all(
                    "load_adapter", model, name=name, path=body.lora_path, in_place=True
                )
            except BatonError:
                # With load_inplace the former adapter is replaced already; it cannot come back.
                if not body.load_inplace:
                    await self._quietly("unload_adapter", model, name=name)
                raise
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_adapter(self, request: HttpRequest) -> Response:
        body = struct_of(object_of(await read_body(request)), UnloadBody)
        name = body.lora_name
        if not name:
            raise InvalidRequest("lora_name is missing", field="lora_name")
        model = self._model(body.model)
        async with self._one:
            if name not in self._offered(model):
                raise ModelNotFound(f"there is no adapter {name[:200]!r}", field="lora_name")
            outcomes = await self._give("unload_adapter", model, name=name)
            _raise_first([each for each in outcomes if not isinstance(each.error, ModelNotFound)])
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    # ---- inside ----

    async def _pause(self, mode: str) -> None:
        """Order the pause; return when no request runs or waits any more. With mode `keep` return
        as soon as the nodes have obeyed."""
        await self._all("pause", mode="hold" if mode == "keep" else "refuse")
        if mode == "abort":
            await self._services.aborts.everything()
        if mode == "keep":
            return
        dispatcher = self._services.dispatcher
        while dispatcher.live() or dispatcher.waiting() or any(map(_busy, self._loads())):
            self._reported.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):  # no report may follow the last request's end
                    await self._reported.wait()

    def _loads(self) -> list[NodeLoad]:
        return [record.load for record in self._services.registry.records()]

    def _model(self, asked: str | None) -> str:
        """Return the key of the model that a body names. Raises the errors of served_model, but not
        because none of its nodes is there."""
        only = self._services.models.only
        if asked is None and only is not None:
            return only.key
        return served_model(self._services, asked).model.key

    def _offered(self, model: str) -> set[str]:
        records = self._services.registry.records(model)
        return {adapter_name(id_) for record in records for id_ in offered(record)}

    async def _all(self, action: ControlAction, model: str | None = None, **values: Any) -> None:
        """Give an order to every connected node, or to one model's, and wait for all answers.

        Raises the error of the first node that failed; the message names the node."""
        _raise_first(await self._give(action, model, **values))

    async def _quietly(self, action: ControlAction, model: str, **values: Any) -> None:
        for outcome in await self._give(action, model, **values):
            if outcome.error is not None:
                log.info("%s on %s: %s", action, outcome.node_id, outcome.error.message)

    async def _give(
        self, action: ControlAction, model: str | None, **values: Any
    ) -> list[_Outcome]:
        registry = self._services.registry
        records = registry.records(model)
        sessions = [(each.node_id, registry.session(each.boot_id)) for each in records]
        connected = [(id_, session) for id_, session in sessions if session is not None]
        if not connected:
            raise Unavailable("no node is connected")
        order = ControlNode(0, action, **values)
        errors = await asyncio.gather(*(_obey(session, order) for _, session in connected))
        return [_Outcome(*each, error) for each, error in zip(connected, errors, strict=True)]


async def _obey(session: NodeSession, order: ControlNode) -> BatonError | None:
    try:
        await session.orders.give(order, ORDER_S)
    except BatonError as error:
        return error
    return None


def _raise_first(outcomes: Sequence[_Outcome]) -> None:
    for outcome in outcomes:
        error = outcome.error
        if error is not None:
            kind = type(error) if isinstance(error, InvalidRequest) else Unavailable
            raise kind(f"node {outcome.node_id}: {error.message}", field=error.field)


def _busy(load: NodeLoad) -> bool:
    return bool(load.running or load.waiting or load.swapped or load.fetching)


def _query(request: HttpRequest, *known: str) -> Mapping[str, str]:
    """Return the query parameters. Raises InvalidRequest for one that is not in `known`."""
    for name in request.query_params:
        if name not in known:
            raise InvalidRequest(f"{name[:100]}: no such query parameter", field=name[:100])
    return request.query_params


def _one_of(value: str, allowed: Sequence[str], field: str) -> str:
    if value not in allowed:
        raise InvalidRequest(f"{field}: one of {', '.join(allowed)}", field=field)
    return value


def _flag(value: str, field: str) -> bool:
    return _one_of(value.lower(), ("true", "false", "1", "0"), field) in ("true", "1")


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
