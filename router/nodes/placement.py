"""Placement: whether the prefill node P or the decode node D computes a request's prompt.

Pure arithmetic over two snapshots. It compares the cost of both ways in seconds:

    remote   P's queue, then the prompt tokens that P has not cached, at P's measured rate
             + delay: each request that waits at the router waits for these tokens (WAITING_SHARE)
             + the tail of the hand-over: the bytes that D lacks, at the measured seconds per byte
    local    D's queue, then the prompt tokens that D has not cached, at D's rate
             + interference: each request that D decodes stands still while they are computed

D computes the prompt only if that is clearly cheaper (MARGIN). So a burst spreads over both nodes
while D decodes little. While D decodes many requests, it gets a prompt only when P's queue, and the
delay of those who wait at the router, cost more than the standstill of all these requests together.
There is no threshold for the prompt's length or for a queue; both count by their measured seconds.
Tokens that this router has sent since a node's last load report are counted as well. Rates are of
own cores: D, while idle, lends its cores to P, too. If P has measured nothing, it computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, Protocol

from baton.protocol.handles import NodeLoad

Placement = Literal["auto", "remote", "threshold"]
MARGIN: Final = 1.1  # local must be cheaper by this factor, because the estimates are rough
# A second of delay at the router counts this share of a second in which a stream stands still. More
# cost goodput under recorded traces (docs/log/2026-11-29-a-burst-on-both-nodes.md).
WAITING_SHARE: Final = 0.1
POOLED_AHEAD: Final = 256  # about the tokens of one forward of pooled inputs


class PlacedNode(Protocol):
    """The part of router.nodes.policy.NodeSnapshot that is used here."""

    @property
    def load(self) -> NodeLoad: ...

    @property
    def assigned(self) -> int: ...

    @property
    def assigned_tokens(self) -> int: ...

    @property
    def unreported_tokens(self) -> int: ...

    @property
    def pooling(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that each way costs: time to token 1, and the delay of other requests."""

    remote_s: float
    local_s: float

    @property
    def local_is_cheaper(self) -> bool:
        return self.local_s * MARGIN < self.remote_s


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens to compute before token 1, and how many of them each node has cached. `behind`: how
    many requests wait at the router, for each prefill node, until this one has been computed."""

    num_tokens: int
    prefill_cached: int = 0
    decode_cached: int = 0
    behind: float = 0.0


def placement_costs(prompt: Prompt, prefill: PlacedNode, decode: PlacedNode) -> Costs | None:
    """Return the costs of both ways; None while the prefill node has not measured its rate."""
    prefill_rate = prefill.load.own_prefill_tokens_per_s
    if prefill_rate <= 0:
        return None
    decode_rate = decode.load.own_prefill_tokens_per_s or prefill_rate
    to_compute = prompt.num_tokens - prompt.prefill_cached
    on_prefill = tokens_ahead(prefill) + to_compute * (1 + WAITING_SHARE * prompt.behind)
    to_move = prompt.num_tokens - prompt.decode_cached
    remote_s = on_prefill / prefill_rate + to_move * handover_s_per_token(prefill.load)
    own_s = to_move / decode_rate
    local_s = tokens_ahead(decode) / decode_rate + own_s * (1 + decode.load.running)
    return Costs(remote_s, local_s)


def queued_tokens(node: PlacedNode) -> int:
    """Return how many prompt tokens wait on `node` before a new prompt.

    These are the reported ones plus those sent since, or the ones that this router knows to be
    uncomputed, whichever is more.
    """
    return max(node.load.waiting_tokens + node.unreported_tokens, node.assigned_tokens)


def tokens_ahead(node: PlacedNode) -> int:
    """Return `queued_tokens`, plus POOLED_AHEAD if inputs are pooled on `node`.

    A forward of pooled inputs delays a prompt, but takes no room in the queue.
    """
    return queued_tokens(node) + (POOLED_AHEAD if node.pooling else 0)


def requests_on(node: PlacedNode) -> int:
    """Return how many requests share `node`, or soon will."""
    load = node.load
    return max(load.running + load.waiting + load.swapped + load.fetching, node.assigned)


def handover_s_per_token(load: NodeLoad) -> float:
    """Return the seconds that the tail of a hand-over takes per token; 0 if not measured.

    The exporter measures the tail of its hand-overs and the bytes that it has sent.
    """
    if load.kv_sent_bytes <= 0:
        return 0.0
    return load.kv_token_bytes * load.kv_tail_seconds / load.kv_sent_bytes
