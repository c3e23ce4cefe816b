"""--deterministic: logits equal bit for bit over random batch compositions, chunk borders, prefix
hits and preemptions, in float32 and bfloat16."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine import deterministic
from baton.engine.attention.base import AttentionLayer
from baton.engine.attention.fixed_order import FixedOrderAttention, in_lanes
from baton.engine.attention.reference import ReferenceAttention
from baton.engine.batch import flatten
from baton.engine.interface import SequenceChunk
from baton.engine.loading import LoadedModel
from baton.engine.lora import Adapter
from baton.errors import ConfigError, InternalError
from baton.llm import LLM
from baton.sampling import SamplingParams
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
from tests.tiny_models import VOCAB_SIZE, make_tiny_model

# Names of tiny models: (family, overrides, options of loading)
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "odd-sizes": ("llama", {"intermediate_size": 90, "num_key_value_heads": 1}, {}),
    "windows": ("mistral", {"sliding_window": 21}, {}),
    "qk-norm": ("qwen3", {}, {}),
    "int8-weights": ("qwen3", {}, {"quantization": "int8"}),
    "w8a8-int8-kv": ("llama", {}, {"quantization": "w8a8", "kv_cache_dtype": "int8"}),
    "universal": ("gpt2", {}, {}),
}


def load_model_of(name: str, path: Path, dtype: str) -> LoadedModel:
    kind, overrides, options = MODELS[name]
    checkpoint = make_tiny_model(kind, path, **overrides)
    return load(checkpoint, dtype=dtype, deterministic=True, **options)


def random_prompts(rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(5, VOCAB_SIZE) for _ in range(n)] for n in (5, 23, 140, 1, 61)]


def random_steps(driver: Driver, prompts: list[list[int]], rng: random.Random) -> list[Tensor]:
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
    done = [0] * len(prompts)
    logits = [torch.zeros(len(prompt), VOCAB_SIZE) for prompt in prompts]
    while unfinished := [i for i, prompt in enumerate(prompts) if done[i] < len(prompt)]:
        running = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        if rng.random() < 0.15:
            done[running[0]] = 0
        chunks: list[SequenceChunk] = []
        for i in running:
            count = min(rng.choice((1, 1, 2, 9, 37, 90)), len(prompts[i]) - done[i])
            stop = done[i] + count
            chunks.append(
                SequenceChunk(
                    str(i), prompts[i][done[i] : stop], done[i], held(blocks[i][: -(-stop // size)])
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


@pytest.mark.parametrize("name", [*LAYERS, "latent"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_equals_reference(name: str, kv_heads: int) -> None:
    spec = LAYERS.get(name, AttentionLayer(4, 0.25, latent=12))
    chunks, results = chunks_of(SHAPES), []
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
    assert torch.equal(driver.logits(prompt, range(32), [100, 1, 39]), first)


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


def test_what_cannot_be_deterministic_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="mixtures of experts"):
        deterministic.refuse_changing_shapes({"num_local_experts": 8}, ())
    with pytest.raises(ConfigError, match="LoRA"):
        deterministic.refuse_changing_shapes({}, ("a=b",))
    path = make_tiny_model("llama", tmp_path)
    with pytest.raises(InternalError):
        load(path, deterministic=True).model.add_adapter(Adapter("a", "", {}))
    real = deterministic.first_logits

    def unstable(*arguments: Any) -> Tensor:
        logits = real(*arguments)
        logits[-1] += 1e-6
        return logits

    monkeypatch.setattr(deterministic, "first_logits", unstable)
    with pytest.raises(ConfigError, match="depends on its place"):
        load(path, deterministic=True)
