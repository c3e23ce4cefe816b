"""The requests that a node serves now, by id, each with its session. Event loop only.

Epochs fence. A submission replaces an older epoch of the same request (its router has lost it), and
is refused when a newer or equal epoch is here already.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

from baton.engine.state.sequence import RequestGroup
from baton.node.session import RouterSession
from baton.node.tracing import RequestSpans
from baton.protocol.errors import BatonError, Fenced
from baton.protocol.events import (
    BlockEvent,
    NodeSpan,
    NodeStep,
    NodeTimings,
    RequestFailed,
    SpanName,
    TokenEvent,
)
from baton.protocol.handles import EncodedImage, KVHandle, NodeLoad
from baton.protocol.messages import SubmitPool
from baton.protocol.request import Request

T = TypeVar("T")
OfSession: TypeAlias = defaultdict[RouterSession, list[T]]


@dataclass(eq=False)
class NodeRequest:
    """One request on this node. `ended` is done when its last event was sent, or it cannot go on.

    `prefilled`: set when token 1 is computed, or when no router will report it. `cancelled`: nobody
    wants the request any more. `leaving`: it was asked to move to another node. `export`: the
    export of its prompt, as long as the export ends with the request.
    """

    request: Request
    handle: KVHandle | None
    session: RouterSession
    ended: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    prefilled: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    cancelled: bool = False
    leaving: bool = False
    pool: SubmitPool | None = None  # set if the request asks for vectors, not for tokens
    export: KVHandle | None = None
    encoded: tuple[EncodedImage, ...] = ()  # images whose rows an encode node holds
    spans: RequestSpans | None = None  # None: no trace of it is wanted
    live: set[int] = field(init=False)  # samples (results, for beams) that have not ended here
    stopped: set[int] = field(default_factory=set[int])  # samples that nobody wants any more
    noted: list[NodeSpan] = field(default_factory=list[NodeSpan])  # its times, not told yet
    has_begun: bool = False  # its times up to its first token are told
    num_pauses: int = 0  # of preemptions, that are told

    def __post_init__(self) -> None:
        self.live = set(range(self.request.params.num_outputs)) - set(self.request.ended)

    @property
    def wanted(self) -> Request:
        """The request without the samples that were stopped since it came. Any thread."""
        if not self.stopped:
            return self.request
        return replace(self.request, ended=(*self.request.ended, *tuple(self.stopped)))

    def note(self, name: SpanName, start: float, end: float, **more: Any) -> None:
        """Note what took the request's time from `start` to `end` (clock of this process).

        `more`: further fields of NodeSpan.
        """
        self.noted.append(NodeSpan(name, self._us(start), self._us(end), **more))

    def timings(self, begun: RequestGroup, now: float) -> NodeTimings:
        """Return where the time went until the request got its first token here, just now; after
        that, the pauses that have not been told."""
        if not self.has_begun:
            self._note_first(begun, now)
        for start, end in begun.pauses[self.num_pauses :]:
            self.num_pauses += 1
            self.note(SpanName.PREEMPTED, start, end)
        spans, self.noted, self.has_begun = tuple(self.noted), [], True
        age_us = max(self._us(now), spans[-1].end_us if spans else 0)
        return NodeTimings(self.request.id, self.request.epoch, age_us, spans)

    def _note_first(self, begun: RequestGroup, now: float) -> None:
        last = self.request.arrival + (self.noted[-1].end_us / 1e6 if self.noted else 0.0)
        scheduled_at = max(last, begun.scheduled_at or last)
        computed_at = max(scheduled_at, begun.computed_at or now)
        self.note(SpanName.QUEUE, last, scheduled_at)
        name = SpanName.COMPUTE if self.handle is None else SpanName.FIRST_STEP
        self.note(name, scheduled_at, computed_at, chunks=begun.num_chunks)

    def _us(self, at: float) -> int:
        return max(0, round((at - self.request.arrival) * 1e6))

    def sample_ended(self, sample: int) -> bool:
        """Note that the sample's last event is being sent; return whether all samples have
        ended.
        """
        self.live.discard(sample)
        return not self.live

    def stop(self, sample: int) -> None:
        """Stop a sample; if it was the last, end the request."""
        self.stopped.add(sample)
        if self.sample_ended(sample):
            self.end()

    def send(self, step: NodeStep) -> None:
        self.session.send(step)

    def end(self) -> None:
        """Note that the request's last event has been sent."""
        if not self.ended.done():
            self.ended.set_result(None)

    def break_off(self, error: BatonError) -> None:
        """End the request with `error`, which is raised to those who wait for `ended`."""
        if not self.ended.done():
            self.ended.set_exception(error)
            # Retrieve it, so that asyncio does not report it: perhaps nobody waits any more.
            self.ended.exception()

    def cancel(self) -> None:
        """Stop the request without an event; its task frees what it holds."""
        self.cancelled = True
        if self.task is not None:
            self.task.cancel()


