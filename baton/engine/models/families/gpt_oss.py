"""Reads the config of GPT-OSS: every second layer has a window, and one tensor stores all experts
of a layer.

Source: transformers' GptOssConfig, GptOssExperts and GptOssTopKRouter.
"""

from __future__ import annotations

from typing import Any, Final

from baton.engine.models.config import ClampedGate, ExpertsConfig, GateConfig
from baton.engine.models.families.keys import NotLean

_ALPHA: Final = 1.702  # for configs that do not state it
_KINDS: Final = ("sliding_attention", "full_attention")


def gpt_oss_windows(config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the window of each layer; 0 = full attention. Raises NotLean for layers of another
    kind, and for a config without a RoPE rule."""
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        raise NotLean("a gpt_oss without a RoPE rule has its family's own")
    kinds = config.get("layer_types") or [_KINDS[layer % 2] for layer in range(num_layers)]
    window = config["sliding_window"]
    if len(kinds) != num_layers or set(kinds) - set(_KINDS) or not window:
        raise NotLean(f"layer_types {sorted(set(kinds))} with a window of {window}")
    return tuple(window if kind == _KINDS[0] else 0 for kind in kinds)


def gpt_oss_experts(config: dict[str, Any], count: int, num_layers: int) -> ExpertsConfig:
    """Return the mixture, which every layer has. Raises NotLean for keys that contradict each
    other, and for a limit or alpha of zero."""
    per_token, limit = config["num_experts_per_tok"], config["swiglu_limit"]
    alpha = config.get("swiglu_alpha", _ALPHA)
    if config.get("experts_per_token", per_token) != per_token:
        raise NotLean("experts_per_token and num_experts_per_tok differ")
    if not limit or not alpha:
        raise NotLean(f"swiglu_limit {limit} and swiglu_alpha {alpha}")
    return ExpertsConfig(
        count=count,
        per_token=per_token,
        size=config["intermediate_size"],
        normalized=True,
        prefix="mlp.",
        parts=("gate_proj", "up_proj", "down_proj"),
        layers=frozenset(range(num_layers)),
        gate=GateConfig(biased=True),
        router="router",
        biased=True,
        clamped=ClampedGate(float(limit), float(alpha)),
        stacked="inputs first",
    )
