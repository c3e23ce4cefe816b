"""SequenceState is one sample (or beam) of a request; RequestGroup is all samples of a request.

Both are mutable. The scheduler and the block tables write them; the engine appends tokens and log
probabilities.

    tokens   [ prompt ............ | output ......... ]     all known tokens
             0                  num_prompt        len(tokens)
    KV       [ computed ...... ) [ to compute ........ )    at least one to compute, while it runs
             0          num_computed
    tables   one per layer group: blocks cover every computed token, except the first `num_freed`
             blocks, which a sliding window has left behind or never needed; the first
             `num_registered` blocks are in the prefix map; blocks before `first_whole` lack tokens
             and stay out of the prefix map

There are no phases: a sequence with one token to compute decodes, one with more prefills. An exact
sequence (replay.py) computes its known output tokens one by one, as it did the first time. A group
is admitted, preempted and brought back as a whole. Its first sequence leads. The others follow:
they hold no block until the leader has computed the tokens that they share, then fork from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from baton.engine.state.adoption import Adoption
from baton.engine.state.beam import BeamSearch
from baton.engine.state.images import PromptImages
from baton.engine.state.interface import NO_SLOT, SequenceChunk, Task
from baton.engine.state.occurrences import Occurrences
from baton.guided.guide import Guide
from baton.protocol import block_hashes
from baton.protocol.events import TokenLogprob
from baton.protocol.images import salt
from baton.protocol.kv_spec import BlockLists, HeldBlocks
from baton.protocol.request import FinishReason, Request


@dataclass(slots=True)
class Table:
    """A sequence's blocks in one layer group, from its block `num_freed` on.

    Some of the first blocks may lie in the pool of another node: those of `adoption`.
    """

    blocks: list[int]
    num_freed: int = 0
    num_registered: int = 0
    first_whole: int = 0
    adoption: Adoption | None = None

    @property
    def end(self) -> int:
        """Return how many blocks of the sequence are covered, freed ones included."""
        return self.num_freed + len(self.blocks)


@dataclass(eq=False, slots=True)
class SequenceState:
    """One sample of `request`, or one of its running beams."""

    request: Request
    root: bytes
    tokens: list[int]
    sample_index: int = 0
    fan_out: tuple[int, ...] | None = None  # samples that draw from its last token; None = itself
    tables: list[Table] = field(default_factory=list)  # empty while it holds nothing
    num_computed: int = 0
    num_prefill_chunks: int = 0  # chunks so far of the current prefill
    prefilling: bool = True  # since it was admitted with more than one token; ends when it samples
    following: bool = False  # holds no block yet: it will fork from the group's first sequence
    forked: bool = False  # it may share blocks that it will write, and must copy them before
    candidates: tuple[TokenLogprob, ...] | None = None  # result of this beam step, once computed
    guide: Guide | None = None  # position in params.guided; recomputed from the output, if lost
    drafts: tuple[int, ...] = ()  # what the model's draft head guesses behind the last token
    state_slot: int = NO_SLOT  # of its recurrent state, in a model that keeps one
    kept_slot: int = NO_SLOT  # of its state before the drafts of the step under way
    checkpoint_at: tuple[int, ...] = ()  # tokens: where its chunks stop for state checkpoints
    exact_chunk: int | None = None  # tokens per chunk; None: any number, as is cheapest
    images: PromptImages | None = None  # of the prompt
    outputs_differ: bool = False  # see ModelInfo: no other prompt may find blocks with outputs
    _hashes: list[bytes] = field(default_factory=list)
    _occurrences: Occurrences = field(default_factory=Occurrences)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_outputs(self) -> int:
        """Return the number of known output tokens, which is the output index of the next one."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def replaying(self) -> bool:
        """Whether its next row computes an output token that is already known, and samples
        nothing.
        """
        return (
            self.exact_chunk is not None
            and self.num_computed >= self.num_prompt
            and self.num_uncomputed > 1
        )

    @property
    def decodes(self) -> bool:
        """Whether it computes one token next: the last known one, or one that it replays."""
        return self.num_uncomputed == 1 or self.replaying

    @property
    def prefills(self) -> bool:
        """Whether several tokens are left to compute, and it may compute several at a time."""
        return self.num_uncomputed > 1 and not self.replaying

    def next_tokens(self, room: int) -> int:
        """Return how many known tokens it computes next, at most `room`; 0 if it waits for more
        room.

        A sequence with `exact_chunk` takes whole chunks of the prompt, counted from its first
        token, and output tokens one at a time. So its shapes do not depend on what else is in the
        step, nor on whether it is computed again.
        """
        if self.exact_chunk is None:
            count = max(0, min(self.num_uncomputed, room))
            return count if self.images is None else self.images.uncut(self.num_computed, count)
        prompt_left = self.num_prompt - self.num_computed
        whole = self.exact_chunk - self.num_computed % self.exact_chunk
        wanted = min(prompt_left, whole) if prompt_left > 0 else min(self.num_uncomputed, 1)
        return wanted if wanted <= room else 0

    def hashes(self, count: int, block_size: int) -> Sequence[bytes]:
        """Return the chained hashes of the first `count` blocks, which must be full of known
        tokens.
        """
        while len(self._hashes) < count:
            index = len(self._hashes)
            start, end = index * block_size, (index + 1) * block_size
            parent = self._hashes[-1] if self._hashes else self.root
            beside = salt(self.request.images, start, end)
            if self.outputs_differ and end > self.num_prompt:
                beside += block_hashes.output_salt(max(0, self.num_prompt - start))
            self._hashes.append(block_hashes.chain(parent, self.tokens[start:end], beside))
        return self._hashes[:count]

    def know_hashes(self, other: SequenceState, num_blocks: int) -> None:
        """Take over the hashes of the first `num_blocks` blocks, whose tokens both sequences
        share.
        """
        if len(self._hashes) < num_blocks:
            self._hashes = other._hashes[:num_blocks]

    def chunk(
        self, num_tokens: int, drafts: Sequence[int] = (), num_candidates: int = 0
    ) -> SequenceChunk:
        """Return the chunk for the next `num_tokens` tokens; it samples if it reaches the last one.

        `drafts` are proposals for the tokens after the last known one; blocks must cover them, too.
        """
        end = self.num_computed + num_tokens
        last = end == len(self.tokens)
        params = self.request.params
        draws = last and self.fan_out != ()
        return SequenceChunk(
            request_id=self.request.id,
            token_ids=[*self.tokens[self.num_computed : end], *drafts],
            start=self.num_computed,
            blocks=tuple([HeldBlocks(table.blocks, table.num_freed) for table in self.tables]),
            sample=params if draws else None,
            position=self.num_outputs if last else 0,
            sample_index=self.sample_index,
            history=self.tokens,
            num_prompt=self.num_prompt,
            num_drafts=len(drafts),
            num_candidates=num_candidates if last else 0,
            fan_out=(self.fan_out or ()) if last else (),
            adapter=self.request.adapter,
            prompt_logprobs=params.prompt_logprobs,
            occurrences=self._occurrences,
            guide=self.guide if last else None,
            state_slot=self.state_slot,
            images=self.images,
        )

    def possible(self, drafts: list[int]) -> list[int]:
        """Return the drafts before the first one that the grammar forbids; without one, all."""
        if self.guide is None:
            return drafts
        return self.guide.cut(self.tokens, self.num_prompt, drafts)

    def ends_with(
        self, token: int, num_outputs: int, eos_token_ids: Sequence[int], max_len: int
    ) -> tuple[FinishReason | None, int | None]:
        """Return why the sequence ends after `token`, its output token number `num_outputs`.

        The second value is `token` if it is a stop or EOS token. It is None if a length ends the
        sequence: `max_tokens`, or `max_len` of prompt and output together. Return (None, None) if
        the sequence goes on.
        """
        params = self.request.params
        if token in params.stop_token_ids:
            return FinishReason.STOP, token
        # A grammar allows the end token only where the text may end, and nothing can follow it.
        if token in eos_token_ids and (params.guided is not None or not params.ignore_eos):
            return FinishReason.STOP, token
        if self.full(num_outputs, max_len):
            return FinishReason.LENGTH, None
        return None, None

    def full(self, num_outputs: int, max_len: int) -> bool:
        """Whether the sample may have no more than `num_outputs` output tokens."""
        params = self.request.params
        return num_outputs >= params.max_tokens or self.num_prompt + num_outputs >= max_len


