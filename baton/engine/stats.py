"""EngineStats: what an engine has done since its start. Counters only grow; means are exponential.

Written on the engine thread only. `copy()` there (EngineThread.call) for a consistent reading
elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

SMOOTHING: Final = 0.1  # weight of the newest step in the moving means


@dataclass(slots=True)
class EngineStats:
    """Counters (requests, tokens, chunks) and moving means (seconds, tokens per second)."""

    num_requests: int = 0  # added here
    num_finished: int = 0  # ended by a token: stop, length, or token 1 of a PREFILL task
    num_aborted: int = 0
    num_failed: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_prefix_query_tokens: int = 0  # looked up in the prefix map
    num_prefix_hit_tokens: int = 0  # of these, found
    num_prompt_tokens: int = 0  # computed in prefill chunks (recomputed ones too, hits not)
    num_generated_tokens: int = 0  # sampled
    num_prefill_chunks: int = 0  # rows that computed part of a prompt
    num_chunked_prompts: int = 0  # prompts that took more than one
    step_seconds: float = 0.0  # moving mean
    prefill_tokens_per_s: float = 0.0  # moving mean over steps that prefill

    @property
    def prefix_hit_rate(self) -> float:
        """Share of looked-up tokens found in the prefix map, 0 before the first look-up."""
        queries = self.num_prefix_query_tokens
        return self.num_prefix_hit_tokens / queries if queries else 0.0

    def step_done(self, seconds: float, num_prefill_tokens: int) -> None:
        """Count a step that took `seconds` and computed `num_prefill_tokens` tokens of prompts."""
        self.step_seconds = _mean(self.step_seconds, seconds, first=self.num_steps == 0)
        if num_prefill_tokens and seconds > 0:
            rate = num_prefill_tokens / seconds
            first = self.prefill_tokens_per_s == 0.0
            self.prefill_tokens_per_s = _mean(self.prefill_tokens_per_s, rate, first=first)
        self.num_prompt_tokens += num_prefill_tokens
        self.num_steps += 1

    def copy(self) -> EngineStats:
        return replace(self)


def _mean(mean: float, value: float, *, first: bool) -> float:
    return value if first else mean + SMOOTHING * (value - mean)
