"""Scheduler: which sequence computes how many tokens in the next step. Pure Python: no torch, no
clock, no I/O.

A step is {sequence: number of tokens}; there are no phases (Source: vLLM v1,
v1/core/sched/scheduler.py).

The life of a sequence:
    add(LOCAL or PREFILL)  -> waiting  --admitted: blocks for ALL known tokens, prefix hits first-->
    running add(with reservation)  -> ready    --a slot is free (it holds its blocks
    already)-------------> running running --growth finds no block, youngest of the lowest priority,
    LOCAL--> preempted -> waiting running --remove()--> gone, its blocks given back

Each queue is sorted by (priority, order of arrival). Order within one step:
    1. ready sequences take free slots: they already cost memory, so nothing may wait in front of
    them
    2. running ones get blocks for their known tokens, oldest first; who finds none preempts the
    youngest
       LOCAL sequence, possibly itself. Victims are never older than whoever asks, so the oldest
       advances
    3. tokens: decode rows, then prompts under way, then admissions, until max_num_batched_tokens is
    spent
Admission is strictly in order (no overtaking), so a large prompt at the head gets its room when the
running ones end; reservations may pass a blocked head only MAX_OVERTAKES times, a preempted one
never.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from baton.engine.block_pool import BlockPool
from baton.engine.interface import Reservation, SequenceChunk, Task
from baton.engine.sequence import SequenceState
from baton.engine.stats import EngineStats
from baton.errors import InternalError

MAX_OVERTAKES: Final = 8


@dataclass(slots=True)
class StepPlan:
    """What one step computes: `rows` in the runner's order; `admitted` have their first one now."""

    rows: list[tuple[SequenceState, SequenceChunk]] = field(default_factory=list)
    admitted: list[SequenceState] = field(default_factory=list)
    num_tokens: int = 0
    num_prefill_tokens: int = 0
    num_preempted: int = 0

    @property
    def chunks(self) -> list[SequenceChunk]:
        return [chunk for _, chunk in self.rows]


