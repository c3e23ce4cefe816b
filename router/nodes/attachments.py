"""Attachments: the requests that this router has on one node, and which events they get.

Not here: the session itself (session.py). No I/O; event loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

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

if TYPE_CHECKING:
    from router.nodes.session import NodeSession

FEW: Final = 4


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


class Attachments:
    """The attempts at one node.

    `by_id`: the attempts by request id; read only. `tokens`: prompt tokens that the node has yet to
    compute for them. `unreported_tokens`: those of `tokens` that were sent since the node last
    reported its load. `pooling`: how many of the requests have pooled inputs.
    """

    def __init__(self) -> None:
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

    def begin(self, attempt: Attempt) -> bool:
        """Note that the attempt's first token has come, so its prompt is computed.

        Returns True if that changes `tokens`.
        """
        attempt.begun = True
        if not attempt.tokens:
            return False
        self.tokens -= attempt.tokens
        attempt.tokens = 0
        return True


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
