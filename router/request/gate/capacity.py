"""How much more the nodes can take: may one more request begin?

Pure arithmetic over snapshots. A node's own queue is kept short, for what waits there has left the
router's fair order; it is kept long enough that no node idles while others wait here:

    prefill   prompt tokens queued on prefill nodes (or, without any, on the decode nodes) stay
              below `prefill_window_s` of their measured rate; an idle one takes any prompt
    decode    some decode node has hardly anybody waiting and nobody swapped out, and the free KV
              blocks, with a little on account (AHEAD) that is prefilled by the time it is free,
              hold this prompt beside all that are on their way; an idle one takes any prompt

What a node has not reported yet counts as room: the node can refuse by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from baton.protocol.handles import Role
from router.nodes.placement import queued_tokens, requests_on
from router.nodes.policy import NodeSnapshot, is_full

AHEAD: Final = 0.1  # of the decode nodes' KV; prefill nodes keep it under their leases until then


class Capacity:
    """All `nodes` at one moment: `prefillers` compute prompts and `decoders` decode, of those that
    take requests; without a prefill node the decode nodes are both.

    `pause`: what operators want for new requests: "" to serve them, "hold" to let them wait,
    "refuse".
    """

    __slots__ = ("_prefill_window_s", "decoders", "nodes", "pause", "prefillers")

    def __init__(self, nodes: Sequence[NodeSnapshot], prefill_window_s: float) -> None:
        self._prefill_window_s = prefill_window_s
        self.nodes = nodes
        pauses = {node.load.pause for node in nodes}
        self.pause = "refuse" if "refuse" in pauses else "hold" if "hold" in pauses else ""
        serving = [node for node in nodes if node.takes_requests]
        self.decoders = [node for node in serving if node.role is Role.DECODE]
        self.prefillers = [node for node in serving if node.role is not Role.DECODE]
        self.prefillers = self.prefillers or self.decoders

    def has_room(
        self, prompt_tokens: int, starting: int, starting_tokens: int, *, pooled: bool = False
    ) -> bool:
        """May a prompt of so many tokens begin? Without a node there is nothing to wait for.

        `starting` requests with `starting_tokens` have been admitted and are not with a node yet.
        Inputs that are `pooled` need no decode node.
        """
        if not (self.prefillers if pooled else self.decoders):
            return True
        queued = [queued_tokens(node) for node in self.prefillers]
        ahead = sum(queued) + starting_tokens
        if starting >= queued.count(0) and not self._prefills_soon(prompt_tokens + ahead):
            return False
        return pooled or self._decodes(prompt_tokens, ahead)

    def _prefills_soon(self, tokens: int) -> bool:
        """Do all prefill nodes together compute so many tokens within the window?"""
        window = 0.0
        for node in self.prefillers:
            rate = node.load.prefill_tokens_per_s
            if rate <= 0:
                return True
            window += rate * self._prefill_window_s
        return tokens <= window

    def _decodes(self, prompt_tokens: int, ahead: int) -> bool:
        """Do the decode nodes take the prompt beside the `ahead` tokens that come before it?"""
        free = total = 0
        full = reported = True
        for node in self.decoders:
            if ahead == 0 and requests_on(node) == 0:
                return True
            load, size = node.load, node.block_size
            full = full and is_full(node)
            reported = reported and load.total_blocks > 0
            free += load.free_blocks * size
            total += load.total_blocks * size
        if full:
            return False
        return not reported or prompt_tokens + ahead <= free + AHEAD * total

    def widest(self) -> float:
        """Most sequences of one request that a decode node takes; infinite if that is not known."""
        widths = [node.max_num_seqs for node in self.nodes if node.role is Role.DECODE]
        return max(widths) if widths and all(widths) else math.inf
