"""The engine's machine over a model with recurrent state, whose state is the tokens it has seen.

Each row must find the state behind exactly the tokens before it: not of an earlier owner of its
slot, not of another sequence, not behind more or fewer tokens, also after forks, beams, swapping,
recomputation, aborts in the middle of steps and steps that run ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from baton.engine.core.engine import Engine
from baton.engine.memory.layer_groups import group_layers
from baton.engine.memory.state_arena import StateArena
from baton.engine.memory.state_slots import StateSlots
from baton.engine.state.interface import ChunkResult, SequenceChunk
from baton.protocol.errors import InternalError
from baton.protocol.kv_spec import LayerSpec, StateSpec
from tests.engine.driving import run
from tests.engine.test_engine_machine import EngineMachine
from tests.fakes import FakeHooks, FakeRunner, fake_engine, model_info, request

LONGEST = 40  # tokens
STATE = LayerSpec(0, 0, 0, kind="state", state=StateSpec(conv=(1, LONGEST)))


class SeenTokens:
    """Runs after a FakeRunner: reads, proves and writes the states of a step's rows."""

    def __init__(self, runner: FakeRunner, states: StateArena, layer: int) -> None:
        self._run, self._states, self._layer = runner.run, states, layer
        runner.run = self.run

    def run(
        self, chunks: Sequence[SequenceChunk], on_layer: Callable[[int], None] | None = None
    ) -> list[ChunkResult]:
        results = self._run(chunks, on_layer)
        for chunk in chunks:
            slot, past = torch.tensor([chunk.state_slot]), list[int]()
            if chunk.start:
                held, _ = self._states.read(self._layer, slot)
                assert held is not None
                past = [int(number) - 1 for number in held[0, 0].tolist() if number]
                assert len(past) == chunk.start, "a state behind other tokens"
                known = [*chunk.history[: chunk.start]]
                assert not known or past == known, "a state of another sequence"
            seen = [token + 1 for token in (*past, *chunk.token_ids)]  # 0 = no token
            seen += [0] * (LONGEST - len(seen))
            self._states.write(self._layer, slot, torch.tensor(seen).float().view(1, 1, -1), None)
        return results


def engine_with_states(
    windows: Sequence[int], num_blocks: int, max_num_seqs: int, **options: Any
) -> tuple[Engine, FakeRunner]:
    layers = (*(LayerSpec(1, 2, 2, window=window) for window in windows), STATE)
    num_groups = group_layers(layers, "float32").num_groups
    engine, runner = fake_engine(
        num_blocks=num_blocks * num_groups,
        info=model_info(layers=layers),
        num_slots=max_num_seqs,
        max_num_seqs=max_num_seqs,
        **options,
    )
    assert engine.arena.states is not None
    SeenTokens(runner, engine.arena.states, len(windows))
    return engine, runner


class StateMachine(EngineMachine):
    @initialize(
        num_blocks=st.sampled_from((6, 9, 14, 60)),
        step=st.tuples(st.integers(1, 4), st.integers(0, 12)),
        mode=st.sampled_from(("auto", "swap", "recompute")),
        ahead=st.booleans(),
        odds=st.tuples(st.booleans(), st.booleans()),
    )
    def start(
        self,
        num_blocks: int,
        step: tuple[int, int],
        mode: str,
        ahead: bool,
        odds: tuple[bool, bool],
    ) -> None:
        (max_num_seqs, extra), (ticks, late) = step, odds
        self.engine, self.runner = engine_with_states(
            (0,), num_blocks, max_num_seqs, max_num_batched_tokens=max_num_seqs + extra,
            preemption_mode=mode, async_scheduling=ahead,
        )  # fmt: skip
        self.hooks = FakeHooks()
        self.window = self.runner.window
        self.runner.late = late
        self.runner.seconds_per_step = self.runner.seconds_per_copied_block = float(ticks)
        self.lives, self.reserved, self.unpinned = {}, [], 0
        self.adopted, self.wanted, self.lapsed = {}, False, set()

    # Not with recurrent state yet: KV from other engines, and for them.
    reserve = adopt = hand_on = None  # type: ignore[assignment]

    @invariant()
    def slots_balance(self) -> None:
        states = self.engine.tables.states
        if not self.engine.has_work:
            assert states.num_free == states.num_slots


StateMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStateMachine = StateMachine.TestCase


def serve_two_at_a_time(**pool: bool) -> None:
    """Four equal prompts with different outputs, which do not all fit."""
    engine, _ = engine_with_states((0,), 8, 2, preemption_mode="swap", max_num_batched_tokens=8)
    for name, value in pool.items():
        setattr(engine.pool, name, value)
    for index in range(4):
        engine.add(request(str(index), tuple(range(20, 29)), max_tokens=9, seed=index))
    run(engine)
    assert engine.stats.num_swap_ins


def test_without_a_fault_nothing_is_found() -> None:
    serve_two_at_a_time()


def test_a_slot_with_two_owners_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    take = StateSlots.take

    def take_twice(self: StateSlots, sequence: Any) -> None:
        take(self, sequence)
        self._free.append(sequence.state_slot)

    monkeypatch.setattr(StateSlots, "take", take_twice)
    with pytest.raises(InternalError, match="not those of the sequences"):
        serve_two_at_a_time()
    monkeypatch.setattr(StateSlots, "check", lambda *_: None)
    with pytest.raises(AssertionError, match="a state"):
        serve_two_at_a_time()


def test_a_state_that_stays_behind_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateArena, "write_slots", lambda *_: None)
    with pytest.raises(AssertionError, match="a state"):
        serve_two_at_a_time()


def test_a_prefix_hit_without_its_state_is_found() -> None:
    with pytest.raises(AssertionError, match="a state"):
        serve_two_at_a_time(enable_prefix_caching=True)
