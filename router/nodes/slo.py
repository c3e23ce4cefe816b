"""Service levels: what a client may ask for, what a node would give, what a request got.

Pure arithmetic over a node's snapshot, in seconds. A node that has measured nothing yet promises
nothing, and is not held to anything either.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.nodes.placement import PlacedNode, queued_tokens


@dataclass(frozen=True, slots=True)
class Slo:
    """Longest time to the first token, longest mean time per further token; None = any."""

    ttft_s: float | None = None
    tpot_s: float | None = None


ANY: Slo = Slo()


def expected_ttft_s(node: PlacedNode, uncached: int) -> float | None:
    """Until token 1 of a prompt with so many tokens to compute; None: not measured."""
    rate = node.load.prefill_tokens_per_s
    return (queued_tokens(node) + uncached) / rate if rate > 0 else None


def expected_tpot_s(node: PlacedNode) -> float | None:
    """Its steps as measured; None for an idle one: what they were then says nothing."""
    load = node.load
    return load.step_seconds if load.running and load.step_seconds > 0 else None


def meets(expected_s: float | None, limit_s: float | None) -> bool:
    return expected_s is None or limit_s is None or expected_s <= limit_s
