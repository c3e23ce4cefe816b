"""SequenceState: one sample (or beam) of one request; RequestGroup: all of a request's together.

Mutable; the scheduler and the block tables write them, but for the tokens and their
log probabilities, which the engine appends.

    tokens   [ prompt ............ | output ......... ]     all known tokens
             0                  num_prompt        len(tokens)
    KV       [ computed ...... ) [ to compute ........ )    at least one, while it runs
             0          num_computed
    tables   one per layer group: blocks cover every computed token, but for the first `num_freed`,
             which a sliding window has left behind or never needed; the first `num_registered` of
             them are in the prefix map; those before `first_whole` lack tokens and stay out of it

There are no phases: a sequence with one token to compute decodes, one with more prefills; an exact
one (replay.py) has its known output tokens computed one by one, as they were before. A group
is admitted, preempted and brought back as a whole. Its first sequence leads: the others follow,
without a block, until it has computed what they share with it, and then fork from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.engine.state.adoption import Adoption
from baton.engine.state.beam import BeamSearch
from baton.engine.state.interface import SequenceChunk, Task
from baton.engine.state.occurrences import Occurrences
from baton.guided.guide import Guide
from baton.protocol import block_hashes
from baton.protocol.events import TokenLogprob
from baton.protocol.kv_spec import HeldBlocks
from baton.protocol.request import FinishReason, Request


@dataclass(slots=True)
class Table:
    """A sequence's blocks in one layer group, from its block `num_freed` on. Some of the first may
    be another pool's: those of `adoption`."""

    blocks: list[int]
    num_freed: int = 0
    num_registered: int = 0
    first_whole: int = 0
    adoption: Adoption | None = None

    @property
    def end(self) -> int:
        """Blocks of the sequence covered, freed ones included."""
        return self.num_freed + len(self.blocks)


@dataclass(eq=False, slots=True)
class SequenceState:
    """One sample of `request`, or one of its running beams."""

    request: Request
    root: bytes
    tokens: list[int]
    sample_index: int = 0
    fan_out: tuple[int, ...] | None = None  # samples that draw from its last token; None = its own
    tables: list[Table] = field(default_factory=list)  # empty while it holds nothing
    num_computed: int = 0
    num_prefill_chunks: int = 0  # of the prefill under way
    prefilling: bool = True  # from an admission with more than one token to compute to its sample
    following: bool = False  # it holds nothing yet: it will fork from the group's first sequence
    forked: bool = False  # blocks that it will write may be shared: to be copied before
    candidates: tuple[TokenLogprob, ...] | None = None  # of this beam step, once computed
    guide: Guide | None = None  # through params.guided; a replay of the output, like _occurrences
    exact_chunk: int | None = None  # tokens; None: computed in whatever shape is cheapest
    _hashes: list[bytes] = field(default_factory=list)
    _occurrences: Occurrences = field(default_factory=Occurrences)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_outputs(self) -> int:
        """Output tokens known so far: the absolute output index of the next one."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def replaying(self) -> bool:
        """Its next row computes an output token that is known, and samples nothing."""
        return (
            self.exact_chunk is not None
            and self.num_computed >= self.num_prompt
            and self.num_uncomputed > 1
        )

    @property
    def decodes(self) -> bool:
        """Its next row is one token: the last known one, or one of those it replays."""
        return self.num_uncomputed == 1 or self.replaying

    @property
    def prefills(self) -> bool:
        """More than one token is left to compute, and in more than one at a time."""
        return self.num_uncomputed > 1 and not self.replaying

    def next_tokens(self, room: int) -> int:
        """Known tokens that its next row computes, of at most `room`; 0: it waits for more room.

        An exact one takes whole chunks, counted from its first token, and no two output tokens at
        once: the same shapes whatever shares the step, and whenever it is computed again.
        """
        if self.exact_chunk is None:
            return max(0, min(self.num_uncomputed, room))
        prompt_left = self.num_prompt - self.num_computed
        whole = self.exact_chunk - self.num_computed % self.exact_chunk
        wanted = min(prompt_left, whole) if prompt_left > 0 else min(self.num_uncomputed, 1)
        return wanted if wanted <= room else 0

    def hashes(self, count: int, block_size: int) -> Sequence[bytes]:
        """Chained hashes of the first `count` blocks, all of them full of known tokens."""
        while len(self._hashes) < count:
            index = len(self._hashes)
            tokens = self.tokens[index * block_size : (index + 1) * block_size]
            parent = self._hashes[-1] if self._hashes else self.root
            self._hashes.append(block_hashes.chain(parent, tokens))
        return self._hashes[:count]

    def know_hashes(self, other: SequenceState, num_blocks: int) -> None:
        """Take over the hashes of the first blocks, whose tokens both share."""
        if len(self._hashes) < num_blocks:
            self._hashes = other._hashes[:num_blocks]

    def chunk(
        self, num_tokens: int, drafts: Sequence[int] = (), num_candidates: int = 0
    ) -> SequenceChunk:
        """Work for the next `num_tokens` tokens; samples if they reach the last known one.

        `drafts` are proposals for what follows it; blocks must cover them too.
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
        )

    def possible(self, drafts: list[int]) -> list[int]:
        """`drafts` up to the first that no sample could be."""
        if self.guide is None:
            return drafts
        return self.guide.cut(self.tokens, self.num_prompt, drafts)

    def ends_with(
        self, token: int, num_outputs: int, eos_token_ids: Sequence[int], max_len: int
    ) -> tuple[FinishReason | None, int | None]:
        """Whether `token`, the last of `num_outputs`, ends the sample, and the stop id if it is."""
        params = self.request.params
        if token in params.stop_token_ids:
            return FinishReason.STOP, token
        # A grammar allows its end only where it may end, and then nothing can follow.
        if token in eos_token_ids and (params.guided is not None or not params.ignore_eos):
            return FinishReason.STOP, token
        if self.full(num_outputs, max_len):
            return FinishReason.LENGTH, None
        return None, None

    def full(self, num_outputs: int, max_len: int) -> bool:
        """Whether so many outputs are all that it may have."""
        params = self.request.params
        return num_outputs >= params.max_tokens or self.num_prompt + num_outputs >= max_len


