"""GLM-4 (`glm` and `glm4`), out of a config.json: gate and up in one tensor, half of each head
rotated, neighbours together; `glm4` has norms behind attention and MLP, too.

Source: transformers' GlmModel, Glm4Model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from baton.engine.kernels.rope import PairRotation
from baton.engine.models.config import DecoderConfig, LayerNames
from baton.engine.models.families.keys import NotLean, check_rope, partly

_NAMES: Final = {
    "glm": LayerNames(fused_gate_up=True),
    "glm4": LayerNames(
        attention_output_norm="post_self_attn_layernorm",
        mlp_output_norm="post_mlp_layernorm",
        fused_gate_up=True,
    ),
}
_ROTATED: Final = 0.5  # of a head, where the config does not say


def glm_config(config: dict[str, Any], base: DecoderConfig) -> DecoderConfig:
    """`base`: what all families have in common. Raises NotLean."""
    if config.get("hidden_act", "silu") != "silu":
        raise NotLean(f"hidden_act {config['hidden_act']!r}")
    rule, rotated = partly(config, base, _ROTATED)
    check_rope(rule)
    return replace(
        base,
        qkv_bias=bool(config["attention_bias"]),
        output_bias=False,
        rope=rule,
        rotated_dim=rotated,
        pairs=PairRotation.NEIGHBOURS,
        names=_NAMES[config["model_type"]],
    )
