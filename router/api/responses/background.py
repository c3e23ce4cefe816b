"""Responses that nobody waits for: each a resumable request (router/resumable), whose end is kept.

    create    kept as `queued`, then begun: it runs to its end whether somebody reads it or not, and
              goes on at another router if its own is gone
    look      what has become of it by now, at any router
    stream    its events, from any of them on, for as long as the request's log is kept
    cancel    kept as `cancelled` first; an end that comes later changes nothing

How it ended is kept by the router that ran it, or by whoever looks first (the log tells all).
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
ACCEPT_S: Final = 1.0  # a refusal that comes so soon is told to whoever asks
MARGIN_S: Final = 60.0  # beyond its deadline nothing of a request is left


class Background:
    """Registers with the router's Runs what is to be done when one ends."""

    def __init__(self, services: RouterServices, keeper: Keeper, resumable: ResumableApi) -> None:
        self._services = services
        self._keeper = keeper
        self._resumable = resumable
        self._longest_s = services.config.request_timeout_s + MARGIN_S
        if services.runs is not None:
            services.runs.enders[PATH] = self._ended

    async def create(self, request: HttpRequest, body: bytes) -> Response | ResumedReply:
        """Raises InvalidRequest, KeyReused, Overloaded, Unavailable."""
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
        """Raises Unavailable."""
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
            return stored  # it waits for room at some router
        if found is None:
            await self._failed(owner, stored.id, Unavailable("the response was lost"))
        else:
            await self._settle(found)
        return await self._keeper.load(owner, stored.id) or stored

    async def stream(self, owner: str, stored: Stored, after: int) -> ResumedReply:
        """Its events after the one of number `after`. Raises RequestNotFound, Unavailable."""
        found = await self._resumable.runs.find(owner, _name_of(stored))
        if found is None and not stored.ended:
            raise Unavailable("the response has not begun yet: ask again", retry_after_s=1)
        if found is None:
            message = "the events of this response are not kept any more: read it without stream"
            raise RequestNotFound(message, field="stream")
        told = _own(await self._resumable.told_of(found.canonical))
        return self._resumable.reading(replace(told, stream=True, after=after), found)

    async def cancel(self, owner: str, stored: Stored) -> Stored:
        """Raises UnsupportedFeature for one that never ran in the background."""
        if not stored.background:
            message = "id: only a response in the background can be cancelled"
            raise UnsupportedFeature(message, field="id")
        if not stored.ended:
            stored = stored.with_(status="cancelled")
            await self._keeper.keep(owner, stored, replace=True)
            await self.abort(owner, stored)
        return stored

    async def abort(self, owner: str, stored: Stored) -> None:
        """End the request of one that is not wanted any more."""
        await self._services.aborts.everywhere([record_id(owner, _name_of(stored))])

    # ---- inside ----

    async def _begin(self, request: HttpRequest, asked: NamedRequest) -> Found:
        """Keep it as queued, then run it; what is refused leaves nothing."""
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
        """A resumable request of /v1/responses has ended here."""
        if asks_background(found.canonical.body):
            await self._settle(found)

    async def _settle(self, found: Found) -> None:
        """Keep how it ended: read to its end, it keeps itself. Raises Unavailable."""
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
    """The response object, as the HTTP answer."""
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
