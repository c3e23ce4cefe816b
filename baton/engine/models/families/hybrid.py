"""Reads the configs of families in which most layers have linear attention: Qwen3-Next, Qwen3.5.

    all          norms multiply by 1 + weight, a part of each head rotates, attention has a gate
    Qwen3-Next   mixtures of experts; the first product of linear attention is stored by key head
    Qwen3.5      dense, or mixtures whose experts may be stored in one tensor per layer

A checkpoint with images is read as its language model. Its RoPE rule has sections for the axes of
an image. A text's positions are equal on all axes, so the sections do not matter.
Source: transformers' Qwen3NextModel, Qwen3_5TextModel, Qwen3_5MoeTextModel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from baton.engine.kernels.delta_rule import DeltaSizes
from baton.engine.models.config import DecoderConfig, DeltaConfig, ExpertsConfig
from baton.engine.models.families.fused import partly_rotated
from baton.engine.models.families.keys import COUNTS, EXTRA_LAYERS, NotLean, check_rope

_LINEAR, _FULL = "linear_attention", "full_attention"
_EVERY: Final = 4  # every 4th layer has full attention
_ROTATED: Final = 0.25  # the share of a head's dims that rotate, if the config states none
# Keys that change nothing if they have these values. Other values are not served.
_PLAIN: Final[dict[str, Any]] = {
    "hidden_act": "silu", "attn_output_gate": True, "output_gate_type": "swish",
    "mamba_ssm_dtype": "float32", "use_sliding_window": False,
}  # fmt: skip
_SECTIONS: Final = ("mrope_section", "mrope_interleaved")
_WITH_IMAGES: Final = {
    "qwen3_5": ("qwen3_5_text", "Qwen3_5ForConditionalGeneration"),
    "qwen3_5_moe": ("qwen3_5_moe_text", "Qwen3_5MoeForConditionalGeneration"),
}
# Keys of such a checkpoint that do not change how it processes text.
_IMAGES: Final = {
    "text_config", "vision_config", "image_token_id", "video_token_id", "vision_start_token_id",
    "vision_end_token_id", "tie_word_embeddings", "model_type", "architectures", "dtype",
    "torch_dtype", "transformers_version", "initializer_range", "eos_token_id", "bos_token_id",
    "pad_token_id", "_name_or_path", "language_model_only",
}  # fmt: skip
PREFIX: Final = "model.language_model."
NO_DENSE: Final = "qwen3_5_moe_text"  # a family whose layers all have experts


def language_model(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the language model, if `config` is of a Qwen3.5 with images; any other
    config as it is. Raises NotLean."""
    family = config.get("model_type", "")
    if family not in _WITH_IMAGES:
        return config
    own, architecture = _WITH_IMAGES[family]
    text: dict[str, Any] = config.get("text_config") or {}
    named = config.get("architectures", [architecture])  # absent: served for text (seeing.py)
    if named != [architecture]:
        raise NotLean(f"architectures {named} of {family}")
    unknown = sorted(set(config) - _IMAGES)
    if unknown or text.get("model_type") != own:
        raise NotLean(f"config keys {unknown} are not understood")
    if config.get("tie_word_embeddings", False) != text.get("tie_word_embeddings", False):
        raise NotLean("two values of tie_word_embeddings")
    return {key: value for key, value in text.items() if key != "architectures"}


def hybrid_config(config: dict[str, Any], base: DecoderConfig) -> DecoderConfig:
    """Return the config of a Qwen3-Next or Qwen3.5. `base`: what is read alike for all families.
    Raises NotLean."""
    family: str = config["model_type"]
    for key, plain in _PLAIN.items():
        if config.get(key, plain) != plain:
            raise NotLean(f"{key} {config[key]!r} in {family}")
    parameters = tuple(each for each in base.rope.parameters if each[0] not in _SECTIONS)
    plain_rope = replace(base, rope=replace(base.rope, parameters=parameters))
    rule, rotated = partly_rotated(config, plain_rope, _ROTATED)
    check_rope(rule)
    return replace(
        base,
        rope=rule,
        rotated_dim=rotated,
        qk_norm=True,
        norm_offset=1.0,
        gated=True,
        experts=None if family == "qwen3_5_text" else _experts(config, base.num_layers),
        delta=_delta(config, base.num_layers),
        extra_layers=extra_layers(config),
        extra_prefix="mtp.",
    )


def extra_layers(config: dict[str, Any]) -> int:
    """Return how many layers draft tokens. Published configs of Qwen3-Next do not state it: their
    checkpoints have one."""
    stated = [config[key] for key in EXTRA_LAYERS if config.get(key) is not None]
    return stated[0] if stated else int(config["model_type"] == "qwen3_next")


def _experts(config: dict[str, Any], num_layers: int) -> ExpertsConfig:
    """Return the mixture. Raises NotLean for a number of experts that is absent or not clear, and
    for dense layers or weights of experts that transformers' class of the family does not have."""
    counts = {config[key] for key in COUNTS if key in config}
    if len(counts) != 1 or not min(counts):
        raise NotLean(f"{' and '.join(COUNTS)} are absent or differ")
    dense: set[int] = set(config.get("mlp_only_layers") or ())
    every, normalized = config.get("decoder_sparse_step", 1), config.get("norm_topk_prob", True)
    if config["model_type"] == NO_DENSE and (dense or every != 1 or not normalized):
        raise NotLean(f"mlp_only_layers, decoder_sparse_step or norm_topk_prob in {NO_DENSE}")
    sparse = (layer for layer in range(num_layers) if (layer + 1) % every == 0)
    return ExpertsConfig(
        count=counts.pop(),
        per_token=config["num_experts_per_tok"],
        size=config["moe_intermediate_size"],
        normalized=normalized,
        prefix="mlp.",
        parts=("gate_proj", "up_proj", "down_proj"),
        layers=frozenset(layer for layer in sparse if layer not in dense),
        shared_size=config["shared_expert_intermediate_size"],
        stacked="outputs first",
    )


def _delta(config: dict[str, Any], num_layers: int) -> DeltaConfig | None:
    """Return the layers with linear attention; None if there are none. Raises NotLean."""
    kinds = config.get("layer_types")
    if kinds is None:
        every = config.get("full_attention_interval", _EVERY)
        kinds = [_LINEAR if (layer + 1) % every else _FULL for layer in range(num_layers)]
    if len(kinds) != num_layers or set(kinds) - {_LINEAR, _FULL}:
        raise NotLean(f"layer_types {sorted(set(kinds))}")
    sizes = DeltaSizes(
        key_heads=config["linear_num_key_heads"],
        value_heads=config["linear_num_value_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
        taps=config["linear_conv_kernel_dim"],
    )
    if sizes.value_heads % sizes.key_heads:
        raise NotLean(f"{sizes.value_heads} value heads for {sizes.key_heads} key heads")
    layers = frozenset(layer for layer, kind in enumerate(kinds) if kind == _LINEAR)
    return DeltaConfig(sizes, layers, config["model_type"] == "qwen3_next") if layers else None
