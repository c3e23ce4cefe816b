"""Traces of requests: the router's spans of OpenTelemetry, made from timelines.

`RouterTracing` makes the ids of a request's root span when it arrives, so that nodes get their
parent in `traceparent`. When the request has ended, its marks go to a child process, in batches;
the spans themselves are made there (`python -m router.request.tracing`), off the event loop:

    chat demo            root: continues the client's trace
        intake, elsewhere, gate, placement, migration, retry, reply
        attempt          one per epoch: an error if its node failed; the nodes' spans are below it
            prefill, hand-over, decode
            kv transfer  as the router sees it; the nodes tell their own halves
        log-append       the longest ones of a resumable request

A resumable request may go on at another router, which makes the same ids. The router where it ends
makes the root and all attempts; those of other routers are errors without nodes.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final

import msgspec

from baton.protocol.request import Request, RequestState
from baton.runtime.tracing.sender import ExportPlan, SpanSender, SpanSink
from baton.runtime.tracing.spans import Attributes, SpanEvent, TraceContext, TraceSpan
from router.request.timeline import (
    Milestone,
    StageSpan,
    TimelineEntry,
    TimelineMark,
    stages_of,
    transfers_of,
)

if TYPE_CHECKING:
    from router.config import RouterConfig
SCOPE: Final = "baton.router"
BATCH: Final = 64  # requests in a message
DELAY_S: Final = 0.25  # the most that a request waits for others
OPERATIONS: Final = {"chatcmpl": "chat", "cmpl": "text_completion", "msg": "chat", "resp": "chat"}
ROUTER_GONE: Final = "its router is gone or gave it up"
ANY_OPERATION: Final = "text_completion"
_OF_ATTEMPTS: Final = frozenset({"encoding", "prefill", "hand-over", "decode"})
_ENDS: Final = (Milestone.FAILED, Milestone.MOVING)  # of an epoch


class FinishedRequest(msgspec.Struct, frozen=True, array_like=True):
    """What the spans of one request are made of. Times: seconds of the router's clock, of which
    `arrival` was at `arrived_at` wall-clock seconds. `first_epoch`: earlier ones were another
    router's. `left`: another router goes on with it. `appends`: the longest ones to its log."""

    root: TraceContext
    name: str
    model: str
    arrival: float
    arrived_at: float
    end: float
    marks: list[TimelineMark]
    output_tokens: int
    error: str
    attributes: Attributes
    first_epoch: int
    left: bool
    appends: list[StageSpan] = []

    def at_ns(self, at: float) -> int:
        return round((self.arrived_at + (at - self.arrival)) * 1e9)


class RouterTracing:
    """Begins traces, and sends ended requests to the child. Event loop only.

    `sink` takes the messages for the child. `ratio`: which share of the requests that come without
    a trace is traced. `model` returns the name of a model by its key.
    """

    def __init__(
        self,
        sink: SpanSink,
        model: Callable[[str], str],
        ratio: float = 1.0,
    ) -> None:
        self._sink = sink
        self._model = model
        self._ratio = ratio
        self._ended: list[tuple[Request, TimelineEntry]] = []
        self._encode = msgspec.msgpack.Encoder().encode

    def begin(self, request: Request) -> TraceContext:
        """Return the root span of a request, the same on any router."""
        parent = TraceContext.parse(request.traceparent)
        return TraceContext.root(parent, f"{request.id} {request.params.seed}", self._ratio)

    def finished(self, request: Request, entry: TimelineEntry) -> None:
        """Send the spans of a request that has ended, within DELAY_S: its answer is written by
        then, if the client reads."""
        root = entry.trace.root
        if root is None or not root.sampled:
            return
        if len(self._ended) == BATCH:
            self.flush()
        self._ended.append((request, entry))
        if len(self._ended) == 1:
            asyncio.get_running_loop().call_later(DELAY_S, self.flush)

    def flush(self) -> None:
        """Send the requests that have ended."""
        if self._ended:
            ended, self._ended = self._ended, []
            self._sink.send(self._encode([self._told(*each) for each in ended]))

    def _told(self, request: Request, entry: TimelineEntry) -> FinishedRequest:
        assert entry.trace.root is not None, "only sampled requests are kept"
        return FinishedRequest(
            root=entry.trace.root,
            name=_operation(request.id),
            model=request.adapter or self._model(entry.trace.model),
            arrival=entry.arrival,
            arrived_at=entry.arrived_at,
            end=entry.end,
            marks=entry.marks,
            output_tokens=entry.trace.output_tokens,
            error=entry.error if entry.trace.outcome == RequestState.FAILED else "",
            attributes=_attributes(request, entry),
            first_epoch=request.epoch,
            left=entry.trace.left,
            appends=entry.appends,
        )

    def close(self) -> None:
        """Send what is left, and wait until the child has sent it on. Twice is safe."""
        self.flush()
        self._sink.close()


