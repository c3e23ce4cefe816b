"""--deterministic: logits equal bit for bit over random batch compositions, chunk borders, prefix
hits, preemptions, drafts, experts and adapters, in float32 and bfloat16."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine.attention.fixed_order import FixedOrderAttention, in_lanes
from baton.engine.attention.reference import ReferenceAttention
from baton.engine.loading.loading import LoadedModel
from baton.engine.models import deterministic
from baton.engine.state.attention import AttentionLayer
from baton.engine.state.batch import flatten
from baton.engine.state.interface import SequenceChunk
from baton.llm import LLM
from baton.protocol.adapters import adapter_name
from baton.protocol.errors import ConfigError
from baton.protocol.sampling import SamplingParams
from tests.adapters import ids_of
from tests.block_lists import held
from tests.engine.running import Driver, load, logits_of, relative_error
from tests.engine.test_attention import (
    BLOCK,
    CPU,
    LAYERS,
    SHAPES,
    Pool,
    chunks_of,
    fill_past,
    random_rows,
)
from tests.engine.test_models_lora import linear_layers, make_adapter
from tests.golden.draft_models import add_mtp, save_eagle3
from tests.golden.latent_models import save_latent
from tests.golden.random_models import save_random
from tests.tiny_models import VOCAB_SIZE, make_tiny_model

LENGTHS = (5, 23, 90, 1, 61)  # of prompts
# Names of tiny models: (family, overrides, options of loading)
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "odd-sizes": ("llama", {"intermediate_size": 90, "num_key_value_heads": 1}, {}),
    "windows": ("mistral", {"sliding_window": 21}, {}),
    "qk-norm": ("qwen3", {}, {}),
    "int8-weights": ("qwen3", {}, {"quantization": "int8"}),
    "w4a8": ("llama", {}, {"quantization": "w4a8"}),
    "w8a8-int8-kv": ("llama", {}, {"quantization": "w8a8", "kv_cache_dtype": "int8"}),
    "universal": ("gpt2", {}, {}),
}
# Mixtures of experts: (family, overrides, options of loading, rows of a tile)
MIXTURES: dict[str, tuple[str, dict[str, Any], dict[str, Any], int]] = {
    "mixtral": ("mixtral", {"num_local_experts": 4}, {}, 16),
    "qwen3-moe": (
        "qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48},
        {}, 16,
    ),
    "qwen2-moe": (
        "qwen2_moe",
        {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 80,
        },
        {"quantization": "int8"}, 16,
    ),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}, {}, 16),
    "universal-gpt-oss": (
        "gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2},
        {"model_impl": "transformers"}, 1,
    ),
    "deepseek-v3": (
        "deepseek_v3",
        {
            "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "head_dim": 8,
            "qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4,
            "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
            "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        },
        {}, 16,
    ),
    "universal-mixtral": (
        "mixtral", {"num_local_experts": 4}, {"model_impl": "transformers"}, 1
    ),
}  # fmt: skip


def load_model_of(name: str, path: Path, dtype: str) -> LoadedModel:
    kind, overrides, options = MODELS[name]
    checkpoint = make_tiny_model(kind, path, **overrides)
    return load(checkpoint, dtype=dtype, deterministic=True, **options)


def random_prompts(rng: random.Random, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    return [[rng.randrange(5, VOCAB_SIZE) for _ in range(n)] for n in lengths]


def random_steps(
    driver: Driver, prompts: list[list[int]], rng: random.Random, adapters: Sequence[str] = ()
) -> list[Tensor]:
    """Logits [tokens, vocab] of each prompt, computed in random chunks beside random others.

    A sequence may lose its place (preemption): it starts again in the same blocks.
    """
    order = list(range(driver.arena.num_blocks))
    rng.shuffle(order)
    size = driver.arena.block_size
    blocks: list[list[int]] = []
    for prompt in prompts:
        needed = -(-len(prompt) // size)
        blocks.append(order[:needed])
        order = order[needed:]
    names = ids_of(driver.loaded.info, adapters)
    done = [0] * len(prompts)
    logits = [torch.zeros(len(prompt), VOCAB_SIZE) for prompt in prompts]
    while unfinished := [i for i, prompt in enumerate(prompts) if done[i] < len(prompt)]:
        running = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        if rng.random() < 0.15:
            done[running[0]] = 0
        chunks: list[SequenceChunk] = []
        for i in running:
            count = min(rng.choice((1, 2, 9, 37, 90)), len(prompts[i]) - done[i])
            stop = done[i] + count
            chunks.append(
                SequenceChunk(
                    str(i),
                    prompts[i][done[i] : stop],
                    done[i],
                    held(blocks[i][: -(-stop // size)]),
                    adapter=names[i] if names else "",
                )
            )
        for i, chunk, rows in zip(running, chunks, driver.step(chunks), strict=True):
            logits[i][done[i] : done[i] + len(chunk.token_ids)] = rows
            done[i] += len(chunk.token_ids)
    return logits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_equal_bit_for_bit(name: str, dtype: str, tmp_path: Path) -> None:
    driver = Driver(load_model_of(name, tmp_path, dtype))
    prompts = random_prompts(random.Random(1))
    first = random_steps(driver, prompts, random.Random(2))
    for seed in (3, 4):
        again = random_steps(driver, prompts, random.Random(seed))
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
    alone = driver.logits(prompts[4], range(8), [61])
    assert torch.equal(alone, first[4]), "a prompt alone, in one chunk"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=[pytest.mark.long] * (rows == 1 and dtype == "float32"))
        for name, (_, _, _, rows) in MIXTURES.items()
        for dtype in ("float32", "bfloat16")
    ],
)
def test_experts_are_equal_bit_for_bit(name: str, dtype: str, tmp_path: Path) -> None:
    """Which experts batch mates choose does not show."""
    family, overrides, options, tile_rows = MIXTURES[name]
    path = save_random(tmp_path, family, **overrides)
    loaded = load(path, dtype=dtype, deterministic=True, **options)
    tiles: list[int] = []
    driver = Driver(loaded)
    # A model that computes one row at a time takes long.
    prompts = random_prompts(random.Random(1), LENGTHS if tile_rows > 1 else (5, 14, 19, 1, 11))
    inner = loaded.model._model  # type: ignore[attr-defined]
    forward = inner.forward

    def counted(ids: Tensor, *rest: Any) -> Tensor:
        tiles.append(ids.shape[0])
        return forward(ids, *rest)

    inner.forward = counted
    first = random_steps(driver, prompts, random.Random(2))
    assert set(tiles) == {tile_rows}
    again = random_steps(driver, prompts, random.Random(3))
    assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
    assert torch.equal(driver.logits(prompts[4], range(8), [len(prompts[4])]), first[4])
    if dtype == "float32":
        plain = logits_of(load(path, **options), prompts[2])
        assert relative_error(first[2], plain) < 1e-5


def test_plain_experts_are_not_equal_bit_for_bit(tmp_path: Path) -> None:
    """Even in tiles of one shape: what makes them equal is that experts have one too."""
    path = save_random(tmp_path, "mixtral", num_local_experts=4)
    loaded = load(path, deterministic=True)
    for layer in loaded.model._model._layers:  # type: ignore[attr-defined]
        object.__setattr__(layer.mlp, "fixed_shapes", False)
    driver = Driver(loaded)
    prompts = random_prompts(random.Random(1))
    first, second = (random_steps(driver, prompts, random.Random(seed)) for seed in (2, 3))
    assert not all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kind", "impl"), [("llama", "lean"), ("gpt2", "transformers")])
def test_adapters_are_equal_bit_for_bit(kind: str, impl: str, dtype: str, tmp_path: Path) -> None:
    """Which adapters batch mates ask for does not show."""
    base = make_tiny_model(kind, tmp_path / "base")
    ends = ("c_attn", "c_fc") if kind == "gpt2" else ("q_proj", "o_proj", "up_proj", "down_proj")
    layers = linear_layers(base, ends)
    modules = tuple(
        f"{name}={make_adapter(tmp_path / name, layers, seed, r=rank)}"
        for seed, (name, rank) in enumerate([("a", 4), ("b", 6)])
    )
    options: dict[str, Any] = {"dtype": dtype, "model_impl": impl, "lora_modules": modules}
    loaded = load(base, deterministic=True, **options)
    driver = Driver(loaded)
    prompts = random_prompts(random.Random(1))
    mixed = ("a", "", "b", "b", "a")
    first = random_steps(driver, prompts, random.Random(2), mixed)
    again = random_steps(driver, prompts, random.Random(3), mixed)
    assert all(torch.equal(x, y) for x, y in zip(again, first, strict=True))
    for name in ("a", "b", ""):
        every = random_steps(driver, prompts, random.Random(4), [name] * 5)
        for i, wanted in enumerate(mixed):
            assert torch.equal(every[i], first[i]) == (wanted == name)
    if dtype == "float32":
        plain = random_steps(Driver(load(base, **options)), prompts, random.Random(2), mixed)
        assert all(relative_error(x, y) < 1e-5 for x, y in zip(first, plain, strict=True))


@pytest.mark.parametrize("method", ["ngram", "draft"])
@pytest.mark.parametrize("kind", ["qwen3", "mixtral"])
def test_drafts_change_no_bit(kind: str, method: str, tmp_path: Path) -> None:
    """In bfloat16 rows of a span with drafts are computed as decode rows are: the same tokens with
    speculation and without, and the same log probabilities."""
    if kind == "mixtral":
        target = save_random(tmp_path / "target", kind, num_local_experts=4)
    else:
        target = make_tiny_model(kind, tmp_path / "target")
    common: dict[str, Any] = {
        "model": str(target), "dtype": "bfloat16", "deterministic": True, "device": "cpu",
        "block_size": 8, "num_kv_blocks": 96,
    }  # fmt: skip
    rng = random.Random(4)
    loop = [rng.randrange(5, 320) for _ in range(6)]
    prompts = [loop * 4, [7, 8, 9], loop * 3 + [11, 12]]
    params = [
        SamplingParams(max_tokens=24, temperature=t, seed=3, ignore_eos=True, logprobs=3)
        for t in (0.0, 0.6, 1.0)
    ]
    plain = LLM(**common)
    # The target drafts for itself: with the same noise nearly all of its guesses stand.
    if method == "draft":
        common["speculative_model"] = str(target)
    speculating = LLM(**common, speculative_method=method)
    for each in params:
        expected = [output.outputs[0] for output in plain.generate(prompts, each)]
        found = [output.outputs[0] for output in speculating.generate(prompts, each)]
        assert [f.token_ids for f in found] == [e.token_ids for e in expected]
        assert [f.logprobs for f in found] == [e.logprobs for e in expected]
    stats = speculating.engine.stats
    assert stats.num_drafted_tokens > 20
    if method == "draft":
        assert stats.num_accepted_tokens > 0.9 * stats.num_drafted_tokens
    speculating.engine.check()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "deepseek-v3", "eagle3"])
def test_a_draft_head_changes_no_bit(kind: str, dtype: str, tmp_path: Path) -> None:
    """Beside chunks, prefix hits, preemptions and batch mates a draft head leaves tokens and log
    probabilities those of each prompt alone, without it."""
    head: dict[str, Any] = {"speculative_method": "mtp"}
    if kind == "deepseek-v3":
        path = add_mtp(save_latent(tmp_path, "v3"))
    elif kind == "llama":
        path = add_mtp(make_tiny_model(kind, tmp_path))
    else:
        path = make_tiny_model("llama", tmp_path / "target", num_hidden_layers=5)
        own = save_eagle3(tmp_path / "head", path, 200)
        head = {"speculative_method": "eagle3", "speculative_model": str(own)}
    common: dict[str, Any] = {
        "model": str(path), "dtype": dtype, "deterministic": True, "block_size": 8, "device": "cpu",
    }  # fmt: skip
    prompts = random_prompts(random.Random(4), (24, 3, 26, 33))
    prompts[2][:24] = prompts[0]
    params = [
        SamplingParams(
            max_tokens=14, temperature=temperature, seed=3, ignore_eos=True, logprobs=3, n=num
        )
        for temperature, num in ((0.0, 1), (0.8, 1), (0.8, 2), (1.0, 1))
    ]
    calm = LLM(**common, num_kv_blocks=64, enable_prefix_caching=False)
    expected = [
        calm.generate([prompt], each)[0].outputs
        for prompt, each in zip(prompts, params, strict=True)
    ]
    for mode in ("swap", "recompute"):
        fast = LLM(
            **common, num_kv_blocks=15, preemption_mode=mode, max_num_batched_tokens=29,
            max_num_seqs=6, num_speculative_tokens=3, check_invariants=True, **head,
        )  # fmt: skip
        for _ in range(2):
            found = [output.outputs for output in fast.generate(prompts, params)]
            assert [[f.token_ids for f in each] for each in found] == [
                [e.token_ids for e in each] for each in expected
            ]
            assert [[f.logprobs for f in each] for each in found] == [
                [e.logprobs for e in each] for each in expected
            ]
        stats = fast.engine.stats
        assert stats.num_drafted_tokens > 100
        assert 0 < stats.num_accepted_tokens < stats.num_drafted_tokens
        assert stats.num_preemptions > 0
        assert stats.num_prefix_hit_tokens > 0
        assert stats.num_chunked_prompts > 0


def test_the_plain_mode_is_not_equal_bit_for_bit(tmp_path: Path) -> None:
    """Else the tests above would prove nothing."""
    driver = Driver(load(make_tiny_model("llama", tmp_path)))
    prompts = random_prompts(random.Random(1))
    first, second = (random_steps(driver, prompts, random.Random(seed)) for seed in (2, 3))
    assert not all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_it_computes_the_same_model(tmp_path: Path) -> None:
    path, prompt = make_tiny_model("qwen3", tmp_path), random_prompts(random.Random(1))[2]
    plain, fixed = load(path), load(path, deterministic=True)
    assert relative_error(logits_of(fixed, prompt), logits_of(plain, prompt)) < 3e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_gives_equal_logprobs_whatever_happens(dtype: str, tmp_path: Path) -> None:
    """Prefix hits, swaps, recomputing, chunks, batch mates: the logprobs show every bit."""
    path = make_tiny_model("qwen3", tmp_path)
    rng = random.Random(6)
    shared = [rng.randrange(5, VOCAB_SIZE) for _ in range(24)]
    prompts = [shared + [rng.randrange(5, VOCAB_SIZE) for _ in range(n)] for n in (3, 11, 0, 19)]
    params = SamplingParams(max_tokens=24, temperature=0.7, seed=1, ignore_eos=True, logprobs=3)
    common: dict[str, Any] = {
        "model": str(path), "dtype": dtype, "deterministic": True, "block_size": 8, "device": "cpu",
    }  # fmt: skip
    calm = LLM(**common, num_kv_blocks=64, enable_prefix_caching=False)
    expected = [calm.generate([prompt], params)[0].outputs[0] for prompt in prompts]
    for mode in ("swap", "recompute"):
        tight = LLM(
            **common, num_kv_blocks=16, preemption_mode=mode, max_num_seqs=4,
            max_num_batched_tokens=13,
        )  # fmt: skip
        for _ in range(2):
            found = [output.outputs[0] for output in tight.generate(prompts, params)]
            assert [f.logprobs for f in found] == [e.logprobs for e in expected]
            assert [f.token_ids for f in found] == [e.token_ids for e in expected]
        stats = tight.engine.stats
        assert stats.num_preemptions > 0
        assert stats.num_prefix_hit_tokens > 0
        assert stats.num_chunked_prompts > 0


@pytest.mark.parametrize("shapes", [SHAPES, SHAPES[-1:]], ids=["many", "one"])
@pytest.mark.parametrize("name", [*LAYERS, "latent"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_equals_reference(name: str, kv_heads: int, shapes: Any) -> None:
    spec = LAYERS.get(name, AttentionLayer(4, 0.25, latent=12))
    chunks, results = chunks_of(shapes), []
    for backend in (ReferenceAttention, FixedOrderAttention):
        v_dim = 0 if spec.latent else 12
        pool = Pool.make(kv_heads, 16, v_dim, torch.float32)
        fill_past(pool, chunks)
        step = flatten(chunks, backend(pool, [spec]), BLOCK, CPU)
        q = random_rows(step, 4, 16, 3, torch.float32)
        k, v = (random_rows(step, kv_heads, n, 4, torch.float32) for n in (16, v_dim))
        results.append(step.batch.attend(0, q, k, v))
    torch.testing.assert_close(results[1], results[0], atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("block_size", [8, 16, 32, 128])
def test_block_size_does_not_matter_if_it_divides_a_tile(block_size: int, tmp_path: Path) -> None:
    loaded = load(make_tiny_model("llama", tmp_path), deterministic=True)
    prompt = random_prompts(random.Random(1))[2]
    first = logits_of(loaded, prompt)
    driver = Driver(loaded, num_blocks=32, block_size=block_size)
    assert torch.equal(driver.logits(prompt, range(32), [50, 1, 39]), first)


def test_layers_are_told_of_once_all_rows_are_written(tmp_path: Path) -> None:
    loaded = load(make_tiny_model("llama", tmp_path), deterministic=True)
    driver = Driver(loaded)
    told: list[tuple[int, int]] = []

    def on_layer(layer: int) -> None:
        keys, _ = driver.arena.layer(layer)
        told.append((layer, int(keys.abs().sum((2, 3)).count_nonzero())))

    prompt = random_prompts(random.Random(1))[4]
    step = flatten(
        [SequenceChunk("a", prompt, 0, held(range(8)))], driver.attention, 8, CPU, on_layer
    )
    loaded.forward(step.token_ids, step.positions, step.batch)
    assert told == [(layer, len(prompt)) for layer in range(3)]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_lanes_are_whole_vectors(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = torch.randn(64, generator=torch.Generator().manual_seed(0))
        expected = in_lanes(torch.tanh, x.clone())
        for repeats in (1, 700, 5000):
            rows = in_lanes(torch.tanh, x.repeat(repeats, 1))
            assert torch.equal(rows, expected.expand_as(rows))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("named", ["", "a"])
def test_a_machine_where_places_matter_is_refused(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only the rows of an adapter differ."""
    path = make_tiny_model("llama", tmp_path / "base")
    adapter = make_adapter(tmp_path / "a", linear_layers(path, ("q_proj",)), seed=1)
    real = deterministic.first_logits

    def unstable(model: Any, info: Any, device: Any, ids: Any, adapters: list[str]) -> Tensor:
        logits = real(model, info, device, ids, adapters)
        if adapter_name(adapters[-1]) == named:
            logits[-1] += 1e-6
        return logits

    monkeypatch.setattr(deterministic, "first_logits", unstable)
    with pytest.raises(ConfigError, match="depends on its place"):
        load(path, deterministic=True, lora_modules=(f"a={adapter}",))
