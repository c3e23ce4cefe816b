"""Where a prompt is computed: on the prefill node, or on the decode node that goes on with it.

Pure arithmetic over two snapshots, in seconds. Each way costs the request its time to token 1, and
somebody else a delay:

    remote   P's queue, then the prompt's uncached tokens, at P's measured rate
             + the tail of the hand-over: bytes that D lacks, at the measured seconds per byte
    local    D's queue, then the tokens that D has not cached, at D's rate
             + interference: every stream that D decodes stands still while they are computed

The prompt stays on D only if that is clearly cheaper (MARGIN). So a burst spreads over both nodes
while D has little to decode; while it streams, a prompt moves there only when P's queue is longer
than all those streams' standing still together (who still waits or fetches does not stream). No
length and no queue is a threshold: both are weighed in seconds as measured. Nothing here trusts a
load report alone: tokens that this router has sent since are counted at once. What is not measured
yet argues for remote.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, Protocol

from baton.protocol.handles import NodeLoad

Placement = Literal["auto", "remote", "threshold"]
MARGIN: Final = 1.1  # local must be cheaper by so much: estimates are rough, separation is the rule
POOLED_AHEAD: Final = 256  # tokens of one forward of inputs that are pooled, about


class PlacedNode(Protocol):
    """What is asked of router.nodes.policy.NodeSnapshot."""

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
    """Seconds that either way costs the request and its neighbours."""

    remote_s: float
    local_s: float

    @property
    def local_is_cheaper(self) -> bool:
        return self.local_s * MARGIN < self.remote_s


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens to compute before token 1, and how many of them each node has cached."""

    num_tokens: int
    prefill_cached: int = 0
    decode_cached: int = 0


def placement_costs(prompt: Prompt, prefill: PlacedNode, decode: PlacedNode) -> Costs | None:
    """None as long as the prefill node has measured nothing: then there is nothing to weigh."""
    prefill_rate = prefill.load.prefill_tokens_per_s
    if prefill_rate <= 0:
        return None
    decode_rate = decode.load.prefill_tokens_per_s or prefill_rate
    on_prefill = tokens_ahead(prefill) + prompt.num_tokens - prompt.prefill_cached
    to_move = prompt.num_tokens - prompt.decode_cached
    remote_s = on_prefill / prefill_rate + to_move * handover_s_per_token(prefill.load)
    own_s = to_move / decode_rate
    local_s = tokens_ahead(decode) / decode_rate + own_s * (1 + decode.load.running)
    return Costs(remote_s, local_s)


def queued_tokens(node: PlacedNode) -> int:
    """Prompt tokens in front of a new one: what was reported plus what was sent since, and at least
    what this router knows to be uncomputed."""
    return max(node.load.waiting_tokens + node.unreported_tokens, node.assigned_tokens)


def tokens_ahead(node: PlacedNode) -> int:
    """The same, and the forward of inputs that are pooled there: it stands between two steps, but
    takes no room in the queue."""
    return queued_tokens(node) + (POOLED_AHEAD if node.pooling else 0)


def requests_on(node: PlacedNode) -> int:
    """Requests that share `node`, or soon will."""
    load = node.load
    return max(load.running + load.waiting + load.swapped + load.fetching, node.assigned)


def handover_s_per_token(load: NodeLoad) -> float:
    """Measured on the exporter: tail of its hand-overs over the bytes that it sent."""
    if load.kv_sent_bytes <= 0:
        return 0.0
    return load.kv_token_bytes * load.kv_tail_seconds / load.kv_sent_bytes
