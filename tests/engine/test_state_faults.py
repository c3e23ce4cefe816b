"""Faults of recurrent state, by name: each is put in, and the usual comparisons find it.

a prefix hit without its state            the blocks are there, the state behind them is not
speculation that advances state           a refused draft stays in the state
a stale slot after an abort               a request begins with the state of one that is gone
a flattened batch that mixes sequences    one scan runs over the rows of several sequences
conv state across unequal TP              its channels are cut as one range, not by segments
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from baton.engine.core.engine import Engine
from baton.engine.memory.state_arena import StateArena
from baton.engine.memory.state_checkpoints import StateCheckpoints
from baton.engine.memory.state_slots import StateSlots
from baton.engine.models import recurrent
from baton.engine.parallel.pool import GroupStates
from baton.engine.state.batch import Batch
from baton.protocol.errors import ModelRefused
from baton.protocol.sampling import SamplingParams
from tests.cluster import Plan, cluster
from tests.engine.driving import run, run_samples, tokens_of
from tests.engine.tensor_parallel_ranks import ranks_as_threads
from tests.engine.test_state_machine import engine_with_states
from tests.engine.test_state_models import NEW_TOKENS, ask, engine_of
from tests.fakes import ScriptedProposer, request
from tests.golden.greedy import random_prompts, transformers_tokens
from tests.golden.hybrid_models import RANKED, save_hybrid
from tests.golden.random_models import save_random
from tests.golden.stateful_models import STATEFUL
from tests.tiny_models import VOCAB_SIZE

Patch = pytest.MonkeyPatch
PROMPT = tuple(range(20, 33))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    yield
    logging.getLogger("transformers").setLevel(logging.WARNING)


def prefix_hits(num_checkpoints: int = 2) -> int:
    """Serve equal prompts one after the other; return how many began from a checkpoint."""
    engine, *_ = engine_with_states(
        (0,), 20, 2, num_checkpoints=num_checkpoints, max_num_batched_tokens=32
    )
    for index in range(3):
        engine.add(request(str(index), PROMPT, max_tokens=4))
        run(engine)
    return engine.stats.num_checkpoint_hits


def refused_drafts() -> int:
    """Serve requests whose drafts are often wrong; return how many steps refused some."""
    wrong = ScriptedProposer(lambda ask, index: index == len(ask.history) % 3)
    engine, *_ = engine_with_states((0,), 20, 2, wrong, max_num_batched_tokens=32)
    for index in range(2):
        engine.add(request(str(index), PROMPT[: 5 + index], max_tokens=12))
    run(engine)
    assert engine.stats.num_accepted_tokens
    return engine.stats.num_rollbacks


@pytest.mark.parametrize("serve", [prefix_hits, refused_drafts])
def test_without_a_fault_nothing_is_found(serve: Callable[[], int]) -> None:
    assert serve() >= 2


def test_a_prefix_hit_without_its_state(monkeypatch: Patch) -> None:
    monkeypatch.setattr(StateArena, "copy", lambda *_: None)
    with pytest.raises(AssertionError, match="a state"):
        prefix_hits()


def test_a_prefix_hit_where_no_state_was_kept(monkeypatch: Patch) -> None:
    monkeypatch.setattr(StateCheckpoints, "longest", lambda _, hashes, count: count)
    with pytest.raises(KeyError):  # where the state should be looked up
        prefix_hits(num_checkpoints=0)


def test_speculation_that_advances_state_past_a_refusal(monkeypatch: Patch) -> None:
    settle = StateSlots.settle

    def without_going_back(self: StateSlots, sequence: Any, *, refused: bool) -> bool:
        return settle(self, sequence, refused=False)

    monkeypatch.setattr(StateSlots, "settle", without_going_back)
    with pytest.raises(AssertionError, match="a state"):
        refused_drafts()


def test_speculation_that_goes_back_to_what_it_did_not_keep(monkeypatch: Patch) -> None:
    monkeypatch.setattr(StateArena, "copy", lambda *_: None)
    with pytest.raises(AssertionError, match="a state"):
        refused_drafts()


def test_a_stale_slot_after_an_abort(monkeypatch: Patch, tmp_path: Path) -> None:
    path = save_random(tmp_path, "mamba2", **STATEFUL["mamba2"])
    gone, kept = random_prompts(VOCAB_SIZE, (33, 9))
    expected = transformers_tokens(path, [kept], NEW_TOKENS)

    def after_an_abort() -> list[int]:
        engine = engine_of(path, max_num_seqs=1)
        ask(engine, "gone", gone)
        engine.step()
        engine.abort("gone")
        ask(engine, "kept", kept)
        return tokens_of(run_samples(engine)["kept", 0])

    assert [after_an_abort()] == expected

    def read_always(self: Any, rows: Tensor, spans: Any, states: Any) -> Tensor:
        return run_mixer(
            self, rows, [replace(span, start=span.start or 1) for span in spans], states
        )

    run_mixer = recurrent._SplitMixer._run
    monkeypatch.setattr(recurrent._SplitMixer, "_run", read_always)
    assert [after_an_abort()] != expected


def test_a_flattened_batch_that_mixes_sequences(monkeypatch: Patch, tmp_path: Path) -> None:
    path = save_random(tmp_path, "qwen3_next", **STATEFUL["qwen3_next"])
    prompts = random_prompts(VOCAB_SIZE, (7, 6))
    expected = transformers_tokens(path, prompts, NEW_TOKENS)

    def together(engine: Engine) -> list[list[int]]:
        for index, prompt in enumerate(prompts):
            ask(engine, str(index), prompt)
        return [tokens_of(events) for _, events in sorted(run_samples(engine).items())]

    route = {"model_impl": "transformers"}  # the lean one has no mixers of transformers
    assert together(engine_of(path, **route)) == expected
    loaded = engine_of(path, **route)
    split = recurrent._SplitMixer.__call__

    def as_one(self: Any, hidden_states: Tensor, *given: Any, **named: Any) -> Tensor:
        batch: Batch = named[self.cache].batch
        whole = replace(batch.spans[0], num_rows=hidden_states.shape[1])
        named[self.cache] = recurrent.StepCache(replace(batch, spans=(whole,)))
        return split(self, hidden_states, *given, **named)

    monkeypatch.setattr(recurrent._SplitMixer, "__call__", as_one)
    assert together(loaded) != expected
    with pytest.raises(ModelRefused, match="logits change"):
        engine_of(path, **route)  # the comparison at the start finds it, too


async def test_conv_state_across_unequal_tp(monkeypatch: Patch, tmp_path: Path) -> None:
    """As many bytes arrive, in another order: only the tokens tell. (Between equal sizes they do
    not: both ends make the same mistake.)"""
    path = save_hybrid(tmp_path, "qwen3.5", **RANKED)
    prompts = [tuple(prompt) for prompt in random_prompts(VOCAB_SIZE, (17, 30))]
    expected = transformers_tokens(path, prompts, NEW_TOKENS)
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)

    async def handed_over(*sizes: int) -> list[list[int]]:
        nodes = [{"dtype": "float32", "tensor_parallel_size": size} for size in sizes]
        with ranks_as_threads():
            async with cluster(Plan(path, nodes[:1], nodes[1:], lanes=("stream",))) as c:
                done = await c.generate(prompts, greedy)
                assert c.decode[0].transfers.fetches == len(prompts)
                return [list(each.token_ids) for each in done]

    for sizes in ((2, 1), (1, 2)):
        assert await handed_over(*sizes) == expected

    def as_one_range(self: GroupStates, layer: int, slot: int) -> tuple[Tensor, ...]:
        parts = [StateArena.layer_bytes(each, layer, slot) for each in self._ranks]
        return (*(conv for conv, _ in parts), *(matrices for _, matrices in parts))

    monkeypatch.setattr(GroupStates, "layer_bytes", as_one_range)
    for sizes in ((2, 1), (1, 2)):
        assert await handed_over(*sizes) != expected
