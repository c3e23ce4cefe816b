"""A request on a session with a node, and the events that it gets. Values, no behaviour."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.protocol.events import HandleReady, Pooled, RequestFailed, Subscribed, TokenEvent


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The stream to `node_id` broke: it aborts whatever this router gave it.

    `drained`: it ended in good order. The node had nothing left, and no export that was not
    fetched. `silent`: its machine answers no pings, so nobody else hears of it either. `stalled`:
    it is there, but its engine hangs. `suspect`: it may have died of this request (suspects.py).
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
