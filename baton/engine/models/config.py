"""The canonical config of a lean decoder, read from a config.json without transformers.

A checkpoint is lean only if every key is understood: one unknown key and the universal route serves
it instead, so that a model is never run with a feature silently missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from baton.engine.attention.base import AttentionLayer
from baton.engine.models.rope import LEAN_KINDS, RopeRule, rope_rule
from baton.kv_spec import LayerSpec

ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Keys whose absence means a family-dependent default in transformers: absent, the universal route
# decides.
_REQUIRED: Final = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings",
}  # fmt: skip
_REQUIRED_BY_FAMILY: Final = {
    "llama": set[str](),
    "mistral": {"num_key_value_heads", "sliding_window"},
    "qwen2": {"num_key_value_heads"},
    "qwen3": {"num_key_value_heads", "head_dim"},
}
_UNDERSTOOD: Final = _REQUIRED | {
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "tie_word_embeddings",
    "rope_theta", "rope_scaling", "rope_parameters", "attention_bias", "mlp_bias",
    "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "pretraining_tp",
}  # fmt: skip
# Keys that change nothing in a forward pass of inference.
_IRRELEVANT: Final = {
    "model_type", "architectures", "transformers_version", "torch_dtype", "dtype", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "attention_dropout",
    "output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward",
    "is_encoder_decoder", "id2label", "label2id", "problem_type", "_name_or_path", "auto_map",
    "unsloth_fixed", "unsloth_version",
}  # fmt: skip


class NotLean(Exception):
    """The reason why a checkpoint needs the universal route; never leaves the loader."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Everything `Decoder` needs to know. `windows[l]` 0 = full attention in layer l."""

    vocab_size: int
    max_positions: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]
    rope: RopeRule

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """What each layer stores per token."""
        return tuple(
            layer_spec(self.num_kv_heads, self.head_dim, self.head_dim, w) for w in self.windows
        )

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """How each layer attends."""
        scale = self.head_dim**-0.5
        return tuple(AttentionLayer(self.num_heads, scale, window) for window in self.windows)


def layer_spec(kv_heads: int, k_dim: int, v_dim: int, window: int) -> LayerSpec:
    """The spec both routes derive, so that a lean node and a universal one agree on the layout."""
    return LayerSpec(kv_heads, k_dim, v_dim, window, "sliding" if window else "full")


def decoder_config(config: dict[str, Any]) -> DecoderConfig:
    """Read a config.json of one of the ARCHITECTURES. Raises NotLean with the reason."""
    family = config.get("model_type", "")
    _check_understood(family, config)
    heads, num_layers = config["num_attention_heads"], config["num_hidden_layers"]
    rope = rope_rule(config) or RopeRule("default", 10000.0)
    attention_bias = bool(config.get("attention_bias", False))
    return DecoderConfig(
        vocab_size=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        tied_embeddings=config.get("tie_word_embeddings", False),
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=attention_bias and family != "qwen2",
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        windows=_windows(family, config, num_layers),
        rope=rope,
    )


def _check_understood(family: str, config: dict[str, Any]) -> None:
    """Raise NotLean unless each key is known and has a value that the lean decoder implements."""
    if family not in ARCHITECTURES:
        raise NotLean(f"model_type {family!r} has no lean decoder")
    architectures = config.get("architectures") or [ARCHITECTURES[family]]
    if ARCHITECTURES[family] not in architectures:
        raise NotLean(f"architecture {architectures[0]} is not {ARCHITECTURES[family]}")
    unknown = sorted(key for key in config if key not in _UNDERSTOOD | _IRRELEVANT)
    if unknown:
        raise NotLean(f"config keys {unknown} are not understood")
    required = _REQUIRED | _REQUIRED_BY_FAMILY[family]
    missing = sorted(key for key in required if key not in config)
    if missing:
        raise NotLean(f"config keys {missing} are absent")
    if config.get("hidden_act", "silu") != "silu":
        raise NotLean(f"hidden_act {config['hidden_act']!r}")
    if config.get("pretraining_tp", 1) != 1:
        raise NotLean("pretraining_tp above 1")
    if family in ("mistral", "qwen2") and config.get("attention_bias"):
        raise NotLean(f"attention_bias in {family}")
    if family != "llama" and config.get("mlp_bias"):
        raise NotLean(f"mlp_bias in {family}")
    if family == "llama" and (config.get("sliding_window") or config.get("layer_types")):
        raise NotLean("windows in llama")
    _check_rope(rope_rule(config))


def _check_rope(rule: RopeRule | None) -> None:
    if rule is None:
        return
    parameters = {name for name, value in rule.parameters if value is not None}
    needed = {
        "default": set[str](),
        "linear": {"factor"},
        "llama3": {
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        },
    }
    if rule.kind not in LEAN_KINDS or parameters != needed[rule.kind]:
        raise NotLean(f"RoPE rule {rule.text}")


def _windows(family: str, config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Window of each layer, as transformers derives it: 0 = full attention."""
    window = config.get("sliding_window") or 0
    if family == "mistral":
        if config.get("layer_types") is not None:
            raise NotLean("layer_types in mistral")
        return (window,) * num_layers
    if family == "llama" or not config.get("use_sliding_window", False) or not window:
        return (0,) * num_layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", 28)
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    if len(kinds) != num_layers or set(kinds) - {"full_attention", "sliding_attention"}:
        raise NotLean(f"layer_types {sorted(set(kinds))}")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
