"""Timelines over HTTP: on the public port for the tenant that asked, on the admin port for all.

    GET /v1/requests                  the requests that ended last: ?slowest=true&limit=20
    GET /v1/requests/{name}/timeline  where one request's time went: by reply id or x-request-id;
                                      ?format=perfetto for ui.perfetto.dev, ?text=true with texts

Answers hold names, times and counts. A prompt and its answers are told only if the router keeps
them (router/request/texts.py), only if asked for, and only to the one API key that made the request
or, with --console-show-text, to operators. A router knows the requests that it has served itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Final, TypeVar

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from baton.protocol.errors import InvalidRequest, RequestNotFound
from baton.protocol.events import LayersCame, layers_came
from router.api.perfetto import perfetto_trace
from router.request.request_ids import names
from router.request.scores import NodeScore
from router.request.terms import grant_of
from router.request.timeline import NodeWork, StageSpan, TimelineEntry, TimelineRing
from router.services import RouterServices

LIST_PATH: Final = "/v1/requests"
PATH: Final = "/v1/requests/{name}/timeline"
MOST_LISTED: Final = 100
DEFAULT_LISTED: Final = 20
RUNNING: Final = "running"  # the outcome of a request that is still under way
FORMATS: Final = {"json": False, "perfetto": True, "": False}
TRUTHS: Final = {"true": True, "1": True, "false": False, "0": False, "": False}


T = TypeVar("T")


class RequestSummary(msgspec.Struct):
    """A request that has ended; with outcome `running`, what one under way has done so far. Times
    are milliseconds; `arrived_at` is in seconds since 1970. `queue_ms`: how long it waited, at the
    router and on nodes."""

    request_id: str
    arrived_at: float
    total_ms: float
    ttft_ms: float | None
    queue_ms: float | None
    outcome: str
    error: str | None
    tenant: str | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    prefill_node: str | None
    decode_node: str | None
    retries: int
    migrations: int
    preemptions: int


class RequestList(msgspec.Struct):
    data: list[RequestSummary]


class TimelineLayers(msgspec.Struct):
    """When the KV of layers `first` to `last` came, of a fetch: `kv_bytes`. Of a prompt in several
    chunks each layer comes several times, so these times overlap. `name`: says which layers."""

    name: str
    first: int
    last: int
    start_ms: float
    end_ms: float
    kv_bytes: int


class TimelinePart(msgspec.Struct, omit_defaults=True):
    """What a node did with the request, as the node told: `queue`, `compute` (`chunks` of the
    prompt), `fetch` (`kv_bytes` over `lane`, group by group of `layers`) or `first step`. Of a
    transfer, what this router saw: `export`, until the decode node began to fetch, and `subscribe`,
    from then on; these have no `node`. Times count from the arrival."""

    name: str
    node: str
    start_ms: float
    end_ms: float
    chunks: int = 0
    kv_bytes: int = 0
    lane: str = ""
    layers: list[TimelineLayers] = []


class TimelineSpan(msgspec.Struct, omit_defaults=True):
    """What took the time from `start_ms` to `end_ms`, counted from the arrival. `tokens`: the
    client got the output tokens [first, last) in it. `parts`: what nodes told of it; those of a
    decode node may begin before it."""

    stage: str
    start_ms: float
    end_ms: float
    epoch: int
    node: str | None = None
    tokens: tuple[int, int] | None = None
    why: str | None = None
    parts: list[TimelinePart] = []


class TimelineLog(msgspec.Struct):
    """What logging the tokens of a resumable request took: how many appends, their time in all,
    that of the longest one, and the `longest` few as spans (stage `log-append`)."""

    appends: int
    total_ms: float
    longest_ms: float
    longest: list[TimelineSpan]


class RequestText(msgspec.Struct):
    """A prompt as the model got it, and its answers as the model made them. `cut`: they had more
    tokens than are kept."""

    prompt: str
    answers: list[str]
    cut: bool


class Timeline(RequestSummary):
    """`stages` lie end to end from 0 to `total_ms`; `transfers` of KV, and what is in `log`, lie
    beside them. `log`: None for a plain request. `scores`: how the policy rated the nodes, if the
    client asked for a receipt. `text`: None if it is not kept, was not asked for, or is not for
    this key."""

    stages: list[TimelineSpan]
    transfers: list[TimelineSpan]
    scores: list[NodeScore]
    log: TimelineLog | None = None
    text: RequestText | None = None


class TimelinesApi:
    """The two routes. `everyone`: for operators, who see the requests of all tenants."""

    def __init__(self, services: RouterServices, everyone: bool) -> None:
        self._services = services
        self._ring = TimelineRing(0) if services.timelines is None else services.timelines
        self._everyone = everyone
        # Without API keys nobody can show that a request was his.
        config = services.config
        self._shows_text = config.console_show_text if everyone else bool(len(config.key_ring()))

    def routes(self) -> list[Route]:
        return [
            Route(LIST_PATH, self.list, methods=["GET"]),
            Route(PATH, self.timeline, methods=["GET"]),
        ]

    async def list(self, request: HttpRequest) -> Response:
        """Return the newest requests, or the slowest ones of those that are kept."""
        domain = self._domain(request)
        _check_query(request, "slowest", "limit")
        slowest = _choice(request, "slowest", TRUTHS)
        limit = request.query_params.get("limit", str(DEFAULT_LISTED))
        if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= MOST_LISTED):
            raise InvalidRequest(f"limit: 1 to {MOST_LISTED}", field="limit")
        entries = self._ring.slowest(domain) if slowest else self._ring.newest(domain)
        return _json(RequestList([summary_of(each) for each in islice(entries, int(limit))]))

    async def timeline(self, request: HttpRequest) -> Response:
        """Return one timeline; of a request under way, what has happened so far. Raises
        RequestNotFound."""
        _check_query(request, "format", "text")
        perfetto = _choice(request, "format", FORMATS)
        wants_text = _choice(request, "text", TRUTHS)
        asked, domain = str(request.path_params["name"]), self._domain(request)
        entry = self._under_way(asked, domain) or self._ring.find(asked, domain)
        if entry is None:
            text = f"no timeline of {asked[:200]!r}: this router keeps those of its last requests"
            raise RequestNotFound(text, field="request_id")
        timeline = timeline_of(entry)
        if perfetto:
            return _json(perfetto_trace(timeline))
        if wants_text:
            timeline.text = await self._text(request, entry)
        return _json(timeline)

    def _under_way(self, asked: str, domain: str | None) -> TimelineEntry | None:
        """Return the request that `asked` names, if it runs or waits: so far."""
        dispatcher, now = self._services.dispatcher, self._services.clock.monotonic()
        for request, trace in (*dispatcher.live(), *dispatcher.waiting()):
            if domain in (None, trace.terms.grant.domain) and names(asked, request.id):
                came, length = time.time() - (now - request.arrival), len(request.prompt_ids)
                return TimelineEntry(request.id, request.arrival, came, length, "", trace, now)
        return None

    async def _text(self, request: HttpRequest, entry: TimelineEntry) -> RequestText | None:
        """Return what was asked and answered, if whoever asks now may see it."""
        texts, model = self._services.dispatcher.texts, self._services.models[entry.trace.model]
        if texts is None or not self._shows_text:
            return None
        holder = None if self._everyone else grant_of(request.scope).holder
        kept = texts.find(entry.request_id, holder)
        if kept is None:
            return None
        spelled = [
            asyncio.to_thread(model.tokenizer.decode, it, False)
            for it in (kept.prompt, *kept.answers)
        ]
        prompt, *answers = await asyncio.gather(*spelled)
        return RequestText(prompt, answers, kept.cut)

    def _domain(self, request: HttpRequest) -> str | None:
        return None if self._everyone else grant_of(request.scope).domain


def summary_of(entry: TimelineEntry) -> RequestSummary:
    """Return one line of a list of requests."""
    trace, first = entry.trace, entry.trace.first_token_at
    queue_s = trace.queue_s(entry.arrival)
    return RequestSummary(
        request_id=entry.request_id,
        arrived_at=round(entry.arrived_at, 6),
        total_ms=_ms(entry.total_s),
        ttft_ms=None if first is None else _ms(first - entry.arrival),
        queue_ms=None if queue_s is None else _ms(queue_s),
        outcome=trace.outcome or RUNNING,
        error=entry.error or None,
        tenant=trace.terms.grant.tenant or None,
        prompt_tokens=entry.prompt_tokens,
        cached_tokens=trace.cached_tokens,
        output_tokens=trace.output_tokens,
        prefill_node=trace.decode_node if trace.local_prefill else trace.prefill_node,
        decode_node=trace.decode_node,
        retries=trace.retries,
        migrations=trace.migrations,
        preemptions=trace.preemptions,
    )


def timeline_of(entry: TimelineEntry) -> Timeline:
    """Return the whole timeline."""
    return Timeline(
        **msgspec.structs.asdict(summary_of(entry)),
        stages=[_told(stage, entry.arrival, work) for stage, work in entry.work],
        transfers=[_transfer(span, entry.arrival) for span in entry.transfers],
        scores=list(entry.trace.scores),
        log=_log(entry),
    )


def _transfer(span: StageSpan, arrival: float) -> TimelineSpan:
    told = _told(span, arrival)
    if span.subscribed is not None:
        at_ms = _ms(span.subscribed - arrival)
        told.parts = [
            TimelinePart("export", "", told.start_ms, at_ms),
            TimelinePart("subscribe", "", at_ms, told.end_ms),
        ]
    return told


def _log(entry: TimelineEntry) -> TimelineLog | None:
    log = entry.trace.log_appends
    if log is None:
        return None
    longest = [_told(span, entry.arrival) for span in entry.appends]
    return TimelineLog(log.count, _ms(log.total_s), _ms(log.longest_s), longest)


def _told(span: StageSpan, arrival: float, work: Sequence[NodeWork] = ()) -> TimelineSpan:
    has_tokens = span.last_token > span.first_token
    return TimelineSpan(
        stage=span.stage,
        start_ms=_ms(span.start - arrival),
        end_ms=_ms(span.end - arrival),
        epoch=span.epoch,
        node=span.node or None,
        tokens=(span.first_token, span.last_token) if has_tokens else None,
        why=span.why or None,
        parts=[_part(each, arrival) for each in work],
    )


def _part(work: NodeWork, arrival: float) -> TimelinePart:
    return TimelinePart(
        work.span.name,
        work.node,
        _ms(max(0.0, work.start - arrival)),
        _ms(max(0.0, work.end - arrival)),
        work.span.chunks,
        work.span.kv_bytes,
        work.span.lane,
        [_layers(each, work, arrival) for each in layers_came(work.span.layers)],
    )


def _layers(came: LayersCame, work: NodeWork, arrival: float) -> TimelineLayers:
    first, last = came.first, came.last
    name = f"layer {first}" if first == last else f"layers {first}-{last}"
    start, end = (
        max(0.0, min(work.end, work.start + us / 1e6) - arrival)
        for us in (came.start_us, came.end_us)
    )
    return TimelineLayers(name, first, last, _ms(start), _ms(end), came.kv_bytes)


def _check_query(request: HttpRequest, *known: str) -> None:
    if unknown := set(request.query_params) - set(known):
        field = min(unknown)[:100]
        raise InvalidRequest(f"{field}: no such query parameter", field=field)


def _choice(request: HttpRequest, name: str, choices: Mapping[str, T]) -> T:
    found = choices.get(request.query_params.get(name, "").lower())
    if found is None:
        text = " or ".join(each for each in choices if each.isalpha())
        raise InvalidRequest(f"{name}: {text}", field=name)
    return found


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
