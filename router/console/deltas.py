"""What changed between two states of the console, and the state after a change. Pure.

A delta is bounded whatever the cluster's size: of many changed nodes it tells those first whose
state changed, then those that were told longest ago, MOST_NODES in all. The others follow in the
next deltas. So `told`, the state that a watcher has, may lag; without further changes it arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from router.api.timelines import RequestSummary
from router.console.views import (
    ConsoleDelta,
    ConsoleSnapshot,
    NodeCard,
    RequestCards,
    RequestsDelta,
)

T = TypeVar("T")
MOST_NODES: Final = 250  # of one delta: some 85 kB
MOST_EVENTS: Final = 200
MOST_ENDED: Final = 50


def delta_of(
    told: ConsoleSnapshot, now: ConsoleSnapshot, most_nodes: int = MOST_NODES
) -> ConsoleDelta:
    """Return what a watcher that has `told` must hear to have `now`."""
    had = {each.id: each for each in told.nodes}
    here = {each.id for each in now.nodes}
    nodes = _changed(had, told.nodes, now.nodes, most_nodes)
    last = told.events[-1].seq if told.events else 0
    return ConsoleDelta(
        seq=now.seq,
        at=now.at,
        totals=now.totals,
        router=_if_new(told.router, now.router),
        store=_if_new(told.store, now.store),
        nodes=nodes or UNSET,
        gone=[each for each in had if each not in here] or UNSET,
        flows=_if_new(told.flows, now.flows),
        requests=_requests(told.requests, now.requests),
        events=[each for each in now.events if each.seq > last] or UNSET,
    )


def after(told: ConsoleSnapshot, delta: ConsoleDelta) -> ConsoleSnapshot:
    """Return the state of a watcher that had `told` and has heard `delta`.

    Nodes lie in the order in which they were told last, the longest ago first.
    """
    nodes = {each.id: each for each in told.nodes}
    for gone in _or(delta.gone, []):
        nodes.pop(gone, None)
    for card in _or(delta.nodes, []):
        nodes.pop(card.id, None)
        nodes[card.id] = card
    return ConsoleSnapshot(
        seq=delta.seq,
        at=delta.at,
        router=_or(delta.router, told.router),
        totals=delta.totals,
        store=_or(delta.store, told.store),
        nodes=list(nodes.values()),
        flows=_or(delta.flows, told.flows),
        requests=_requests_after(told.requests, delta.requests),
        events=[*told.events, *_or(delta.events, [])][-MOST_EVENTS:],
    )


def _changed(
    had: dict[str, NodeCard], order: Sequence[NodeCard], now: Sequence[NodeCard], most: int
) -> list[NodeCard]:
    changed = [each for each in now if had.get(each.id) != each]
    if len(changed) <= most:
        return changed
    place = {each.id: index for index, each in enumerate(order)}

    def urgency(card: NodeCard) -> tuple[bool, int]:
        before = had.get(card.id)
        return before is not None and before.state == card.state, place.get(card.id, -1)

    return sorted(changed, key=urgency)[:most]


def _requests(told: RequestCards, now: RequestCards) -> RequestsDelta | UnsetType:
    known = {_name(each) for each in told.ended}
    delta = RequestsDelta(
        live=_if_new(told.live, now.live),
        num_live=_if_new(told.num_live, now.num_live),
        ended=[each for each in now.ended if _name(each) not in known] or UNSET,
    )
    return UNSET if delta == RequestsDelta() else delta


def _requests_after(told: RequestCards, delta: RequestsDelta | UnsetType) -> RequestCards:
    if isinstance(delta, UnsetType):
        return told
    return RequestCards(
        live=_or(delta.live, told.live),
        num_live=_or(delta.num_live, told.num_live),
        ended=[*_or(delta.ended, []), *told.ended][:MOST_ENDED],
    )


def _name(summary: RequestSummary) -> tuple[str, float]:
    return summary.request_id, summary.arrived_at


def _if_new(told: T, now: T) -> T | UnsetType:
    return UNSET if told == now else now


def _or(told: T | UnsetType, otherwise: T) -> T:
    return otherwise if isinstance(told, UnsetType) else told


def event_name(state: ConsoleSnapshot | ConsoleDelta) -> str:
    """Return the name of a state's server-sent event."""
    return "snapshot" if isinstance(state, ConsoleSnapshot) else "delta"


def frame(state: ConsoleSnapshot | ConsoleDelta) -> bytes:
    """Return a state as a server-sent event."""
    return b"event: %b\ndata: %b\n\n" % (event_name(state).encode(), msgspec.json.encode(state))
