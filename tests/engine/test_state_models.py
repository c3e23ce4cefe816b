"""Models with recurrent state give transformers' tokens: in chunks, in batches, when preempted,
forked and planned ahead; and what is refused with them is refused by name."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.config import EngineConfig
from baton.engine.core.assembly import build_engine, load_parts
from baton.engine.core.engine import Engine
from baton.engine.loading.loading import load_model
from baton.engine.performance.estimate import rows, sized
from baton.engine.performance.ideal import EstimateOptions
from baton.protocol.errors import ModelRefused
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from tests.engine.driving import assert_all_free, run_samples, tokens_of
from tests.golden.greedy import our_tokens, random_prompts, transformers_tokens
from tests.golden.random_models import save_random
from tests.golden.stateful_models import STATEFUL
from tests.tiny_models import VOCAB_SIZE

PROMPTS = random_prompts(VOCAB_SIZE)
NEW_TOKENS = 20
# KV and state in layers of their own; both in one layer; state alone.
SHORT = ("qwen3_next", "falcon_h1", "mamba2")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    yield
    logging.getLogger("transformers").setLevel(logging.WARNING)


def engine_of(path: Path, **options: Any) -> Engine:
    given: dict[str, Any] = {
        "dtype": "float32", "device": "cpu", "max_model_len": 128, "block_size": 4,
        "num_kv_blocks": 200, "max_num_batched_tokens": 16, "max_num_seqs": 4,
        "check_invariants": True,
    }  # fmt: skip
    return build_engine(EngineConfig(str(path), **(given | options)))


def ask(engine: Engine, name: str, prompt: list[int], **params: Any) -> None:
    given: dict[str, Any] = {"max_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True}
    engine.add(Request(name, tuple(prompt), SamplingParams(**(given | params))))


@pytest.mark.parametrize("model_type", STATEFUL)
def test_tokens_are_those_of_generate(model_type: str, tmp_path: Path) -> None:
    path = save_random(tmp_path, model_type, **STATEFUL[model_type])
    loaded = load_model(EngineConfig(str(path), dtype="float32", max_model_len=256))
    expected = transformers_tokens(path, PROMPTS)
    assert our_tokens(loaded, PROMPTS) == expected
    assert len({token for output in expected for token in output}) > 10  # decisive


@pytest.mark.parametrize(
    "model_type",
    [
        model_type if model_type in SHORT else pytest.param(model_type, marks=pytest.mark.long)
        for model_type in STATEFUL
    ],
)
def test_an_engine_preempts_forks_and_plans_ahead(model_type: str, tmp_path: Path) -> None:
    path = save_random(tmp_path, model_type, **STATEFUL[model_type])
    expected = transformers_tokens(path, PROMPTS, NEW_TOKENS)
    seen: dict[str, int] = {}
    for options in (
        {"async_scheduling": True},
        {"preemption_mode": "recompute", "num_kv_blocks": 18},
        {"preemption_mode": "swap", "num_kv_blocks": 18},
    ):
        engine = engine_of(path, **options)
        for index, prompt in enumerate(PROMPTS):
            ask(engine, str(index), prompt, n=2 if index == 1 else 1)
        events = run_samples(engine)
        for index, tokens in enumerate(expected):
            assert tokens_of(events[str(index), 0]) == tokens, (options, index)
        assert tokens_of(events["1", 1]) == expected[1]
        assert_all_free(engine)
        assert engine.tables.states.num_free == engine.tables.states.num_slots == 4
        stats = engine.stats
        for name in ("num_forks", "num_preemptions", "num_swap_ins", "num_steps_ahead"):
            seen[name] = seen.get(name, 0) + getattr(stats, name)
    assert all(seen.values()), seen


def test_beams_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = save_random(tmp_path, "qwen3_next", **STATEFUL["qwen3_next"])
    engine = engine_of(path)
    ask(engine, "beams", PROMPTS[1], beam_width=3, n=1)
    ask(engine, "plain", PROMPTS[2])
    events = run_samples(engine)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.tensor([PROMPTS[1]])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS, do_sample=False, num_beams=3, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert tokens_of(events["beams", 0]) == found[0, len(PROMPTS[1]) :].tolist()
    assert [tokens_of(events["plain", 0])] == transformers_tokens(path, [PROMPTS[2]], NEW_TOKENS)
    assert_all_free(engine)


def test_a_slot_of_an_aborted_request_is_nobodys_past(tmp_path: Path) -> None:
    path = save_random(tmp_path, "mamba2", **STATEFUL["mamba2"])
    expected = transformers_tokens(path, PROMPTS, NEW_TOKENS)
    engine = engine_of(path, max_num_seqs=1)
    for index in (2, 0, 4, 1):
        ask(engine, "gone", PROMPTS[3])
        for _ in range(4):
            engine.step()
        engine.abort("gone")
        ask(engine, "kept", PROMPTS[index])
        assert tokens_of(run_samples(engine)["kept", 0]) == expected[index]


def test_equal_prompts_do_not_share_what_has_no_state(tmp_path: Path) -> None:
    path = save_random(tmp_path, "qwen3_next", **STATEFUL["qwen3_next"])
    expected = transformers_tokens(path, [PROMPTS[2]], NEW_TOKENS)
    engine = engine_of(path)
    for _ in range(2):
        ask(engine, "again", PROMPTS[2])
        assert [tokens_of(run_samples(engine)["again", 0])] == expected
    assert engine.stats.num_prefix_hit_tokens == 0


def test_what_is_refused_with_recurrent_state(tmp_path: Path) -> None:
    path = save_random(tmp_path, "mamba2", **STATEFUL["mamba2"])
    config = EngineConfig(str(path), dtype="float32", max_model_len=128, num_kv_blocks=8)
    parts = load_parts(config)
    with pytest.raises(ModelRefused, match="how the prompt is cut"):
        load_model(EngineConfig(str(path), dtype="float32", max_model_len=128, deterministic=True))
    assert parts.active.pooler is None


@pytest.mark.parametrize("model_type", ["qwen3_next", "falcon_h1", "mamba2"])
def test_memory_is_what_the_estimate_says(model_type: str, tmp_path: Path) -> None:
    path = save_random(tmp_path, model_type, **STATEFUL[model_type])
    found = sized(EstimateOptions(path, memory="40MB", context=128, max_num_seqs=8))
    config = EngineConfig(
        str(path), dtype="float32", max_model_len=128, block_size=16, max_num_seqs=8,
        kv_cache_memory=f"{found.kv_bytes}B",
    )  # fmt: skip
    arena = load_parts(config).arena
    assert arena.states is not None
    assert (found.state_bytes, found.state_slots) == (arena.states.slot_bytes, 8)
    assert found.state_checkpoints == arena.states.num_checkpoints > 0
    assert found.num_blocks == arena.num_blocks
    assert found.kv_bytes is not None
    assert arena.num_bytes + arena.states.num_bytes <= found.kv_bytes
    few = EngineConfig(
        str(path), dtype="float32", max_model_len=128, block_size=16, max_num_seqs=64,
        kv_cache_memory=f"{6 * found.state_bytes}B",
    )  # fmt: skip
    parts = load_parts(few)  # slots take at most half, and fewer requests run at once
    assert parts.arena.states is not None
    assert (parts.config.max_num_seqs, parts.arena.states.num_slots) == (3, 3)


@pytest.mark.parametrize(("slots", "sequences", "owned"), [(64, 8, 16), (6, 1, 3), (2, 1, 1)])
def test_memory_for_drafts_and_checkpoints(
    slots: int, sequences: int, owned: int, tmp_path: Path
) -> None:
    """`slots`: for how many the memory for KV and states would be enough; `owned`: by sequences."""
    path = save_random(tmp_path, "qwen3_next", **STATEFUL["qwen3_next"])
    size = sized(EstimateOptions(path)).state_bytes
    config = EngineConfig(
        str(path), dtype="float32", max_model_len=128, block_size=4, max_num_seqs=8,
        kv_cache_memory=f"{slots * size}B", speculative_method="ngram",
        num_state_checkpoints=0 if slots < 6 else 2,
    )  # fmt: skip
    parts = load_parts(config)
    states = parts.arena.states
    assert states is not None
    assert (parts.config.max_num_seqs, states.num_slots) == (sequences, owned)
    assert states.num_bytes == (owned + states.num_checkpoints) * size
    assert states.num_checkpoints == config.num_state_checkpoints
    found = sized(EstimateOptions(path, memory="1GB", num_state_checkpoints=7))
    assert found.state_checkpoints == 7
    assert "7 checkpoints" in dict(rows(found))["state per request"]
