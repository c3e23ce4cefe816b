"""How the policy rated each node when it chose nodes for a request: for clients' receipts.

Computed only for requests whose client wants a receipt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from baton.protocol.handles import Role
from router.nodes.placement import queued_tokens, requests_on
from router.nodes.policy import (
    Ask,
    NodeSnapshot,
    PolicySettings,
    decode_cost,
    is_usable,
    prefill_cost,
    prefix_lengths,
    session_worth,
)
from router.nodes.slo import expected_tpot_s, expected_ttft_s, meets

MOST_SCORES: Final = 16  # a receipt stays readable, and a header within its limit


@dataclass(frozen=True, slots=True)
class NodeScore:
    """How the policy rated one node for one request.

    `cost`: the smallest is best; for a prefill node in prompt tokens to compute before token 1, for
    a decode node in requests that share its steps. `queued`: tokens (prefill) or requests (decode)
    on the node. `session`: how many requests less it counts because the session was there last.
    `expected_ms`: time to token 1 (prefill) or per token (decode); None if not measured.
    """

    node: str
    role: str
    chosen: bool
    cost: float
    queued: int
    cached_tokens: int
    free_blocks: int
    session: float
    expected_ms: float | None
    meets_slo: bool


def scores_of(
    ask: Ask,
    nodes: Sequence[NodeSnapshot],
    settings: PolicySettings,
    chosen: Sequence[NodeSnapshot | None],
) -> tuple[NodeScore, ...]:
    """Return the scores of the usable nodes: chosen ones first, then by role and cost.

    At most MOST_SCORES are returned.
    """
    usable = [node for node in nodes if is_usable(node, ask)]
    cached = prefix_lengths(ask, usable) if settings.prefix_weight else {}
    taken = {node.boot_id for node in chosen if node is not None}
    scores = [
        _score(node, ask, cached.get(node.boot_id, 0), settings, node.boot_id in taken)
        for node in usable
    ]
    scores.sort(key=lambda score: (not score.chosen, score.role, score.cost))
    return tuple(scores[:MOST_SCORES])


def _score(
    node: NodeSnapshot, ask: Ask, cached: int, settings: PolicySettings, chosen: bool
) -> NodeScore:
    prefills = node.role is Role.PREFILL
    if prefills:
        cost, queued, session = prefill_cost(node, ask, cached, settings), queued_tokens(node), 0.0
        expected_s = expected_ttft_s(node, len(ask.known_ids) - cached)
    else:
        cost, queued = decode_cost(node, ask, cached, settings), requests_on(node)
        session = session_worth(node, ask)
        expected_s = expected_tpot_s(node)
    return NodeScore(
        node=node.node_id,
        role=node.role.value,
        chosen=chosen,
        cost=round(cost, 3),
        queued=queued,
        cached_tokens=cached,
        free_blocks=node.load.free_blocks,
        session=session,
        expected_ms=None if expected_s is None else round(expected_s * 1000, 3),
        meets_slo=meets(expected_s, ask.slo.ttft_s if prefills else ask.slo.tpot_s),
    )
