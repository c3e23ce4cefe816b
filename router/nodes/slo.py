"""Service levels: the times that a client may ask for, and those that a node is expected to keep.

Pure arithmetic over a node's snapshot, in seconds. A node that has measured nothing yet has no
expected times, and counts as fast enough.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.nodes.placement import PlacedNode, queued_tokens


@dataclass(frozen=True, slots=True)
class Slo:
    """The longest time to the first token, and the longest mean time per further token.

    None: no limit.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None


ANY: Slo = Slo()


def expected_ttft_s(node: PlacedNode, uncached: int) -> float | None:
    """Return the expected time to token 1 of a prompt with `uncached` tokens to compute.

    None if the node has not measured its rate.
    """
    rate = node.load.prefill_tokens_per_s
    return (queued_tokens(node) + uncached) / rate if rate > 0 else None


def expected_tpot_s(node: PlacedNode) -> float | None:
    """Return the expected time per token: the node's measured time per engine step.

    None if the node has measured none, or is idle: its last steps say nothing about the next ones.
    """
    load = node.load
    return load.step_seconds if load.running and load.step_seconds > 0 else None


def meets(expected_s: float | None, limit_s: float | None) -> bool:
    return expected_s is None or limit_s is None or expected_s <= limit_s
