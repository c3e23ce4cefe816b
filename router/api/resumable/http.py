"""Resumable requests over HTTP: wraps the generating routes, and adds a route to read one again.

A plain request does not come here: `hooked` looks for the headers of resumable requests. For a
resumable request the route makes the exchange (checks, prompt, frames), but does not run it:
router/resumable/runs.py runs the request, and the client reads its log. A client reads again with
the same request (`last-event-id`, `idempotency-key`, or only the same x-request-id), or with `GET
/v1/requests/{id}/stream`. Then the route, on any router, makes the same exchange from the body in
the request's record.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hmac import compare_digest
from typing import Any, Final

import msgspec
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

# Path of a resumable route -> the field of its body that errors name if the body is too large.
RESUMABLE: Final = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/responses": "input",
    "/v1/messages": "messages",
}
NOT_RESUMABLE: Final = ("/inference/v1/generate",)


class ResumableApi:
    """Wraps the resumable routes of an app. Tells the router's Runs how to make the completion of a
    record."""

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
        """Return all routes of the app, the resumable ones wrapped, and the route of `stream`."""
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

    # ---- begin a request, or read it again ----

    async def _create(self, path: str, request: HttpRequest, terms: ResumeTerms) -> ResumedReply:
        """Begin the request, or find it if it was begun before; return the answer to its reader.

        Raises InvalidRequest, KeyReused, RequestNotFound, Unavailable."""
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
        """Return the request of that key or name if it was begun before, else None.

        Raises KeyReused if it had another body; Unavailable."""
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
        """Check a new request. Return its Canonical, which the record keeps, and its exchange. Does
        not run the request."""
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
        """Return the fields of a request's record. Raises InvalidRequest if they are too large."""
        fields = canonical.fields(self.runs.clock, RESUMABLE[canonical.api])
        if asked.key is not None:
            fields[ALIAS] = record_id(asked.owner, asked.key)
        return fields

    async def stream(self, request: HttpRequest) -> ResumedReply:
        """Answer `GET /v1/requests/{id}/stream`: the events after the position in `starting_after`
        or `last-event-id`."""
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
        """Return the answer to a reader who has seen the events up to `seen`."""
        return ResumedReply(exchange, found.canonical.name, _Reader(self.runs, found, seen))

    # ---- exchanges of records ----

    async def told_of(self, canonical: Canonical) -> Exchange:
        """Return the exchange that answers readers of a kept request. Does not run the request."""
        if canonical.api not in self._handlers:
            message = "this request was begun by gRPC: go on with it there"
            raise UnsupportedFeature(message, field="request_id")
        scope: Scope = {"type": "http", "method": "POST", "path": canonical.api, "headers": []}
        pinned = Pin(canonical.name, canonical.created, canonical.owner, again=True)
        exchange = await self._call(canonical.api, scope, canonical.body, pinned)
        [completion] = exchange.completions
        completion.request = canonical.request
        # No receipt: a replay does not know the times of the real run.
        completion.trace.terms = msgspec.structs.replace(completion.trace.terms, receipt=False)
        return exchange

    async def _completion(self, canonical: Canonical) -> Completion:
        """Return the completion of an adopted request, ready to run."""
        [completion] = (await self.told_of(canonical)).completions
        return completion.twin()

    async def _call(self, path: str, scope: Scope, body: bytes, pinned: Pin) -> Exchange:
        """Call the route's handler with `body`; return the exchange, which is not run."""
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
        """The router's Runs. Raises Unavailable if it has none."""
        runs = self._services.runs
        if runs is None:
            raise Unavailable("this server takes no resumable requests")
        return runs


@dataclass(frozen=True, slots=True)
class NamedRequest:
    """A resumable request as its client sends it. `name`: unique among the owner's requests. `key`:
    a second name, made of the idempotency key; None if there is no such key or it is `name`."""

    path: str
    owner: str
    name: str
    body: bytes
    grace_s: float
    key: str | None = None


@dataclass(frozen=True, slots=True)
class _Reader:
    """The request that a reader reads, and the position up to which it has seen the events."""

    runs: Runs
    found: Found
    seen: Position


class ResumedReply:
    """The ASGI answer to one reader of a resumable request."""

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
    """Raise KeyReused if the request `found` was begun with another body than that of `asked`."""
    by_key = asked.key is not None or asked.name.startswith(KEY_PREFIX)
    if not compare_digest(found.body_digest, body_digest(asked.path, asked.body)):
        raise KeyReused(
            "this request id or idempotency key was used with another body",
            field="idempotency-key" if by_key else "x-request-id",
        )


def asked_of(
    request: HttpRequest, path: str, body: bytes, key: str | None, grace_s: float
) -> NamedRequest:
    """Return a request under its name: the id that the client gave, else the idempotency key, else
    a random id."""
    name = given_id(request.scope) or key or known_id(request.scope)
    other = None if key == name else key
    return NamedRequest(path, owner_of(request.scope), name, body, grace_s, other)


def owner_of(scope: Scope) -> str:
    """Return the digest of a request's API key; without keys all clients have the same digest. For
    a request that is made again, it is the digest of the original key."""
    pinned = pin_of(scope)
    if pinned is not None:
        return pinned.owner
    return owner_digest(keys_of(scope["headers"]) if GRANT_KEY in scope else [])


def _unknown(name: str) -> RequestNotFound:
    return RequestNotFound(f"no such request: {name[:200]!r}", field="request_id")
