"""The engine's machine over a model with recurrent state, whose state is the tokens it has seen.

Each row must find the state behind exactly the tokens before it: not of an earlier owner of its
slot, not of another sequence, not behind more or fewer tokens, also after forks, beams, swapping,
recomputation, prefix hits, refused drafts, aborts in the middle of steps and steps that run ahead.
States that are handed over are those behind the last token of their export, also when its request
has ended long ago.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from baton.engine.core.engine import Engine
from baton.engine.memory.layer_groups import group_layers
from baton.engine.memory.state_arena import StateArena
from baton.engine.memory.state_sizes import slots_per_sequence
from baton.engine.memory.state_slots import StateSlots
from baton.engine.sampling.proposer import Proposer
from baton.engine.state.interface import ChunkResult, SequenceChunk, Task
from baton.protocol.errors import InternalError
from baton.protocol.kv_spec import BlockLists, LayerSpec, StateSpec
from tests.engine.driving import run
from tests.engine.test_engine_machine import TEXT, EngineMachine
from tests.fakes import (
    FakeHooks,
    FakeRunner,
    ScriptedProposer,
    fake_engine,
    model_info,
    request,
)

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
            past = list[int]()
            if chunk.start:
                past = self.tokens(chunk.state_slot)
                assert len(past) == chunk.start, "a state behind other tokens"
                known = [*chunk.history[: chunk.start]]
                assert not known or past == known, "a state of another sequence"
            self.write(chunk.state_slot, (*past, *chunk.token_ids))
        return results

    def tokens(self, slot: int) -> list[int]:
        """The tokens that the state in `slot` has seen."""
        held, _ = self._states.read(self._layer, torch.tensor([slot]))
        assert held is not None
        return [int(number) - 1 for number in held[0, 0].tolist() if number]

    def write(self, slot: int, tokens: Sequence[int]) -> None:
        """Put the state behind `tokens` into `slot`."""
        seen = [token + 1 for token in tokens]  # 0 = no token
        seen += [0] * (LONGEST - len(seen))
        state = torch.tensor(seen).float().view(1, 1, -1)
        self._states.write(self._layer, torch.tensor([slot]), state, None)


def engine_with_states(
    windows: Sequence[int],
    num_blocks: int,
    max_num_seqs: int,
    proposer: Proposer | None = None,
    **options: Any,
) -> tuple[Engine, FakeRunner, SeenTokens]:
    layers = (*(LayerSpec(1, 2, 2, window=window) for window in windows), STATE)
    num_groups = group_layers(layers, "float32").num_groups
    engine, runner = fake_engine(
        num_blocks=num_blocks * num_groups,
        info=model_info(layers=layers),
        num_slots=max_num_seqs * slots_per_sequence(speculates=proposer is not None),
        max_num_seqs=max_num_seqs,
        proposer=proposer,
        **{"state_checkpoint_spacing": 1, **options},
    )
    assert engine.arena.states is not None
    return engine, runner, SeenTokens(runner, engine.arena.states, len(windows))


class StateMachine(EngineMachine):
    goes_back = False

    @initialize(
        num_blocks=st.sampled_from((6, 9, 14, 60)),
        step=st.tuples(st.integers(1, 4), st.integers(0, 12)),
        options=st.fixed_dictionaries(
            {
                "preemption_mode": st.sampled_from(("auto", "swap", "recompute")),
                "async_scheduling": st.booleans(),
                "num_checkpoints": st.sampled_from((0, 1, 2, 9)),
                "state_checkpoint_spacing": st.sampled_from((1, 5)),
                "num_speculative_tokens": st.integers(1, 5),
            }
        ),
        odds=st.tuples(st.sampled_from((None, 0, 3, 10)), st.booleans(), st.booleans()),
    )
    def start(
        self,
        num_blocks: int,
        step: tuple[int, int],
        options: dict[str, Any],
        odds: tuple[int | None, bool, bool],
    ) -> None:
        """`odds`: as EngineMachine.start's."""
        (max_num_seqs, extra), (spoilt, ticks, late) = step, odds
        proposer = None
        if spoilt is not None:
            proposer = ScriptedProposer(
                lambda ask, index: (len(ask.history) * 7 + index) % 10 < spoilt
            )
        self.hooks = FakeHooks()
        self.engine, self.runner, self.seen = engine_with_states(
            (0,), num_blocks, max_num_seqs, proposer,
            max_num_batched_tokens=max_num_seqs + extra, hooks=self.hooks, **options,
        )  # fmt: skip
        self.window = self.runner.window
        self.runner.late = late
        self.runner.seconds_per_step = self.runner.seconds_per_copied_block = float(ticks)
        self.lives, self.reserved, self.unpinned = {}, [], 0
        self.adopted, self.wanted, self.lapsed = {}, False, set()
        self.given_back = Counter()

    def bring_state(self, blocks: BlockLists, tokens: Sequence[int]) -> None:
        slot = blocks[0].state_slot
        assert slot is not None
        self.seen.write(slot, tokens)

    def prove_state(self, blocks: BlockLists, tokens: Sequence[int]) -> None:
        slot = blocks[0].state_slot
        assert slot is not None
        assert self.seen.tokens(slot) == list(tokens), "a state behind other tokens leaves"

    @rule(data=st.data(), length=st.sampled_from((9, 12, 13)))
    def add_alike(self, data: st.DataObject, length: int) -> None:
        """A plain request, which may resume from a checkpoint of those before it."""
        name = f"k{len(self.lives)}-{len(self.runner.batches)}"
        asked = request(name, TEXT[:length], max_tokens=data.draw(st.integers(1, 8)))
        if asked.id not in self.lives:
            self.engine.add(asked)
            self.born(asked, Task.LOCAL)

    @invariant()
    def slots_balance(self) -> None:
        states = self.engine.tables.states
        if not self.engine.has_work:
            reserved = sum(max(1, asked.params.width) for asked, _ in self.reserved)
            assert states.num_free >= states.num_slots - states.num_pinned - reserved
            if not self.reserved:
                assert states.num_free == states.num_slots - states.num_pinned


StateMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStateMachine = StateMachine.TestCase


def serve_two_at_a_time(**pool: bool) -> None:
    """Four equal prompts with different outputs, which do not all fit."""
    engine, *_ = engine_with_states((0,), 8, 2, preemption_mode="swap", max_num_batched_tokens=8)
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