class Scheduler:
    """Owns the queues, the sequences' blocks and the reservations. Counts into `stats`."""

    def __init__(
        self, pool: BlockPool, max_num_seqs: int, max_num_batched_tokens: int, stats: EngineStats
    ) -> None:
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._stats = stats
        self._waiting: list[SequenceState] = []
        self._ready: list[SequenceState] = []
        self._running: list[SequenceState] = []
        self._reservations: set[Reservation] = set()
        self._num_reserved = 0
        self._overtakes = 0  # reservations granted past the present head of waiting

    # ---- what others may see ----

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Running or about to: ready ones only lack a slot."""
        return len(self._running) + len(self._ready)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens not yet computed, of sequences waiting or under way."""
        waiting = sum(sequence.num_uncomputed for sequence in self._waiting)
        return waiting + sum(s.num_uncomputed for s in self._running if s.prefilling)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._ready or self._running)

    def sequences(self) -> list[SequenceState]:
        return [*self._waiting, *self._ready, *self._running]

    def owned_blocks(self) -> Counter[int]:
        """References that sequences and reservations hold, per block: for BlockPool.check()."""
        owned: Counter[int] = Counter()
        for sequence in self.sequences():
            owned.update(sequence.blocks)
        for reservation in self._reservations:
            owned.update(reservation.blocks)
        return owned

    # ---- in and out ----

    def add(self, sequence: SequenceState) -> None:
        insort(self._waiting, sequence, key=_key)

    def add_reserved(self, sequence: SequenceState, reservation: Reservation) -> None:
        """Take over a reservation: its tokens count as computed, its full blocks can be found.

        Raises InternalError for a reservation that is not held (cancelled, or used before).
        """
        self._forget(reservation)
        sequence.blocks = list(reservation.blocks)
        # One token must be left to compute: the next one is sampled from its hidden state.
        sequence.num_computed = min(reservation.num_tokens, len(sequence.tokens) - 1)
        if sequence.num_computed < reservation.start_token:
            # That token lies in a prefix hit, which others read: recompute its block in a fresh
            # one.
            whole = sequence.num_computed // self._pool.block_size
            self._pool.unref(sequence.blocks[whole:])
            del sequence.blocks[whole:]
            sequence.num_computed = whole * self._pool.block_size
        sequence.prefilling = sequence.num_uncomputed > 1
        sequence.admitted_before = True
        self.register_full_blocks(sequence)
        insort(self._ready, sequence, key=_key)

    def remove(self, sequence: SequenceState) -> None:
        """Give back everything that `sequence` holds; the end of its life here."""
        if self._waiting and self._waiting[0] is sequence:
            self._overtakes = 0
        for queue in (self._running, self._ready, self._waiting):
            if sequence in queue:
                queue.remove(sequence)
                self._release_blocks(sequence)
                return
        raise InternalError(f"{sequence.request.id}: not in this scheduler")

    def reserve(
        self, request_id: str, hashes: Sequence[bytes], num_tokens: int
    ) -> Reservation | None:
        """Blocks for `num_tokens` tokens, known ones of `hashes` first; None = no room now."""
        head = self._waiting[0] if self._waiting else None
        if head is not None and (head.admitted_before or self._overtakes >= MAX_OVERTAKES):
            return None
        blocks = self._take(hashes, self._pool.blocks_for(num_tokens), headroom=0)
        if blocks is None:
            return None
        taken, num_hits = blocks
        if head is not None:
            self._overtakes += 1
        start = num_hits * self._pool.block_size
        self._stats.num_prefix_query_tokens += num_tokens
        self._stats.num_prefix_hit_tokens += start
        self._num_reserved += 1
        reservation = Reservation(request_id, tuple(taken), num_tokens, start, self._num_reserved)
        self._reservations.add(reservation)
        return reservation

    def cancel(self, reservation: Reservation) -> None:
        """Give a reservation back. Does nothing for one that is not held (cancelled, or used)."""
        if reservation in self._reservations:
            self._forget(reservation)
            self._pool.unref(reservation.blocks)

    # ---- one step ----

    def schedule(self) -> StepPlan:
        """Plan the next step. Mutates queues and block tables; blocks cover all planned tokens."""
        while self._ready and len(self._running) < self._max_num_seqs:
            insort(self._running, self._ready.pop(0), key=_key)
        plan = StepPlan(num_preempted=self._grow_running())
        for sequence in self._running:
            if sequence.num_uncomputed == 1:
                self._plan_row(plan, sequence)
        for sequence in self._running:
            if sequence.num_uncomputed > 1:
                self._plan_row(plan, sequence)
        if not plan.num_preempted:
            self._admit(plan)
        return plan

    def computed(self, sequence: SequenceState, chunk: SequenceChunk) -> None:
        """The runner has written the KV of `chunk`."""
        sequence.num_computed = chunk.start + len(chunk.token_ids)
        self.register_full_blocks(sequence)

    def register_full_blocks(self, sequence: SequenceState) -> None:
        """Enter the computed full blocks that are not yet in the prefix map."""
        full = sequence.num_computed // self._pool.block_size
        if full <= sequence.num_registered:
            return  # nearly every decode step: no hashing, no copies
        hashes = sequence.hashes(full, self._pool.block_size)
        for index in range(sequence.num_registered, full):
            parent = hashes[index - 1] if index else b""
            self._pool.register(sequence.blocks[index], hashes[index], parent)
        sequence.num_registered = full

    # ---- inside ----

    def _grow_running(self) -> int:
        """Blocks for all known tokens of running sequences, oldest first; returns the preempted."""
        preempted = 0
        index = 0
        while index < len(self._running):
            sequence = self._running[index]
            missing = self._pool.blocks_for(len(sequence.tokens)) - len(sequence.blocks)
            blocks = self._pool.allocate(max(0, missing))
            if blocks is not None:
                sequence.blocks.extend(blocks)
                index += 1
            else:
                # The victim stands at `index` or behind it, so nobody before it changes.
                self._preempt(self._victim())
                preempted += 1
        return preempted

    def _victim(self) -> SequenceState:
        """The youngest LOCAL sequence of the lowest priority (who asks for more is LOCAL
        itself)."""
        return max((s for s in self._running if s.task is Task.LOCAL), key=_key)

    def _preempt(self, sequence: SequenceState) -> None:
        """By recompute: its blocks go, its tokens stay, it waits in front of those that came
        later."""
        self._running.remove(sequence)
        self._release_blocks(sequence)
        sequence.num_computed = 0
        sequence.num_registered = 0
        sequence.admitted_before = True
        insort(self._waiting, sequence, key=_key)
        self._stats.num_preemptions += 1

    def _admit(self, plan: StepPlan) -> None:
        budget = self._max_num_batched_tokens
        while (
            self._waiting and len(self._running) < self._max_num_seqs and plan.num_tokens < budget
        ):
            sequence = self._waiting[0]
            size = self._pool.block_size
            # At least one token is left to compute, for its hidden state.
            hashes = sequence.hashes((len(sequence.tokens) - 1) // size, size)
            count = self._pool.blocks_for(len(sequence.tokens))
            # One block of growth for each running LOCAL sequence: else the newcomer, the youngest,
            # would be preempted at once and its work thrown away.
            headroom = sum(1 for s in self._running if s.task is Task.LOCAL)
            taken = self._take(hashes, count, headroom)
            if taken is None:
                return
            self._waiting.pop(0)
            self._overtakes = 0
            self._start(sequence, *taken)
            insort(self._running, sequence, key=_key)
            plan.admitted.append(sequence)
            self._plan_row(plan, sequence)

    def _start(self, sequence: SequenceState, blocks: list[int], num_hits: int) -> None:
        sequence.blocks = blocks
        sequence.num_computed = num_hits * self._pool.block_size
        sequence.num_registered = num_hits
        sequence.num_prefill_chunks = 0
        sequence.prefilling = True
        if not sequence.admitted_before:
            sequence.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt)
            self._stats.num_prefix_query_tokens += len(sequence.tokens)
            self._stats.num_prefix_hit_tokens += sequence.num_computed
        sequence.admitted_before = True

    def _take(
        self, hashes: Sequence[bytes], count: int, headroom: int
    ) -> tuple[list[int], int] | None:
        """`count` blocks, hits first, and the number of hits; None unless `headroom` stay free."""
        hits = self._pool.lookup(hashes)
        # Held before anything is allocated: the allocation must not evict them.
        self._pool.ref(hits)
        missing = count - len(hits)
        fresh = self._pool.allocate(missing) if missing + headroom <= self._pool.num_free else None
        if fresh is None:
            self._pool.unref(hits)
            return None
        return hits + fresh, len(hits)

    def _plan_row(self, plan: StepPlan, sequence: SequenceState) -> None:
        num_tokens = min(sequence.num_uncomputed, self._max_num_batched_tokens - plan.num_tokens)
        if num_tokens <= 0:
            return
        plan.rows.append((sequence, sequence.chunk(num_tokens)))
        plan.num_tokens += num_tokens
        if sequence.prefilling:
            plan.num_prefill_tokens += num_tokens

    def _release_blocks(self, sequence: SequenceState) -> None:
        self._pool.unref(sequence.blocks)
        sequence.blocks = []

    def _forget(self, reservation: Reservation) -> None:
        if reservation not in self._reservations:
            raise InternalError(f"{reservation.request_id}: this reservation is not held")
        self._reservations.remove(reservation)


def _key(sequence: SequenceState) -> tuple[int, int]:
    return sequence.key
