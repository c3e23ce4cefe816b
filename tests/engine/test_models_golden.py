"""Golden tests: our two routes against transformers.generate, token for token, in float32.

One module, so that transformers is imported once. Every step is a mixed batch: some sequences
prefill in small chunks while others decode.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from baton.engine.config import EngineConfig
from baton.engine.interface import SequenceChunk
from baton.engine.kv_cache import KVArena
from baton.engine.loading import LoadedModel, load_model
from baton.engine.runner import ModelRunner
from baton.errors import ModelRefused
from baton.sampling import SamplingParams
from tests.tiny_models import VOCAB_SIZE, make_tiny_model

NEW_TOKENS = 20
GREEDY = SamplingParams(temperature=0.0)
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
# name -> (family, config overrides)
LEAN_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": None}),
    "llama3-rope": ("llama", {"rope_scaling": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "linear-rope": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "qwen2": ("qwen2", {"head_dim": None}),
    "qwen2-mixed-windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-biased": ("qwen3", {"attention_bias": True, "num_key_value_heads": 4}),
    "mistral": ("mistral", {}),
    "mistral-full": ("mistral", {"sliding_window": None, "rope_theta": 1e6}),
}


def prompts() -> list[list[int]]:
    """Five prompts of mixed lengths."""
    generator = torch.Generator().manual_seed(7)
    lengths = (3, 17, 41, 11, 1)
    return [torch.randint(5, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


def generate_with_transformers(path: Path) -> list[list[int]]:
    """The reference: transformers' own generate, one prompt at a time."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    outputs: list[list[int]] = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


def generate_with_runner(loaded: LoadedModel, block_size: int = 4) -> list[list[int]]:
    """A tiny engine: chunked prefill of at most 7 tokens per sequence and step, decode beside
    it."""
    known = prompts()
    lengths = [len(prompt) for prompt in known]
    blocks_each = -(-(max(lengths) + NEW_TOKENS) // block_size)
    # Blocks are handed out shuffled: a table that is not ascending must not matter.
    order = torch.randperm(blocks_each * len(known), generator=torch.Generator().manual_seed(3))
    tables = order.view(len(known), blocks_each).tolist()
    info = loaded.info
    arena = KVArena(info.layers, order.numel(), block_size, info.kv_dtype, loaded.device)
    runner = ModelRunner(loaded, arena)
    computed = [0] * len(known)
    while active := [i for i, ids in enumerate(known) if len(ids) < lengths[i] + NEW_TOKENS]:
        chunks: list[SequenceChunk] = []
        for i in active:
            stop = min(computed[i] + 7 - i % 3, len(known[i]))
            last = stop == len(known[i])
            held = tables[i][: -(-stop // block_size)]
            tokens = known[i][computed[i] : stop]
            chunks.append(
                SequenceChunk(str(i), tokens, computed[i], held, GREEDY if last else None)
            )
            computed[i] = stop
        for i, token in zip(active, runner.run(chunks), strict=True):
            if token is not None:
                known[i].append(token)
    return [ids[length:] for ids, length in zip(known, lengths, strict=True)]


def load(path: Path, impl: Any, dtype: Any = "float32") -> LoadedModel:
    """Load on the CPU by one route."""
    return load_model(EngineConfig(model=str(path), dtype=dtype, model_impl=impl, device="cpu"))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """transformers warns about configs that are unusual on purpose."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    yield
    logging.getLogger("transformers").setLevel(logging.WARNING)


@pytest.mark.parametrize("name", LEAN_MODELS)
def test_lean_and_universal_give_transformers_tokens(name: str, tmp_path: Path) -> None:
    kind, overrides = LEAN_MODELS[name]
    path = make_tiny_model(kind, tmp_path, **overrides)
    if name == "mistral-full":  # null is not the same as absent, which means 4096
        text = (path / "config.json").read_text()
        (path / "config.json").write_text(text.replace("{", '{"sliding_window": null,', 1))
    expected = generate_with_transformers(path)
    lean, universal = load(path, "auto"), load(path, "transformers")
    assert lean.info.model_impl == "lean"
    assert universal.info.model_impl == "transformers"
    assert lean.info.layers == universal.info.layers
    assert lean.info.digest == universal.info.digest
    assert lean.info.vocab_size == universal.info.vocab_size == VOCAB_SIZE
    assert lean.attention_layers == universal.attention_layers
    assert generate_with_runner(lean) == expected
    assert generate_with_runner(universal, block_size=5) == expected
    assert len({token for output in expected for token in output}) > 10  # decisive, not degenerate


def test_gpt2_gives_transformers_tokens(tmp_path: Path) -> None:
    path = make_tiny_model("gpt2", tmp_path)
    loaded = load(path, "auto")
    assert loaded.info.model_impl == "transformers"
    assert loaded.info.max_model_len == 512
    assert generate_with_runner(loaded) == generate_with_transformers(path)


def save_random(path: Path, model_type: str, **overrides: Any) -> Path:
    """A random checkpoint of any transformers family, with our tokenizer."""
    torch.manual_seed(0)
    make_tiny_model("llama", path)  # for the tokenizer
    base = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers":
        3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 256, "pad_token_id": 0,
    }  # fmt: skip
    config = AutoConfig.for_model(model_type, **{**base, **overrides})
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 1.2 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        # softcaps, scaled embeddings; logits scaled after the head; sinks; a nested decoder
        ("gemma2", {"sliding_window": 9, "query_pre_attn_scalar": 16}),
        ("cohere", {"logit_scale": 0.25}),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9}),
        ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    ],
)
def test_universal_serves_special_attention(
    model_type: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    path = save_random(tmp_path, model_type, **overrides)
    loaded = load(path, "auto")
    assert loaded.info.model_impl == "transformers"
    assert generate_with_runner(loaded) == generate_with_transformers(path)


@pytest.mark.parametrize(
    ("model_type", "overrides", "reason"),
    [
        ("bloom", {"n_head": 4}, "0 of"),
        ("mamba", {"state_size": 4}, "cannot be served"),
        ("bert", {"is_decoder": False}, "not causal"),
        ("doge", {}, "its own attention mask"),
        ("llama4_text", {}, "layers of type chunked_attention"),
    ],
)
def test_universal_refuses_by_name(
    model_type: str, overrides: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = save_random(tmp_path, model_type, **overrides)
    with pytest.raises(ModelRefused, match=reason) as refusal:
        load(path, "auto")
    assert model_type.split("_")[0] in str(refusal.value).lower()


@pytest.mark.parametrize("impl", ["lean", "transformers"])
def test_bfloat16_follows_float32_closely(impl: str, tmp_path: Path) -> None:
    path = make_tiny_model("qwen3", tmp_path, torch_dtype="bfloat16")
    exact, half = load(path, impl), load(path, impl, "auto")
    assert half.dtype == torch.bfloat16
    assert half.info.kv_dtype == "bfloat16"
    assert half.weight_bytes * 2 == exact.weight_bytes
    outputs = zip(generate_with_runner(exact), generate_with_runner(half), strict=True)
    assert sum(a[0] == b[0] for a, b in outputs) >= 4
