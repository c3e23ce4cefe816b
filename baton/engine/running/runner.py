"""ModelRunner runs one engine step: it flattens the chunks, runs the model, and samples.

Only rows that need logits are multiplied with the head, the widest matrix of the model:

    rows of a chunk     k k k k | k d d d        k known tokens, d drafts (num_drafts = 3)
    sampled rows                  ^ ^ ^ ^        one draw for each of position .. position + 3
    prompt logprobs     ^ ^ ^ ^                  rows that predict a prompt token, in slabs

The draw after an accepted draft has the noise and the history of plain decoding. So the accepted
tokens are those of plain decoding, whatever was proposed.
Synchronous; owned by the engine thread. It keeps no state between steps except the pool's KV.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from baton.engine.loading.loading import LoadedModel
from baton.engine.running import masks
from baton.engine.running.attention_choice import choose_attention
from baton.engine.running.cuda_graphs import choose_graphs
from baton.engine.sampling import logprobs, penalties
from baton.engine.sampling.sampler import Draw, prepare, sample
from baton.engine.state.attention import KVViews
from baton.engine.state.batch import Batch, Span, States, Step, flatten
from baton.engine.state.interface import ChunkResult, Sampled, SequenceChunk
from baton.protocol.events import TokenLogprob

if TYPE_CHECKING:  # it draws with what is below
    from baton.engine.running.head_drafts import HeadDrafts

PROMPT_SLAB_ELEMENTS: Final = 1 << 23  # logits of prompt rows at once: 32 MiB


@dataclass(frozen=True, slots=True)
class Asked:
    """A chunk that samples, and its draws. Draw i uses row `first` + i of the sampled rows."""

    chunk: SequenceChunk
    first: int
    draws: tuple[Draw, ...]

    @property
    def drafts(self) -> Sequence[int]:
        """Return the proposals among the chunk's tokens; draw i decides whether drafts[i] is
        accepted.
        """
        chunk = self.chunk
        return chunk.token_ids[len(chunk.token_ids) - chunk.num_drafts :]


class ModelRunner:
    """Implements interface.Runner over a loaded model, the pool's KV views, and the states of a
    model that keeps recurrent state.

    `drafts`: runs the model's draft head behind each step.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        pool: KVViews,
        states: States | None = None,
        drafts: HeadDrafts | None = None,
    ) -> None:
        self._loaded = loaded
        self._states = states
        self._drafts = drafts
        self._attention = choose_attention(loaded, pool)
        self._block_size = pool.layer(0)[0].shape[1]
        self._taps = () if loaded.head is None else loaded.head.taps
        # A graph computes hidden states alone.
        self._graphs = (
            None if self._taps else choose_graphs(loaded, self._attention, self._block_size)
        )
        prepare(loaded.device)

    @torch.inference_mode()
    def run(
        self, chunks: Sequence[SequenceChunk], on_layer: Callable[[int], None] | None = None
    ) -> list[ChunkResult]:
        """See interface.Runner.run."""
        if not chunks:
            return []
        images = self._loaded.images
        if images is not None:
            images.make_rows(chunks)
        step = flatten(
            chunks, self._attention, self._block_size, self._loaded.device, on_layer, self._states
        )
        if images is not None:
            images.release(chunks)
        if self._taps:
            step = replace(step, batch=replace(step.batch, taps=self._taps))
        elif self._loaded.head is None and step.batch.logits is None:  # a head reads all rows
            step = replace(step, batch=replace(step.batch, read=rows_read(chunks)))
        hidden = self._forward(step)
        sampled = self._sample(chunks, step.batch, hidden)
        if self._drafts is not None:
            sampled = self._drafts.run(chunks, step.batch, hidden, sampled)
        prompts = self._prompt_logprobs(chunks, step.batch.spans, hidden)
        return [
            ChunkResult(sampled.get(index), prompts.get(index, ())) for index in range(len(chunks))
        ]

    def _forward(self, step: Step) -> Tensor:
        """Return the hidden states [T, H], from a CUDA graph if one fits the step."""
        hidden = None if self._graphs is None else self._graphs.forward(step)
        if hidden is None:
            hidden = self._loaded.forward(step.token_ids, step.positions, step.batch)
        return hidden

    def _sample(
        self, chunks: Sequence[SequenceChunk], batch: Batch, hidden: Tensor
    ) -> dict[int, Sampled]:
        """Return what each sampling chunk yields, by the chunk's index."""
        rows: list[int] = []
        asked: dict[int, Asked] = {}
        for index, chunk in enumerate(chunks):
            if chunk.sample is None:
                continue
            draws = draws_of(chunk)
            end = batch.spans[index].first_row + batch.spans[index].num_rows
            asked[index] = Asked(chunk, len(rows), draws)
            rows.extend([end - 1] * len(draws) if chunk.fan_out else range(end - len(draws), end))
        if not asked:
            return {}
        logits = None if batch.logits is None else batch.logits.made
        if logits is None:
            if rows != list(range(hidden.shape[0])):
                hidden = _rows(hidden, rows)
            logits = self._loaded.logits(hidden)
        outcomes = choose(logits, list(asked.values()), self._loaded.info.eos_token_ids)
        return dict(zip(asked, outcomes, strict=True))

    def _prompt_logprobs(
        self, chunks: Sequence[SequenceChunk], spans: Sequence[Span], hidden: Tensor
    ) -> dict[int, tuple[tuple[TokenLogprob, ...], ...]]:
        """Return log probabilities of the prompt tokens that the rows predict, by the chunk's
        index.
        """
        rows: list[int] = []
        tokens: list[int] = []
        counts: list[int] = []
        shares: dict[int, slice] = {}
        for index, chunk in enumerate(chunks):
            if chunk.prompt_logprobs is None:
                continue
            # Row r predicts token start + r + 1; the last prompt token predicts no prompt token.
            stop = min(chunk.start + spans[index].num_rows, chunk.num_prompt - 1)
            count = max(0, stop - chunk.start)
            shares[index] = slice(len(rows), len(rows) + count)
            first = spans[index].first_row
            rows.extend(range(first, first + count))
            tokens.extend(chunk.history[chunk.start + 1 : chunk.start + 1 + count])
            counts.extend([chunk.prompt_logprobs] * count)
        reported: list[tuple[TokenLogprob, ...]] = []
        rows_at_once = max(1, PROMPT_SLAB_ELEMENTS // self._loaded.info.vocab_size)
        for at in range(0, len(rows), rows_at_once):
            slab = slice(at, at + rows_at_once)
            logits = self._loaded.logits(_rows(hidden, rows[slab]))
            reported.extend(logprobs.report(logits, tokens[slab], counts[slab]))
        return {index: tuple(reported[share]) for index, share in shares.items()}


def rows_read(chunks: Sequence[SequenceChunk]) -> tuple[int, ...] | None:
    """Return of how many last rows of each chunk the hidden states are read; None = of all."""
    counts = [chunk.rows_read for chunk in chunks]
    return None if counts == [len(chunk.token_ids) for chunk in chunks] else tuple(counts)


def choose(logits: Tensor, asked: Sequence[Asked], eos_token_ids: Sequence[int]) -> list[Sampled]:
    """Choose tokens, or candidates of beams, for each of `asked`.

    `logits` [rows of all, vocab] float32 are changed where masks, penalties or beams ask for it.
    Raises InternalError for logits that are not numbers.
    """
    draws = [draw for one in asked for draw in one.draws]
    # Reported log probabilities are those of raw logits, but only chosen tokens tell which rows are
    # reported. So raw rows are copied before they change.
    kept = [row for row, draw in enumerate(draws) if draw.params.logprobs is not None]
    raw = _rows(logits, kept) if kept else None
    for one in asked:
        if one.chunk.num_candidates:
            # The softmax comes before masks, as in transformers' beam search, so that scores of
            # beams with different masks stay comparable.
            logits[one.first] = logits[one.first].log_softmax(-1)
    masks.apply(logits, asked)
    penalties.apply(logits, draws, eos_token_ids)
    branches = _branches(logits, asked)
    drawn = [row for row in range(len(draws)) if row not in branches]
    remaining = _rows(logits, drawn) if branches else logits
    tokens = sample(remaining, [draws[row] for row in drawn]) if drawn else []
    by_row = dict(zip(drawn, tokens, strict=True))
    standing = {one.first: _accepted(one, by_row) for one in asked if one.first in by_row}
    reported = {} if raw is None else _reported(raw, kept, draws, standing)
    outcomes: list[Sampled] = []
    for one in asked:
        if one.first in branches:
            outcomes.append(Sampled((), candidates=branches[one.first]))
            continue
        accepted = standing[one.first]
        rows = range(one.first, one.first + len(accepted))
        outcomes.append(Sampled(accepted, tuple(reported[row] for row in rows if row in reported)))
    return outcomes


def draws_of(chunk: SequenceChunk) -> tuple[Draw, ...]:
    """Return the draws of a chunk that samples.

    They are one draw and one more after each draft, or one per sample that fans out from the chunk.
    """
    params = chunk.sample
    assert params is not None
    first = Draw(
        params, chunk.sample_index, chunk.position, chunk.history, chunk.num_prompt,
        occurrences=chunk.occurrences,
    )  # fmt: skip
    if chunk.fan_out:
        return tuple(replace(first, sample_index=sample) for sample in chunk.fan_out)
    if not chunk.num_drafts:
        return (first,)
    drafts = chunk.token_ids[len(chunk.token_ids) - chunk.num_drafts :]
    later = (
        replace(first, position=chunk.position + i, ahead=drafts[:i] if params.remembers else ())
        for i in range(1, len(drafts) + 1)
    )
    return (first, *later)


def _accepted(one: Asked, tokens: Mapping[int, int]) -> tuple[int, ...]:
    """Return the tokens that plain decoding would have drawn: up to the first that is not the
    draft.

    With `fan_out`, return one token per sample.
    """
    if one.chunk.fan_out:
        return tuple(tokens[one.first + index] for index in range(len(one.draws)))
    accepted: list[int] = []
    for row, draft in enumerate(one.drafts, start=one.first):
        accepted.append(tokens[row])
        if tokens[row] != draft:
            return tuple(accepted)
    return (*accepted, tokens[one.first + len(one.drafts)])


def _branches(logits: Tensor, asked: Sequence[Asked]) -> dict[int, tuple[TokenLogprob, ...]]:
    """Return the candidates of each beam, by row of the logits; empty without beams."""
    beams = [one for one in asked if one.chunk.num_candidates]
    if not beams:
        return {}
    rows = _rows(logits, [one.first for one in beams])
    best = logprobs.candidates(rows, [one.chunk.num_candidates for one in beams])
    return {one.first: row for one, row in zip(beams, best, strict=True)}


def _reported(
    raw: Tensor,
    kept: Sequence[int],
    draws: Sequence[Draw],
    standing: Mapping[int, tuple[int, ...]],
) -> dict[int, tuple[TokenLogprob, ...]]:
    """Return log probabilities by row, for those rows of `kept` whose tokens were accepted.

    `raw` holds the logits of the rows `kept`.
    """
    tokens = {
        first + i: token for first, accepted in standing.items() for i, token in enumerate(accepted)
    }
    places = [place for place, row in enumerate(kept) if row in tokens]
    if not places:
        return {}
    rows = [kept[place] for place in places]
    counts = [draws[row].params.logprobs or 0 for row in rows]
    best = logprobs.report(_rows(raw, places), [tokens[row] for row in rows], counts)
    reported = dict(zip(rows, best, strict=True))
    for row, place in zip(rows, places, strict=True):
        if ids := draws[row].params.logprob_token_ids:
            reported[row] = logprobs.report_ids(raw[place], tokens[row], ids)
    return reported


def _rows(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Return a copy of some rows of a tensor, which may be none."""
    if not rows:
        return tensor[:0]
    return tensor[torch.tensor(rows, dtype=torch.int64, device=tensor.device)]
