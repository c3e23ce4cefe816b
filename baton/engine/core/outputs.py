"""Outputs: turns the runner's results into tokens, token events, and the ends of samples.

For each row of a step, known tokens are added (accepted drafts and the sampled one), blocks are
marked computed, and an event reports it. A beam search reports nothing before it is done; then each
of the n best is one event. This is the last part of Engine.step; it calls only public methods of
the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from baton.engine.core.scheduler import Scheduler
from baton.engine.state.interface import ChunkResult, Sampled, SequenceChunk, Task
from baton.engine.state.sequence import RequestGroup, SequenceState
from baton.engine.state.stats import EngineStats
from baton.engine.state.step_plan import Row, StepPlan
from baton.protocol.errors import InternalError
from baton.protocol.events import TokenEvent, TokenLogprob
from baton.protocol.request import FinishReason

# why a sample ends (None: it does not), and by which stop id
End = tuple[FinishReason | None, int | None]


class Outputs:
    """Takes the results of steps.

    `limit(task)`: the most tokens, prompt and output. `ended(group)` is called for each request
    that leaves the engine by an event.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        stats: EngineStats,
        eos_token_ids: Sequence[int],
        limit: Callable[[Task], int],
        ended: Callable[[RequestGroup], None],
    ) -> None:
        self._scheduler = scheduler
        self._stats = stats
        self._eos_token_ids = eos_token_ids
        self._limit = limit
        self._ended = ended

    def take(self, plan: StepPlan, results: Sequence[ChunkResult]) -> list[TokenEvent]:
        """Add the results to the plan's sequences; return the events. Raises InternalError if they
        do not fit.
        """
        if len(results) != len(plan.rows):
            raise InternalError(f"{len(results)} results for {len(plan.rows)} rows")
        events: list[TokenEvent] = []
        for row, result in zip(plan.rows, results, strict=True):
            if row.gone:
                continue  # planned before its end was known
            if (result.sampled is None) != (row.chunk.sample is None):
                raise InternalError(f"{row.chunk.request_id}: tokens exactly where they are asked")
            row.group.note_prompt_logprobs(row.chunk.start, result.prompt_logprobs)
            self._count_chunk(row.sequence, row.chunk)
            begins = result.sampled is not None
            if row.group.task is Task.PREFILL and not row.group.dropped:
                prefilled = self._prefilled(row, result.sampled)
                events.extend(prefilled)
                begins = bool(prefilled)  # perhaps every sample has its token 1 already
            elif result.sampled is None or row.group.dropped:
                self._scheduler.computed(row.group, row.sequence, row.chunk, 0)
            elif row.group.beams is not None:
                self._scheduler.computed(row.group, row.sequence, row.chunk, 0)
                row.sequence.candidates = result.sampled.candidates
                events.extend(self._search(row.group))
            else:
                events.append(self._sampled(row, result.sampled))
            if begins and not row.group.begun:
                self._stats.num_first_step_drafts += row.chunk.num_drafts
                _begin(plan, row)
        return events

    def end_of(self, sequence: SequenceState, task: Task) -> End:
        """Return whether, and why, the known tokens end the sample already."""
        if sequence.num_outputs <= 0:
            return None, None
        return sequence.ends_with(
            sequence.tokens[-1], sequence.num_outputs, self._eos_token_ids, self._limit(task)
        )

    # ---- prompts for others ----

    def _prefilled(self, row: Row, sampled: Sampled | None) -> list[TokenEvent]:
        """End a PREFILL request with its last row; return its events.

        They are token 1 of each sample that lacks it (if none does, an event without a token), or
        the first candidates of a search.
        """
        group, sequence = row.group, row.sequence
        self._scheduler.computed(group, sequence, row.chunk, 0)
        if sequence.num_uncomputed:
            return []
        request, position = group.request, sequence.num_outputs
        last = TokenEvent(
            request.id, request.epoch, position, (), sequence.sample_index,
            num_cached_tokens=group.num_cached_tokens,
        )  # fmt: skip
        events: list[TokenEvent] = []
        if group.beams is not None:
            candidates = () if sampled is None else sampled.candidates
            events = [replace(last, candidates=candidates, prompt_logprobs=_reported_now(group))]
        elif sampled is not None:
            samples = (sequence.sample_index,) if sequence.fan_out is None else sequence.fan_out
            limit = self._limit(group.task)
            for index, token in enumerate(sampled.token_ids):
                end = sequence.ends_with(token, position + 1, self._eos_token_ids, limit)
                events.append(
                    replace(
                        last, token_ids=(token,), sample=samples[index], finish_reason=end[0],
                        stop_token_id=end[1], logprobs=sampled.logprobs[index : index + 1],
                        drafts=sampled.drafts, prompt_logprobs=_reported_now(group),
                    )
                )  # fmt: skip
            self._stats.num_generated_tokens += len(events)
        self._scheduler.end(group, sequence)
        self._ended(group)
        return events or [last]

    # ---- samples ----

    def _sampled(self, row: Row, sampled: Sampled) -> TokenEvent:
        """Append the sampled tokens, up to one that ends the sample; end the sample if one does."""
        group, sequence, chunk = row.group, row.sequence, row.chunk
        drawn, num_drafts = sampled.token_ids, chunk.num_drafts
        drafts = tuple(chunk.token_ids[len(chunk.token_ids) - num_drafts :])
        if not drawn or drawn[:-1] != drafts[: len(drawn) - 1] or len(drawn) > num_drafts + 1:
            raise InternalError(f"{chunk.request_id}: sampled {drawn} over drafts {drafts}")
        position = sequence.num_outputs
        tokens, (reason, stop_token) = self._up_to_end(row, drawn, position)
        num_accepted = min(len(tokens), len(drawn) - 1)
        sequence.tokens.extend(tokens)
        self._scheduler.computed(group, sequence, chunk, num_accepted)
        self._stats.num_accepted_tokens += num_accepted
        self._stats.num_generated_tokens += len(tokens)
        sequence.drafts = sampled.drafts  # guesses behind the last of `drawn`; if cut, it has ended
        event = TokenEvent(
            group.request.id, group.request.epoch, position, tokens, sequence.sample_index,
            finish_reason=reason,
            stop_token_id=stop_token,
            num_cached_tokens=group.num_cached_tokens,
            logprobs=sampled.logprobs[: len(tokens)],
            prompt_logprobs=_reported_now(group),
            preemptions=group.num_preempted if reason is not None else 0,
        )  # fmt: skip
        if reason is not None and self._scheduler.end(group, sequence):
            self._ended(group)
        return event

    def _up_to_end(
        self, row: Row, drawn: tuple[int, ...], position: int
    ) -> tuple[tuple[int, ...], End]:
        """Return `drawn`, from output index `position` on, cut after a token that ends the
        sample.
        """
        limit = self._limit(row.group.task)
        for index, token in enumerate(drawn, 1):
            end = row.sequence.ends_with(token, position + index, self._eos_token_ids, limit)
            if end[0] is not None:
                return drawn[:index], end
        return drawn, (None, None)

    # ---- beams ----

    def begin_search(self, group: RequestGroup) -> list[TokenEvent]:
        """Do the first step of a search whose candidates came with its prompt's KV; return its
        events.
        """
        return self._search(group)

    def _search(self, group: RequestGroup) -> list[TokenEvent]:
        """Do one step of the search, once all beams have their candidates; return the events if it
        is done.
        """
        beams, sequences = group.beams, group.sequences
        candidates = [s.candidates for s in sequences if s.candidates is not None]
        if beams is None or len(candidates) < len(sequences):
            return []
        parents = beams.advance(candidates)
        if beams.done:
            self._scheduler.remove(group)
            self._ended(group)
            return self._results(group)
        self._scheduler.branch(group, [sequences[parent] for parent in parents])
        for sequence, hypothesis in zip(group.sequences, beams.running, strict=True):
            sequence.tokens.append(hypothesis.token_ids[-1])
            sequence.candidates = None
        return []

    def _results(self, group: RequestGroup) -> list[TokenEvent]:
        assert group.beams is not None, "only a search has results"
        events: list[TokenEvent] = []
        count = group.request.params.n
        for sample, hypothesis in enumerate(group.beams.best(count)):
            last = hypothesis.token_ids[-1]
            stopped = last in group.beams.stop_ids
            self._stats.num_generated_tokens += len(hypothesis.token_ids)
            events.append(
                TokenEvent(
                    group.request.id, group.request.epoch, 0, hypothesis.token_ids, sample,
                    finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
                    stop_token_id=last if stopped else None,
                    num_cached_tokens=group.num_cached_tokens,
                    logprobs=hypothesis.logprobs,
                    prompt_logprobs=_reported_now(group),
                    preemptions=group.num_preempted,
                )
            )  # fmt: skip
        for sample in range(len(events), count):  # all other hypotheses were ruled out
            reason = FinishReason.LENGTH
            request = group.request
            events.append(
                TokenEvent(request.id, request.epoch, 0, (), sample, finish_reason=reason)
            )
        return events

    def _count_chunk(self, sequence: SequenceState, chunk: SequenceChunk) -> None:
        if not sequence.prefilling:
            return
        sequence.num_prefill_chunks += 1
        self._stats.num_prefill_chunks += 1
        # The known output of an exact request is no part of its prompt: it is replayed.
        end = chunk.start + len(chunk.token_ids)
        replays = sequence.exact_chunk is not None and end >= sequence.num_prompt
        if chunk.sample is not None or replays:
            sequence.prefilling = False
            self._stats.num_chunked_prompts += sequence.num_prefill_chunks > 1


def _begin(plan: StepPlan, row: Row) -> None:
    """Note that the row's request gets its first token here, or the first after a pause."""
    row.group.begun = True
    row.group.num_chunks = row.group.num_chunks or row.sequence.num_prefill_chunks
    plan.begun.append(row.group)


def _reported_now(group: RequestGroup) -> tuple[tuple[TokenLogprob, ...], ...]:
    """Return the prompt's logprobs for the request's first event; () for later ones."""
    if group.reported:
        return ()
    logprobs, group.prompt_logprobs = tuple(group.prompt_logprobs), []
    group.reported = True
    return logprobs
