"""Tiny random mixtures with latent attention: each gate, rope and dense layer of their families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tests.golden.random_models import save_random, with_random_norms

_LATENT: Final[dict[str, Any]] = {
    "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "num_key_value_heads": 4, "head_dim": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 48, "n_routed_experts": 8, "n_shared_experts": 1,
}  # fmt: skip
_V2: Final = {**_LATENT, "first_k_dense_replace": 1, "n_shared_experts": 2}
_V3: Final = {**_LATENT, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}
YARN: Final = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32, "beta_slow": 1,
    "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 0.9,
}  # fmt: skip
LATENT_MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "v3": ("deepseek_v3", {**_V3, "rope_parameters": YARN}),
    "v3, halves": ("deepseek_v3", {**_V3, "rope_interleave": False, "tie_word_embeddings": True}),
    "v3, biases": ("deepseek_v3", {**_V3, "attention_bias": True}),
    "v3, plain queries": ("deepseek_v3", {**_V3, "q_lora_rank": None, "norm_topk_prob": False}),
    "v2, greedy": ("deepseek_v2", {**_V2, "topk_method": "greedy", "q_lora_rank": None}),
    "v2, groups": (
        "deepseek_v2",
        {
            **_V2, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
            "routed_scaling_factor": 3.0, "rope_parameters": YARN | {"mscale": 1.2},
        },
    ),
    "glm4 lite": ("glm4_moe_lite", {**_LATENT, "mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "kimi k2": ("kimi_k2", {**_V3, "n_group": 1, "topk_group": 1, "rope_parameters": YARN}),
}  # fmt: skip


def save_latent(path: Path, name: str, **overrides: Any) -> Path:
    """LATENT_MODELS[name], its norms and the biases of its gates random too.

    A Kimi K2 is stored as DeepSeek-V3, as which transformers can run it; `as_published` renames it.
    """
    family, sizes = LATENT_MODELS[name]
    family = family.replace("kimi_k2", "deepseek_v3")
    return with_random_norms(save_random(path, family, **{**sizes, **overrides}))


def as_published(path: Path, name: str) -> Path:
    """Write the config as the family's own checkpoints have it."""
    family, _ = LATENT_MODELS[name]
    file = path / "config.json"
    values = json.loads(file.read_text())
    rope = values.pop("rope_parameters")
    values |= {"model_type": family, "rope_theta": rope.pop("rope_theta"), "moe_layer_freq": 1}
    for key in ("qk_head_dim", "head_dim", "output_router_logits"):
        values.pop(key, None)
    if values.get("rope_interleave"):
        del values["rope_interleave"]
    kind = rope.pop("rope_type")
    values["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    gate = ("softmax", "greedy") if family == "deepseek_v2" else ("sigmoid", "noaux_tc")
    values.setdefault("scoring_func", gate[0])
    values.setdefault("topk_method", gate[1])
    if family != "glm4_moe_lite":
        values |= {"aux_loss_alpha": 0.001, "seq_aux": True, "ep_size": 1}
    file.write_text(json.dumps(values))
    return path
