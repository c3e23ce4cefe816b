"""The console's state, from the parts of a router that know it. Functions read, none writes."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Final

from baton.protocol.handles import NodeLoad
from baton.protocol.request import Request
from router.api.timelines import summary_of
from router.console.views import (
    FlowCard,
    NodeCard,
    NodeState,
    RequestCard,
    RequestCards,
    StoreFacts,
)
from router.nodes.flows import FlowRate
from router.nodes.registry import NodeStatus
from router.request.dispatcher import Dispatcher
from router.request.timeline import GATE, STAGES, Milestone, TimelineRing
from router.request.trace import RequestTrace
from router.store.guard import StoreGuard

MOST_LIVE: Final = 100
MOST_ENDED: Final = 50
MOST_FLOWS: Final = 200
MOST_CHARS: Final = 200
RATE_LOOKS: Final = 5


class TokenRates:
    """Tokens per second of each life of a node, over the last looks at its counter."""

    def __init__(self) -> None:
        self._looks: dict[str, deque[tuple[float, int]]] = {}

    def look(self, loads: Mapping[str, NodeLoad], now: float) -> None:
        """Note the counters by boot id at `now`, and forget the nodes that are gone."""
        for boot_id in self._looks.keys() - loads.keys():
            del self._looks[boot_id]
        for boot_id, load in loads.items():
            looks = self._looks.setdefault(boot_id, deque(maxlen=RATE_LOOKS))
            looks.append((now, load.step_tokens))

    def of(self, boot_id: str) -> float:
        looks = self._looks.get(boot_id)
        if not looks or looks[-1][0] <= looks[0][0]:
            return 0.0
        (start, before), (end, after) = looks[0], looks[-1]
        return round((after - before) / (end - start), 1)


def node_card(status: NodeStatus, rates: TokenRates) -> NodeCard:
    """Return a node as the console shows it."""
    record, load = status.record, status.load
    state, text = node_state(status)
    if record is None:
        return NodeCard(status.address, None, state, status.address, text=text)
    return NodeCard(
        id=record.node_id,
        role=record.role.value,
        state=state,
        address=status.address,
        instance=record.boot_id,
        model=record.model,
        running=load.running,
        waiting=load.waiting,
        kv_used=load.total_blocks - load.free_blocks,
        kv_total=load.total_blocks,
        kv_cached=load.cached_blocks,
        mbu=round(load.mbu, 4) or None,
        mfu=round(load.mfu, 4) or None,
        tokens_per_s=rates.of(record.boot_id),
        precision=record.precision,
        ranks=len(record.endpoint.ranks) or 1,
        text=text,
    )


def node_state(status: NodeStatus) -> tuple[NodeState, str]:
    """Return a node's state, and why it does not serve."""
    load = status.load
    cases: tuple[tuple[bool, NodeState, str], ...] = (
        (not status.connected and bool(status.refused), "refused", status.refused[:MOST_CHARS]),
        (not status.connected, "lost", "no session with the node"),
        (status.stalled, "unhealthy", "its engine makes no progress"),
        (status.quarantined, "quarantined", "it failed too often"),
        (load.draining, "draining", "it takes no new requests"),
        (load.asleep, "asleep", "an operator sent it to sleep"),
        (bool(load.pause), "paused", "an operator has paused it"),
    )
    for holds, state, text in cases:
        if holds:
            return state, text
    return "serving", ""


def request_cards(dispatcher: Dispatcher, ring: TimelineRing, now: float) -> RequestCards:
    """Return the oldest requests under way, and those that ended last."""
    live, waiting = dispatcher.live(), dispatcher.waiting()
    cards = [request_card(*each, now) for each in live[:MOST_LIVE]]
    cards += [request_card(*each, now, GATE) for each in waiting[: MOST_LIVE - len(cards)]]
    return RequestCards(
        live=cards,
        num_live=len(live) + len(waiting),
        ended=[summary_of(each) for each in islice(ring.newest(), MOST_ENDED)],
    )


def request_card(
    request: Request, trace: RequestTrace, now: float, stage: str | None = None
) -> RequestCard:
    """Return a request under way as the console shows it. `stage`: None: as its marks say."""
    return RequestCard(
        request_id=request.id,
        age_ms=round((now - request.arrival) * 1000, 1),
        stage=stage or stage_of(trace),
        prompt_tokens=len(request.prompt_ids),
        output_tokens=trace.output_tokens,
        prefill_node=trace.decode_node if trace.local_prefill else trace.prefill_node,
        decode_node=trace.decode_node,
        retries=trace.retries,
        migrations=trace.migrations,
        tenant=trace.terms.grant.tenant or None,
    )


def stage_of(trace: RequestTrace) -> str:
    """Return the stage in which a request that the gate has let in is now."""
    for mark in reversed(trace.marks):
        if mark.milestone in STAGES:
            return STAGES[mark.milestone]
    return STAGES[Milestone.ADMITTED]


def flow_cards(flows: Sequence[tuple[str, str, FlowRate]]) -> list[FlowCard]:
    """Return the busiest flows, the busiest first."""
    busiest = sorted(flows, key=lambda it: (-it[2].bytes_per_s, -it[2].faults))[:MOST_FLOWS]
    return [
        FlowCard(
            source, target, rate.lane, rate.bytes_per_s, rate.transfers_per_s, rate.ms_p50,
            rate.ms_p99, rate.faults,
        )
        for source, target, rate in busiest
    ]  # fmt: skip


def store_facts(store: StoreGuard) -> StoreFacts:
    stats = store.stats
    text = "away: requests go on unlogged" if stats.away else "answers"
    if stats.outages:
        text += f"; outages so far: {stats.outages}"
    return StoreFacts(store.name, not stats.away, text)


def loads_of(statuses: Sequence[NodeStatus]) -> dict[str, NodeLoad]:
    """Return the loads of the connected nodes by boot id."""
    return {it.record.boot_id: it.load for it in statuses if it.connected and it.record is not None}
