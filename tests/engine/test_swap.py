"""Preemption by swap or recompute: what is copied, what is chosen, who comes back first."""

from __future__ import annotations

import pytest

from baton.engine.config import PreemptionMode
from baton.engine.memory.block_pool import BlockPool
from baton.engine.memory.block_tables import BlockTables
from baton.engine.memory.swap import Swapper
from baton.engine.state.interface import ModelInfo, Task
from baton.engine.state.sequence import RequestGroup, SequenceState
from baton.engine.state.stats import EngineStats
from baton.protocol.errors import InternalError
from baton.protocol.kv_spec import LayerSpec
from tests.engine.driving import PROMPT, assert_all_free, expected, run, tokens_of
from tests.engine.test_scheduler import Bench, NoMemory
from tests.fakes import FakeClock, expected_output, fake_engine, model_info, request

ROOT = b"root"


class Ticking(FakeClock):
    """Each reading is a second later."""

    def monotonic(self) -> float:
        self.advance(1.0)
        return self.now


def make(mode: PreemptionMode, **stats: float) -> tuple[Swapper, BlockTables, EngineStats]:
    counters = EngineStats(**stats)  # type: ignore[arg-type]
    tables = BlockTables(BlockPool(8, 4), NoMemory(), counters)
    return Swapper(tables, counters, Ticking(), mode, block_bytes=100), tables, counters


def group_of(tables: BlockTables, num_tokens: int, samples: int = 1) -> RequestGroup:
    tokens = list(range(num_tokens))
    asked = request(prompt=tokens)
    sequences = [SequenceState(asked, ROOT, list(tokens), s) for s in range(samples)]
    leader = sequences[0]
    taken = tables.take([], num_tokens, headroom=0)
    assert taken is not None
    leader.tables = taken.tables
    leader.num_computed = num_tokens
    tables.register_full_blocks(leader)
    for follower in sequences[1:]:
        tables.fork(leader, follower, num_tokens)
    return RequestGroup(asked, Task.LOCAL, 0, sequences)


@pytest.mark.parametrize(
    ("mode", "copy", "prefill", "swaps"),
    [
        ("swap", 1.0, 1e9, True),
        ("recompute", 1e9, 1.0, False),
        ("auto", 0.0, 5.0, True),  # not measured yet
        ("auto", 5.0, 0.0, True),
        ("auto", 100.0, 1.0, True),  # 3 blocks there and back: 6 s; 10 tokens: 10 s
        ("auto", 100.0, 2.0, False),  # 10 tokens: 5 s
    ],
)
def test_the_cheaper_way_is_taken(
    mode: PreemptionMode, copy: float, prefill: float, swaps: bool
) -> None:
    swapper, tables, _ = make(mode, copy_bytes_per_s=copy, prefill_tokens_per_s=prefill)
    assert swapper.prefers_swap(group_of(tables, 10)) == swaps


def test_shared_blocks_are_copied_once_and_shared_again() -> None:
    swapper, tables, stats = make("swap")
    group = group_of(tables, 10, samples=3)
    before = [s.tables[0].blocks for s in group.sequences]
    assert before[0] == before[1] == before[2]
    swapper.swap_out(group)
    assert tables.pool.num_free == 8
    assert (swapper.num_blocks, stats.num_swapped_out_blocks) == (3, 3)
    assert stats.copy_bytes_per_s == 300.0
    swapper.check([group])
    assert swapper.swap_in(group, headroom=0)
    first, second, third = (s.tables[0].blocks for s in group.sequences)
    assert first == second == third
    assert [tables.pool.ref_count(block) for block in first] == [3, 3, 3]
    # Two full blocks were still in the prefix map: only the last one is copied back.
    assert stats.num_swapped_in_blocks == 1
    assert first[:2] == before[0][:2]
    assert swapper.num_blocks == 0
    swapper.check([])


def test_evicted_blocks_come_back_and_can_be_found_again() -> None:
    swapper, tables, stats = make("swap")
    group = group_of(tables, 10)
    hashes = list(group.leader.hashes(2, 4))
    swapper.swap_out(group)
    others = tables.pool.allocate(8)
    assert others is not None
    assert tables.pool.lookup(hashes) == [], "all were evicted"
    assert not swapper.swap_in(group, headroom=0)
    tables.pool.unref(others)
    assert not swapper.swap_in(group, headroom=6)
    assert swapper.swap_in(group, headroom=5)
    assert stats.num_swapped_in_blocks == 3
    assert tables.pool.lookup(hashes) == group.leader.tables[0].blocks[:2]


def test_never_more_swapped_blocks_than_the_pool_has() -> None:
    swapper, tables, _ = make("swap")
    groups = []
    for size in (20, 12):
        group = group_of(tables, size)
        assert swapper.prefers_swap(group)
        swapper.swap_out(group)
        groups.append(group)
    assert swapper.num_blocks == 8
    third = group_of(tables, 3)
    assert not swapper.prefers_swap(third)
    swapper.drop(groups[0])
    assert swapper.prefers_swap(third)
    with pytest.raises(InternalError, match="host copies"):
        swapper.check(groups)