def tracing_of(config: RouterConfig, name_of: Callable[[str], str]) -> RouterTracing | None:
    """Return what traces the requests of a router, with its child; None if nobody wants traces.
    `name_of`: returns the name of a model by its key."""
    if config.otlp_traces_endpoint is None:
        return None
    plan = ExportPlan(
        config.otlp_traces_endpoint,
        config.otlp_traces_protocol,
        service="baton-router",
        instance=config.router_id or "",
        log_level=config.log_level,
        log_format=config.log_format,
    )

    sink = SpanSender(plan, "router.request.tracing")
    return RouterTracing(sink, name_of, config.otlp_traces_ratio)


def _operation(request_id: str) -> str:
    return OPERATIONS.get(request_id.replace("_", "-").partition("-")[0], ANY_OPERATION)


def _attributes(request: Request, entry: TimelineEntry) -> Attributes:
    """Return the attributes of the root span. None of them is text of the prompt or of the
    answer.

    Source: OpenTelemetry's semantic conventions of generative AI; vLLM's names (tracing.py).
    """
    params, trace = request.params, entry.trace
    found: Attributes = {
        "gen_ai.provider.name": "baton",
        "gen_ai.request.id": request.id,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.n": params.num_outputs,
        "gen_ai.request.choice.count": params.num_outputs,
        "gen_ai.usage.input_tokens": entry.prompt_tokens,
        "gen_ai.usage.output_tokens": trace.output_tokens,
        "gen_ai.usage.prompt_tokens": entry.prompt_tokens,
        "gen_ai.usage.completion_tokens": trace.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": trace.cached_tokens,
        "gen_ai.usage.num_sequences": params.num_outputs,
        "gen_ai.latency.e2e": entry.total_s,
        "baton.outcome": trace.outcome,
        "baton.retries": trace.retries,
        "baton.migrations": trace.migrations,
        "baton.preemptions": trace.preemptions,
    }
    if (log := trace.log_appends) is not None:
        found["baton.log.appends"] = log.count
        found["baton.log.seconds"] = log.total_s
        found["baton.log.longest_seconds"] = log.longest_s
    if (queue_s := trace.queue_s(entry.arrival)) is not None:
        found["gen_ai.latency.time_in_queue"] = queue_s
    if trace.first_token_at is not None:
        first_s = trace.first_token_at - entry.arrival
        found["gen_ai.latency.time_to_first_token"] = first_s
        found["gen_ai.response.time_to_first_chunk"] = first_s
        end = trace.finished_at or entry.end
        found["gen_ai.latency.time_in_model_decode"] = end - trace.first_token_at
        if trace.scheduled_at is not None:
            prefill_s = trace.first_token_at - trace.scheduled_at
            found["gen_ai.latency.time_in_model_prefill"] = prefill_s
    return found


# ---- in the child -------------------------------------------------------------------------------
_decode: Final = msgspec.msgpack.Decoder(list[FinishedRequest]).decode


def spans_in(message: bytes) -> Iterator[TraceSpan]:
    """Yield the spans of the requests in a message of `RouterTracing`."""
    for finished in _decode(message):
        yield from spans_of(finished)


