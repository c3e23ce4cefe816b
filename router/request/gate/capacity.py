"""How much more the nodes can take: may one more request begin, and when would it have token 1?

Pure functions over snapshots. A node's own queue is kept short, for what waits there has left the
router's fair order; it is kept long enough that no node idles while others wait here:

    prefill   prompt tokens queued on prefill nodes (or, without any, on the decode nodes) stay
              below `prefill_window_s` of their measured rate; an idle one takes any prompt
    decode    some decode node has hardly anybody waiting and nobody swapped out, and the free KV
              blocks, with a little on account (AHEAD) that is prefilled by the time it is free,
              hold this prompt beside all that are on their way; an idle one takes any prompt

What a node has not reported yet counts as room: the node can refuse by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from baton.protocol.handles import Role
from baton.protocol.request import Request
from router.nodes.placement import queued_tokens, requests_on
from router.nodes.policy import Ask, NodeSnapshot, is_full, prefix_lengths
from router.nodes.slo import expected_tpot_s, expected_ttft_s, meets

AHEAD: Final = 0.1  # of the decode nodes' KV; prefill nodes keep it under their leases until then


@dataclass(frozen=True, slots=True)
class OnTheWay:
    """Admitted by this router, not yet with a node."""

    requests: int = 0
    tokens: int = 0


def has_room(
    prompt_tokens: int, nodes: Sequence[NodeSnapshot], way: OnTheWay, prefill_window_s: float
) -> bool:
    """May a prompt of so many tokens begin? Without a node there is nothing to wait for."""
    prefillers, decoders = _by_role(nodes)
    if not decoders:
        return True
    queued = [queued_tokens(node) for node in prefillers]
    on_way = way.tokens + sum(queued)
    if not _prefill_room(prompt_tokens, prefillers, queued, way, prefill_window_s):
        return False
    return _decode_room(prompt_tokens, decoders, on_way)


def serves(nodes: Sequence[NodeSnapshot], *, pooled: bool) -> bool:
    """Is there a node that takes requests? Tokens need a decode node, pooled vectors any node."""
    prefillers, decoders = _by_role(nodes)
    return bool(prefillers) if pooled else bool(decoders)


def has_prefill_room(
    tokens: int, nodes: Sequence[NodeSnapshot], way: OnTheWay, prefill_window_s: float
) -> bool:
    """The same for inputs that are pooled: nothing is decoded."""
    prefillers, _ = _by_role(nodes)
    queued = [queued_tokens(node) for node in prefillers]
    return not prefillers or _prefill_room(tokens, prefillers, queued, way, prefill_window_s)


def _by_role(
    nodes: Sequence[NodeSnapshot],
) -> tuple[list[NodeSnapshot], list[NodeSnapshot]]:
    """Nodes that compute prompts, and those that decode; may be the same."""
    prefillers: list[NodeSnapshot] = []
    decoders: list[NodeSnapshot] = []
    for node in nodes:
        if node.takes_requests:
            (decoders if node.role is Role.DECODE else prefillers).append(node)
    return prefillers or decoders, decoders


def _prefill_room(
    prompt_tokens: int,
    nodes: Sequence[NodeSnapshot],
    queued: Sequence[int],
    way: OnTheWay,
    window_s: float,
) -> bool:
    if way.requests < queued.count(0):
        return True
    window = 0.0
    for node in nodes:
        rate = node.load.prefill_tokens_per_s
        if rate <= 0:
            return True
        window += rate * window_s
    return sum(queued) + way.tokens + prompt_tokens <= window


def _decode_room(prompt_tokens: int, nodes: Sequence[NodeSnapshot], on_way: int) -> bool:
    free = total = 0
    full = reported = True
    for node in nodes:
        if on_way == 0 and requests_on(node) == 0:
            return True
        load, size = node.load, node.block_size
        full = full and is_full(node)
        reported = reported and load.total_blocks > 0
        free += load.free_blocks * size
        total += load.total_blocks * size
    if full:
        return False
    return not reported or prompt_tokens + on_way <= free + AHEAD * total


def widest(nodes: Sequence[NodeSnapshot]) -> int | None:
    """Most sequences of one request that a decode node takes; None while that is not known."""
    widths = [node.max_num_seqs for node in nodes if node.role is Role.DECODE]
    return max(widths) if widths and all(widths) else None


def best_ttft_s(request: Request, nodes: Sequence[NodeSnapshot], limit_s: float) -> float | None:
    """The shortest time to token 1 that a node promises; None: no node promises anything.

    Prefixes are looked up only if nothing is within `limit_s` without.
    """
    usable = [node for node in nodes if node.takes_requests]
    prefillers = [node for node in usable if node.role is Role.PREFILL]
    # A decode node computes prompts too, where it has shown how fast (router/nodes/placement.py).
    measured = [n for n in usable if n not in prefillers and n.load.prefill_tokens_per_s > 0]
    computing = prefillers + measured
    best = _best_ttft(request, computing, {})
    if best is None or best <= limit_s:
        return best
    ask = Ask(request.known_ids, tenant_salt=request.tenant_salt, adapter=request.adapter)
    return _best_ttft(request, computing, prefix_lengths(ask, computing))


def _best_ttft(
    request: Request, nodes: Sequence[NodeSnapshot], cached: dict[str, int]
) -> float | None:
    length = len(request.known_ids)
    expected = [expected_ttft_s(node, length - cached.get(node.boot_id, 0)) for node in nodes]
    known = [seconds for seconds in expected if seconds is not None]
    # One that has measured nothing may be fast.
    return min(known) if known and len(known) == len(expected) else None


def can_keep_tpot(nodes: Sequence[NodeSnapshot], limit_s: float) -> bool:
    """Does some decode node take steps within `limit_s`? An idle one does."""
    decoders = [n for n in nodes if n.role is Role.DECODE and n.takes_requests]
    return not decoders or any(meets(expected_tpot_s(node), limit_s) for node in decoders)


def paused(nodes: Sequence[NodeSnapshot]) -> str:
    """What operators want for new requests: "" to serve them, "hold" to let them wait, "refuse"."""
    found = {node.load.pause for node in nodes}
    return "refuse" if "refuse" in found else "hold" if "hold" in found else ""
