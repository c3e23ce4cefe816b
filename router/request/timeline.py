"""The timeline of a request: what happened to it, when, and on which node.

A journey notes a TimelineMark at each milestone. A mark ends one stage and begins the next, so the
stages cover the time from the first byte that came to the last byte that went, without a gap and
without an overlap:

    (arrival)  -> intake     its body is read, checked and tokenized; `elsewhere` if ADOPTED follows
    ENTERED    -> gate       waits to be let in
    ADOPTED    -> placement  this router goes on with a request of a router that is gone
    ADMITTED   -> placement  nodes are chosen; if there is none, the request waits for one
    ENCODING   -> encoding   encode nodes turn its images into rows of the model's input
    PREFILLING -> prefill    a node computes the prompt: a prefill node, or the decode node itself
    PREFILLED  -> hand-over  token 1 is out; the decode node does not have all of the KV yet
    FETCHING   -> hand-over  another decode node fetches an export that is still there
    DECODING   -> decode     the decode node has sent its first event
    MOVING     -> migration  a decode node has exported the KV and let go of the request
    FAILED     -> retry      a node failed; the next epoch begins
    POOLING    -> pooling    nodes compute the vectors of its inputs
    FINISHED   -> reply      nodes are done; the rest of the answer is written
    (end)

EXPORTED and SUBSCRIBED begin no stage: the KV moves while the prompt is computed. They bound the
span of the transfer, which lies beside the stages. So do a resumable request's appends to the log.

With its first token a node tells where the time went inside it (NodeWork). That belongs to the
prefill, or to the hand-over if the node fetched KV; then it may begin before that stage. Clocks of
nodes differ, so a node tells durations, and they are counted back from when the router heard them.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import msgspec

from baton.protocol.events import NodeSpan, SpanName
from router.request.request_ids import names

if TYPE_CHECKING:
    from router.request.trace import RequestTrace


class Milestone(StrEnum):
    """What a mark notes."""

    ENTERED = "entered"
    ADOPTED = "adopted"
    ADMITTED = "admitted"
    ENCODING = "encoding"
    PREFILLING = "prefilling"
    EXPORTED = "exported"
    SUBSCRIBED = "subscribed"
    PREFILLED = "prefilled"
    FETCHING = "fetching"
    DECODING = "decoding"
    MOVING = "moving"
    FAILED = "failed"
    POOLING = "pooling"
    FINISHED = "finished"


GATE: Final = "gate"
PREFILL: Final = "prefill"
POOLING: Final = "pooling"
TRANSFER: Final = "transfer"
REPLY: Final = "reply"
LOG_APPEND: Final = "log-append"
MOST_APPENDS: Final = 4  # of a request that are told one by one
STAGES: Final = {
    Milestone.ENTERED: GATE,
    Milestone.ADOPTED: "placement",
    Milestone.ADMITTED: "placement",
    Milestone.ENCODING: "encoding",
    Milestone.PREFILLING: PREFILL,
    Milestone.PREFILLED: "hand-over",
    Milestone.FETCHING: "hand-over",
    Milestone.DECODING: "decode",
    Milestone.MOVING: "migration",
    Milestone.FAILED: "retry",
    Milestone.POOLING: POOLING,
    Milestone.FINISHED: REPLY,
}
# The first stage, by the first mark; else the gate.
BEFORE: Final = {Milestone.ENTERED: "intake", Milestone.ADOPTED: "elsewhere"}
_OF_FETCHES: Final = (STAGES[Milestone.PREFILLED], STAGES[Milestone.MOVING])
_MOVES_KV: Final = frozenset(
    {Milestone.EXPORTED, Milestone.SUBSCRIBED, Milestone.FETCHING, Milestone.MOVING}
)

_HAS_KV: Final = frozenset({Milestone.DECODING, Milestone.FAILED, Milestone.FINISHED})


class TimelineMark(msgspec.Struct, frozen=True, gc=False):
    """A milestone of a request. `at`: seconds of the router's clock. `node`: the node of the stage
    that begins. `tokens`: how many the client had by then. `why`: what failed."""

    at: float
    milestone: Milestone
    node: str = ""
    epoch: int = 0
    tokens: int = 0
    why: str = ""


class NodeWork(msgspec.Struct, frozen=True):
    """A span of a node's work on a request. `start`, `end` and `told_at`, when the router heard of
    it: seconds of the router's clock. `fetched`: the node got the KV from another one."""

    span: NodeSpan
    node: str
    start: float
    end: float
    told_at: float
    epoch: int
    fetched: bool


