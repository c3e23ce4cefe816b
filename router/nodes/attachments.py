"""Attachments: the requests that this router has on one node, and which events they get.

Each event goes to the request that it names, if that is attached in the same epoch: first those of
plain requests, whose tokens are logged later (router/store/guard.py), then those of resumable
ones, when the tokens of all of them are logged. Not here: the session itself (session.py). Event
loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from baton.protocol.events import (
    Encoded,
    HandleReady,
    NodeStep,
    NodeTimings,
    Pooled,
    RequestFailed,
    Subscribed,
    TokenEvent,
)
from baton.protocol.messages import AbortRequest, RouterMessage
from baton.runtime.failpoints import FAILPOINTS
from router.nodes.health import HealthStats

if TYPE_CHECKING:
    from router.nodes.session import NodeSession

FEW: Final = 4
PART_EVENTS: Final = 256  # events routed in one turn of the loop: some 5 ms with their clients


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The stream to `node_id` broke: the node aborts all requests that this router gave it.

    `drained`: the node ended the stream in good order, without requests, and without exports that
    had yet to be fetched. `silent`: its machine answers no pings, so other nodes do not hear of its
    death either. `stalled`: the node answers, but its engine hangs. `suspect`: the node may have
    died of the request that gets this event.
    """

    node_id: str
    reason: str
    drained: bool = False
    silent: bool = False
    stalled: bool = False
    suspect: bool = False


RequestEvent = (
    TokenEvent | HandleReady | Subscribed | Pooled | Encoded | RequestFailed | NodeTimings
)
NodeEvent = RequestEvent | SessionLost


@dataclass(slots=True, eq=False)
class Attempt:
    """One request at one node, under one epoch. The node's events of the request go to `deliver`.

    `tokens`: prompt tokens that the node has to compute. `begun`: a token has come from the node.
    `pooled`: the inputs are pooled, in a forward between two engine steps. `session` and `boot_id`:
    the session with the node and the node's incarnation; NodeSession.attach sets both.
    """

    request_id: str
    epoch: int
    deliver: Callable[[NodeEvent], None]
    tokens: int = 0
    begun: bool = False
    pooled: bool = False
    session: NodeSession | None = None
    boot_id: str = ""

    @property
    def connected(self) -> bool:
        """Whether the session with this incarnation of the node still stands."""
        return self.session is not None and self.session.boot_id == self.boot_id

    def send(self, message: RouterMessage) -> None:
        """Queue a message to the node; do nothing if the node is not connected."""
        if self.session is not None and self.session.boot_id == self.boot_id:
            self.session.send(message)

    def leave(self, *, abort: bool) -> None:
        """Deliver no more events. `abort`: also tell the node to stop the request."""
        self.deliver = _nobody  # breaks the reference cycle between receiver and attempt
        if self.session is not None and self.session.boot_id == self.boot_id:
            self.session.detach(self.request_id)
            if abort:
                self.session.send(AbortRequest(self.request_id, self.epoch))


def _nobody(event: NodeEvent) -> None:
    """Ignore an event for an attempt that was left."""


class StepLog(Protocol):
    """What a session needs of StoreGuard (router/store/guard.py). `note` logs a plain request's
    tokens soon, and returns True; those of a resumable one are appended before they are shown."""

    def note(self, event: TokenEvent) -> bool: ...

    def shows_logged(self, request_id: str) -> bool: ...

    async def append(self, events: Sequence[TokenEvent]) -> None: ...


