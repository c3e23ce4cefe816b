"""Golden tests of the families that CI must hold, against transformers' generate in float32.

Each is a tiny random checkpoint as transformers itself saves it; test_models_golden.py has the
families that need no transformers to be written.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.engine.config import EngineConfig
from baton.engine.core.assembly import build_engine
from baton.engine.loading.loading import LoadedModel, load_model
from baton.engine.models.families.keys import NotLean
from baton.engine.models.families.read import decoder_config
from baton.protocol.errors import ConfigError
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from tests.engine.driving import run, tokens_of
from tests.golden.greedy import NEW_TOKENS, our_tokens, random_prompts, transformers_tokens
from tests.golden.random_models import save_random
from tests.tiny_models import VOCAB_SIZE

PROMPTS = random_prompts(VOCAB_SIZE)
MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
MLA: dict[str, Any] = {
    "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    **MOE, **MLA, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_neox": {},
    "nemotron": {},  # drops the keywords of a forward on their way to attention
    "stablelm": {},
    "phi3": {"sliding_window": 9},
    "glm4": {"attention_bias": True},
    "gemma2": {"sliding_window": 9, "query_pre_attn_scalar": 16, "tie_word_embeddings": False},
    "gemma3_text": {
        "sliding_window": 9,
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": False,
        "sliding_window_pattern": 2,
    },
    "mixtral": {"num_experts_per_tok": 2, "num_local_experts": 4},
    "qwen3_moe": {**MOE, "num_experts": 4, "norm_topk_prob": True},
    "qwen2_moe": {**MOE, "num_experts": 4, "shared_expert_intermediate_size": 40},
    "deepseek_v3": DEEPSEEK,
    "deepseek_v2": {**DEEPSEEK, "topk_method": "greedy", "n_group": 1},
    "gpt_oss": {**MOE, "num_local_experts": 4, "sliding_window": 9},
    # A hybrid class whose layers all attend; layers that attend to another layer's keys.
    "granitemoehybrid": {
        "layer_types": ["attention"] * 3, "mamba_n_heads": 4, "num_local_experts": 0,
        "shared_intermediate_size": 96, "position_embedding_type": "rope",
    },
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_kv_shared_layers": 1, "sliding_window": 9, "laurel_rank": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 16,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0],
    },
}  # fmt: skip


def load(path: Path, impl: Any = "auto", dtype: Any = "float32", **options: Any) -> LoadedModel:
    """Load on the CPU."""
    config = EngineConfig(str(path), dtype=dtype, model_impl=impl, device="cpu", **options)
    return load_model(config)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """transformers warns about configs that are unusual on purpose."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    yield
    logging.getLogger("transformers").setLevel(logging.WARNING)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_family_gives_transformers_tokens(model_type: str, tmp_path: Path) -> None:
    path = save_random(tmp_path, model_type, **FAMILIES[model_type])
    loaded = load(path, "transformers")
    expected = transformers_tokens(path, PROMPTS)
    assert our_tokens(loaded, PROMPTS) == expected
    assert len({token for output in expected for token in output}) > 10  # decisive


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("mixtral", {"sliding_window": 9, "head_dim": None}),
        ("qwen3_moe", {"mlp_only_layers": [1]}),
        ("qwen3_moe", {"norm_topk_prob": False, "tie_word_embeddings": True}),
        ("qwen2_moe", {"decoder_sparse_step": 2}),
        ("qwen2_moe", {"qkv_bias": False, "norm_topk_prob": True, "num_experts_per_tok": 4}),
    ],
)
def test_grouped_experts_equal_the_universal_route(
    model_type: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    path = save_random(tmp_path, model_type, **{**FAMILIES[model_type], **overrides})
    lean, universal = load(path), load(path, "transformers")
    assert (lean.info.model_impl, universal.info.model_impl) == ("lean", "transformers")
    assert lean.info.layers == universal.info.layers
    assert lean.weight_bytes == universal.weight_bytes
    expected = transformers_tokens(path, PROMPTS)
    assert our_tokens(lean, PROMPTS) == our_tokens(universal, PROMPTS) == expected


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 9}, "windows"),
        ("mixtral", {"rms_norm_eps": None}, "absent"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act"),
        ("qwen2_moe", {"num_experts": None}, "absent"),
        ("qwen3_moe", {"rope_parameters": None}, "rope_theta"),
    ],
)
def test_other_mixtures_are_not_lean(
    model_type: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = save_random(tmp_path, model_type, **FAMILIES[model_type])
    config = json.loads((path / "config.json").read_text()) | changes
    with pytest.raises(NotLean, match=reason):
        decoder_config({key: value for key, value in config.items() if value is not None})


@pytest.mark.parametrize("model_type", ["deepseek_v3", "gemma3_text", "glm4", "phi3", "qwen3_moe"])
def test_the_whole_engine_gives_transformers_tokens(model_type: str, tmp_path: Path) -> None:
    """Latents, mixed windows, windows everywhere, experts; in a pool too small for all at once."""
    path = save_random(tmp_path, model_type, **FAMILIES[model_type])
    num_groups = 3 if model_type == "gemma3_text" else 1  # two slide
    engine = build_engine(
        EngineConfig(
            str(path), dtype="float32", device="cpu", block_size=4, num_kv_blocks=24 * num_groups,
            max_num_seqs=5, max_num_batched_tokens=16, check_invariants=True,
        )
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for index, prompt in enumerate(PROMPTS):
        engine.add(Request(str(index), tuple(prompt), params))
    events = run(engine)
    found = [tokens_of(events[str(index)]) for index in range(len(PROMPTS))]
    assert found == transformers_tokens(path, PROMPTS)
    assert engine.arena.groups.num_groups == num_groups
    if model_type in ("phi3", "gemma3_text"):  # what windows give back may come early enough
        assert engine.stats.num_window_freed_blocks > 0
    else:
        assert engine.stats.num_preemptions > 0


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe", "deepseek_v3", "gemma3_text"])
def test_bfloat16_follows_float32_closely(model_type: str, tmp_path: Path) -> None:
    path = save_random(tmp_path, model_type, **FAMILIES[model_type])
    exact, half = load(path), load(path, dtype="bfloat16")
    assert half.info.kv_dtype == "bfloat16"
    outputs = zip(our_tokens(exact, PROMPTS, 4), our_tokens(half, PROMPTS, 4), strict=True)
    assert sum(a[0] == b[0] for a, b in outputs) >= 3


def test_mla_keeps_one_latent_per_token(tmp_path: Path) -> None:
    loaded = load(save_random(tmp_path, "deepseek_v3", **DEEPSEEK))
    for spec, attention in zip(loaded.info.layers, loaded.attention_layers, strict=True):
        assert (spec.kind, spec.kv_heads, spec.k_dim, spec.v_dim) == ("mla", 1, 32 + 8, 0)
        assert attention.latent == 32
        # Expanded, a token would take 4 heads of 24 + 12 numbers instead of one latent of 40.
        assert spec.token_bytes("float32") * 3 < 4 * (24 + 12) * 4


def test_longrope_is_served_up_to_its_original_length(tmp_path: Path) -> None:
    """Beyond it transformers changes the frequencies of every row of the forward call."""
    factors = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [4.0] * 8}
    scaling = {"type": "longrope", **factors}
    path = save_random(tmp_path, "phi3", original_max_position_embeddings=48, rope_scaling=scaling)
    loaded = load(path)
    assert loaded.info.max_model_len == 48
    with pytest.raises(ConfigError, match="48 positions"):
        load(path, max_model_len=49)
    prompts = [prompt[:25] for prompt in PROMPTS]
    assert our_tokens(loaded, prompts) == transformers_tokens(path, prompts)