@dataclass(frozen=True, slots=True)
class StageSpan:
    """What took the request's time from `start` to `end`, in seconds of the router's clock. The
    client got the tokens [first_token, last_token) in it. `subscribed`: of a transfer, when the
    decode node began to fetch; None if it did not."""

    stage: str
    start: float
    end: float
    node: str = ""
    epoch: int = 0
    first_token: int = 0
    last_token: int = 0
    why: str = ""
    subscribed: float | None = None


@dataclass(slots=True)
class LogAppends:
    """How long the store took to log the tokens of a resumable request, which shows no other ones.

    `longest`: the appends that took longest, at most MOST_APPENDS: (seconds, start), a heap. Those
    of two nodes may overlap. The request's RunLog alone writes.
    """

    count: int = 0
    total_s: float = 0.0
    longest: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])

    def add(self, start: float, end: float) -> None:
        """Note an append from `start` to `end`, with success or without."""
        self.count += 1
        self.total_s += end - start
        heapq.heappush(self.longest, (end - start, start))
        if len(self.longest) > MOST_APPENDS:
            heapq.heappop(self.longest)

    @property
    def spans(self) -> list[StageSpan]:
        """The longest ones, in the order of time."""
        return [
            StageSpan(LOG_APPEND, start, start + took)
            for took, start in sorted(self.longest, key=lambda each: each[1])
        ]

    @property
    def longest_s(self) -> float:
        return max((took for took, _ in self.longest), default=0.0)


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """A request as the ring keeps it: times and counts, nothing of its content.

    `arrival`: seconds of the router's clock; `arrived_at`: the same in wall-clock seconds. `now`:
    until when a request is told that is still under way.
    """

    request_id: str
    arrival: float
    arrived_at: float
    prompt_tokens: int
    error: str
    trace: RequestTrace
    now: float | None = None

    @property
    def end(self) -> float:
        trace = self.trace
        return trace.answered_at or trace.finished_at or self.now or self.arrival

    @property
    def total_s(self) -> float:
        return self.end - self.arrival

    @property
    def marks(self) -> list[TimelineMark]:
        """All marks in order, with those of the times that stand in the trace."""
        trace, all_tokens = self.trace, self.trace.output_tokens
        known = trace.marks[0].tokens if trace.marks else all_tokens
        before = (
            (trace.adopted_at, Milestone.ADOPTED, known),
            (trace.entered_at, Milestone.ENTERED, 0),
            (trace.admitted_at, Milestone.ADMITTED, 0),
        )
        found = [
            TimelineMark(max(self.arrival, at), milestone, tokens=tokens)
            for at, milestone, tokens in before
            if at is not None
        ]
        found += trace.marks
        if trace.finished_at is not None and trace.answered_at is not None:
            found.append(TimelineMark(trace.finished_at, Milestone.FINISHED, tokens=all_tokens))
        return found

    @property
    def stages(self) -> list[StageSpan]:
        return stages_of(self.arrival, self.marks, self.end, self.trace.output_tokens)

    @property
    def transfers(self) -> list[StageSpan]:
        return transfers_of(self.marks, self.end)

    @property
    def appends(self) -> list[StageSpan]:
        """The longest appends to the log of a resumable request, up to the end."""
        log, end = self.trace.log_appends, self.end
        begun = [] if log is None else [span for span in log.spans if span.start <= end]
        return [replace(span, end=min(span.end, end)) for span in begun]

    def told(self) -> str:
        """Return the stages with what nodes did in them, for the log of a slow request."""
        stages = [_stage_told(stage, work, self.arrival) for stage, work in self.work]
        log = self.trace.log_appends
        took = f", {log.count} log appends {_ms(log.total_s)} ms" if log is not None else ""
        return "; timeline: " + ", ".join(stages) + took

    @property
    def work(self) -> list[tuple[StageSpan, list[NodeWork]]]:
        """Return each stage with what nodes did for it: the work of a node that fetched belongs to
        the hand-over (or migration), all other work to the prefill (or pooling). A preemption is
        told when it ends, belongs to that stage, and may begin before it: that part is cut off."""
        found: list[tuple[StageSpan, list[NodeWork]]] = [(stage, []) for stage in self.stages]
        for each in self.trace.work:
            kinds = _OF_FETCHES if each.fetched else (PREFILL, POOLING)
            begun = [it for it in found if it[0].epoch <= each.epoch and it[0].stage != REPLY]
            if each.span.name == SpanName.PREEMPTED:
                stage, work = [it for it in begun if it[0].start <= each.told_at][-1]
                start = max(each.start, stage.start)
                work.append(msgspec.structs.replace(each, start=start, end=max(each.end, start)))
            else:  # a decode node's first event may come before that of the prefill node
                ([it for it in begun if it[0].stage in kinds] or begun)[-1][1].append(each)
        return found