class Attachments:
    """The attempts at one node. `stats` counts the events that none of them waits for.

    `by_id`: the attempts by request id; read only. `tokens`: prompt tokens that the node has yet to
    compute for them. `unreported_tokens`: those of `tokens` that were sent since the node last
    reported its load. `pooling`: how many of the requests have pooled inputs.
    """

    def __init__(self, log: StepLog, stats: HealthStats) -> None:
        self._log = log
        self._stats = stats
        self.by_id: dict[str, Attempt] = {}
        self._unreported: dict[str, int] = {}  # request -> prompt tokens
        self.tokens = 0
        self.unreported_tokens = 0
        self.pooling = 0

    def add(self, attempt: Attempt) -> None:
        """Add an attempt. It replaces another attempt of the same request, if there is one."""
        if attempt.request_id in self.by_id:
            self.remove(attempt.request_id)
        self.by_id[attempt.request_id] = attempt
        self._unreported[attempt.request_id] = attempt.tokens
        self.tokens += attempt.tokens
        self.unreported_tokens += attempt.tokens
        self.pooling += attempt.pooled

    def remove(self, request_id: str) -> bool:
        """Remove a request's attempt; do nothing if there is none.

        Returns True if that changed the counted prompt tokens.
        """
        attempt = self.by_id.pop(request_id, None)
        unreported = self._unreported.pop(request_id, 0)
        self.unreported_tokens -= unreported
        if attempt is None:
            return unreported > 0
        self.tokens -= attempt.tokens
        self.pooling -= attempt.pooled
        return unreported > 0 or attempt.tokens > 0

    def clear(self) -> list[Attempt]:
        """Remove and return all attempts."""
        removed, self.by_id = list(self.by_id.values()), {}
        self.tokens = self.pooling = 0
        self.load_reported()
        return removed

    def load_reported(self) -> None:
        """Note that the node has reported its load, which contains all requests sent so far."""
        self._unreported.clear()
        self.unreported_tokens = 0

    def receiver(self, event: RequestEvent) -> Attempt | None:
        """Return the attempt that `event` is for; None if it is gone or has another epoch."""
        attempt = self.by_id.get(event.request_id)
        if attempt is None or attempt.epoch == event.epoch:
            return attempt
        # Epoch 0: the node refused the message before it could read the epoch.
        return attempt if isinstance(event, RequestFailed) and event.epoch == 0 else None

    def begin(self, attempt: Attempt) -> None:
        """Note that the attempt's first token has come, so its prompt is computed."""
        attempt.begun = True
        self.tokens -= attempt.tokens
        attempt.tokens = 0

    # ---- events ----

    async def show(self, events: Sequence[RequestEvent]) -> None:
        """Give the events to their attempts, in order; those of resumable requests last.

        Many events go in parts, and the requests that got one run before the next.
        """
        later: list[RequestEvent] = []
        for start in range(0, len(events), PART_EVENTS):
            if start:
                await asyncio.sleep(0)
            self._route(events[start : start + PART_EVENTS], later)
        if len(later) > PART_EVENTS:
            await self._show_in_parts(later)
        elif later:
            await self._append(later)
            self._route(later)

    async def _show_in_parts(self, events: Sequence[RequestEvent]) -> None:
        """Append the tokens to the log, then give the events to their attempts, part by part.

        While one part goes to its requests, the store writes the next.
        """
        starts = range(0, len(events), PART_EVENTS)
        parts = [events[start : start + PART_EVENTS] for start in starts]
        logged = [asyncio.create_task(self._append(part)) for part in parts]
        try:
            for part, done in zip(parts, logged, strict=True):
                await done
                self._route(part)
                await asyncio.sleep(0)  # the requests that got these events run first
        finally:
            for task in logged:
                task.cancel()
            await asyncio.gather(*logged, return_exceptions=True)

    async def _append(self, events: Sequence[RequestEvent]) -> None:
        current = [e for e in events if isinstance(e, TokenEvent) and self.receiver(e)]
        if current:
            await self._log.append(current)
            FAILPOINTS.hit("logged_not_sent")

    def _route(
        self, events: Sequence[RequestEvent], later: list[RequestEvent] | None = None
    ) -> None:
        """Give the events to their attempts, but add those that have to wait to `later`: tokens of
        resumable requests, and what follows them. `later` None: they are logged."""
        for event in events:
            attempt = self.receiver(event)
            if attempt is None:
                self._stats.stale_events += 1
                continue
            if isinstance(event, TokenEvent):
                if later is not None:
                    FAILPOINTS.hit("sampled_not_logged")
                    if not self._log.note(event):
                        later.append(event)
                        continue
                if not attempt.begun:
                    self.begin(attempt)
            elif later and self._log.shows_logged(event.request_id):
                later.append(event)
                continue
            attempt.deliver(event)


def suspects(attached: Collection[Attempt], num_running: int) -> set[str]:
    """Return the ids of the requests that a node may have died of.

    A request that kills nodes usually does so when it begins. If the node had at most FEW requests,
    all of them are suspects. Otherwise the requests without a token yet are, if they are at most
    FEW. Others are innocent: nodes also die by themselves. `num_running`: requests of all routers
    that the node has reported last.
    """
    beginning = {each.request_id for each in attached if not each.begun}
    if max(len(attached), num_running) <= FEW:
        return {each.request_id for each in attached}
    return beginning if len(beginning) <= FEW else set()


def in_order(step: NodeStep) -> tuple[RequestEvent, ...]:
    """Return the events of a step in the order of delivery: of each request first its handle, then
    its times, its tokens, then its failure."""
    return (
        *step.handles, *step.subscribed, *step.pooled, *step.encoded, *step.timings, *step.tokens,
        *step.failed,
    )  # fmt: skip
