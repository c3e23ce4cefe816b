"""Reads the configs of families with latent attention (MLA), and of mixtures of experts like
DeepSeek's."""

from __future__ import annotations

from typing import Any

from baton.engine.kernels.rope import PairRotation
from baton.engine.models.config import ExpertsConfig, GateConfig, LatentConfig
from baton.engine.models.families.keys import COUNTS, LATENT, NotLean


def latent_config(family: str, config: dict[str, Any]) -> LatentConfig | None:
    """Return the sizes of latent attention; None for a family without it. Raises NotLean."""
    if family not in LATENT:
        return None
    heads = config["num_attention_heads"]
    if config.get("num_key_value_heads", heads) not in (None, heads):
        raise NotLean("latents that not all heads share")
    if config.get("partial_rotary_factor", 1) != 1:
        raise NotLean("a rotated part of which not all dims are rotated")
    if config.get("attention_bias") and not config["q_lora_rank"]:
        raise NotLean("attention_bias without q_lora_rank")
    regrouped = config.get("rope_interleave", True)
    pairs = PairRotation.REGROUPED if regrouped else PairRotation.HALVES
    return LatentConfig(
        query_rank=config["q_lora_rank"] or 0,
        rank=config["kv_lora_rank"],
        nope_dim=config["qk_nope_head_dim"],
        rope_dim=config["qk_rope_head_dim"],
        value_dim=config["v_head_dim"],
        pairs=PairRotation.NEIGHBOURS if family == "deepseek_v2" else pairs,
    )


def latent_experts(family: str, config: dict[str, Any], num_layers: int) -> ExpertsConfig:
    """Return the mixture of experts of one of the families SIGMOID_MOE. Raises NotLean."""
    count, shared = config["n_routed_experts"], config["n_shared_experts"]
    if any(config.get(key, count) != count for key in COUNTS):
        raise NotLean(f"n_routed_experts and {' or '.join(COUNTS)} differ")
    if not shared:
        raise NotLean("no shared experts")
    if config.get("moe_layer_freq", 1) != 1:
        raise NotLean("moe_layer_freq above 1")
    return ExpertsConfig(
        count=count,
        per_token=config["num_experts_per_tok"],
        size=config["moe_intermediate_size"],
        normalized=bool(config.get("norm_topk_prob", False)),
        prefix="mlp.",
        parts=("gate_proj", "up_proj", "down_proj"),
        layers=_sparse_layers(family, config, num_layers),
        shared_size=shared * config["moe_intermediate_size"],
        shared="shared_experts",
        shared_gated=False,
        gate=_gate(family, config, count),
    )


def _sparse_layers(family: str, config: dict[str, Any], num_layers: int) -> frozenset[int]:
    if family != "glm4_moe_lite":
        return frozenset(range(config["first_k_dense_replace"], num_layers))
    kinds = config.get("mlp_layer_types") or ["dense"] + ["sparse"] * (num_layers - 1)
    sparse = frozenset(layer for layer, kind in enumerate(kinds) if kind == "sparse")
    first = config.get("first_k_dense_replace")
    if len(kinds) != num_layers or (first is not None and min(sparse, default=first) != first):
        raise NotLean("mlp_layer_types and first_k_dense_replace do not fit")
    return sparse


def _gate(family: str, config: dict[str, Any], count: int) -> GateConfig:
    """Return how experts are chosen. Raises NotLean if transformers' class of this family does not
    choose them as the config says, or if the groups do not fit the experts."""
    sigmoid = family != "deepseek_v2"
    scoring, method = ("sigmoid", "noaux_tc") if sigmoid else ("softmax", config["topk_method"])
    if config.get("scoring_func", scoring) != scoring:
        raise NotLean(f"scoring_func {config['scoring_func']!r} in {family}")
    if config.get("topk_method", method) != method or (
        not sigmoid and method not in ("greedy", "group_limited_greedy")
    ):
        raise NotLean(f"topk_method {config['topk_method']!r} in {family}")
    if not sigmoid and config.get("norm_topk_prob"):
        raise NotLean(f"norm_topk_prob in {family}")
    groups, kept = (
        (1, 1)
        if method == "greedy"
        else (config.get("n_group") or 1, config.get("topk_group") or 1)
    )
    if count % groups or kept > groups or config["num_experts_per_tok"] > kept * count // groups:
        raise NotLean(f"{kept} of {groups} groups of {count} experts")
    if sigmoid and groups > 1 and count // groups < 2:
        raise NotLean("groups of one expert")
    return GateConfig(sigmoid, True, groups, kept, config["routed_scaling_factor"])
