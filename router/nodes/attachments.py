"""The requests of this router on one session with a node, and the events that they get.

Not here: the session itself (session.py). No I/O; event loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from baton.protocol.events import (
    HandleReady,
    NodeStep,
    Pooled,
    RequestFailed,
    Subscribed,
    TokenEvent,
)

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
class Attachment:
    """One request on this session: events of `epoch` go to `deliver`.

    `tokens`: prompt tokens that the node has to compute. `begun`: a token has come from there.
    `pooled`: its inputs are pooled, in forwards between the steps of others.
    """

    request_id: str
    epoch: int
    deliver: Callable[[NodeEvent], None]
    tokens: int = 0
    begun: bool = False
    pooled: bool = False


class Attachments:
    """All of them, by request. `tokens`: prompt tokens that they still have to compute.
    `unreported_tokens`: of these, sent since the node last reported its load. `pooling`: requests
    whose inputs are pooled."""

    def __init__(self) -> None:
        self._by_id: dict[str, Attachment] = {}
        self._unreported: dict[str, int] = {}  # request -> prompt tokens
        self.tokens = 0
        self.unreported_tokens = 0
        self.pooling = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, attachment: Attachment) -> None:
        """A request that is not among them."""
        self._by_id[attachment.request_id] = attachment
        self._unreported[attachment.request_id] = attachment.tokens
        self.tokens += attachment.tokens
        self.unreported_tokens += attachment.tokens
        self.pooling += attachment.pooled

    def remove(self, request_id: str) -> bool:
        """Twice is safe. True: its prompt tokens were counted, and are not any more."""
        attachment = self._by_id.pop(request_id, None)
        unreported = self._unreported.pop(request_id, 0)
        self.unreported_tokens -= unreported
        if attachment is None:
            return unreported > 0
        self.tokens -= attachment.tokens
        self.pooling -= attachment.pooled
        return unreported > 0 or attachment.tokens > 0

    def clear(self) -> list[Attachment]:
        """Remove and return all of them."""
        removed, self._by_id = list(self._by_id.values()), {}
        self.tokens = self.pooling = 0
        self.load_reported()
        return removed

    def load_reported(self) -> None:
        """The load that the node reports contains all requests sent so far."""
        self._unreported.clear()
        self.unreported_tokens = 0

    def holds(self, request_id: str) -> bool:
        return request_id in self._by_id

    def receiver(self, event: RequestEvent) -> Attachment | None:
        """The request that `event` is for; None if it is gone or in another epoch."""
        attachment = self._by_id.get(event.request_id)
        if attachment is None:
            return None
        # Epoch 0: the node refused the message before it could read the epoch.
        unread = isinstance(event, RequestFailed) and event.epoch == 0
        return attachment if unread or attachment.epoch == event.epoch else None

    def begin(self, attachment: Attachment) -> bool:
        """Its token 1 has come, so its prompt is computed. True if that changes `tokens`."""
        attachment.begun = True
        if not attachment.tokens:
            return False
        self.tokens -= attachment.tokens
        attachment.tokens = 0
        return True

    def suspects(self, num_running: int) -> set[str]:
        """See the function of this name."""
        return suspects(self._by_id.values(), num_running)


def suspects(attached: Collection[Attachment], num_running: int) -> set[str]:
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
