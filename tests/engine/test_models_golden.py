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

from baton.engine.config import EngineConfig
from baton.engine.loading.loading import LoadedModel, load_model
from baton.protocol.errors import ModelRefused
from tests.golden.greedy import our_tokens, random_prompts, transformers_tokens
from tests.golden.random_models import save_random
from tests.tiny_models import VOCAB_SIZE, make_tiny_model

PROMPTS = random_prompts(VOCAB_SIZE)
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
YARN_MSCALE = YARN | {"mscale": 0.707, "mscale_all_dim": 1.0, "beta_fast": 16, "beta_slow": 2}
# name -> (family, config overrides)
LEAN_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": None}),
    "llama3-rope": ("llama", {"rope_scaling": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "linear-rope": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "dynamic-rope": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    "yarn": ("llama", {"rope_scaling": YARN}),
    "yarn-mscale": ("qwen3", {"rope_scaling": YARN_MSCALE}),
    "yarn-smooth": ("qwen2", {"rope_scaling": YARN | {"truncate": False}, "head_dim": None}),
    "yarn-factor": ("mistral", {"rope_scaling": YARN | {"attention_factor": 1.3}}),
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
    expected = transformers_tokens(path, PROMPTS)
    lean, universal = load(path, "auto"), load(path, "transformers")
    assert lean.info.model_impl == "lean"
    assert universal.info.model_impl == "transformers"
    assert lean.info.layers == universal.info.layers
    assert lean.info.digest == universal.info.digest
    assert lean.info.vocab_size == universal.info.vocab_size == VOCAB_SIZE
    assert lean.attention_layers == universal.attention_layers
    assert our_tokens(lean, PROMPTS) == expected
    assert our_tokens(universal, PROMPTS, block_size=5) == expected
    assert len({token for output in expected for token in output}) > 10  # decisive, not degenerate


def test_gpt2_gives_transformers_tokens(tmp_path: Path) -> None:
    path = make_tiny_model("gpt2", tmp_path)
    loaded = load(path, "auto")
    assert loaded.info.model_impl == "transformers"
    assert loaded.info.max_model_len == 512
    assert our_tokens(loaded, PROMPTS) == transformers_tokens(path, PROMPTS)


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        # softcaps, scaled embeddings; logits scaled after the head; a nested decoder
        ("gemma2", {"sliding_window": 9, "query_pre_attn_scalar": 16}),
        ("cohere", {"logit_scale": 0.25}),
        ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    ],
)
def test_universal_serves_special_attention(
    model_type: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    path = save_random(tmp_path, model_type, **overrides)
    loaded = load(path, "transformers")
    assert loaded.info.model_impl == "transformers"
    assert our_tokens(loaded, PROMPTS) == transformers_tokens(path, PROMPTS)


@pytest.mark.parametrize(
    ("model_type", "overrides", "reason"),
    [
        ("bloom", {"n_head": 4}, "0 of"),
        ("mamba", {"state_size": 4}, "cannot be served"),
        ("bert", {"is_decoder": False}, "it is an encoder"),
        ("bigbird_pegasus", {"decoder_layers": 2}, "not causal"),
        ("doge", {}, "its own attention mask"),
        ("inkling_text", {}, "layers of type hybrid_sliding"),
        ("moshi", {}, "layer 0 has a window that its attention is not told of"),
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
    outputs = zip(our_tokens(exact, PROMPTS), our_tokens(half, PROMPTS), strict=True)
    assert sum(a[0] == b[0] for a, b in outputs) >= 4
