"""Capacity: whether the nodes have room for one more request.

Pure arithmetic over snapshots. A node's own queue is kept short, because requests that wait there
have left the router's fair order. It is kept long enough that no node idles while requests wait at
the router. A request begins when both hold:

    prefill   the prompt tokens queued on prefill nodes (or, without any, on the decode nodes) stay
              below `prefill_window_s` of their measured rate; an idle node takes any prompt. Or
              placement gives this prompt to a decode node instead, and the same is true of that
              node: a short prompt does not wait here for a long one that a prefill node computes,
              and in a burst the decode nodes compute prompts as well
    decode    some decode node has no queue to speak of and no request swapped out, and the decode
              nodes' free KV blocks, plus the share AHEAD of all blocks, hold this prompt beside all
              that are on their way; an idle node takes any prompt

What a node has not reported yet counts as room: the node can refuse by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from baton.protocol.handles import Role
from router.nodes.placement import queued_tokens, requests_on
from router.nodes.policy import NodeSnapshot, PolicySettings, Route, is_full, prefills_locally

# Share of the decode nodes' KV blocks that prompts may need beyond the free ones. Blocks become
# free while such prompts are computed; until then the prefill nodes keep the KV under leases.
AHEAD: Final = 0.1


class Capacity:
    """The nodes of one model at one moment, and what they can take. `model`: its key; `nodes` are
    those of all models; `window_s`: the prefill window; `policy`: says who computes a prompt.

    `prefillers` and `decoders`: the nodes that take requests now, by what they compute. Without a
    prefill node the decode nodes are also the `prefillers`. `pause`: what operators want for new
    requests: "" serves them, "hold" lets them wait, "refuse" refuses them.
    """

    __slots__ = ("_all", "_model", "_policy", "_window_s", "decoders", "pause", "prefillers")

    def __init__(
        self,
        nodes: Sequence[NodeSnapshot],
        window_s: float,
        policy: PolicySettings,
        model: str = "",
    ) -> None:
        self._window_s, self._policy = window_s, policy
        self._all, self._model = nodes, model
        pauses = {node.load.pause for node in nodes if node.model == model}
        self.pause = "refuse" if "refuse" in pauses else "hold" if "hold" in pauses else ""
        serving = [node for node in nodes if node.model == model and node.takes_requests]
        self.decoders = [node for node in serving if node.role is Role.DECODE]
        self.prefillers = [node for node in serving if node.role is not Role.DECODE]
        self.prefillers = self.prefillers or self.decoders

    @property
    def nodes(self) -> list[NodeSnapshot]:
        """The nodes of the model, also those that take no requests now."""
        return [node for node in self._all if node.model == self._model]

    def has_room(
        self,
        prompt_tokens: int,
        starting: int,
        starting_tokens: int,
        *,
        behind: int = 0,
        pooled: bool = False,
    ) -> bool:
        """Whether a prompt of `prompt_tokens` may begin. True if there is no node to wait for.

        `starting` requests with `starting_tokens` have been admitted and are not on a node yet.
        `behind`: requests that wait behind the prompt; ask first without them, as a prefill node
        may have room for it. `pooled`: the inputs are pooled, so they need no decode node.
        """
        if not (self.prefillers if pooled else self.decoders):
            return True
        queued = [queued_tokens(node) for node in self.prefillers]
        ahead = sum(queued) + starting_tokens
        soon = starting < queued.count(0) or self._prefills_soon(prompt_tokens + ahead)
        if pooled:
            return soon
        soon = soon or self._decoder_prefills_soon(prompt_tokens, starting_tokens, behind)
        return soon and self._decodes(prompt_tokens, ahead)

    def _prefills_soon(self, tokens: int) -> bool:
        """Whether all prefill nodes together compute `tokens` within the prefill window.

        True if some node has not measured its rate yet.
        """
        window = 0.0
        for node in self.prefillers:
            rate = node.load.prefill_tokens_per_s
            if rate <= 0:
                return True
            window += rate * self._window_s
        return tokens <= window

    def _decoder_prefills_soon(self, prompt_tokens: int, starting_tokens: int, behind: int) -> bool:
        """Whether placement gives the prompt to a decode node that is soon done with its own queue.

        Cached prefixes do not count. `starting_tokens` count as if they were queued there.
        """
        if self.prefillers is self.decoders:
            return False
        each_behind = behind / len(self.prefillers)
        for node in self.decoders:
            ahead = queued_tokens(node) + starting_tokens
            window = node.load.prefill_tokens_per_s * self._window_s
            if (not ahead or ahead + prompt_tokens <= window) and all(
                prefills_locally(prompt_tokens, Route(node), other, self._policy, each_behind)
                for other in self.prefillers
            ):
                return True
        return False

    def _decodes(self, prompt_tokens: int, ahead: int) -> bool:
        """Whether the decode nodes have room for the prompt and for `ahead` tokens before it."""
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
        """Return the most sequences of one request that any decode node runs at once.

        Infinite if some decode node has not reported its limit, or there is none.
        """
        widths = [node.max_num_seqs for node in self.nodes if node.role is Role.DECODE]
        return max(widths) if widths and all(widths) else math.inf
