"""Models with recurrent state over two and four ranks: the logits of one rank, the tokens of
transformers. Every rank of Qwen3-Next and Qwen3.5 has its heads of each state, wherever the state
goes; of the universal route's models it has the whole state."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.core.engine import Engine
from baton.engine.loading.loading import LoadedModel, load_model
from baton.engine.memory.state_sizes import slot_bytes
from baton.engine.models.families.read import decoder_config
from baton.engine.parallel.group import RankGroup
from baton.engine.parallel.pool import GroupStates
from baton.engine.parallel.sharding import rank_config
from baton.engine.performance.estimate import read_config, sized
from baton.engine.performance.ideal import EstimateOptions
from baton.engine.state.place import RankPlace, rank_layers
from baton.protocol.errors import InternalError, ModelRefused
from baton.protocol.kv_spec import StateSpec
from tests.adapters import id_of
from tests.engine.driving import assert_all_free, run_samples, tokens_of
from tests.engine.quantized_models import quantized_pair
from tests.engine.running import relative_error
from tests.engine.tensor_parallel_ranks import by_threads, config_of, engine_of_ranks, logits_of
from tests.engine.test_hybrid_models import save_wide
from tests.engine.test_models_lora import linear_layers, make_adapter
from tests.engine.test_state_models import ask, engine_of
from tests.engine.test_state_speculation import Oracle, speculating
from tests.fakes import request
from tests.golden.greedy import random_prompts, transformers_tokens
from tests.golden.hybrid_models import RANKED, save_hybrid, save_with_images
from tests.golden.random_models import save_random
from tests.golden.stateful_models import STATEFUL
from tests.tiny_models import VOCAB_SIZE, make_tiny_model

LAID_OUT = ("qwen3 next", "qwen3.5", "qwen3.5 moe")  # by key head, in segments, with experts
KINDS = (*LAID_OUT, "qwen3 next, half dense", "qwen3.5, biased")
RANKED_WIDE = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}  # of save_wide's sizes
QUICK = {("qwen3 next", 2), ("nemotron_h", 2)}
NEW_TOKENS = 20
PROMPTS = random_prompts(VOCAB_SIZE)
SHARED = [9 + i * i % 31 for i in range(24)]  # 6 blocks
ALIKE = [[*SHARED, *rest] for rest in random_prompts(VOCAB_SIZE, (17, 11, 8))]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    yield
    logging.getLogger("transformers").setLevel(logging.WARNING)


def ranked(path: Path, name: str, **overrides: Any) -> Path:
    if name in STATEFUL:
        return save_random(path, name, **STATEFUL[name], **overrides)
    return save_hybrid(path, name, **RANKED, **overrides)


def shares(path: Path, size: int, **options: Any) -> list[tuple[LoadedModel, torch.Tensor]]:
    """Of each rank its share and its logits."""
    config = config_of(path, tensor_parallel_size=size, **options)

    def share(group: RankGroup) -> tuple[LoadedModel, torch.Tensor]:
        loaded = load_model(config, group)
        return loaded, logits_of(loaded, size)

    return by_threads(size, share)


@pytest.mark.parametrize("name", KINDS)
@torch.inference_mode()
def test_logits_of_two_and_four_ranks_are_those_of_one(name: str, tmp_path: Path) -> None:
    path = ranked(tmp_path, name)
    whole = load_model(config_of(path))
    expected = logits_of(whole, 1)
    for size in (2, 4):
        ranks = shares(path, size)
        leader, found = ranks[0]
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
        assert leader.info.layers == whole.info.layers
        assert leader.info.digest == whole.info.digest
        assert leader.weight_bytes < (0.75 if size == 2 else 0.6) * whole.weight_bytes


@pytest.mark.parametrize("name", LAID_OUT)
def test_a_rank_keeps_what_its_share_of_the_model_advances(name: str, tmp_path: Path) -> None:
    config = decoder_config(read_config(ranked(tmp_path, name)))
    for size in (2, 4):
        own = rank_config(config, RankPlace(0, size))
        for mine, told in zip(own.layers, rank_layers(config.layers, size), strict=True):
            assert mine == told
            assert mine.state is None or mine.state.segments == told.state.segments  # type: ignore[union-attr]


def test_two_ranks_in_bfloat16(tmp_path: Path) -> None:
    """By the compiled kernels, where there are any."""
    path = save_wide(tmp_path, "qwen3.5")
    whole = load_model(replace(config_of(path), dtype="bfloat16"))
    config = replace(config_of(path, tensor_parallel_size=2), dtype="bfloat16")
    with torch.inference_mode():
        expected = logits_of(whole, 1)
        exact = logits_of(load_model(config_of(path)), 1)

    def share(group: RankGroup) -> tuple[LoadedModel, torch.Tensor]:
        loaded = load_model(config, group)
        return loaded, logits_of(loaded, 2)

    (leader, found), _ = by_threads(2, share)
    assert leader.info.layers == whole.info.layers, "a convolution's inputs have the model's dtype"
    bound = 1.5 * relative_error(expected, exact) + 0.01
    assert relative_error(found, exact) < bound


# ---- an engine ----

OPTIONS: dict[str, Any] = {
    "max_model_len": 128, "block_size": 4, "num_kv_blocks": 200, "max_num_batched_tokens": 16,
    "max_num_seqs": 4,
}  # fmt: skip
COUNTED = (
    "num_prompt_tokens", "num_prefix_hit_tokens", "num_forks", "num_preemptions", "num_swap_ins",
    "num_checkpoint_hits", "num_checkpoints_stored", "num_checkpoints_replaced",
    "num_accepted_tokens", "num_rollbacks",
)  # fmt: skip


UNIVERSAL = tuple(name for name in STATEFUL if not name.startswith("qwen3"))
# Two ranks with the first family of each route; all else is `soak`.
SERVED = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.soak)
    for case in (*itertools.product(LAID_OUT, (2, 4)), *((name, 2) for name in UNIVERSAL))
]


def counts(engine: Engine) -> dict[str, int]:
    return {name: getattr(engine.stats, name) for name in COUNTED}


def answers(engine: Engine, prompts: list[list[int]], **params: Any) -> list[list[int]]:
    """The tokens of all prompts together, of all their samples."""
    for index, prompt in enumerate(prompts):
        ask(engine, str(index), prompt, **params)
    found = [tokens_of(events) for _, events in sorted(run_samples(engine).items())]
    assert_all_free(engine)
    states = engine.tables.states
    assert (states.num_free, states.num_pinned) == (states.num_slots, 0)
    return found


@pytest.mark.parametrize(("name", "size"), SERVED)
def test_preempted_prompts_in_chunks(name: str, size: int, tmp_path: Path) -> None:
    """A pool so small that requests leave it, and their states with them: to host memory, or to
    nowhere. Each is counted as with one rank."""
    path = ranked(tmp_path, name)
    expected = transformers_tokens(path, PROMPTS, NEW_TOKENS)
    for mode in ("swap", "recompute"):
        options = {**OPTIONS, "num_kv_blocks": 18, "preemption_mode": mode}
        alone = engine_of(path, **options)
        assert answers(alone, PROMPTS) == expected
        with engine_of_ranks(str(path), size, **options) as engine:
            assert answers(engine, PROMPTS) == expected
            assert counts(engine) == counts(alone)
            assert engine.stats.num_preemptions
            assert bool(engine.stats.num_swap_ins) == (mode == "swap")
            assert isinstance(engine.arena.states, GroupStates)


@pytest.mark.parametrize(("name", "size"), SERVED)
def test_prompts_that_begin_alike_and_samples_that_fork(
    name: str, size: int, tmp_path: Path
) -> None:
    path = ranked(tmp_path, name)
    expected = transformers_tokens(path, ALIKE, NEW_TOKENS)
    options = {**OPTIONS, "num_state_checkpoints": 4, "state_checkpoint_spacing": 4}
    sampled = {"n": 4, "temperature": 1.0, "seed": 5}
    alone = engine_of(path, **options)
    with engine_of_ranks(str(path), size, **options) as engine:
        for prompt, tokens in zip(ALIKE, expected, strict=True):
            for each in (alone, engine):
                assert answers(each, [prompt]) == [tokens]
        forked = answers(alone, ALIKE[:1], **sampled)
        assert answers(engine, ALIKE[:1], **sampled) == forked
        assert len({tuple(tokens) for tokens in forked}) == 4
        assert counts(engine) == counts(alone)
        assert engine.stats.num_checkpoint_hits == 2
        assert engine.stats.num_forks == 3


@pytest.mark.parametrize(("name", "size"), SERVED)
def test_refused_drafts_leave_no_trace_on_any_rank(name: str, size: int, tmp_path: Path) -> None:
    path = ranked(tmp_path, name)
    expected = transformers_tokens(path, PROMPTS, NEW_TOKENS)
    outputs = {str(index): tokens for index, tokens in enumerate(expected)}
    options = {**OPTIONS, "num_kv_blocks": 24, "speculative_method": "ngram"}
    alone = speculating(path, outputs, **options)
    assert answers(alone, PROMPTS) == expected
    with engine_of_ranks(str(path), size, Oracle(outputs), **options) as engine:
        assert answers(engine, PROMPTS) == expected
        assert counts(engine) == counts(alone)
        assert engine.stats.num_rollbacks
        assert engine.stats.num_accepted_tokens


def test_a_draft_model_on_rank_0_alone(tmp_path: Path) -> None:
    path = ranked(tmp_path / "model", "qwen3.5")
    expected = transformers_tokens(path, PROMPTS, NEW_TOKENS)
    draft = str(make_tiny_model("llama", tmp_path / "draft"))
    options = {**OPTIONS, "speculative_method": "draft", "speculative_model": draft}
    with engine_of_ranks(str(path), 2, **options) as engine:
        assert answers(engine, PROMPTS) == expected
        assert engine.stats.num_rollbacks


def test_steps_are_planned_ahead(tmp_path: Path) -> None:
    path = ranked(tmp_path, "qwen3.5")
    expected = transformers_tokens(path, PROMPTS, NEW_TOKENS)
    with engine_of_ranks(str(path), 2, **OPTIONS, async_scheduling=True) as engine:
        assert answers(engine, PROMPTS) == expected
        assert engine.stats.num_steps_ahead


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_the_language_model_of_a_model_of_images(family: str, tmp_path: Path) -> None:
    """All experts of a layer are one tensor, which is read and then cut."""
    path = save_with_images(tmp_path, family)
    expected = transformers_tokens(path, PROMPTS, NEW_TOKENS)
    with engine_of_ranks(str(path), 2, **OPTIONS) as engine:
        assert answers(engine, PROMPTS) == expected


@pytest.mark.parametrize("name", ["qwen3 next", "qwen3.5 moe"])
def test_whole_experts_on_each_rank(name: str, tmp_path: Path) -> None:
    path = ranked(tmp_path, name)
    expected = transformers_tokens(path, PROMPTS, NEW_TOKENS)
    with engine_of_ranks(str(path), 4, **OPTIONS, enable_expert_parallel=True) as engine:
        assert answers(engine, PROMPTS) == expected


@pytest.mark.parametrize("name", ["qwen3 next", "qwen3.5"])
def test_adapters_are_split_too(name: str, tmp_path: Path) -> None:
    path = ranked(tmp_path / "base", name)
    ends = ("in_proj_qkv", "in_proj_a", "in_proj_z", "in_proj_qkvz", "in_proj_ba", "out_proj")
    adapter = make_adapter(tmp_path / "a", linear_layers(path, (*ends, "q_proj", "o_proj")), seed=1)
    options = {**OPTIONS, "lora_modules": (f"a={adapter}",)}

    def of(engine: Engine) -> list[list[int]]:
        for index, prompt in enumerate(PROMPTS):
            named = id_of(engine.info, "a" if index % 2 else "")
            greedy = {"temperature": 0.0}
            engine.add(
                request(str(index), prompt, max_tokens=NEW_TOKENS, adapter=named, sampling=greedy)
            )
        return [tokens_of(events) for _, events in sorted(run_samples(engine).items())]

    expected = of(engine_of(path, **options))
    plain = answers(engine_of(path, **OPTIONS), PROMPTS)
    assert [index for index in range(len(PROMPTS)) if plain[index] != expected[index]] == [1, 3]
    with engine_of_ranks(str(path), 4, **options) as engine:
        assert of(engine) == expected


# ---- weights of integers ----

PRODUCTS = ("_proj", "_qkvz", "_ba", "_qkv", "_z", "_b", "_a")
FORMATS = ("int8", "w8a8", "int4", "stored w8a8", "stored w4a16", "stored gptq-desc-act")
INTEGERS = [
    pytest.param(
        *case,
        marks=()
        if case in {("int4", "qwen3.5", 4), ("stored w8a8", "qwen3 next", 2)}
        else pytest.mark.soak,
    )
    for case in itertools.product(FORMATS, LAID_OUT, (2, 4))
]


@pytest.mark.parametrize(("scheme", "name", "size"), INTEGERS)
@torch.inference_mode()
def test_integers_over_ranks(scheme: str, name: str, size: int, tmp_path: Path) -> None:
    """Of every product, those of linear attention included; as many bytes as are estimated."""
    stored = scheme.removeprefix("stored ")
    options: dict[str, Any] = {} if stored != scheme else {"quantization": scheme}
    path = save_wide(tmp_path / "plain", name, **RANKED_WIDE)
    if stored != scheme:
        twin = save_wide(tmp_path / "twin", name, **RANKED_WIDE)
        path, _ = quantized_pair(stored, path, twin, products=PRODUCTS)
    whole = load_model(config_of(path, **options))
    expected = logits_of(whole, 1)
    ranks = shares(path, size, **options)
    found = ranks[0][1]
    if stored == "w8a8" and name != "qwen3.5":
        # A number between two integers may be rounded to the other one: few rows differ.
        assert relative_error(found, expected) < 0.3
    else:
        torch.testing.assert_close(found, expected, atol=3e-4, rtol=2e-3)
    assert {loaded.info.digest for loaded, _ in ranks} == {whole.info.digest}
    estimate = sized(EstimateOptions(path, dtype="float32", tensor_parallel_size=size, **options))
    for rank, (loaded, _) in enumerate(ranks):
        assert loaded.weight_bytes < (0.75 if size == 2 else 0.6) * whole.weight_bytes, rank
        # w8a8 adds 8 inputs to a product that ranks cut: here to the 16 of each expert's.
        most = 1.1 if stored != "w8a8" or size == 2 else 1.2
        assert 0.9 < loaded.weight_bytes / estimate.weight_bytes < most, rank


# ---- memory, and what is refused ----


@pytest.mark.parametrize("name", LAID_OUT)
def test_memory_is_what_the_estimate_says(name: str, tmp_path: Path) -> None:
    """Weights, KV and states of one rank; a rank that gets them makes as many slots."""
    path = save_wide(tmp_path, name, **RANKED_WIDE)
    for size in (1, 2, 4):
        found = sized(
            EstimateOptions(path, tensor_parallel_size=size, memory="40MB", max_num_seqs=8)
        )
        assert found.refused is None
        group = None if size == 1 else RankGroup(RankPlace(0, size), "gloo")
        loaded = load_model(config_of(path, tensor_parallel_size=size), group)
        assert 0.9 < loaded.weight_bytes / found.weight_bytes < 1.1
        layers = rank_layers(loaded.info.layers, size)
        assert found.state_bytes == slot_bytes(layers)
        assert found.kv_bytes_per_token == sum(each.token_bytes("float32") for each in layers)
        assert found.state_slots == 8


def test_slots_and_checkpoints_of_all_ranks(tmp_path: Path) -> None:
    path = save_wide(tmp_path, "qwen3.5", **RANKED_WIDE)
    options: dict[str, Any] = {"kv_cache_memory": "20MB", "block_size": 16, "max_num_seqs": 8}
    alone = engine_of(path, **{**options, "num_kv_blocks": None}).arena
    with engine_of_ranks(str(path), 4, max_model_len=128, **options) as engine:
        mine, theirs = engine.arena.states, alone.states
        assert mine is not None
        assert theirs is not None
        assert mine.num_slots == theirs.num_slots == 8
        assert mine.num_checkpoints == theirs.num_checkpoints > 0
        assert 4 * mine.num_bytes == theirs.num_bytes
        assert engine.pool.num_blocks == alone.num_blocks


@pytest.mark.parametrize(
    ("size", "sizes", "why"),
    [
        (4, {"linear_num_key_heads": 2}, "2 key heads of linear attention cannot be split over 4"),
        (3, {"num_attention_heads": 6, "num_key_value_heads": 3}, "4 key heads of linear att"),
        (3, {}, "4 query heads"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(
    size: int, sizes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    path = save_hybrid(tmp_path, "qwen3 next", **{**RANKED, **sizes})
    with pytest.raises(ModelRefused, match=why) as refused:
        load_model(config_of(path, tensor_parallel_size=size))
    assert refused.value.field == "tensor_parallel_size"


@pytest.mark.parametrize(
    ("state", "size", "why"),
    [
        (StateSpec((8, 3), (4, 2, 2), segments=(4, 2)), 2, "are not 8 channels"),
        (StateSpec((8, 3), (4, 2, 2), segments=(3, 3, 2)), 2, "2 ranks cannot split"),
        (StateSpec((12, 3), (6, 2, 2), segments=(4, 4, 4)), 4, "4 ranks cannot split"),
    ],
)
def test_a_state_that_cannot_be_cut_is_no_rank_s(state: StateSpec, size: int, why: str) -> None:
    with pytest.raises(InternalError, match=why):
        state.share(size)
