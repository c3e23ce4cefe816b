"""best_of: of several samples, those whose tokens are the most probable ones on average.

The one rule for `LLM` and for routers, OpenAI's: log probability per token, so that a short sample
is not better for being short. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def best_samples(logprobs: Sequence[Sequence[float]], n: int) -> list[int]:
    """Indices of the `n` best of `logprobs`, best first; ties in their own order.

    `logprobs[i]` are the log probabilities of sample i's tokens; a sample without any comes last.
    """

    def mean(sample: int) -> float:
        known = logprobs[sample]
        return math.fsum(known) / len(known) if known else -math.inf

    return sorted(range(len(logprobs)), key=lambda sample: -mean(sample))[:n]
