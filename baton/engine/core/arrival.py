"""Arrival: makes a request a group of sequences, with all tokens known of each. Pure.

Where a request is decoded, each live sample is a sequence. Where only its prompt is computed, there
is one sequence, from whose last token each sample draws its next. Tokens that all samples have
emitted alike then count as prompt, unless the request resumes exactly: in that case only its prompt
is computed (replay.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from baton.engine.state.beam import BeamSearch
from baton.engine.state.interface import ModelInfo, Task
from baton.engine.state.sequence import RequestGroup, SequenceState
from baton.protocol.events import FirstToken, TokenEvent, TokenLogprob
from baton.protocol.request import FinishReason, Request

EndOf = Callable[[SequenceState, Task], tuple[FinishReason | None, int | None]]


def new_group(
    request: Request,
    task: Task,
    order: int,
    root: bytes,
    info: ModelInfo,
    exact_chunk: int | None = None,
) -> RequestGroup:
    """Return a group of all live samples of `request` with their known tokens; for beams, of the
    prompt.

    `root`: parent of its first block hash. `order`: its place in the order of arrival.
    `exact_chunk`: see replay.py.
    """
    params = request.params
    if params.best_of is not None and params.best_of > params.n and params.logprobs is None:
        # Choosing the best ones needs the log probability of each token.
        request = replace(request, params=replace(params, logprobs=0))
    beams = None
    if params.beam_width:
        eos = () if params.ignore_eos and params.guided is None else info.eos_token_ids
        stop_ids = frozenset((*params.stop_token_ids, *eos))
        beams = BeamSearch(params, stop_ids, info.vocab_size)
    resumed = exact_chunk is not None and request.emitted(0) != ()
    if task is Task.PREFILL and (params.num_samples > 1 or resumed):
        known = request.known_ids if exact_chunk is None else request.prompt_ids
        sequences = [_fanning_out(request, root, known)]
    else:
        sequences = [
            SequenceState(request, root, [*request.prompt_ids, *request.emitted(sample)], sample)
            for sample in request.live_samples
        ]
    for sequence in sequences:
        sequence.exact_chunk = exact_chunk
        sequence.outputs_differ = info.outputs_differ
    return RequestGroup(request, task, order, sequences, beams)


def _fanning_out(request: Request, root: bytes, known: Sequence[int]) -> SequenceState:
    """Return one sequence of `known`, the tokens that all live samples share.

    The samples that have no token beyond these draw their next one from it.
    """
    live = request.live_samples
    position = len(known) - len(request.prompt_ids)
    lacking = tuple(sample for sample in live if len(request.emitted(sample)) == position)
    return SequenceState(request, root, list(known), live[0], lacking)


def arrive(
    group: RequestGroup, first_tokens: Sequence[FirstToken], end_of: EndOf
) -> list[TokenEvent]:
    """Fill in the tokens known beyond the request, and drop the samples that they end.

    Return the events that report this.
    """
    if group.beams is not None:
        group.leader.candidates = _candidates(first_tokens)
        return []
    request, events = group.request, list[TokenEvent]()
    for sequence in list(group.sequences):
        if sequence.fan_out is not None:
            continue  # no sample, but what samples share
        position = sequence.num_outputs
        fill(sequence, first_tokens)
        reason, stop_token = end_of(sequence, group.task)
        if reason is not None:
            group.sequences.remove(sequence)
        repeated = tuple(sequence.tokens[sequence.num_prompt + position :])
        if repeated or reason is not None:
            events.append(
                TokenEvent(
                    request.id, request.epoch, position, repeated, sequence.sample_index,
                    finish_reason=reason, stop_token_id=stop_token,
                    logprobs=known_logprobs(sequence, position, first_tokens),
                )
            )  # fmt: skip
    return events


def fill(sequence: SequenceState, first_tokens: Sequence[FirstToken]) -> None:
    """Append the tokens of positions that the sequence lacks, with the drafts behind them; for
    other positions it has the token.
    """
    for first in sorted(first_tokens, key=lambda token: token.position):
        if first.sample == sequence.sample_index and first.position == sequence.num_outputs:
            sequence.tokens.append(first.token_id)
            sequence.drafts = first.drafts


def known_logprobs(
    sequence: SequenceState, position: int, first_tokens: Sequence[FirstToken]
) -> tuple[tuple[TokenLogprob, ...], ...]:
    """Return END's log-probabilities of a sequence's tokens from `position` on; () if it
    sent none.
    """
    known = {t.position: t.logprobs for t in first_tokens if t.sample == sequence.sample_index}
    return tuple(filter(None, (known.get(at) for at in range(position, sequence.num_outputs))))


def _candidates(first_tokens: Sequence[FirstToken]) -> tuple[TokenLogprob, ...] | None:
    """Return a search's first candidates, best first.

    None if END sent none; then they are computed here.
    """
    ranked = sorted(first_tokens, key=lambda token: token.sample)
    return (
        tuple(
            TokenLogprob(token.token_id, token.cumulative_logprob, token.sample + 1)
            for token in ranked
        )
        or None
    )
