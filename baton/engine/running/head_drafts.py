"""HeadDrafts: runs a model's draft head behind each step, so that the next step has guesses.

    step      positions  p  p+1  p+2 (sampled: t)      known tokens, drafts that were accepted
    pass 1    tokens     p+1  p+2  t                   all rows: the head's KV is then as complete
              writes     p  p+1  p+2                   as the target's; the last row gives draft 1
    pass 2    tokens               t -> draft 1        one row per sequence: from the head's own
              writes                    p+3            state; gives draft 2; and so on

The drafts are drawn with the request's own params and with the noise that the target will have at
that position, as in draft.py. A row behind a rejected draft is left out: the next step writes its
slot. Slots of drafts are overwritten then, too.

What the head guesses touches the acceptance alone. So two inexact things are allowed. The last slot
of a block that two requests share was computed with the next token of the one that wrote it. And
where several samples, or none, follow a row, it takes one of their tokens, or its own.
It keeps no state between steps but the pool's KV: a lost draft costs one step without drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.engine.loading.loading import LoadedModel
from baton.engine.memory.kv_cache import KVArena
from baton.engine.models.draft_heads import DraftHead
from baton.engine.running.runner import Asked, ModelRunner, choose
from baton.engine.sampling.sampler import Draw
from baton.engine.state.attention import Attention
from baton.engine.state.batch import Batch, flatten
from baton.engine.state.interface import Sampled, SequenceChunk
from baton.protocol.sampling import SamplingParams


def make_runner(loaded: LoadedModel, arena: KVArena, num_drafts: int) -> ModelRunner:
    """Return a runner over `arena`; a model with a draft head guesses up to `num_drafts` tokens."""
    head = loaded.head
    drafts = None if head is None else HeadDrafts(loaded, head, arena.block_size, num_drafts)
    return ModelRunner(loaded, arena, arena.states, drafts)


@dataclass(slots=True)
class _Drafting:
    """A sequence that drafts. `row`: of its last state; `start`: that state's position.

    `known`: tokens that were sampled in this step, which are not in chunk.history yet.
    """

    index: int
    chunk: SequenceChunk
    params: SamplingParams
    known: tuple[int, ...]
    limit: int
    start: int
    row: int
    drafts: list[int]

    @property
    def draw(self) -> Draw:
        """The draw of the next draft."""
        ahead, chunk = (*self.known, *self.drafts), self.chunk
        return Draw(
            self.params, chunk.sample_index, chunk.position + len(ahead), chunk.history,
            chunk.num_prompt, ahead, chunk.occurrences,
        )  # fmt: skip

    def next_chunk(self, block_size: int) -> SequenceChunk | None:
        """Return the row behind the last draft; None if no draft is wanted, or no slot is free."""
        start = self.start + 1
        if len(self.drafts) >= self.limit or start >= self.chunk.blocks[0].end * block_size:
            return None
        return SequenceChunk(
            self.chunk.request_id, self.drafts[-1:], start, self.chunk.blocks, self.params
        )


class HeadDrafts:
    """Runs `head` with the KV of the model's own batches. Owned by the runner's thread."""

    def __init__(
        self, loaded: LoadedModel, head: DraftHead, block_size: int, num_drafts: int
    ) -> None:
        """`num_drafts`: the most drafts per sequence and step."""
        self._head, self._device = head, loaded.device
        self._layer = len(loaded.info.layers) - 1
        self._eos_token_ids, self._max_len = loaded.info.eos_token_ids, loaded.info.max_model_len
        self._block_size, self._num_drafts = block_size, num_drafts

    def run(
        self,
        chunks: Sequence[SequenceChunk],
        batch: Batch,
        hidden: Tensor,
        sampled: Mapping[int, Sampled],
    ) -> dict[int, Sampled]:
        """Run the head behind a step of `chunks`; return `sampled` with drafts.

        `hidden` [T, H]: of the rows of `batch`. Calls batch.on_layer once the head's KV is written.
        """
        rows: list[int] = []
        shifted: list[SequenceChunk] = []
        active: list[_Drafting] = []
        for index, (chunk, span) in enumerate(zip(chunks, batch.spans, strict=True)):
            tokens = _shifted(chunk, sampled.get(index))
            rows.extend(range(span.first_row, span.first_row + len(tokens)))
            shifted.append(replace(chunk, token_ids=tokens, num_drafts=0))
            drafting = self._begin(index, chunk, sampled.get(index), len(rows) - 1)
            if drafting is not None:
                active.append(drafting)
        states = self._head.states(hidden, batch.tapped)
        if len(rows) < states.shape[0]:
            states = states[torch.tensor(rows, dtype=torch.int64, device=states.device)]
        states = self._forward(shifted, states, batch.attention)
        result = dict(sampled)
        while active:
            last = states[torch.tensor([one.row for one in active], device=states.device)]
            self._draw(active, last)
            for one in active:
                result[one.index] = replace(sampled[one.index], drafts=tuple(one.drafts))
            following = [(one, one.next_chunk(self._block_size)) for one in active]
            kept = [row for row, (_, chunk) in enumerate(following) if chunk is not None]
            more = [chunk for _, chunk in following if chunk is not None]
            active = [active[row] for row in kept]
            if active:
                states = self._forward(
                    more, last[torch.tensor(kept, device=last.device)], batch.attention
                )
                for row, one in enumerate(active):
                    one.row, one.start = row, one.start + 1
        if batch.on_layer is not None:  # not before: an export may read the slots of drafts as well
            batch.on_layer(self._layer)
        return result

    def _begin(
        self, index: int, chunk: SequenceChunk, sampled: Sampled | None, row: int
    ) -> _Drafting | None:
        """Return what drafts behind `chunk`; None if nothing does."""
        params = chunk.sample
        if sampled is None or params is None or chunk.fan_out or not sampled.token_ids:
            return None
        known = sampled.token_ids
        if self._ends(params, known[-1]):
            return None
        start = chunk.start + len(chunk.token_ids) - chunk.num_drafts + len(known) - 2
        # The last token of an output needs no guess for a next one.
        room = params.max_tokens - chunk.position - len(known) - 1
        limit = min(self._num_drafts, room, self._max_len - start - 2)
        if limit < 1:
            return None
        if params.logprobs is not None:  # nobody reads the log probabilities of a guess
            params = replace(params, logprobs=None)
        return _Drafting(index, chunk, params, known, limit, start, row, [])

    def _ends(self, params: SamplingParams, token: int) -> bool:
        return token in params.stop_token_ids or (
            not params.ignore_eos and token in self._eos_token_ids
        )

    def _forward(
        self, chunks: Sequence[SequenceChunk], states: Tensor, attention: Attention
    ) -> Tensor:
        step = flatten(chunks, attention, self._block_size, self._device)
        return self._head.forward(states, step.token_ids, step.positions, step.batch)

    def _draw(self, active: Sequence[_Drafting], states: Tensor) -> None:
        """Draw one more draft for each of `active`, whose last states are states [N, H]."""
        asked = [
            Asked(replace(one.chunk, sample=one.params, num_drafts=0, guide=None), row, (one.draw,))
            for row, one in enumerate(active)
        ]
        drawn = choose(self._head.logits(states), asked, self._eos_token_ids)
        for one, outcome in zip(active, drawn, strict=True):
            token = outcome.token_ids[0]
            one.drafts.append(token)
            if self._ends(one.params, token):
                one.limit = len(one.drafts)


def _shifted(chunk: SequenceChunk, sampled: Sampled | None) -> list[int]:
    """Return the tokens behind the rows of `chunk` whose own tokens stand: all known ones, and the
    accepted drafts."""
    num_known = len(chunk.token_ids) - chunk.num_drafts
    end = chunk.start + num_known
    tokens = list(chunk.history[chunk.start + 1 : end + 1])
    if len(tokens) == num_known:
        return tokens  # the chunk does not reach the last known token
    if sampled is None or not sampled.token_ids:
        return [*tokens, chunk.token_ids[num_known - 1]]
    return [*tokens, *(sampled.token_ids[:1] if chunk.fan_out else sampled.token_ids)]
