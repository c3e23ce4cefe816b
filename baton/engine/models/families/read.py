"""A lean decoder's config, read from a config.json without transformers.

To add a family, add its keys to keys.py. What is special to the family goes here, or into a file of
its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from baton.engine.kernels.rope import RopeRule, rope_rule
from baton.engine.models.config import DecoderConfig, ExpertsConfig
from baton.engine.models.families import gemma, hybrid
from baton.engine.models.families.fused import glm_config, phi_config
from baton.engine.models.families.gpt_oss import gpt_oss_experts, gpt_oss_windows
from baton.engine.models.families.keys import (
    COUNTS,
    LATENT,
    OWN,
    SIGMOID_MOE,
    UNDERSTOOD_BY_FAMILY,
    NotLean,
    check_understood,
)
from baton.engine.models.families.latent import latent_config, latent_experts

_READERS: Final[dict[str, Callable[[dict[str, Any], DecoderConfig], DecoderConfig]]] = {
    "gemma": gemma.gemma_config, "gemma2": gemma.gemma_config,
    "gemma3_text": gemma.gemma_config,
    "phi3": phi_config, "glm": glm_config, "glm4": glm_config,
    "glm4_moe": glm_config,
    "qwen3_next": hybrid.hybrid_config, "qwen3_5_text": hybrid.hybrid_config,
    "qwen3_5_moe_text": hybrid.hybrid_config,
}  # fmt: skip
# How the config of the language model is found in that of a model with images, and what stands
# before the names of its tensors.
_WITH_IMAGES: Final = (
    (gemma.text_of_images, gemma.PREFIX),
    (hybrid.language_model, hybrid.PREFIX),
)


def decoder_config(config: dict[str, Any]) -> DecoderConfig:
    """Read a config.json of one of the ARCHITECTURES. Raises NotLean with the reason."""
    for language_model, prefix in _WITH_IMAGES:
        text = language_model(config)
        if text is not config:
            return replace(decoder_config(text), prefix=prefix)
    family = config.get("model_type", "")
    if family == hybrid.NO_DENSE:
        config = {"intermediate_size": 0, **config}
    check_understood(family, config)
    heads, num_layers = config["num_attention_heads"], config["num_hidden_layers"]
    rope = rope_rule(config) or RopeRule("default", 10000.0)
    attention_bias = bool(config.get("attention_bias", False))
    latent = latent_config(family, config)
    base = DecoderConfig(
        vocab_size=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=latent.rope_dim
        if latent
        else config.get("head_dim") or config["hidden_size"] // heads,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        tied_embeddings=config.get("tie_word_embeddings", False),
        qkv_bias=family == "qwen2" or attention_bias or _qkv_bias(family, config),
        output_bias=attention_bias and family != "qwen2",
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family in ("qwen3", "qwen3_moe"),
        windows=_windows(family, config, num_layers),
        rope=rope,
        experts=_experts(family, config, num_layers),
        latent=latent,
        extra_layers=config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 0,
        sinks=family == "gpt_oss",
    )
    return _READERS[family](config, base) if family in _READERS else base


def _windows(family: str, config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the window of each layer, as transformers derives it; 0 = full attention. Families in
    OWN get 0 here; their own file sets their windows later."""
    if family == "gpt_oss":
        return gpt_oss_windows(config, num_layers)
    window = config.get("sliding_window") or 0
    if family in ("mistral", "mixtral"):
        if config.get("layer_types") is not None:
            raise NotLean(f"layer_types in {family}")
        return (window,) * num_layers
    if (
        family in ("llama", *LATENT, *OWN)
        or not config.get("use_sliding_window", False)
        or not window
    ):
        kinds = set(config.get("layer_types") or ()) - {"full_attention"}
        if kinds and family == "qwen2_moe":
            raise NotLean(f"layer_types {sorted(kinds)} without a window")
        return (0,) * num_layers
    if family in UNDERSTOOD_BY_FAMILY:
        raise NotLean(f"windows in {family}")
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", 28)
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    if len(kinds) != num_layers or set(kinds) - {"full_attention", "sliding_attention"}:
        raise NotLean(f"layer_types {sorted(set(kinds))}")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _qkv_bias(family: str, config: dict[str, Any]) -> bool:
    """Whether q, k and v have biases in a Qwen2-MoE: yes, unless its config says no. False for
    other families."""
    return family == "qwen2_moe" and bool(config.get("qkv_bias", True))


def _experts(family: str, config: dict[str, Any], num_layers: int) -> ExpertsConfig | None:
    """Return the mixture of experts; None for a dense family. Raises NotLean."""
    if family in SIGMOID_MOE:
        return latent_experts(family, config, num_layers)
    if family not in UNDERSTOOD_BY_FAMILY:
        return None
    counts = {config[key] for key in COUNTS if key in config}
    if len(counts) != 1:
        raise NotLean(f"{' and '.join(COUNTS)} are absent or differ")
    count: int = counts.pop()
    if family == "gpt_oss":
        return gpt_oss_experts(config, count, num_layers)
    if family == "mixtral":
        return ExpertsConfig(
            count=count,
            per_token=config["num_experts_per_tok"],
            size=config["intermediate_size"],
            normalized=True,
            prefix="block_sparse_moe.",
            parts=("w1", "w3", "w2"),
            layers=frozenset(range(num_layers)),
        )
    dense: set[int] = set(config.get("mlp_only_layers") or ())
    every = config.get("decoder_sparse_step", 1)
    sparse = (layer for layer in range(num_layers) if (layer + 1) % every == 0)
    return ExpertsConfig(
        count=count,
        per_token=config["num_experts_per_tok"],
        size=config["moe_intermediate_size"],
        normalized=config["norm_topk_prob"],
        prefix="mlp.",
        parts=("gate_proj", "up_proj", "down_proj"),
        layers=frozenset(layer for layer in sparse if layer not in dense),
        shared_size=config.get("shared_expert_intermediate_size", 0),
    )
