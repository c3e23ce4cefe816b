"""Replay: how an exact request is computed, so that computing it again gives the same bits. Pure.

Kernels may choose their order of sums by the shape of their input, so KV made in one prefill of
prompt and emitted tokens is not bit for bit what prefill and decode steps made before. A request
with `resume="exact"` is computed in shapes that depend on its own tokens only:

    prompt   [ chunk ][ chunk ][ rest ]     whole chunks counted from token 0, never a prefix hit
    output   t t t t t t t                  one row each, whether sampled now or known already

So after a node was lost (or after a preemption) the prompt is prefilled alone. The emitted tokens
follow in decode steps that sample nothing: a replay. Such a request is not speculated on. With
`--deterministic` every shape gives the same bits: there an exact request is like any other.
"""

from __future__ import annotations

from typing import Final

from baton.engine.config import EngineConfig
from baton.protocol.request import Request

EXACT_CHUNK_TOKENS: Final = 512  # the same on all nodes whose steps have room for it


def exact_chunk_of(request: Request, config: EngineConfig) -> int | None:
    """Return how many prompt tokens a row of an exact request computes; None for any other request.

    The chunk is so small that a step always has room for it once no older prompt takes the room:
    decode rows never take more than max_num_seqs, and drafts half of what these leave.
    """
    if request.resume != "exact" or config.deterministic:
        return None
    room = (config.max_num_batched_tokens - config.max_num_seqs) // 2
    return max(1, min(EXACT_CHUNK_TOKENS, room))
