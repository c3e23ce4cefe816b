"""Arrival: a request becomes a group of sequences, with all that is known of each. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton.engine.beam import BeamSearch
from baton.engine.interface import ModelInfo, Task
from baton.engine.sequence import RequestGroup, SequenceState, num_samples
from baton.events import FirstToken, TokenLogprob
from baton.request import Request


def new_group(
    request: Request, task: Task, order: int, root: bytes, info: ModelInfo
) -> RequestGroup:
    """All samples of `request` with what is known of each; for beams, the prompt. `root`: parent of
    its first block hash; `order`: of its arrival."""
    params = request.params
    if params.best_of is not None and params.best_of > params.n and params.logprobs is None:
        # Whoever picks the best ones needs each token's own log probability.
        request = replace(request, params=replace(params, logprobs=0))
    beams = None
    if params.beam_width:
        eos = () if params.ignore_eos else info.eos_token_ids
        stop_ids = frozenset((*params.stop_token_ids, *eos))
        beams = BeamSearch(params, stop_ids, info.vocab_size)
    outputs = request.output_ids if beams is None else ()
    sequences = [
        SequenceState(
            request,
            root,
            [*request.prompt_ids, *(outputs[sample] if sample < len(outputs) else ())],
            sample,
        )
        for sample in range(1 if beams else num_samples(params))
    ]
    return RequestGroup(request, task, order, sequences, beams)


def fill(sequence: SequenceState, first_tokens: Sequence[FirstToken]) -> None:
    """Append the tokens of positions that the sequence lacks; those it has are repetitions."""
    for first in sorted(first_tokens, key=lambda token: token.position):
        if first.sample == sequence.sample_index and first.position == sequence.num_outputs:
            sequence.tokens.append(first.token_id)


def told_of(
    sequence: SequenceState, position: int, first_tokens: Sequence[FirstToken]
) -> tuple[tuple[TokenLogprob, ...], ...]:
    """END's log-probabilities of a sequence's tokens from `position` on; () if none were told."""
    told = {t.position: t.logprobs for t in first_tokens if t.sample == sequence.sample_index}
    return tuple(filter(None, (told.get(at) for at in range(position, sequence.num_outputs))))
