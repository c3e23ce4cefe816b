"""best_of: choose the samples whose tokens are the most probable on average.

`LLM` and routers use this one rule, which is OpenAI's: log probability per token, so that a short
sample is not better for being short. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def best_samples(logprobs: Sequence[Sequence[float]], n: int) -> list[int]:
    """Return the indices of the `n` best of `logprobs`, best first; ties keep their order.

    `logprobs[i]` are the log probabilities of sample i's tokens; a sample without tokens comes
    last.
    """

    def mean(sample: int) -> float:
        known = logprobs[sample]
        return math.fsum(known) / len(known) if known else -math.inf

    return sorted(range(len(logprobs)), key=lambda sample: -mean(sample))[:n]
