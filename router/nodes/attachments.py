"""The attempts at one node: the requests that this router has there, and the events that they get.

Not here: the session itself (session.py). No I/O; event loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.protocol.events import (
    HandleReady,
    NodeStep,
    Pooled,
    RequestFailed,
    Subscribed,
    TokenEvent,
)
from baton.protocol.messages import AbortRequest, RouterMessage

if TYPE_CHECKING:
    from router.nodes.session import NodeSession

FEW: Final = 4


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The stream to `node_id` broke: the node aborts all requests that this router gave it.

    `drained`: it ended in good order. The node had nothing left, and no export that was not
    fetched. `silent`: its machine answers no pings, so nobody else hears of it either. `stalled`:
    it is there, but its engine hangs. `suspect`: it may have died of this request.
    """

    node_id: str
    reason: str
    drained: bool = False
    silent: bool = False
    stalled: bool = False
    suspect: bool = False


RequestEvent = TokenEvent | HandleReady | Subscribed | Pooled | RequestFailed
NodeEvent = RequestEvent | SessionLost


@dataclass(slots=True, eq=False)
class Attempt:
    """One request at one node, under one epoch: the node's events of it go to `deliver`.

    `tokens`: prompt tokens that the node has to compute. `begun`: a token has come from there.
    `pooled`: its inputs are pooled, in forwards between the steps of others. `session` and
    `boot_id`: which incarnation of which node it is at; NodeSession.attach sets them.
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
        """Does the session with this incarnation of the node still stand?"""
        return self.session is not None and self.session.boot_id == self.boot_id

    def send(self, message: RouterMessage) -> None:
        """Queue a message to the node; dropped if it is not connected."""
        if self.session is not None and self.session.boot_id == self.boot_id:
            self.session.send(message)

    def leave(self, *, abort: bool) -> None:
        """Take no more events of the node. `abort`: its work has not ended yet, stop it."""
        self.deliver = _nobody  # whom it delivered to knows this attempt: no cycle is left behind
        if self.session is not None and self.session.boot_id == self.boot_id:
            self.session.detach(self.request_id)
            if abort:
                self.session.send(AbortRequest(self.request_id, self.epoch))


def _nobody(event: NodeEvent) -> None:
    """Gets what comes for an attempt that was left."""


class Attachments:
    """`by_id`: the attempts by request, to be read only. `tokens`: prompt tokens that they still
    have to compute. `unreported_tokens`: of these, sent since the node last reported its load.
    `pooling`: requests whose inputs are pooled."""

    def __init__(self) -> None:
        self.by_id: dict[str, Attempt] = {}
        self._unreported: dict[str, int] = {}  # request -> prompt tokens
        self.tokens = 0
        self.unreported_tokens = 0
        self.pooling = 0

    def add(self, attempt: Attempt) -> None:
        """In place of another attempt at the same request, if there is one."""
        if attempt.request_id in self.by_id:
            self.remove(attempt.request_id)
        self.by_id[attempt.request_id] = attempt
        self._unreported[attempt.request_id] = attempt.tokens
        self.tokens += attempt.tokens
        self.unreported_tokens += attempt.tokens
        self.pooling += attempt.pooled

    def remove(self, request_id: str) -> bool:
        """Twice is safe. True: its prompt tokens were counted, and are not any more."""
        attempt = self.by_id.pop(request_id, None)
        unreported = self._unreported.pop(request_id, 0)
        self.unreported_tokens -= unreported
        if attempt is None:
            return unreported > 0
        self.tokens -= attempt.tokens
        self.pooling -= attempt.pooled
        return unreported > 0 or attempt.tokens > 0

    def clear(self) -> list[Attempt]:
        """Remove and return all of them."""
        removed, self.by_id = list(self.by_id.values()), {}
        self.tokens = self.pooling = 0
        self.load_reported()
        return removed

    def load_reported(self) -> None:
        """The load that the node reports contains all requests sent so far."""
        self._unreported.clear()
        self.unreported_tokens = 0

    def receiver(self, event: RequestEvent) -> Attempt | None:
        """The request that `event` is for; None if it is gone or in another epoch."""
        attempt = self.by_id.get(event.request_id)
        if attempt is None:
            return None
        # Epoch 0: the node refused the message before it could read the epoch.
        unread = isinstance(event, RequestFailed) and event.epoch == 0
        return attempt if unread or attempt.epoch == event.epoch else None

    def begin(self, attempt: Attempt) -> bool:
        """Its token 1 has come, so its prompt is computed. True if that changes `tokens`."""
        attempt.begun = True
        if not attempt.tokens:
            return False
        self.tokens -= attempt.tokens
        attempt.tokens = 0
        return True


def suspects(attached: Collection[Attempt], num_running: int) -> set[str]:
    """Ids of the requests that a node may have died of: these must end, the others go on.

    A request that kills nodes does so where it begins. So a death counts against the requests that
    the node had just begun, if they are few, and against all requests that it ran, if those were
    few. A request in mid-stream among many others is innocent: nodes also die by themselves.
    `num_running`: as the node reported last, with the requests of other routers.
    """
    beginning = {each.request_id for each in attached if not each.begun}
    if max(len(attached), num_running) <= FEW:
        return {each.request_id for each in attached}
    return beginning if len(beginning) <= FEW else set()


def in_order(step: NodeStep) -> tuple[RequestEvent, ...]:
    """The events of a step. A request's handle comes before its tokens, its failure after them."""
    return (*step.handles, *step.subscribed, *step.pooled, *step.tokens, *step.failed)