def spans_of(finished: FinishedRequest) -> Iterator[TraceSpan]:
    """Yield the spans of one request, the root first."""
    if not finished.left:
        yield _root(finished)
        yield from _attempts(finished)
    stages = stages_of(finished.arrival, finished.marks, finished.end, finished.output_tokens)
    for stage in stages:
        of_attempt = stage.stage in _OF_ATTEMPTS
        above = finished.root.epoch(stage.epoch) if of_attempt else finished.root
        yield _stage(finished, stage, stage.stage, above)
    for transfer in transfers_of(finished.marks, finished.end):
        # A transfer that a migration has begun belongs to the attempt before it.
        above = finished.root.epoch(transfer.epoch)
        yield _stage(finished, transfer, "kv transfer", above)
    for append in finished.appends:
        yield _stage(finished, append, append.stage, finished.root)


def _root(finished: FinishedRequest) -> TraceSpan:
    model = {"gen_ai.operation.name": finished.name, "gen_ai.request.model": finished.model}
    return TraceSpan(
        f"{finished.name} {finished.model}",
        SCOPE,
        finished.root,
        finished.at_ns(finished.arrival),
        finished.at_ns(finished.end),
        {**finished.attributes, **model, "gen_ai.response.model": finished.model},
        finished.error or None,
        server=True,
    )


def _attempts(finished: FinishedRequest) -> Iterator[TraceSpan]:
    """Yield a span for each epoch that reached a node, or was another router's."""
    adopted = [mark.at for mark in finished.marks if mark.milestone is Milestone.ADOPTED]
    taken_over_ns = finished.at_ns(adopted[0] if adopted else finished.arrival)
    for epoch in range(1, finished.first_epoch):
        yield TraceSpan(
            "attempt",
            SCOPE,
            finished.root.epoch(epoch),
            taken_over_ns,
            taken_over_ns,
            {"baton.epoch": epoch},
            ROUTER_GONE,
        )
    epochs = dict.fromkeys(mark.epoch for mark in finished.marks if mark.epoch)
    last = max(epochs, default=0)
    ended = [mark.at for mark in finished.marks if mark.milestone is Milestone.FINISHED]
    done = ended[0] if ended else finished.end
    for epoch in epochs:
        marks = list(_marks_of(finished.marks, epoch))
        if not marks:
            continue
        begin = marks[0].at
        over = next((mark for mark in marks if _is_end(mark, epoch)), None)
        end = done if over is None else over.at
        failed = over is not None and over.milestone is Milestone.FAILED
        error = over.why if failed and over is not None else None
        if over is None and epoch == last:
            error = finished.error or None
        nodes = dict.fromkeys(mark.node for mark in marks if mark.node)
        yield TraceSpan(
            "attempt",
            SCOPE,
            finished.root.epoch(epoch),
            finished.at_ns(begin),
            finished.at_ns(end),
            {"baton.epoch": epoch, "baton.nodes": ",".join(nodes)},
            error,
        )


def _marks_of(marks: Iterable[TimelineMark], epoch: int) -> Iterator[TimelineMark]:
    """Yield the marks of an epoch in order. It may begin with a migration, which the epoch before
    has marked."""
    for mark in marks:
        begins = mark.milestone is Milestone.MOVING and mark.epoch == epoch - 1
        if begins or mark.epoch == epoch:
            yield mark


def _is_end(mark: TimelineMark, epoch: int) -> bool:
    return mark.milestone in _ENDS and mark.epoch == epoch


def _stage(
    finished: FinishedRequest, stage: StageSpan, name: str, above: TraceContext
) -> TraceSpan:
    attributes: Attributes = {"baton.epoch": stage.epoch}
    if stage.node:
        attributes["baton.node"] = stage.node
    if stage.last_token > stage.first_token:
        attributes["baton.tokens"] = stage.last_token - stage.first_token
    if stage.why:
        attributes["baton.why"] = stage.why
    start, end = finished.at_ns(stage.start), finished.at_ns(stage.end)
    subscribed: tuple[SpanEvent, ...] = ()
    if stage.subscribed is not None:
        subscribed = (SpanEvent("subscribed", finished.at_ns(stage.subscribed)),)
    return TraceSpan(name, SCOPE, above.child(), start, end, attributes, events=subscribed)


if __name__ == "__main__":
    from baton.runtime.tracing import exporter  # the extra `otel`, in the child alone

    exporter.main(sys.argv[1:], spans_in)