def failure(request: Request, error: BatonError) -> RequestFailed:
    """Return what is sent to a router when `request` ends in `error`."""
    return RequestFailed(
        request.id, request.epoch, error.code, error.message, error.retryable, error.field
    )


class RequestTable:
    """The newest epoch of each request. An older epoch that still cleans up is not in the table."""

    def __init__(self) -> None:
        self._by_id: dict[str, NodeRequest] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[NodeRequest]:
        return iter(list(self._by_id.values()))

    def add(self, entry: NodeRequest) -> NodeRequest | None:
        """Add `entry`; return the older epoch that it replaces, or None. Raises Fenced."""
        request = entry.request
        older = self._by_id.get(request.id)
        if older is not None and older.request.epoch >= request.epoch:
            raise Fenced(
                f"request {request.id} runs here under epoch {older.request.epoch}, "
                f"epoch {request.epoch} came too late"
            )
        self._by_id[request.id] = entry
        return older

    def find(self, request_id: str, epoch: int | None = None) -> NodeRequest | None:
        """Return the request if it is here (under `epoch`, if given), else None."""
        entry = self._by_id.get(request_id)
        if entry is None or epoch not in (None, entry.request.epoch):
            return None
        return entry

    def find_upto(self, request_id: str, epoch: int) -> NodeRequest | None:
        """Return the request if it is here under `epoch` or an older one, else None."""
        entry = self._by_id.get(request_id)
        return None if entry is None or entry.request.epoch > epoch else entry

    def remove(self, entry: NodeRequest) -> None:
        """Forget `entry`, unless a newer epoch has replaced it."""
        if self._by_id.get(entry.request.id) is entry:
            del self._by_id[entry.request.id]

    def of(self, session: RouterSession) -> list[NodeRequest]:
        return [entry for entry in self._by_id.values() if entry.session is session]


@dataclass(slots=True)
class StepNews:
    """What one engine step brings, by the router session that it concerns. Event loop only.

    NodeShell makes one message of it per session. `block_events` concern all sessions that know the
    prefix map, everything else only one.
    """

    block_events: tuple[BlockEvent, ...] = ()
    tokens: OfSession[TokenEvent] = field(default_factory=lambda: defaultdict(list))
    failures: OfSession[RequestFailed] = field(default_factory=lambda: defaultdict(list))
    timings: OfSession[NodeTimings] = field(default_factory=lambda: defaultdict(list))

    @property
    def sessions(self) -> set[RouterSession]:
        return {*self.tokens, *self.failures, *self.timings}

    def add_timings(self, begun: list[RequestGroup], requests: RequestTable, now: float) -> None:
        """Add where the time of those requests went that have got their first token."""
        for each in begun:
            entry = requests.find(each.request.id, each.request.epoch)
            if entry is not None:
                self.timings[entry.session].append(entry.timings(each, now))

    def message(self, session: RouterSession, load: NodeLoad) -> NodeStep | None:
        """Return the message for one session; None if there is nothing to say."""
        step = NodeStep(
            tokens=tuple(self.tokens.get(session, ())),
            failed=tuple(self.failures.get(session, ())),
            load=session.changed_load(load),
            block_events=self.block_events if session.synced else (),
            timings=tuple(self.timings.get(session, ())),
        )
        told = step.tokens or step.failed or step.load or step.block_events or step.timings
        return step if told else None
