"""Reads the configs of families that store several products in one tensor and rotate a part of each
head.

    phi3 (Phi-3, Phi-4)  q, k and v in one tensor, gate and up in one; longrope
    glm, glm4            gate and up in one; neighbouring dims rotate together; glm4 also has norms
                         behind attention and MLP
    glm4_moe             no fused tensors, and dims rotate as Llama's; queries and keys may be
                         normalized

longrope has two sets of frequencies. transformers uses the long set for all rows of a call as soon
as the longest sequence passes `original_max_position_embeddings`. In Baton no sequence passes it,
because `position_limit` (kernels/rope.py) ends the longest context there. So the short set is
exact.
Source: transformers' Phi3Model, GlmModel, Glm4Model, Glm4MoeModel, modeling_rope_utils.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

from baton.engine.kernels.rope import PairRotation, RopeRule
from baton.engine.models.config import DecoderConfig, LayerNames
from baton.engine.models.families.keys import NotLean, check_rope

_PLAIN: Final[dict[str, Any]] = {  # Phi-4-mini writes these keys; other values are not served
    "attention_bias": False, "mlp_bias": False, "lm_head_bias": False, "full_attn_mod": 1,
    "interpolate_factor": 1, "hidden_act": "silu",
}  # fmt: skip
_LONG_KEYS: Final = {
    "short_factor", "long_factor", "original_max_position_embeddings", "factor", "attention_factor",
}  # fmt: skip
_GLM_NAMES: Final = {
    "glm": LayerNames(fused_gate_up=True),
    "glm4": LayerNames(
        attention_output_norm="post_self_attn_layernorm",
        mlp_output_norm="post_mlp_layernorm",
        fused_gate_up=True,
    ),
}
_GLM_ROTATED: Final = 0.5  # the share of a head's dims that rotate, if the config states none


def phi_config(config: dict[str, Any], base: DecoderConfig) -> DecoderConfig:
    """Return the config of a Phi-3. `base`: what is read alike for all families. Raises NotLean."""
    for key, plain in _PLAIN.items():
        if config.get(key, plain) != plain:
            raise NotLean(f"{key} {config[key]!r} in phi3")
    if config.get("rope_scaling") and config.get("rope_parameters"):
        raise NotLean("rope_scaling and rope_parameters")
    rule, rotated = partly_rotated(config, base, 1.0)
    if rule.kind == "longrope":
        rule = _long(rule, config, rotated)
    else:
        check_rope(rule)
        if rule.kind != "default":
            raise NotLean(f"RoPE rule {rule.text} in phi3")
    window = config.get("sliding_window")
    if window is not None and window < 1:
        raise NotLean(f"sliding_window {window}")
    return replace(
        base,
        rope=rule,
        rotated_dim=rotated,
        windows=(window or 0,) * base.num_layers,
        names=LayerNames(fused_qkv=True, fused_gate_up=True),
    )


def _long(rule: RopeRule, config: dict[str, Any], rotated: int) -> RopeRule:
    """Return the longrope rule for positions up to the original length: the short set of
    frequencies, and the attention factor as a number. Raises NotLean."""
    given = dict(rule.parameters)
    original = config.get("original_max_position_embeddings")
    if set(given) - _LONG_KEYS or not isinstance(original, int):
        raise NotLean(f"RoPE rule {rule.text}, original_max_position_embeddings {original}")
    if given.get("original_max_position_embeddings", original) != original:
        raise NotLean("two values of original_max_position_embeddings")
    short = given.get("short_factor") or []
    if len(short) != rotated // 2:
        raise NotLean(f"{len(short)} short factors for {rotated // 2} frequencies")
    scale = given.get("attention_factor")
    if scale is None:
        factor = given.get("factor") or config["max_position_embeddings"] / original
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeRule(
        "longrope", rule.theta, (("attention_factor", scale), ("short_factor", tuple(short)))
    )


def glm_config(config: dict[str, Any], base: DecoderConfig) -> DecoderConfig:
    """Return the config of a GLM. `base`: what is read alike for all families. Raises NotLean."""
    if config.get("hidden_act", "silu") != "silu":
        raise NotLean(f"hidden_act {config['hidden_act']!r}")
    family = config["model_type"]
    rule, rotated = partly_rotated(config, base, _GLM_ROTATED)
    check_rope(rule)
    return replace(
        base,
        qkv_bias=bool(config["attention_bias"]),
        output_bias=False,
        rope=rule,
        rotated_dim=rotated,
        qk_norm=bool(config.get("use_qk_norm", False)),
        pairs=PairRotation.HALVES if family == "glm4_moe" else PairRotation.NEIGHBOURS,
        names=_GLM_NAMES.get(family, LayerNames()),
    )


def partly_rotated(
    config: dict[str, Any], base: DecoderConfig, default: float
) -> tuple[RopeRule, int]:
    """Return the RoPE rule, and how many dims of a head it rotates. `default`: the share of the
    dims that rotate, if the config states none.

    Raises NotLean for a share that gives no even number of dims.
    """
    parameters = dict(base.rope.parameters)
    stated = config.get("partial_rotary_factor", default)
    share = parameters.pop("partial_rotary_factor", stated)
    rotated = int(base.head_dim * share) if isinstance(share, int | float) else 0
    if not 0 < rotated <= base.head_dim or rotated % 2:
        raise NotLean(f"partial_rotary_factor {share} of {base.head_dim}")
    return replace(base.rope, parameters=tuple(sorted(parameters.items()))), rotated
