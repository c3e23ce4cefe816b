"""RequestTrace: what happened to one request and when, for metrics, logs and tests.

Times are seconds of the router's Clock (monotonic); a time is None until its event has happened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

from baton.protocol.clock import Clock
from baton.protocol.errors import BatonError
from baton.protocol.events import NodeSpan, NodeTimings, SpanName, TokenEvent
from baton.protocol.request import Request
from baton.runtime.tracing.spans import TraceContext
from router.nodes.policy import Route
from router.request.scores import NodeScore
from router.request.terms import STANDARD, Terms
from router.request.timeline import POOLING, LogAppends, Milestone, NodeWork, TimelineMark

MOST_WORK: Final = 256  # parts of a timeline
HANDOVER_PARTS: Final = (SpanName.QUEUE, SpanName.FETCH, SpanName.FIRST_STEP)
OWN_WORDS: Final = 429  # messages of HTTP statuses from this one on never quote a client
TRACES_KEY: Final = "baton.traces"  # in an ASGI scope: the traces that the answer ends


@dataclass(slots=True)
class RequestTrace:
    """One request's journey. `Dispatcher.run` writes the trace, the caller of `run` reads it.

    `terms`: what the client asked for; `model`: the key of the model that it named
    (router/models.py); the caller sets them before the start.
    """

    terms: Terms = STANDARD
    model: str = ""
    pooled: str = ""  # the client's field with the inputs to pool; empty: tokens are generated
    behind: int = 0  # how many waited at the gate when it was let in for a decode node to prefill
    entered_at: float | None = None  # came to the gate: it is read, checked and tokenized
    adopted_at: float | None = None  # taken over from a router that is gone
    admitted_at: float | None = None  # let in by the gate
    queued_at: float | None = None  # recorded in the store
    dispatched_at: float | None = None  # first submitted to a node
    first_token_at: float | None = None  # token 1 handed to the caller
    subscribed_at: float | None = None  # the decode node has begun to fetch the KV
    handover_at: float | None = None  # first event of the decode node after a transfer
    finished_at: float | None = None  # terminal, whatever the outcome
    answered_at: float | None = None  # the last byte of its answer went to the transport
    prefill_node: str | None = None  # node ids; None for prefill: local on the decode node
    decode_node: str | None = None
    local_prefill: bool = False
    retries: int = 0
    node_deaths: int = 0
    migrations: int = 0  # to another decode node, with its KV
    preemptions: int = 0  # on the node where it ended
    cached_tokens: int = 0  # prompt tokens that the computing node found in its prefix map
    output_tokens: int = 0  # over all samples
    outcome: str = ""  # RequestState value at the end
    text_stop: bool = False
    aborted: bool = False  # by an operator: its client still waits for an end
    told_at: int | None = None  # wall-clock seconds at which a replayed token was logged
    scores: tuple[NodeScore, ...] = ()  # of the last choice of nodes, if the terms want a receipt
    left: bool = False  # given up here: another router goes on with it
    log_appends: LogAppends | None = None  # None: a plain request
    root: TraceContext | None = None  # its root span; None: traces are off
    # Its reader's, while tokens need not wait for the reader's task: takes an event that continues
    # the only sample, in the turn of the loop in which it came. False: it goes to the task instead.
    shows: Callable[[TokenEvent], bool] | None = None
    gathers: bool = False  # its reader wants all tokens together, so `shows` keeps them
    # What its journey has reached, in order.
    marks: list[TimelineMark] = field(default_factory=list[TimelineMark])
    work: list[NodeWork] = field(default_factory=list[NodeWork])  # what nodes told of it

    def node_at(self, milestone: Milestone) -> str:
        """Return the node of the stage that `milestone` begins; "" if it has none."""
        if milestone in (Milestone.ENCODING, Milestone.FAILED):
            return ""
        prefills = milestone is Milestone.PREFILLING and self.prefill_node
        return prefills or self.decode_node or ""

    def placed(self, route: Route) -> None:
        """Note the nodes that were chosen."""
        self.local_prefill = route.prefill is None
        self.decode_node = route.decode.node_id
        self.prefill_node = None if route.prefill is None else route.prefill.node_id

    def joined(self, request: Request) -> Request:
        """Return `request` with the span of its epoch as the one above its nodes' spans."""
        if self.root is None:
            return request
        return replace(request, traceparent=self.root.epoch(request.epoch).traceparent)

    def visited(self, clock: Clock, node: str, timings: NodeTimings) -> None:
        """Note where the time went on a node, which it tells with its first token."""
        now = clock.monotonic()
        came = now - timings.age_us / 1e6
        fetched = SpanName.FETCH in [span.name for span in timings.spans]
        for span in timings.spans[: max(0, MOST_WORK - len(self.work))]:
            start, end = came + span.start_us / 1e6, came + span.end_us / 1e6
            self.work.append(NodeWork(span, node, start, end, now, timings.epoch, fetched))

    def pooled_on(self, node: str, start: float, end: float) -> None:
        """Note that a node had one group of the inputs to pool, whether it answered or failed."""
        self.decode_node = node
        if len(self.work) < MOST_WORK:
            span = NodeSpan(POOLING, 0, round((end - start) * 1e6))
            self.work.append(NodeWork(span, node, start, end, end, 1, fetched=False))

    def count(self, event: TokenEvent, computes: bool = True) -> None:
        """Take from a node's event how often the request was preempted there and, if the node
        `computes` the prompt, how much of it the node found in its prefix map."""
        if computes:
            self.cached_tokens = max(self.cached_tokens, event.num_cached_tokens)
        self.preemptions = max(self.preemptions, event.preemptions)

    def stopped_by_text(self) -> None:
        """Note that a stop string was found: the caller closes the stream now, and the request
        counts as FINISHED, not CANCELLED."""
        self.text_stop = True

    @property
    def handover_s(self) -> float | None:
        """Seconds from token 1 to the decode node's first event; None without a hand-over."""
        if self.first_token_at is None or self.handover_at is None:
            return None
        return max(0.0, self.handover_at - self.first_token_at)

    @property
    def handover_parts_s(self) -> dict[str, float]:
        """Return how much of the hand-over the decode node spent on what, by SpanName. Empty
        without a hand-over, and if the node tells no times."""
        if self.first_token_at is None or self.handover_at is None or not self.work:
            return {}
        parts: dict[str, float] = dict.fromkeys(HANDOVER_PARTS, 0.0)
        for each in self.work:
            start, end = max(each.start, self.first_token_at), min(each.end, self.handover_at)
            if each.fetched and end > start and each.span.name in parts:
                parts[each.span.name] += end - start
        return parts

    def node_queue_s(self, until: float = inf) -> float:
        """Return how long the request waited on nodes before `until`.

        Waiting on a decode node counts from token 1 on: before, a prefill node was busy with it.
        """
        total = 0.0
        for each in self.work:
            if each.span.name == SpanName.QUEUE:
                start = max(each.start, self.first_token_at or 0.0) if each.fetched else each.start
                total += max(0.0, min(each.end, until) - start)
        return total

    def queue_s(self, arrival: float) -> float | None:
        """Return how long the request waited: at the gate, for a choice of nodes, and on nodes.
        None if it was never sent to a node. `arrival`: its own, or when this router took it over.
        """
        if self.dispatched_at is None:
            return None
        return max(0.0, self.dispatched_at - self._came(arrival)) + self.node_queue_s()

    def _came(self, arrival: float) -> float:
        """Return when the request began to wait on this router."""
        return self.entered_at or self.adopted_at or arrival

    @property
    def scheduled_at(self) -> float | None:
        """Return when a node had it and it waited no more for token 1; None if no node had it."""
        if self.dispatched_at is None:
            return None
        until = self.first_token_at or inf
        return min(until, self.dispatched_at + self.node_queue_s(until))

    def told(self, request: Request, failure: BatonError | None) -> str:
        """Return a line for the log: the outcome, and the time that each stage took.

        A stage in which the request ended lasts until that end. The queue is all waiting, that on
        nodes too. The hand-over is a part of the decode stage: from token 1 to the decode node's
        first event.
        """
        why = "" if failure is None else f"; {failure.http_status} {failure.code}"
        if failure is not None and failure.http_status >= OWN_WORDS:
            why += f": {failure.message}"
        if self.terms.grant.tenant:
            why = f", tenant {self.terms.grant.tenant}{why}"
        end, came = self.finished_at or request.arrival, self._came(request.arrival)
        prefill_node = self.decode_node if self.local_prefill else self.prefill_node
        waited_s = self.queue_s(request.arrival)
        stages = [f"queue {_ms(0.0, end - came if waited_s is None else waited_s)}"]
        if came > request.arrival:
            before = "intake" if self.adopted_at is None else "elsewhere"
            stages.insert(0, f"{before} {_ms(request.arrival, came)}")
        if self.scheduled_at is not None and not self.pooled:
            took = _ms(self.scheduled_at, self.first_token_at or end)
            stages.append(f"prefill {took} on {prefill_node}")
        elif self.scheduled_at is not None:
            stages.append(f"pooling {_ms(self.scheduled_at, end)}")
        if self.handover_s is not None:
            stages.append(f"hand-over {round(self.handover_s * 1000)} ms")
        if self.first_token_at is not None:
            stages.append(f"decode {_ms(self.first_token_at, end)} on {self.decode_node}")
        return (
            f"{self.outcome} in {_ms(request.arrival, end)}: {', '.join(stages)};"
            f" {len(request.prompt_ids)} prompt tokens ({self.cached_tokens} cached),"
            f" {self.output_tokens} output tokens, {self.retries} retries{why}"
        )

    def tpot_s(self, samples: int) -> float | None:
        """Return the mean seconds per token after the first; None without a second token."""
        tokens = self.output_tokens / samples - 1
        if self.first_token_at is None or self.finished_at is None or tokens <= 0:
            return None
        return (self.finished_at - self.first_token_at) / tokens


def _ms(start: float, end: float) -> str:
    return f"{max(0, round((end - start) * 1000))} ms"