def test_swapped_requests_come_back_before_waiting_ones_and_stop_reservations() -> None:
    bench = Bench(num_blocks=6, budget=64, mode="swap")
    first, second = bench.add("a", 7), bench.add("b", 7)
    while not bench.stats.num_preemptions:
        bench.step()
    assert bench.scheduler.num_swapped == 1
    assert second.leader.num_computed == len(second.leader.tokens) - 1, "nothing is lost"
    bench.add("c", 2, priority=-5)
    assert bench.step() == {"a": 1}
    assert bench.reserve("d", 1) is None
    bench.scheduler.remove(first)
    assert list(bench.step().items()) == [("b", 1), ("c", 2)]
    assert bench.stats.num_prompt_tokens == 0


def test_a_swap_round_trip_keeps_tokens() -> None:
    engine, runner = fake_engine(num_blocks=10, preemption_mode="swap")
    asked = [request(f"r{i}", PROMPT[: 5 + i], seed=i, max_tokens=20) for i in range(3)]
    for each in asked:
        engine.add(each)
    events = run(engine)
    for each in asked:
        assert tokens_of(events[each.id]) == expected(each)
    stats = engine.stats
    told = [event.preemptions for each in asked for event in events[each.id]]
    assert sum(told) == stats.num_preemptions, "each once, with a request's last event"
    assert stats.num_swap_outs == stats.num_swap_ins == stats.num_preemptions > 0
    assert stats.num_swapped_out_blocks >= stats.num_swapped_in_blocks > 0
    # Nothing was computed twice.
    assert sum(len(c.token_ids) for b in runner.batches for c in b) == sum(
        len(each.prompt_ids) + 19 for each in asked
    )
    assert_all_free(engine)


def test_abort_of_a_swapped_request_forgets_its_copy() -> None:
    engine, _ = fake_engine(num_blocks=8, preemption_mode="swap")
    for i in range(3):
        engine.add(request(f"r{i}", PROMPT[:6], seed=i, max_tokens=18))
    while not engine.current_load().swapped:
        engine.step()
    assert engine.current_load().swapped == 1
    assert engine.abort("r2")
    assert engine.current_load().swapped == 0
    run(engine)
    assert_all_free(engine)


# ---- windows ----


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("window", [1, 3, 4, 9])
def test_windows_free_what_nobody_sees_and_keep_tokens(window: int, mode: str) -> None:
    engine, _ = fake_engine(
        num_blocks=17, info=windowed(window, window), preemption_mode=mode,
        max_num_seqs=4, max_num_batched_tokens=9,
    )  # fmt: skip
    asked = [request(f"r{i}", PROMPT[: 7 + i], seed=i, max_tokens=50) for i in range(5)]
    for each in asked:
        engine.add(each)
    used: list[int] = []
    events: dict[str, list[int]] = {each.id: [] for each in asked}
    while engine.has_work:
        for event in engine.step():
            events[event.request_id].extend(event.token_ids)
        used.append(engine.pool.num_used)
    for each in asked:
        wanted = expected_output(each.prompt_ids, each.params, window=window)
        assert events[each.id] == wanted
    assert engine.stats.num_window_freed_blocks > 50
    # Four requests of up to 61 tokens run in 17 blocks of 4, without one block of waiting room.
    assert max(used) <= 17
    assert_all_free(engine)


def test_one_layer_that_sees_all_keeps_its_own_blocks_alone() -> None:
    engine, _ = fake_engine(info=windowed(3, 0))
    asked = request(prompt=PROMPT, max_tokens=40)
    engine.add(asked)
    for _ in range(30):
        engine.step()
    # 48 computed tokens: 12 blocks that all see, and the last one or two of those with a window.
    usage = engine.kv_usage()
    assert usage.allocated_blocks <= 12 + 2
    assert engine.stats.num_window_freed_blocks >= 10
    engine.abort(asked.id)
    assert_all_free(engine)


def test_layers_of_unequal_bytes_share_blocks_which_all_stay() -> None:
    layers = (LayerSpec(1, 2, 2, window=3), LayerSpec(2, 2, 2))
    engine, _ = fake_engine(info=model_info(layers=layers))
    engine.add(request(prompt=PROMPT, max_tokens=40))
    run(engine)
    assert engine.arena.groups.num_groups == 1
    assert engine.stats.num_window_freed_blocks == 0


def test_a_table_with_holes_is_never_handed_out() -> None:
    engine, _ = fake_engine(num_blocks=30, info=windowed(4, 4))
    long = request("long", PROMPT, max_tokens=60)
    engine.add(long)
    for _ in range(40):
        engine.step()
    # Its first blocks are free; some are taken by others, so a chain of hits must end there.
    other = request("other", tuple(reversed(PROMPT)), max_tokens=50)
    engine.add(other)
    for _ in range(20):
        engine.step()
    again = request("again", (*PROMPT, *expected_output(PROMPT, long.params, window=4)[:9]))
    engine.add(again)
    events = run(engine)["again"]
    assert tokens_of(events) == expected_output(again.prompt_ids, again.params, window=4)
    assert_all_free(engine)


def windowed(*windows: int) -> ModelInfo:
    layers = tuple(LayerSpec(1, 2, 2, window=window) for window in windows)
    return model_info(layers=layers)
