"""Scheduler: which sequence computes how many tokens in the next step.

Pure Python: no torch, no clock, no I/O.

A step is {sequence: number of tokens}; there are no phases (Source: vLLM v1,
v1/core/sched/scheduler.py).

The life of a request (RequestGroup: all its samples or beams, always together):
    add(LOCAL or PREFILL)  -> waiting --admitted: blocks for ALL known tokens, hits first--> running
    add(with reservation)  -> ready   --slots are free (it holds its blocks already)-------> running
    running --growth finds no block: youngest of the lowest priority, LOCAL--> preempted
    preempted, by swap      -> swapped --its blocks fit again--> running
    preempted, by recompute -> waiting
    running --remove(): each sample when it ends--> gone, its blocks given back

Each queue is sorted by (priority, order of arrival). Order within one step:
    1. ready requests take free slots: they already cost memory, so nothing may wait in front of
       them
    2. running ones get blocks for their known tokens, oldest first; who finds none preempts the
       youngest LOCAL request, possibly itself. Victims are never older than whoever asks, so the
       oldest advances
    3. tokens: decode rows, then drafts, then prompts under way
    4. swapped ones come back, then waiting ones are admitted, until slots or tokens are spent
Admission is strictly in order (no overtaking), so a large prompt at the head gets its room when the
running ones end; reservations may pass a blocked head only MAX_OVERTAKES times, a preempted one
never.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from operator import attrgetter
from typing import Final, TypeAlias

from baton.engine.core.reservations import Reservations, num_sequences
from baton.engine.memory.block_tables import BlockTables, Taken
from baton.engine.memory.swap import Swapper
from baton.engine.running.speculation import Drafter
from baton.engine.state.adoption import Adoption
from baton.engine.state.interface import NO_SLOT, Reservation, SequenceChunk, Task
from baton.engine.state.sequence import RequestGroup, SequenceState, count_blocks, shared_tokens
from baton.engine.state.stats import EngineStats
from baton.engine.state.step_plan import Row, StepLimits, StepPlan
from baton.protocol.errors import InternalError
from baton.protocol.request import Request

MAX_OVERTAKES: Final = 8
MayExport: TypeAlias = Callable[[int, int], bool]  # EngineHooks.may_admit


class Scheduler:
    """Owns the queues, the sequences' blocks and the reservations. Counts into `stats`.

    A PREFILL request is admitted only if `may_export` says so; a refused one waits at the head, and
    none overtakes it. `drafter`: proposes the drafts of decode rows.
    """

    def __init__(
        self,
        tables: BlockTables,
        swapper: Swapper,
        limits: StepLimits,
        stats: EngineStats,
        may_export: MayExport = lambda num_tokens, num_pending: True,
        drafter: Drafter | None = None,
    ) -> None:
        self._tables = tables
        self._pool = tables.pool
        self._swapper = swapper
        self._limits = limits
        self._stats = stats
        self._drafter = drafter
        self._waiting: list[RequestGroup] = []
        self._swapped: list[RequestGroup] = []
        self._ready: list[RequestGroup] = []
        self._running: list[RequestGroup] = []
        self._may_export = may_export
        self._reservations = Reservations(tables, stats)
        self._flying: set[SequenceState] = set()
        self._held: list[SequenceState] = []  # ended samples that a step under way computes
        self._overtakes = 0  # reservations granted past the present head of the waiting queue
        self.short_of_room = False  # the last step lacked blocks, or export room, for some request

    def use(self, drafter: Drafter | None) -> None:
        """Draft with `drafter` from now on; None = no drafts. Only while there are no requests."""
        self._drafter = drafter

    # ---- what others may see ----

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_swapped(self) -> int:
        return len(self._swapped)

    @property
    def num_running(self) -> int:
        """The number of requests that run or are ready (they lack only a slot)."""
        return len(self._running) + len(self._ready)

    @property
    def num_waiting_tokens(self) -> int:
        """The number of prompt tokens not yet computed, of requests waiting or under way."""
        waiting = sum(group.num_uncomputed for group in self._waiting)
        return waiting + sum(g.num_uncomputed for g in self._running if g.prefilling)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._swapped or self._ready or self._running)

    @property
    def steady(self) -> bool:
        """Whether the next step can be planned while one runs: no request drafts, exports, is
        swapped out or reads adopted pages, and all running ones will find blocks for one more
        token."""
        if self._drafter is not None or self._swapped or self._tables.adoptions:
            return False
        running = [*self._running, *self._ready]
        if any(group.task is Task.PREFILL for group in (*running, *self._waiting)):
            return False
        tables = self._tables.num_groups * sum(len(group.sequences) for group in running)
        return 2 * tables <= self._pool.num_free

    def groups(self) -> list[RequestGroup]:
        return [*self._waiting, *self._swapped, *self._ready, *self._running]

    def sequences(self) -> list[SequenceState]:
        return [sequence for group in self.groups() for sequence in group.sequences]

    def owned_blocks(self) -> Counter[int]:
        """Return the references of sequences and reservations per block, for BlockPool.check().

        Raises InternalError if the host copies are not those of the swapped requests.
        """
        self._swapper.check(self._swapped)
        holding = [*self.sequences(), *self._held]
        self._tables.states.check(holding, self._reservations.slots)
        owned = count_blocks(holding)
        for table in self._reservations.tables:
            owned.update(table.blocks)
        return self._tables.prove_owned(owned, self.sequences())

    # ---- in and out ----

    def add(self, group: RequestGroup) -> None:
        _follow(group)
        insort(self._waiting, group, key=attrgetter("key"))

    def add_reserved(
        self, group: RequestGroup, reservation: Reservation, adoption: Adoption | None = None
    ) -> None:
        """Take over a reservation: its tokens count as computed, and its full blocks can be found.

        The blocks of `adoption` cannot be found, as they lie in another pool. Raises the errors of
        Reservations.take().
        """
        sequence, taken = group.leader, self._reservations.take(reservation, group)
        _follow(group)
        self._tables.take_reserved(sequence, reservation, taken, adoption)
        sequence.prefilling = sequence.prefills
        self._attach(group)
        group.admitted_before = True
        insort(self._ready, group, key=attrgetter("key"))

    def remove(self, group: RequestGroup) -> None:
        """Remove `group` and free everything that it holds."""
        if self._waiting and self._waiting[0] is group:
            self._overtakes = 0
        for queue in (self._running, self._ready, self._swapped, self._waiting):
            if group in queue:
                queue.remove(group)
                for sequence in group.sequences:
                    self._release(sequence)
                if queue is self._swapped:
                    self._swapper.drop(group)
                if self._drafter is not None:
                    self._drafter.forget(group.request.id)
                return
        raise InternalError(f"{group.request.id}: not in this scheduler")

    def end(self, group: RequestGroup, sequence: SequenceState) -> bool:
        """End one sample; return whether it was the last, so that its group is gone."""
        if len(group.sequences) == 1:
            self.remove(group)
            return True
        group.sequences.remove(sequence)
        self._release(sequence)
        return False

    def branch(self, group: RequestGroup, parents: Sequence[SequenceState]) -> None:
        """Replace the group's sequences (beams, all computed) by forks of `parents`, in order.

        The first fork of a parent is the parent itself; a beam without forks is freed at once.
        """
        for sequence in group.sequences:
            if sequence not in parents:
                self._release(sequence)
        beams: list[SequenceState] = []
        for parent in parents:
            if parent not in beams:
                beams.append(parent)
                continue
            child = SequenceState(parent.request, parent.root, list(parent.tokens))
            child.prefilling = False
            child.guide = parent.guide.fork() if parent.guide else None
            child.exact_chunk, child.images = parent.exact_chunk, parent.images
            child.outputs_differ = parent.outputs_differ
            self._tables.fork(parent, child, parent.num_computed)
            beams.append(child)
        group.sequences = beams

    def reserve(
        self,
        request: Request,
        hashes: Sequence[bytes],
        num_tokens: int,
        precision: str | None = None,
        adopting: bool = False,
    ) -> Reservation | None:
        """Reserve blocks for `num_tokens` tokens, those known by `hashes` first, or (`adopting`)
        for what follows the full ones. Return None if there is no room now."""
        head = self._waiting[0] if self._waiting else None
        blocked = head is not None and (head.admitted_before or self._overtakes >= MAX_OVERTAKES)
        seated = {*self._ready, *self._running}
        if blocked or self._swapped or not self._tables.states.fit(seated, num_sequences(request)):
            return None
        made = self._reservations.make(request, hashes, num_tokens, precision, adopting)
        self._overtakes += made is not None and head is not None
        return made

    def cancel(self, reservation: Reservation) -> None:
        """Free a reservation. Does nothing for one that is not held (cancelled, or used)."""
        self._reservations.cancel(reservation)

    # ---- one step ----

    def schedule(self) -> StepPlan:
        """Plan the next step. Changes queues and block tables; blocks cover all planned tokens."""
        seated: list[RequestGroup] = []
        while self._ready and self._slots_for(self._ready[0]):
            seated.append(self._ready.pop(0))
            insort(self._running, seated[-1], key=attrgetter("key"))
        for group in self._running:
            for sequence in group.stopped:
                self.end(group, sequence)
        plan = StepPlan(num_preempted=self._grow_running(), seated=seated)
        self.short_of_room = False
        self._plan_decodes(plan)
        for group in self._running:
            for sequence in group.sequences:
                if sequence.prefills:
                    self._plan_row(plan, group, sequence)
        if not plan.num_preempted:
            self._swap_in(plan)
            self._admit(plan)
        self.short_of_room |= plan.num_preempted > 0 or bool(self._swapped)
        return plan

    def fly(self, sequences: Iterable[SequenceState]) -> None:
        """Say which `sequences` the step under way computes (run_ahead.py).

        The step still writes into their blocks. So blocks that such a sequence releases are not
        free yet: the scheduler keeps them until the next call of fly(), which frees them.
        """
        held, self._held, self._flying = self._held, [], set(sequences)
        for sequence in held:
            self._tables.release(sequence)

    def give_way(self, group: RequestGroup) -> None:
        """Preempt `group`, which runs or is ready: the owner of the pages that it reads needs them
        back."""
        if group in self._ready:
            self._ready.remove(group)
            self._running.append(group)
        self._preempt(group)

    def computed(
        self, group: RequestGroup, sequence: SequenceState, chunk: SequenceChunk, num_accepted: int
    ) -> None:
        """Note that the KV of `chunk` is written and `num_accepted` of its drafts are accepted."""
        sequence.num_computed = chunk.start + len(chunk.token_ids) - chunk.num_drafts + num_accepted
        if chunk.num_drafts:
            self._tables.settle_drafts(sequence, chunk, num_accepted)
        self._tables.register_full_blocks(sequence)
        waits = False
        if len(group.sequences) > 1 and sequence is group.leader:
            waits = self._attach(group)
        if group.task is Task.LOCAL and not waits:
            self._tables.free_invisible(sequence)

    def state_stays(self, group: RequestGroup) -> bool:
        """Whether the recurrent state of `group`, if any, is not behind the tokens that its samples
        share: then it cannot go on elsewhere."""
        alone = len(group.sequences) == 1 and group.beams is None
        return self._tables.states.num_slots > 0 and (not alone or self._states_fly(group))

    def prove_private(self, plan: StepPlan) -> None:
        """Raise InternalError if a row would write where another sequence or an export reads.
        Exports of PREFILL requests are left out: they are read while they are written."""
        for row in plan.rows:
            if row.group.task is Task.LOCAL:
                end = row.chunk.start + len(row.chunk.token_ids)
                self._tables.prove_private(row.sequence, end)

    # ---- inside ----

    def _release(self, sequence: SequenceState) -> None:
        if sequence in self._flying:
            self._held.append(copy(sequence))
            sequence.tables, sequence.state_slot = [], NO_SLOT
        self._tables.release(sequence)

    def _states_fly(self, group: RequestGroup) -> bool:
        """Whether a step that has run ahead moves states of `group` on: they are behind more tokens
        than are known, and only computing gets the earlier ones back."""
        keeps = self._tables.states.num_slots > 0
        return keeps and not self._flying.isdisjoint(group.sequences)

    def _slots_for(self, group: RequestGroup) -> bool:
        """Whether `group` may run beside the running ones."""
        groups = (*self._running, group)
        if sum(each.width for each in groups) > self._limits.max_num_seqs:
            return False
        fits = self._tables.states.fit({*self._ready, *groups})
        self.short_of_room |= not fits  # exports hold slots, too
        return fits

    def _attach(self, group: RequestGroup) -> bool:
        """Fork followers whose share the leader has computed; return whether some still wait."""
        waits = False
        for follower in group.sequences[1:]:
            if not follower.following:
                continue
            shared = shared_tokens(group.leader, follower)
            if group.leader.num_computed < shared:
                waits = True
                continue
            self._tables.fork(group.leader, follower, shared)
            follower.prefilling = follower.prefills
        return waits

    def _grow_running(self) -> int:
        """Give running requests blocks for their tokens, oldest first; return how many were
        preempted."""
        preempted = 0
        index = 0
        while index < len(self._running):
            if all(
                self._tables.grow(sequence, len(sequence.tokens))
                for sequence in self._running[index].sequences
                if not sequence.following
            ):
                index += 1
            else:
                # The victim stands at `index` or behind it, so nobody before it changes.
                self._preempt(self._victim())
                preempted += 1
        return preempted

    def _victim(self) -> RequestGroup:
        """Return the youngest LOCAL request of the lowest priority. There is one: the request that
        asks for blocks is LOCAL itself."""
        return max((g for g in self._running if g.task is Task.LOCAL), key=attrgetter("key"))

    def _preempt(self, group: RequestGroup) -> None:
        """Free a request's blocks, keep its tokens, put it before the waiting ones that
        came later."""
        self._running.remove(group)
        self._stats.num_preemptions += 1
        group.note_preemption(self._swapper.clock.monotonic())
        swaps = not self._states_fly(group) and self._swapper.prefers_swap(group)
        if swaps and self._swapper.swap_out(group):
            insort(self._swapped, group, key=attrgetter("key"))
            return
        for sequence in group.sequences:
            self._release(sequence)
            sequence.candidates = None  # computed again
        _follow(group)
        insort(self._waiting, group, key=attrgetter("key"))

    def _swap_in(self, plan: StepPlan) -> None:
        while self._swapped and self._slots_for(self._swapped[0]):
            group = self._swapped[0]
            if not self._swapper.swap_in(group, self.headroom()):
                return
            self._swapped.pop(0)
            insort(self._running, group, key=attrgetter("key"))
            for sequence in group.sequences:
                if not sequence.following:
                    grown = self._tables.grow(sequence, len(sequence.tokens))
                    assert grown, "swap_in has made room"
                    self._plan_row(plan, group, sequence)

    def _admit(self, plan: StepPlan) -> None:
        budget = self._limits.max_num_batched_tokens
        while self._waiting and not self._swapped and plan.num_tokens < budget:
            group = self._waiting[0]
            leader = group.leader
            if not self._slots_for(group) or not leader.next_tokens(budget - plan.num_tokens):
                return
            if group.task is Task.PREFILL and not self._may_export(
                len(leader.tokens), plan.num_pending
            ):
                self._stats.num_export_refusals += 1
                self.short_of_room = True
                return
            num_hashes = self._tables.most_hits(group) if group.may_hit else 0
            hashes = leader.hashes(num_hashes, self._pool.block_size)
            headroom = self.headroom() + self._tables.blocks_of_followers(group)
            taken = self._tables.take(hashes, len(leader.tokens), headroom)
            if taken is None:
                self.short_of_room = True
                return
            self._waiting.pop(0)
            self._overtakes = 0
            self._start(group, taken)
            insort(self._running, group, key=attrgetter("key"))
            plan.admitted.append(group)
            self._plan_row(plan, group, leader)

    def headroom(self) -> int:
        """Return one block of growth for each table of a running LOCAL sequence. Without it a new
        request, the youngest, would be preempted at once and its work thrown away."""
        running = sum(len(g.sequences) for g in self._running if g.task is Task.LOCAL)
        return running * self._tables.num_groups

    def _start(self, group: RequestGroup, taken: Taken) -> None:
        leader = group.leader
        self._tables.begin(leader, taken)
        leader.num_prefill_chunks = 0
        leader.prefilling = True
        self._attach(group)
        if not group.admitted_before:
            group.num_cached_tokens = min(leader.num_computed, leader.num_prompt)
            self._stats.num_prefix_query_tokens += len(leader.tokens)
            self._stats.num_prefix_hit_tokens += leader.num_computed
        group.admitted_before = True

    def _plan_decodes(self, plan: StepPlan) -> None:
        """Plan rows of one token (also replayed ones), and drafts in the tokens that these
        leave."""
        rows = [
            (group, sequence)
            for group in self._running
            for sequence in group.sequences
            if sequence.decodes and not sequence.following
        ]
        drafts = {} if self._drafter is None else self._draft(self._drafter, rows)
        for group, sequence in rows:
            self._plan_row(plan, group, sequence, drafts.get(sequence, []))

    def _draft(
        self, drafter: Drafter, rows: Sequence[tuple[RequestGroup, SequenceState]]
    ) -> dict[SequenceState, list[int]]:
        """Return drafts that fit the step and the pool; no request is preempted for them."""
        budget = self._limits.max_num_batched_tokens - len(rows)
        if self._waiting or len(rows) < sum(len(group.sequences) for group in self._running):
            budget //= 2  # prompts, and what is computed again, must advance
        sequences = [s for group, s in rows if group.may_draft]
        kept = drafter.propose_within(sequences, budget, self._tables)
        self._stats.num_drafted_tokens += sum(map(len, kept.values()))
        return kept

    def _plan_row(
        self,
        plan: StepPlan,
        group: RequestGroup,
        sequence: SequenceState,
        drafts: Sequence[int] = (),
    ) -> None:
        room = self._limits.max_num_batched_tokens - plan.num_tokens
        num_tokens = 0 if sequence.following else sequence.next_tokens(room)
        if not num_tokens:
            return
        num_tokens = self._tables.next_stop(group, sequence, num_tokens)
        num_candidates = 0 if group.beams is None else group.beams.num_candidates
        chunk = sequence.chunk(num_tokens, drafts, num_candidates)
        plan.rows.append(Row(group, sequence, chunk))
        plan.num_tokens += len(chunk.token_ids)
        if sequence.prefilling:
            plan.num_prefill_tokens += num_tokens
        self._stats.num_replayed_tokens += sequence.replaying


def _follow(group: RequestGroup) -> None:
    """Let all sequences but the first wait until they can fork from it."""
    for sequence in group.sequences[1:]:
        sequence.following = True
