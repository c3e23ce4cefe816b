"""BeamSearch: which continuations of a request's beams live on. Pure logic over candidates: no
blocks, no tensors, no engine.

The life of a search:
    running: one hypothesis, the prompt, without output
    advance(candidates of each running one) -> the survivors, each with the index of its parent
    ... until `done`; then `best(n)` holds the results, best first

It equals transformers' beam search token for token. Scores are rounded to float32 after each
addition and division, as they are there, so that near-ties fall the same way.
Source: transformers, generation/utils.py, _beam_search and its helpers (5.x).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from baton.protocol.events import TokenLogprob
from baton.protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A beam. `score` is the sum of its log probabilities; of a finished one, over
    length ** length_penalty. `logprobs[i]` belongs to token_ids[i] (empty unless asked for)."""

    token_ids: tuple[int, ...] = ()
    score: float = 0.0
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()


class BeamSearch:
    """The search of one request. `stop_ids` end a hypothesis; so does params.max_tokens."""

    def __init__(self, params: SamplingParams, stop_ids: frozenset[int], vocab_size: int) -> None:
        self.width = params.beam_width
        self._vocab_size = vocab_size
        self.running: list[Hypothesis] = [Hypothesis()]
        self.done = False
        self.stop_ids = stop_ids
        self._params = params
        self._finished: list[Hypothesis] = []  # best first, at most `width`

    @property
    def num_candidates(self) -> int:
        """Continuations of each beam that can matter:
        `width` may live on, and stops beside them."""
        wanted = max(self.width + len(self.stop_ids), self._params.logprobs or 0)
        return min(wanted, self._vocab_size)

    def best(self, count: int) -> list[Hypothesis]:
        """The results, once `done`."""
        return self._finished[:count]

    def advance(self, candidates: Sequence[Sequence[TokenLogprob]]) -> list[int]:
        """One step: `candidates[i]` continue running[i], best first.

        Mutates `running` (best first) and returns the parent of each; sets `done` when no running
        one can improve the result.
        """
        length = len(self.running[0].token_ids) + 1
        last = length >= self._params.max_tokens
        ranked = self._ranked(candidates)
        survivors: list[tuple[int, Hypothesis]] = []
        for rank, (score, parent, candidate) in enumerate(ranked):
            stops = last or candidate.token_id in self.stop_ids
            if stops and rank < self.width:
                final = self._penalized(score, length)
                self._finished.append(self._grown(parent, candidate, candidates, final))
            elif not stops and len(survivors) < self.width:
                survivors.append((parent, self._grown(parent, candidate, candidates, score)))
        # Stable: an earlier one stays in front of its equals.
        self._finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self._finished[self.width :]
        self.running = [hypothesis for _, hypothesis in survivors]
        self.done = last or not survivors or not self._can_improve(length)
        return [parent for parent, _ in survivors]

    def _ranked(
        self, candidates: Sequence[Sequence[TokenLogprob]]
    ) -> list[tuple[float, int, TokenLogprob]]:
        """(score, parent, candidate), best first."""
        flat = [
            (_float32(self.running[parent].score + candidate.logprob), parent, candidate)
            for parent, row in enumerate(candidates)
            for candidate in row
        ]
        flat.sort(key=lambda item: (-item[0], item[1], item[2].rank))
        return flat

    def _grown(
        self,
        parent: int,
        candidate: TokenLogprob,
        candidates: Sequence[Sequence[TokenLogprob]],
        score: float,
    ) -> Hypothesis:
        base, logprobs = self.running[parent], ()
        if self._params.logprobs is not None:
            best = candidates[parent][: self._params.logprobs]
            others = (each for each in best if each.token_id != candidate.token_id)
            logprobs = (*base.logprobs, (candidate, *others))
        return Hypothesis((*base.token_ids, candidate.token_id), score, logprobs)

    def _can_improve(self, length: int) -> bool:
        """Whether a running hypothesis may still reach the finished ones; a heuristic by design."""
        if len(self._finished) < self.width:
            return True
        if self._params.early_stopping == "true":
            return False
        longest = self._params.early_stopping == "never" and self._params.length_penalty > 0
        reach = self._params.max_tokens if longest else length
        return self._penalized(self.running[0].score, reach) > self._finished[-1].score

    def _penalized(self, score: float, length: int) -> float:
        divisor = length**self._params.length_penalty
        return _float32(score / (_float32(divisor) or divisor))


def _float32(value: float) -> float:
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
