"""The routes for stored responses: read, stream, list their input, cancel, delete.

GET, DELETE  /v1/responses/{id}
POST         /v1/responses/{id}/cancel
GET          /v1/responses/{id}/input_items
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message

from baton.protocol.errors import InvalidRequest, RequestNotFound, UnsupportedFeature
from router.api.http.reading import read_body
from router.api.responses.background import PATH, Background, json_of, told
from router.api.responses.body import asks_background
from router.api.responses.items import Item
from router.api.responses.keeper import Keeper, Stored
from router.api.resumable.http import ResumableApi, ResumedReply, owner_of
from router.request.terms import grant_of
from router.services import RouterServices

MAX_PAGE: Final = 100
PAGE: Final = 20
_TRUE: Final = ("true", "1")
_FALSE: Final = ("false", "0")


class StoredApi:
    """The routes of stored responses. `resumable`: runs responses in the background."""

    def __init__(self, services: RouterServices, resumable: ResumableApi) -> None:
        self._keeper = Keeper.of(services)
        self._background: Background | None = None
        if self._keeper is not None:
            self._background = Background(services, self._keeper, resumable)

    def routes(self, routes: Sequence[Route]) -> list[Route]:
        """Return all routes of the app, with POST /v1/responses wrapped, and this file's routes."""
        one = f"{PATH}/{{id}}"
        return [
            *(self._wrapped(route) if route.path == PATH else route for route in routes),
            Route(one, self.one, methods=["GET", "DELETE"]),
            Route(f"{one}/cancel", self.cancel, methods=["POST"]),
            Route(f"{one}/input_items", self.input_items, methods=["GET"]),
        ]

    def _wrapped(self, route: Route) -> Route:
        """Return the route, which passes bodies with `background: true` to Background."""
        handler: Callable[[HttpRequest], Awaitable[Any]] = route.endpoint

        async def endpoint(request: HttpRequest) -> Any:
            body = await read_body(request)
            if not asks_background(body):
                return await handler(_again(request, body))
            if self._background is None:
                message = "background: nothing is stored here"
                raise UnsupportedFeature(message, field="background")
            return await self._background.create(request, body)

        return Route(route.path, endpoint, methods=["POST"])

    async def one(self, request: HttpRequest) -> Response | ResumedReply:
        """Read or delete. One route has both methods, so that 405 names both as allowed."""
        return await (self.delete if request.method == "DELETE" else self.read)(request)

    async def read(self, request: HttpRequest) -> Response | ResumedReply:
        owner, stored, background = await self._found(request)
        query = request.query_params
        place = query.get("starting_after")
        after = -1 if place is None else _number(place)
        if not _flag(query.get("stream", "false"), "stream"):
            return told(await background.look(owner, stored))
        if not stored.background:
            message = "stream: only a response in the background can be streamed again"
            raise UnsupportedFeature(message, field="stream")
        return await background.stream(owner, stored, after)

    async def delete(self, request: HttpRequest) -> Response:
        owner, stored, background = await self._found(request)
        assert self._keeper is not None, "it has found one"
        if not await self._keeper.drop(owner, stored.id):
            raise _unknown(stored.id)
        if not stored.ended:
            await background.abort(owner, stored)
        return json_of({"id": stored.id, "object": "response", "deleted": True})

    async def cancel(self, request: HttpRequest) -> Response:
        owner, stored, background = await self._found(request)
        return told(await background.cancel(owner, await background.look(owner, stored)))

    async def input_items(self, request: HttpRequest) -> Response:
        _, stored, _ = await self._found(request)
        query = request.query_params
        return json_of(page_of(stored.items, query.get("order"), query.get("limit"),
                               query.get("after")))  # fmt: skip

    async def _found(self, request: HttpRequest) -> tuple[str, Stored, Background]:
        """Return the owner, the stored response that the path names, and the Background.

        Raises RequestNotFound, Unavailable, Overloaded."""
        id_, owner = str(request.path_params["id"]), owner_of(request.scope)
        stored = (
            None
            if self._keeper is None
            else await self._keeper.load(owner, id_, grant_of(request.scope))
        )
        if stored is None or self._background is None:
            raise _unknown(id_)
        return owner, stored, self._background


def page_of(
    items: Sequence[Item], order: str | None, limit: str | None, after: str | None
) -> dict[str, Any]:
    """Return a page of items, the newest first unless `order` is asc. Raises InvalidRequest."""
    if order not in (None, "asc", "desc"):
        raise InvalidRequest("order must be asc or desc", field="order")
    most = PAGE if limit is None else int(limit) if limit.isdecimal() and len(limit) < 4 else 0
    if not 1 <= most <= MAX_PAGE:
        raise InvalidRequest(f"limit must be a number from 1 to {MAX_PAGE}", field="limit")
    listed = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        places = [place for place, item in enumerate(listed, 1) if item["id"] == after]
        if not places:
            raise InvalidRequest("after: there is no such item", field="after")
        listed = listed[places[0] :]
    page = listed[:most]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": len(listed) > most,
    }


def _flag(given: str, name: str) -> bool:
    if given.lower() not in (*_TRUE, *_FALSE):
        raise InvalidRequest(f"{name} must be true or false", field=name)
    return given.lower() in _TRUE


def _number(given: str) -> int:
    if not given.isdecimal() or len(given) > 9:
        message = "starting_after: the sequence_number of an event"
        raise InvalidRequest(message, field="starting_after")
    return int(given)


def _unknown(id_: str) -> RequestNotFound:
    return RequestNotFound(f"there is no response {id_[:200]!r}, or no longer", field="id")


def _again(request: HttpRequest, body: bytes) -> HttpRequest:
    """Return the request with its body as if unread, for the next reader."""

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return HttpRequest(request.scope, receive)
