"""Tiny random models whose layers see a part of their keys: chunks, or what a query chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from tests.golden.random_models import save_random, with_random_norms

# Chunks of 10 tokens in two layers of four; queries of the others grow with their position.
LLAMA4: Final[dict[str, Any]] = {
    "num_hidden_layers": 4, "attention_chunk_size": 10, "no_rope_layers": [1, 0, 1, 0],
    "floor_scale": 6, "attn_scale": 0.4, "intermediate_size": 48, "intermediate_size_mlp": 96,
    "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
}  # fmt: skip
# Each query chooses 7 keys.
INDEXED: Final[dict[str, Any]] = {
    "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "num_key_value_heads": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 48, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "index_topk": 7, "index_n_heads": 8,
    "index_head_dim": 16,
}  # fmt: skip
SPARSE_MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama4": ("llama4_text", LLAMA4),
    "llama4, top 2": (
        "llama4_text",
        {**LLAMA4, "num_experts_per_tok": 2, "use_qk_norm": False, "attention_bias": True},
    ),
    "deepseek v3.2": ("deepseek_v32", INDEXED),
    # A layer that reuses what the layer before it chose, and keeps no index keys.
    "glm 5": ("glm_moe_dsa", {**INDEXED, "indexer_types": ["full", "shared", "full"]}),
    "axk2": ("axk2", INDEXED),
    "hy v4": ("hy_v4", INDEXED),
}  # fmt: skip


def save_sparse(path: Path, name: str, **overrides: Any) -> Path:
    """SPARSE_MODELS[name], its norms random too."""
    family, sizes = SPARSE_MODELS[name]
    return with_random_norms(save_random(path, family, **{**sizes, **overrides}))
