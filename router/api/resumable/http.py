"""Resumable requests over HTTP: the generating routes once more, and the one that asks again.

A plain request never comes here: `hooked` looks for the names in its head. For a resumable one the
route makes the call (its checks, its prompt, its frames), but runs nothing: resumable/runs.py does,
and the client reads what is logged. NamedRequest again, by the same request (`last-event-id`,
`idempotency-key`, or just its x-request-id) or by `GET /v1/requests/{id}/stream`, the route makes
the same call of the body that the record keeps, on any router.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hmac import compare_digest
from typing import Any, Final

from starlette.requests import Request as HttpRequest
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from baton.protocol.errors import KeyReused, RequestNotFound, Unavailable, UnsupportedFeature
from router.api.exchange import Exchange, respond_whole
from router.api.http.preparing import Handler, hooked
from router.api.http.reading import read_body
from router.api.openai.bodies import object_of
from router.api.openai.reply_ids import Pin, pin, pin_of
from router.api.resumable.numbered import NumberedReply
from router.request.completion import CallRunner, Completion
from router.request.request_ids import given_id, known_id, note_body_id, pin_request_id
from router.request.terms import GRANT_KEY
from router.resumable.canonical import Canonical, body_digest, owner_digest, record_id
from router.resumable.replay import Told, ToldDispatch
from router.resumable.runs import Found, Runs
from router.resumable.terms import (
    GRACE_HEADER,
    KEY_PREFIX,
    NAME_HEADER,
    POSITION_HEADER,
    POSITION_QUERY,
    SAID_IN,
    START,
    Position,
    ResumeTerms,
    names_meant,
    read_position,
    read_resume_terms,
)
from router.services import RouterServices
from router.store.base import ALIAS
from router.tenants.keys import keys_of

# Path -> the field of its body that makes it large.
RESUMABLE: Final = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/responses": "input",
    "/v1/messages": "messages",
}
NOT_RESUMABLE: Final = ("/inference/v1/generate",)


class ResumableApi:
    """Wraps the routes of an app. Registers with the router's Runs how calls are made again."""

    def __init__(self, services: RouterServices, routes: Sequence[Route]) -> None:
        self._services = services
        self._routes = routes
        self._handlers: dict[str, Handler] = {
            route.path: route.endpoint for route in routes if route.path in RESUMABLE
        }
        if services.runs is not None:
            for path in self._handlers:
                services.runs.builders[path] = self._completion

    def routes(self) -> list[Route]:
        """All routes of the app, the resumable ones wrapped, and one more."""
        wrapped = [self._wrapped(route) for route in self._routes]
        return [*wrapped, Route("/v1/requests/{name}/stream", self.stream, methods=["GET"])]

    def _wrapped(self, route: Route) -> Route:
        if route.path not in RESUMABLE and route.path not in NOT_RESUMABLE:
            return route
        plain: Handler = route.endpoint

        async def resumed(request: HttpRequest) -> Any:
            terms = read_resume_terms(lambda name: request.headers.get(name, ""))
            if terms is None:
                return await plain(request)
            if route.path in NOT_RESUMABLE:
                raise UnsupportedFeature("this route is not resumable", field=GRACE_HEADER)
            return await self._create(route.path, request, terms)

        return Route(route.path, hooked(plain, resumed, SAID_IN), methods=["POST"])

    # ---- asked for the first time, or again ----

    async def _create(self, path: str, request: HttpRequest, terms: ResumeTerms) -> ResumedReply:
        """Raises InvalidRequest, KeyReused, RequestNotFound, Unavailable."""
        body = await read_body(request)
        note_body_id(request, object_of(body).get("request_id"))
        asked = asked_of(request, path, body, terms.key, terms.grace_s)
        found = await self.find(asked)
        if found is None and terms.after is not None:
            raise _unknown(asked.name)
        if found is None:
            canonical, exchange = await self.prepare(request, asked)
            [completion] = exchange.completions
            fields = self.fields(canonical, asked)
            found = await self.runs.begin(canonical, completion.twin(), fields)
            check_same(found, asked)
        return await self._reply(found, terms.after, POSITION_HEADER)

    async def find(self, asked: NamedRequest) -> Found | None:
        """The request, if it was asked for before. Raises KeyReused, Unavailable."""
        found = None if asked.key is None else await self.runs.find(asked.owner, asked.key)
        found = found or await self.runs.find(asked.owner, asked.name)
        if found is None:
            self.runs.check_open()
        else:
            check_same(found, asked)
        return found

    async def prepare(
        self, request: HttpRequest, asked: NamedRequest
    ) -> tuple[Canonical, Exchange]:
        """Check a new request and make it canonical; nothing of it runs."""
        before = pin_of(request.scope)
        created = int(time.time()) if before is None else before.created
        pinned = Pin(asked.name, created, asked.owner)
        exchange = await self._call(asked.path, request.scope, asked.body, pinned)
        [completion, *others] = exchange.completions
        if others:
            message = "prompt: one per request, if it is resumable"
            raise UnsupportedFeature(message, field="prompt")
        completion.request = replace(completion.request, id=record_id(asked.owner, asked.name))
        canonical = Canonical(
            asked.path, asked.name, asked.owner, pinned.created, asked.grace_s, asked.body,
            completion.request,
        )  # fmt: skip
        return canonical, exchange

    def fields(self, canonical: Canonical, asked: NamedRequest) -> dict[str, str]:
        """Of its record. Raises InvalidRequest if it is too large."""
        fields = canonical.fields(self.runs.clock, RESUMABLE[canonical.api])
        if asked.key is not None:
            fields[ALIAS] = record_id(asked.owner, asked.key)
        return fields

    async def stream(self, request: HttpRequest) -> ResumedReply:
        """`GET /v1/requests/{id}/stream`: go on after `starting_after`, or the event last seen."""
        asked, owner = str(request.path_params["name"]), owner_of(request.scope)
        field, after = POSITION_QUERY, request.query_params.get(POSITION_QUERY)
        if after is None:
            field, after = POSITION_HEADER, request.headers.get(POSITION_HEADER)
        for name in names_meant(asked):
            found = await self.runs.find(owner, name)
            if found is not None:
                return await self._reply(found, after, field)
        raise _unknown(asked)

    async def _reply(self, found: Found, after: str | None, field: str) -> ResumedReply:
        exchange = await self.told_of(found.canonical)
        seen = read_position(after, exchange.completions[0].num_choices, field)
        return self.reading(exchange, found, seen)

    def reading(self, exchange: Exchange, found: Found, seen: Position = START) -> ResumedReply:
        """The answer to somebody who reads it."""
        return ResumedReply(exchange, found.canonical.name, _Reader(self.runs, found, seen))

    # ---- calls ----

    async def told_of(self, canonical: Canonical) -> Exchange:
        """How a kept request is told; nothing of it runs."""
        if canonical.api not in self._handlers:
            message = "this request was begun by gRPC: go on with it there"
            raise UnsupportedFeature(message, field="request_id")
        scope: Scope = {"type": "http", "method": "POST", "path": canonical.api, "headers": []}
        pinned = Pin(canonical.name, canonical.created, canonical.owner, again=True)
        exchange = await self._call(canonical.api, scope, canonical.body, pinned)
        [completion] = exchange.completions
        completion.request = canonical.request
        # A receipt tells what happened on the way, and another replay would know something else.
        completion.trace.terms = replace(completion.trace.terms, receipt=False)
        return exchange

    async def _completion(self, canonical: Canonical) -> Completion:
        """The completion of an adopted request, to be run."""
        [completion] = (await self.told_of(canonical)).completions
        return completion.twin()

    async def _call(self, path: str, scope: Scope, body: bytes, pinned: Pin) -> Exchange:
        """What the route makes of a body; nothing of it runs."""
        own: Scope = dict(scope)
        headers = [pair for pair in scope["headers"] if pair[0] != b"content-type"]
        own["headers"] = [*headers, (b"content-type", b"application/json")]
        pin(own, pinned)
        pin_request_id(own, pinned.name)

        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        return await self._handlers[path](HttpRequest(own, receive))

    @property
    def runs(self) -> Runs:
        """Raises Unavailable where there are none."""
        runs = self._services.runs
        if runs is None:
            raise Unavailable("this server takes no resumable requests")
        return runs