class TimelineRing:
    """The timelines of the requests that ended last; the oldest one goes first. Event loop only."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[str, TimelineEntry] = OrderedDict()

    def newest(self, domain: str | None = None) -> Iterator[TimelineEntry]:
        """Yield the entries, the newest first. `domain`: only requests of tenants in this domain;
        None: of all tenants."""
        for entry in reversed(self._entries.values()):
            if domain in (None, entry.trace.terms.grant.domain):
                yield entry

    def slowest(self, domain: str | None = None) -> Iterator[TimelineEntry]:
        """As `newest`, but those that took longest first."""
        return iter(sorted(self.newest(domain), key=lambda entry: -entry.total_s))

    def add(self, entry: TimelineEntry) -> None:
        """Keep the timeline of a request that has ended. A second one of the same name takes the
        place of the first, unless it was refused."""
        was_refused = entry.error and not entry.trace.output_tokens
        if not self._capacity or (was_refused and entry.request_id in self._entries):
            return
        self._entries.pop(entry.request_id, None)  # asked for again: it is the newest now
        self._entries[entry.request_id] = entry
        if len(self._entries) > self._capacity:
            self._entries.popitem(last=False)

    def find(self, asked: str, domain: str | None = None) -> TimelineEntry | None:
        """Return the newest entry that `asked` names: by engine id, reply id or `x-request-id`."""
        found = (entry for entry in self.newest(domain) if names(asked, entry.request_id))
        return next(found, None)


def stages_of(
    arrival: float, marks: Sequence[TimelineMark], end: float, tokens: int
) -> list[StageSpan]:
    """Return the stages from `arrival` to `end`, in order. Each begins where the one before ends.

    `tokens`: how many the client got in all.
    """
    spans: list[StageSpan] = []
    begun = [(mark, STAGES[mark.milestone]) for mark in marks if mark.milestone in STAGES]
    first = BEFORE.get(begun[0][0].milestone, GATE) if begun else GATE
    opened = TimelineMark(arrival, Milestone.ENTERED), first
    for (mark, stage), after in zip([opened, *begun], [*begun, None], strict=True):
        until, had = (end, tokens) if after is None else (after[0].at, after[0].tokens)
        spans.append(
            StageSpan(stage, mark.at, until, mark.node, mark.epoch, mark.tokens, had, mark.why)
        )
    return spans


def transfers_of(marks: Sequence[TimelineMark], end: float) -> list[StageSpan]:
    """Return when KV was on its way: from the moment that an export was known, or was fetched
    again, to the first event of the decode node or to the failure."""
    spans: list[StageSpan] = []
    opened: TimelineMark | None = None
    subscribed: float | None = None
    for mark in marks:
        if mark.milestone in _MOVES_KV:
            first = opened or mark
            opened = msgspec.structs.replace(first, node=mark.node or first.node)
            subscribed = mark.at if mark.milestone is Milestone.SUBSCRIBED else subscribed
        elif opened is not None and mark.milestone in _HAS_KV:
            spans.append(_transfer(opened, mark.at, mark.why, subscribed))
            opened = subscribed = None
    if opened is not None:
        spans.append(_transfer(opened, end, "", subscribed))
    return spans


def _transfer(opened: TimelineMark, end: float, why: str, subscribed: float | None) -> StageSpan:
    return StageSpan(
        TRANSFER, opened.at, end, opened.node, opened.epoch, why=why, subscribed=subscribed
    )


def _stage_told(stage: StageSpan, work: Sequence[NodeWork], arrival: float) -> str:
    place = f" on {stage.node}" if stage.node else ""
    inside = "".join(
        f" [{each.node}: {each.span.name} {_ms(each.end - each.start)} ms]" for each in work
    )
    start, end = _ms(stage.start - arrival), _ms(stage.end - arrival)
    return f"{stage.stage} {start} to {end} ms{place}{inside}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f}"