@dataclass(eq=False, slots=True)
class RequestGroup:
    """All samples of one request that have not ended. `order` numbers requests by arrival here."""

    request: Request
    task: Task
    order: int
    sequences: list[SequenceState]
    beams: BeamSearch | None = None
    num_cached_tokens: int = 0  # prompt tokens that the first admission found in the prefix map
    num_preempted: int = 0
    admitted_before: bool = False  # was preempted: goes first, and is not counted again
    dropped: bool = False  # aborted during a step: the tokens of that step are thrown away
    prompt_logprobs: list[tuple[TokenLogprob, ...]] = field(default_factory=list)  # until reported
    reported: bool = False  # its first event has been emitted
    stopping: set[int] = field(default_factory=set)  # samples that nobody wants any more
    scheduled_at: float | None = None  # monotonic seconds: planned for the first time
    computed_at: float | None = None  # monotonic seconds: the step of its first token ended
    # Has got its first token here, after `num_chunks` chunks of its prompt, or the first one after
    # it was preempted.
    begun: bool = False
    num_chunks: int = 0
    paused_at: float | None = None  # monotonic seconds: preempted, and without a token since then
    pauses: list[tuple[float, float]] = field(default_factory=list)  # from preemption to token

    @property
    def key(self) -> tuple[int, int]:
        """Sort key: lower priority values first, within a priority first come, first served."""
        return (self.request.priority, self.order)

    @property
    def leader(self) -> SequenceState:
        return self.sequences[0]

    @property
    def width(self) -> int:
        """Return how many slots it takes: one per sequence; with beams, the beam width.

        A PREFILL request takes one per sequence even with beams, which begin on the decode node.
        """
        if self.beams is None or self.task is Task.PREFILL:
            return len(self.sequences)
        return self.beams.width

    @property
    def num_uncomputed(self) -> int:
        """Return the known tokens left to compute; a follower counts those that the leader
        lacks.
        """
        return sum(
            s.num_uncomputed
            if not s.following
            else s.num_uncomputed - shared_tokens(self.leader, s)
            for s in self.sequences
        )

    @property
    def may_hit(self) -> bool:
        """Whether the request may use KV from the prefix map.

        It may not if the client forbids it, if it is computed in exact chunks, or if log
        probabilities of the prompt's tokens are still to be reported.
        """
        params = self.request.params
        waiting = params.prompt_logprobs is not None and not self.reported
        return (
            not waiting and self.leader.exact_chunk is None and not params.skip_reading_prefix_cache
        )

    @property
    def prefilling(self) -> bool:
        return any(sequence.prefilling for sequence in self.sequences)

    @property
    def may_draft(self) -> bool:
        """Whether its sequences may compute drafts. A leader may not while others wait to fork from
        it: drafts could carry its state past the tokens that they share.
        """
        if self.beams is not None or self.task is not Task.LOCAL:
            return False
        return not any(sequence.following for sequence in self.sequences)

    @property
    def stopped(self) -> list[SequenceState]:
        """Return the samples that can end now because nobody wants them.

        The list is empty while other samples wait to fork. It never has all samples: the last one
        ends with the request.
        """
        if not self.stopping or any(sequence.following for sequence in self.sequences):
            return []
        ending = [s for s in self.sequences if s.sample_index in self.stopping]
        return ending[: len(self.sequences) - 1]

    def note_preemption(self, now: float) -> None:
        """Note that it loses its blocks. Its next token is reported like a first one."""
        self.num_preempted += 1
        self.admitted_before, self.begun = True, False
        if self.paused_at is None:
            self.paused_at = now

    def note_prompt_logprobs(
        self, start: int, logprobs: Sequence[tuple[TokenLogprob, ...]]
    ) -> None:
        """Store logprobs[i] for prompt token start + 1 + i, in place of what is known from there
        on.
        """
        if logprobs and not self.reported:
            self.prompt_logprobs[start:] = logprobs


