"""Replay: how an exact request is computed, so that computing it again gives the same bits. Pure.

Kernels may choose their order of sums by the shape of their input, so KV made in one prefill of
prompt and emitted tokens is not bit for bit what prefill and decode steps made before. A request
with `resume="exact"` is computed in shapes that depend on its own tokens only:

    prompt   [ chunk ][ chunk ][ rest ]     whole chunks counted from token 0, never a prefix hit
    output   t t t t t t t                  one row each, whether sampled now or known already

So after a node was lost (or after a preemption) the prompt is prefilled alone. The emitted tokens
follow in decode steps that sample nothing: a replay. Such a request is not speculated on, and its
steps run on the node's own cores alone (torch's products may depend on the number of threads). With
`--deterministic` every shape gives the same bits: there an exact request is like any other.
"""

from __future__ import annotations

from baton.engine.config import USUAL_CHUNK, EngineConfig
from baton.engine.state.interface import ModelInfo
from baton.protocol.request import Request


def exact_chunk_of(request: Request, config: EngineConfig) -> int | None:
    """Return how many prompt tokens a row of an exact request computes; None for any other
    request.
    """
    if request.resume != "exact" or config.deterministic:
        return None
    return config.exact_chunk


def precision_of(info: ModelInfo, config: EngineConfig) -> str:
    """Return what nodes must share so that they give the same tokens for a request: the dtypes, and
    the chunk of exact requests where it is not the usual one."""
    if config.deterministic or config.exact_chunk == USUAL_CHUNK:
        return info.precision
    return f"{info.precision}, exact chunks of {config.exact_chunk}"