@dataclass(eq=False, slots=True)
class RequestGroup:
    """All samples of one request that have not ended. `order` counts arrivals in this engine."""

    request: Request
    task: Task
    order: int
    sequences: list[SequenceState]
    beams: BeamSearch | None = None
    num_cached_tokens: int = 0  # prompt tokens that its first admission found in the prefix map
    num_preempted: int = 0
    admitted_before: bool = False  # it was preempted: it has precedence and is counted once
    dropped: bool = False  # aborted during a step: its sampled tokens are thrown away
    prompt_logprobs: list[tuple[TokenLogprob, ...]] = field(default_factory=list)  # until reported
    reported: bool = False  # its first event has been emitted
    stopping: set[int] = field(default_factory=set)  # samples that nobody wants any more

    @property
    def key(self) -> tuple[int, int]:
        """First come, first served within priority (lower runs first)."""
        return (self.request.priority, self.order)

    @property
    def leader(self) -> SequenceState:
        return self.sequences[0]

    @property
    def width(self) -> int:
        """Slots that it takes: its sequences, or what beams will be here."""
        if self.beams is None or self.task is Task.PREFILL:
            return len(self.sequences)
        return self.beams.width

    @property
    def num_uncomputed(self) -> int:
        """Known tokens still to compute; followers count what they do not share with the leader."""
        return sum(
            s.num_uncomputed
            if not s.following
            else s.num_uncomputed - shared_tokens(self.leader, s)
            for s in self.sequences
        )

    @property
    def may_hit(self) -> bool:
        """Whether KV that others computed will do for it: not if each prompt token's own log
        probability is asked for, nor if it is to be computed in the same shapes each time, nor if
        the client says so."""
        params = self.request.params
        waiting = params.prompt_logprobs is not None and not self.reported
        return (
            not waiting and self.leader.exact_chunk is None and not params.skip_reading_prefix_cache
        )

    @property
    def prefilling(self) -> bool:
        return any(sequence.prefilling for sequence in self.sequences)

    @property
    def stopped(self) -> list[SequenceState]:
        """Samples that can end now because nobody wants them. None while others wait to fork, and
        never all: the last one ends with its request."""
        if not self.stopping or any(sequence.following for sequence in self.sequences):
            return []
        ending = [s for s in self.sequences if s.sample_index in self.stopping]
        return ending[: len(self.sequences) - 1]

    def note_prompt_logprobs(
        self, start: int, logprobs: Sequence[tuple[TokenLogprob, ...]]
    ) -> None:
        """`logprobs[i]` is about prompt token start + 1 + i; later ones replace earlier ones."""
        if logprobs and not self.reported:
            self.prompt_logprobs[start:] = logprobs


def shared_tokens(leader: SequenceState, follower: SequenceState) -> int:
    """Leading tokens whose KV `follower` can take from `leader`; one is left to compute."""
    limit = min(len(leader.tokens), len(follower.tokens) - 1)
    prompt = min(limit, leader.num_prompt)
    for index in range(prompt, limit):
        if leader.tokens[index] != follower.tokens[index]:
            return index
    return limit