@dataclass(frozen=True, slots=True)
class NamedRequest:
    """A request that somebody wants kept, under a name of its owner's. `key`: its name by its
    idempotency key, if that is another one."""

    path: str
    owner: str
    name: str
    body: bytes
    grace_s: float
    key: str | None = None


@dataclass(frozen=True, slots=True)
class _Reader:
    """What one reader reads, and what it has seen of it."""

    runs: Runs
    found: Found
    seen: Position


class ResumedReply:
    """ASGI answer to one reader of a resumable request."""

    def __init__(self, exchange: Exchange, name: str, reader: _Reader) -> None:
        self._exchange = exchange
        self._name = name
        self._reader = reader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (NAME_HEADER, self._name.encode())]
                message = {**message, "headers": headers}
            await send(message)

        reader = self._reader
        resumed = reader.seen != START
        async with reader.runs.reading(reader.found, resumed=resumed) as told:
            await self._read(told, scope, receive, named)

    async def _read(self, told: Told, scope: Scope, receive: Receive, send: Send) -> None:
        exchange, reader = self._exchange, self._reader
        runner = CallRunner(ToldDispatch(told), reader.runs.readers, reader.runs.clock)
        if exchange.stream:
            await NumberedReply(exchange, runner, reader.seen)(scope, receive, send)
        else:
            await respond_whole(exchange, runner, scope, receive, send)


def check_same(found: Found, asked: NamedRequest) -> None:
    """Raise KeyReused if another body was sent under that name."""
    by_key = asked.key is not None or asked.name.startswith(KEY_PREFIX)
    if not compare_digest(found.body_digest, body_digest(asked.path, asked.body)):
        raise KeyReused(
            "this request id or idempotency key was used with another body",
            field="idempotency-key" if by_key else "x-request-id",
        )


def asked_of(
    request: HttpRequest, path: str, body: bytes, key: str | None, grace_s: float
) -> NamedRequest:
    """Named by the id that the client gave, else by its idempotency key, else by a drawn one."""
    name = given_id(request.scope) or key or known_id(request.scope)
    other = None if key == name else key
    return NamedRequest(path, owner_of(request.scope), name, body, grace_s, other)


def owner_of(scope: Scope) -> str:
    """Digest of the key that a request was let in with, or first was; everybody's without keys."""
    pinned = pin_of(scope)
    if pinned is not None:
        return pinned.owner
    return owner_digest(keys_of(scope["headers"]) if GRANT_KEY in scope else [])


def _unknown(name: str) -> RequestNotFound:
    return RequestNotFound(f"no such request: {name[:200]!r}", field="request_id")
