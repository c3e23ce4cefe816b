"""BeamSearch decides which continuations of a request's beams live on. It is pure logic over
candidates and knows no blocks, tensors or engine.

The life of a search:
    running: begins with one hypothesis, the prompt without output
    advance(candidates of each running hypothesis) -> for each survivor the index of its parent
    ... until `done`; then `best(n)` returns the results, best first

It equals transformers' beam search token for token. Scores are rounded to float32 after each
addition and division, as transformers does, so that near-ties are decided the same way.
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
    """A beam.

    `score` is the sum of its log probabilities; once finished, that sum over length **
    length_penalty. `logprobs[i]` belongs to token_ids[i]; it is empty unless the request asked for
    log probabilities.
    """

    token_ids: tuple[int, ...] = ()
    score: float = 0.0
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()


class BeamSearch:
    """The beam search of one request. A hypothesis ends at one of `stop_ids` or at max_tokens."""

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
        """Return how many continuations of each beam can matter.

        `width` of them may live on; any number of stop tokens may rank among them.
        """
        wanted = max(self.width + len(self.stop_ids), self._params.logprobs or 0)
        return min(wanted, self._vocab_size)

    def best(self, count: int) -> list[Hypothesis]:
        """Return the `count` best results. Call it once `done` is True."""
        return self._finished[:count]

    def advance(self, candidates: Sequence[Sequence[TokenLogprob]]) -> list[int]:
        """Do one step and return the index of the parent of each survivor.

        `candidates[i]` are continuations of running[i], best first. Replaces `running` by the
        survivors, best first. Sets `done` when no running hypothesis can improve the result.
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
        # The sort is stable: of equal scores, the hypothesis that finished earlier stays in front.
        self._finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self._finished[self.width :]
        self.running = [hypothesis for _, hypothesis in survivors]
        self.done = last or not survivors or not self._can_improve(length)
        return [parent for parent, _ in survivors]

    def _ranked(
        self, candidates: Sequence[Sequence[TokenLogprob]]
    ) -> list[tuple[float, int, TokenLogprob]]:
        """Return all candidates as (score, parent, candidate), best first."""
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
        """Whether a running hypothesis may still beat the worst finished one; a heuristic."""
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
