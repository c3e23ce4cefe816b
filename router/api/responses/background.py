"""Responses in the background: each is a resumable request (router/resumable); its end is stored.

    create    store the response as `queued`, then begin it. It runs to its end even if nobody reads
              it; if its router dies, another one goes on with it
    look      return the present state of the response; any router can do this
    stream    send the events after any position, as long as the request's log is kept
    cancel    store the response as `cancelled`, then abort it; an end that comes later is ignored

The router that ran a response stores its end. If it could not, the first router that looks at the
response finds the end in the log and stores it.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any, Final

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from baton.protocol.errors import (
    BatonError,
    RequestNotFound,
    StoreUnavailable,
    Unavailable,
    UnsupportedFeature,
)
from baton.protocol.request import RequestState
from router.api.dialect import DialectExchange
from router.api.exchange import Exchange
from router.api.responses.answer import ResponseAnswer, error_of
from router.api.responses.body import asks_background, read
from router.api.responses.keeper import Keeper, Stored
from router.api.responses.output import RESPONSE_PREFIX
from router.api.resumable.http import NamedRequest, ResumableApi, ResumedReply, asked_of
from router.request.completion import CallRunner
from router.request.request_ids import note_body_id
from router.resumable.canonical import Canonical, record_id
from router.resumable.replay import ToldDispatch
from router.resumable.runs import Found
from router.resumable.terms import read_resume_terms
from router.services import RouterServices

logger = logging.getLogger(__name__)
PATH: Final = "/v1/responses"
ACCEPT_S: Final = 1.0  # a refusal within this time becomes the answer to POST /v1/responses
MARGIN_S: Final = 60.0  # so long after its deadline a request has certainly ended


class Background:
    """Makes, finds and cancels responses in the background. It asks the router's Runs to be called
    when a request of /v1/responses ends."""

    def __init__(self, services: RouterServices, keeper: Keeper, resumable: ResumableApi) -> None:
        self._services = services
        self._keeper = keeper
        self._resumable = resumable
        self._longest_s = services.config.request_timeout_s + MARGIN_S
        if services.runs is not None:
            services.runs.enders[PATH] = self._ended

    async def create(self, request: HttpRequest, body: bytes) -> Response | ResumedReply:
        """Begin a background response, or find the one that an earlier call with this key began.
        Return its stored status, or the stream of its events if the body has `stream`.

        Raises InvalidRequest, KeyReused, Overloaded, Unavailable; RequestNotFound if the response
        was begun before and then deleted."""
        fields = read(body).fields
        note_body_id(request, fields.get("request_id"))
        terms = read_resume_terms(lambda name: request.headers.get(name, ""))
        asked = asked_of(request, PATH, body, terms and terms.key, self._longest_s)
        found = await self._resumable.find(asked)
        if found is None:
            found = await self._begin(request, asked)
        if fields.get("stream"):
            return self._resumable.reading(await self._resumable.told_of(found.canonical), found)
        stored = await self._keeper.load(asked.owner, RESPONSE_PREFIX + found.canonical.name)
        if stored is None:
            raise RequestNotFound("this response was deleted", field="request_id")
        return told(stored)

    async def look(self, owner: str, stored: Stored) -> Stored:
        """Return `stored` with its present status. If the response has ended since, store its end
        first. Raises Unavailable."""
        if stored.ended:
            return stored
        id_ = record_id(owner, _name_of(stored))
        try:
            record = await self._services.store.reach(lambda store: store.read(id_))
        except StoreUnavailable as error:
            raise Unavailable("the store is away: ask again") from error
        if record is not None and not record.state.terminal:
            queued = record.state is RequestState.QUEUED
            return stored.with_(status="queued" if queued else "in_progress")
        runs = self._resumable.runs
        found = None if runs.waits(id_) else await runs.find(owner, _name_of(stored))
        if found is None and time.time() < stored.response["created_at"] + self._longest_s:
            return stored  # the request waits at the gate of some router
        if found is None:
            await self._failed(owner, stored.id, Unavailable("the response was lost"))
        else:
            await self._settle(found)
        return await self._keeper.load(owner, stored.id) or stored

    async def stream(self, owner: str, stored: Stored, after: int) -> ResumedReply:
        """Return the stream of the events whose `sequence_number` is above `after`.

        Raises RequestNotFound if the events are not kept any more; Unavailable."""
        found = await self._resumable.runs.find(owner, _name_of(stored))
        if found is None and not stored.ended:
            raise Unavailable("the response has not begun yet: ask again", retry_after_s=1)
        if found is None:
            message = "the events of this response are not kept any more: read it without stream"
            raise RequestNotFound(message, field="stream")
        told = _own(await self._resumable.told_of(found.canonical))
        return self._resumable.reading(replace(told, stream=True, after=after), found)

    async def cancel(self, owner: str, stored: Stored) -> Stored:
        """Cancel a response that has not ended; return it as it is stored then.

        Raises UnsupportedFeature if the response is not one in the background."""
        if not stored.background:
            message = "id: only a response in the background can be cancelled"
            raise UnsupportedFeature(message, field="id")
        if not stored.ended:
            stored = stored.with_(status="cancelled")
            await self._keeper.keep(owner, stored, replace=True)
            await self.abort(owner, stored)
        return stored

    async def abort(self, owner: str, stored: Stored) -> None:
        """Abort the request of a response."""
        await self._services.aborts.everywhere([record_id(owner, _name_of(stored))])

    # ---- inside ----

    async def _begin(self, request: HttpRequest, asked: NamedRequest) -> Found:
        """Store a new response as queued, then run its request. If the request is refused, delete
        the stored response and raise the error."""
        canonical, exchange = await self._resumable.prepare(request, asked)
        fields = self._resumable.fields(canonical, asked)
        stored = _answer_of(exchange).stored(status="queued")
        if not await self._keeper.keep(asked.owner, stored):
            raise Unavailable("the response cannot be stored now, and would be lost")
        try:
            [completion] = exchange.completions
            runs = self._resumable.runs
            found = await runs.begin(canonical, completion.twin(), fields, wait_s=ACCEPT_S)
            async with found.reading() as log:
                if log.failure is not None:
                    raise log.failure
        except BatonError:
            await self._keeper.drop(asked.owner, stored.id)
            raise
        return found

    async def _ended(self, found: Found) -> None:
        """Store the end of a response in the background. Runs calls this for every resumable
        request of /v1/responses that has ended at this router."""
        if asks_background(found.canonical.body):
            await self._settle(found)

    async def _settle(self, found: Found) -> None:
        """Store how a response ended: read its log to the end, and its answer stores it; after a
        failure store that. Raises Unavailable."""
        canonical, runs = found.canonical, self._resumable.runs
        exchange = _own(await self._resumable.told_of(canonical))
        try:
            async with found.reading() as log:
                await exchange.whole(CallRunner(ToldDispatch(log), runs.readers, runs.clock))
        except BatonError as error:
            await self._failed(canonical.owner, _id_of(canonical), error)

    async def _failed(self, owner: str, id_: str, error: BatonError) -> None:
        stored = await self._keeper.load(owner, id_)
        if stored is not None and not stored.ended:
            logger.info("response %s failed: %s", id_, error.message)
            failed = stored.with_(status="failed", error=error_of(error))
            await self._keeper.keep(owner, failed, replace=True)


def told(stored: Stored) -> Response:
    """Return the HTTP answer with a stored response."""
    return json_of(stored.response)


def json_of(content: dict[str, Any]) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")


def _own(exchange: Exchange) -> DialectExchange:
    assert isinstance(exchange, DialectExchange), "the route of responses makes such exchanges"
    return exchange


def _answer_of(exchange: Exchange) -> ResponseAnswer:
    answer = _own(exchange).answer
    assert isinstance(answer, ResponseAnswer), "the route of responses makes such answers"
    return answer


def _name_of(stored: Stored) -> str:
    return stored.id.removeprefix(RESPONSE_PREFIX)


def _id_of(canonical: Canonical) -> str:
    return RESPONSE_PREFIX + canonical.name
