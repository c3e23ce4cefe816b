"""Scheduler on a real pool:
order of admission, chunking, preemption, reservations. No model, no engine."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from baton.engine.config import PreemptionMode
from baton.engine.core.scheduler import MAX_OVERTAKES, Scheduler, StepLimits, StepPlan
from baton.engine.memory.block_pool import BlockPool
from baton.engine.memory.block_tables import BlockTables
from baton.engine.memory.swap import Swapper
from baton.engine.state.interface import Reservation, Task
from baton.engine.state.sequence import RequestGroup, SequenceState
from baton.engine.state.stats import EngineStats
from baton.protocol.block_hashes import block_hashes
from baton.protocol.errors import InternalError
from tests.fakes import FakeClock, request

ROOT = b"root"
BLOCK = 4


class NoMemory:
    """Block contents that do not matter here; copies are only counted."""

    def __init__(self) -> None:
        self.copies: list[tuple[int, int]] = []

    def copy_block(self, source: int, target: int) -> None:
        self.copies.append((source, target))

    def clear_block(self, block: int) -> None: ...

    def read_blocks(self, blocks: Sequence[int]) -> tuple[int, ...]:
        return tuple(blocks)

    def write_blocks(self, host: Any, rows: Sequence[int], blocks: Sequence[int]) -> None:
        assert len(rows) == len(blocks) <= len(host)


class Bench:
    """A scheduler with what a test needs around it."""

    def __init__(
        self,
        num_blocks: int = 16,
        max_num_seqs: int = 8,
        budget: int = 16,
        mode: PreemptionMode = "recompute",
    ) -> None:
        self.pool = BlockPool(num_blocks, BLOCK)
        self.stats = EngineStats()
        self.memory = NoMemory()
        self.tables = BlockTables(self.pool, self.memory, self.stats)
        self.swapper = Swapper(self.tables, self.stats, FakeClock(), mode, block_bytes=64)
        limits = StepLimits(max_num_seqs, budget)
        self.scheduler = Scheduler(self.tables, self.swapper, limits, self.stats)
        self._order = itertools.count()

    def group(
        self,
        name: str,
        num_tokens: int,
        task: Task = Task.LOCAL,
        priority: int = 0,
        samples: int = 1,
    ) -> RequestGroup:
        prompt = [hash_byte(name)] * num_tokens
        asked = request(name, prompt, priority=priority)
        sequences = [SequenceState(asked, ROOT, list(prompt), s) for s in range(samples)]
        return RequestGroup(asked, task, next(self._order), sequences)

    def add(
        self,
        name: str,
        num_tokens: int,
        task: Task = Task.LOCAL,
        priority: int = 0,
        samples: int = 1,
    ) -> RequestGroup:
        group = self.group(name, num_tokens, task, priority, samples)
        self.scheduler.add(group)
        return group

    def reserve(self, name: str, num_tokens: int) -> Reservation | None:
        hashes = block_hashes(ROOT, [hash_byte(name)] * num_tokens, BLOCK)
        asked = request(name, [hash_byte(name)] * num_tokens)
        return self.scheduler.reserve(asked, hashes, num_tokens)

    def step(self) -> dict[str, int]:
        """Run one step as an engine would, each sampled token being 0;
        request -> number of tokens."""
        plan = self.scheduler.schedule()
        return self.finish(plan)

    def finish(self, plan: StepPlan) -> dict[str, int]:
        self.scheduler.prove_private(plan)
        for row in plan.rows:
            group, sequence, chunk = row.group, row.sequence, row.chunk
            assert chunk.blocks[0].end * BLOCK >= chunk.start + len(chunk.token_ids)
            self.scheduler.computed(group, sequence, chunk, 0)
            if chunk.sample is not None:
                sequence.tokens.append(sequence.sample_index)
                sequence.prefilling = False
                if group.task is Task.PREFILL:
                    self.scheduler.remove(group)
        self.pool.check(self.scheduler.owned_blocks())
        return {chunk.request_id: len(chunk.token_ids) for chunk in plan.chunks}


def hash_byte(name: str) -> int:
    return 10 + sum(name.encode()) % 80


def test_a_long_prompt_is_chunked_and_samples_once_at_its_end() -> None:
    bench = Bench(budget=8)
    bench.add("a", 19)
    plans = []
    for _ in range(4):
        plan = bench.scheduler.schedule()
        plans.append([(c.start, len(c.token_ids), c.sample is not None) for c in plan.chunks])
        bench.finish(plan)
    assert plans == [[(0, 8, False)], [(8, 8, False)], [(16, 3, True)], [(19, 1, True)]]


def test_decode_rows_come_first_then_prompts_under_way_then_admissions() -> None:
    bench = Bench(budget=8)
    bench.add("a", 2)
    bench.step()
    bench.add("b", 10)
    bench.add("c", 2)
    assert bench.step() == {"a": 1, "b": 7}
    assert list(bench.step().items()) == [("a", 1), ("b", 3), ("c", 2)]


def test_continuous_batching_fills_a_slot_as_soon_as_it_is_free() -> None:
    bench = Bench(max_num_seqs=2)
    first = bench.add("a", 2)
    bench.add("b", 2)
    bench.add("c", 2)
    assert bench.step().keys() == {"a", "b"}
    bench.scheduler.remove(first)
    assert bench.step() == {"b": 1, "c": 2}


def test_priority_goes_before_arrival() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add("low", 2, priority=5)
    bench.add("high", 2, priority=-1)
    assert bench.step().keys() == {"high"}


def test_all_known_blocks_are_taken_at_admission() -> None:
    bench = Bench(budget=8)
    group = bench.add("p", 30, Task.PREFILL)
    bench.step()
    assert len(group.leader.tables[0].blocks) == 8
    assert bench.pool.num_used == 8


def test_nobody_overtakes_a_blocked_head() -> None:
    bench = Bench(num_blocks=8, budget=64)
    running = bench.add("r", 20)
    bench.step()
    bench.add("large", 28)
    bench.add("small", 2)
    assert bench.step() == {"r": 1}
    bench.scheduler.remove(running)
    # The head has the pool now; the small one must leave it a block to grow, so it waits.
    assert bench.step() == {"large": 28}


def test_the_youngest_of_the_lowest_priority_is_preempted_and_comes_back_first() -> None:
    bench = Bench(num_blocks=6, budget=64)
    # Blocks: 1 each for 3 tokens; they grow by one token a step.
    old = bench.add("old", 3)
    important = bench.add("imp", 3, priority=-1)
    young = bench.add("young", 3)
    for _ in range(6):
        bench.step()
    # 8 computed tokens each: 2 blocks each, the pool is full; the 9th token needs a block.
    assert bench.pool.num_free == 0
    bench.add("late", 3)
    bench.step()
    assert bench.stats.num_preemptions == 1
    assert (young.leader.tables, young.leader.num_computed, len(young.leader.tokens)) == ([], 0, 9)
    assert old.leader.tables[0].blocks
    assert important.leader.tables[0].blocks
    bench.scheduler.remove(important)
    assert bench.step() == {"old": 1}, "late would fit, but young was there before"
    bench.scheduler.remove(old)
    assert list(bench.step()) == ["young", "late"]


def test_prefill_is_never_preempted() -> None:
    bench = Bench(num_blocks=5, budget=8)
    local = bench.add("l", 4)
    bench.step()
    export = bench.add("p", 8, Task.PREFILL)
    # "l" takes its second block, "p" two more in one chunk of 7; then "l" outgrows the pool.
    assert bench.step() == {"l": 1, "p": 7}
    assert len(export.leader.tables[0].blocks) == 2
    blocks = list(export.leader.tables[0].blocks)
    local.leader.tokens.extend([0] * 8)
    plan = bench.scheduler.schedule()
    assert bench.stats.num_preemptions == 1
    assert local.leader.tables == []
    assert export.leader.tables[0].blocks == blocks
    assert {c.request_id for c in plan.chunks} == {"p"}


def test_an_admission_leaves_running_ones_room_to_grow() -> None:
    bench = Bench(num_blocks=3, budget=64)
    bench.add("a", 4)
    bench.step()
    bench.add("b", 8)
    assert bench.step() == {"a": 1}, "b would fit, and be preempted in the next step"


def test_prefix_hits_are_shared_but_the_last_token_is_always_computed() -> None:
    bench = Bench()
    first = bench.add("x", 8)
    bench.step()
    second = bench.group("x", 8)
    bench.scheduler.add(second)
    plan = bench.scheduler.schedule()
    (chunk,) = [row.chunk for row in plan.rows if row.group is second]
    assert (chunk.start, len(chunk.token_ids)) == (4, 4)
    assert second.leader.tables[0].blocks[0] == first.leader.tables[0].blocks[0]
    assert second.leader.tables[0].blocks[1] != first.leader.tables[0].blocks[1]
    assert second.num_cached_tokens == 4
    assert bench.stats.num_prefix_hit_tokens == 4
    assert bench.stats.num_prefix_query_tokens == 16


def test_blocks_of_a_prompt_are_not_offered_before_they_are_computed() -> None:
    bench = Bench(budget=64)
    bench.add("x", 8)
    bench.scheduler.add(bench.group("x", 8))
    assert bench.step() == {"x": 8}, "both compute all of it"
    assert bench.stats.num_prefix_hit_tokens == 0


def test_reservation_to_running_without_computing_the_prompt() -> None:
    bench = Bench()
    reservation = bench.reserve("d", 9)
    assert reservation is not None
    assert (reservation.blocks[0].end, reservation.num_tokens, reservation.start_token) == (3, 9, 0)
    sequence = bench.group("d", 9)
    sequence.leader.tokens.append(3)
    bench.scheduler.add_reserved(sequence, reservation)
    plan = bench.scheduler.schedule()
    assert [(c.start, list(c.token_ids)) for c in plan.chunks] == [(9, [3])]
    bench.finish(plan)
    # Its full blocks answer the next reservation of the same prompt.
    again = bench.reserve("d", 9)
    assert again is not None
    assert again.start_token == 8
    assert again.blocks[0].ids[:2] == reservation.blocks[0].ids[:2]
    bench.scheduler.cancel(again)
    bench.scheduler.cancel(again)
    bench.scheduler.remove(sequence)
    bench.pool.check({})


def test_a_reservation_without_first_token_recomputes_the_last_one() -> None:
    bench = Bench()
    first = bench.add("d", 8)
    bench.step()
    reservation = bench.reserve("d", 8)
    assert reservation is not None
    assert reservation.start_token == 8, "all of it is here"
    sequence = bench.group("d", 8)
    bench.scheduler.add_reserved(sequence, reservation)
    plan = bench.scheduler.schedule()
    (chunk,) = [row.chunk for row in plan.rows if row.group is sequence]
    assert (chunk.start, len(chunk.token_ids)) == (4, 4)
    assert sequence.leader.tables[0].blocks[1] != first.leader.tables[0].blocks[1], (
        "a shared block is never written"
    )
    bench.finish(plan)


def test_a_used_or_cancelled_reservation_is_refused() -> None:
    bench = Bench()
    reservation = bench.reserve("d", 4)
    assert reservation is not None
    bench.scheduler.cancel(reservation)
    with pytest.raises(InternalError, match="not held"):
        bench.scheduler.add_reserved(bench.group("d", 4), reservation)
    bench.pool.check({})


def test_reservations_pass_a_blocked_head_a_bounded_number_of_times() -> None:
    bench = Bench(num_blocks=32, budget=64)
    bench.add("r", 40)
    bench.step()
    bench.add("large", 120)
    bench.step()
    granted = [bench.reserve(f"d{i}", 2) for i in range(MAX_OVERTAKES + 3)]
    assert sum(g is not None for g in granted) == MAX_OVERTAKES


def test_reservations_never_pass_a_preempted_sequence() -> None:
    bench = Bench(num_blocks=5, budget=64)
    bench.add("a", 7)
    victim = bench.add("b", 7)
    while not bench.stats.num_preemptions:
        bench.step()
    assert victim.leader.tables == []
    assert bench.pool.num_free > 0
    assert bench.reserve("d", 1) is None


def test_ready_sequences_do_not_wait_behind_a_blocked_head() -> None:
    bench = Bench(num_blocks=4, budget=64)
    reservation = bench.reserve("d", 8)
    assert reservation is not None
    bench.add("large", 16)
    assert bench.step() == {}
    sequence = bench.group("d", 8)
    sequence.leader.tokens.append(3)
    bench.scheduler.add_reserved(sequence, reservation)
    assert bench.step() == {"d": 1}
    bench.scheduler.remove(sequence)
    assert bench.step() == {"large": 16}


def test_removing_twice_is_a_bug_that_is_told() -> None:
    bench = Bench()
    sequence = bench.add("a", 2)
    bench.scheduler.remove(sequence)
    with pytest.raises(InternalError, match="not in this scheduler"):
        bench.scheduler.remove(sequence)