def shared_tokens(leader: SequenceState, follower: SequenceState) -> int:
    """Count the leading tokens whose KV `follower` can take from `leader`.

    At least one token is left for the follower to compute.
    """
    limit = min(len(leader.tokens), len(follower.tokens) - 1)
    prompt = min(limit, leader.num_prompt)
    for index in range(prompt, limit):
        if leader.tokens[index] != follower.tokens[index]:
            return index
    return limit


def as_lists(tables: Sequence[Table]) -> BlockLists:
    """Return the tables' present blocks as lists."""
    return tuple(HeldBlocks(tuple(table.blocks), table.num_freed) for table in tables)


def exported_blocks(sequence: SequenceState) -> BlockLists:
    """Return the present blocks of a sequence and its state slot, as an export names them."""
    return with_state(as_lists(sequence.tables), sequence.state_slot)


def with_state(blocks: BlockLists, slot: int) -> BlockLists:
    """Return `blocks` with the slot of the recurrent state, unless it is NO_SLOT."""
    if slot == NO_SLOT:
        return blocks
    return (replace(blocks[0], state_slot=slot), *blocks[1:])


def count_blocks(sequences: Iterable[SequenceState]) -> Counter[int]:
    """Return the references that these sequences hold, per block."""
    counts: Counter[int] = Counter()
    for sequence in sequences:
        for table in sequence.tables:
            counts.update(table.blocks)
    return counts
