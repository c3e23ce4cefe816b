"""Reads the configs of Gemma 1 to 3.

    all          norms multiply by 1 + weight, embeddings are scaled, the gate is a GELU
    Gemma 2, 3   norms behind attention and MLP, layers with a window
    Gemma 2      soft caps
    Gemma 3      norms of query and key heads; layers with a window have a RoPE rule of their own

Source: transformers' GemmaModel, Gemma2Model, Gemma3TextModel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from baton.engine.kernels.rope import RopeRule, rope_rule
from baton.engine.models.config import DecoderConfig, LayerNames
from baton.engine.models.families.keys import NotLean, check_rope

_ACTIVATION: Final = "gelu_pytorch_tanh"
_SANDWICH: Final = LayerNames(
    mlp_norm="pre_feedforward_layernorm",
    attention_output_norm="post_attention_layernorm",
    mlp_output_norm="post_feedforward_layernorm",
)
_KINDS: Final = ("full_attention", "sliding_attention")
_PATTERNS: Final = {"gemma2": 2, "gemma3_text": 6}  # every 2nd or 6th layer has full attention
_GLOBAL_THETA, _LOCAL_THETA = 1e6, 1e4
# Keys of a Gemma 3 with images that do not change how it processes text. _TEXT_DEFAULTS are the
# values of keys that the config of its language model may leave out.
_IMAGES: Final = {
    "text_config", "vision_config", "boi_token_index", "eoi_token_index", "image_token_index",
    "mm_tokens_per_image", "tie_word_embeddings", "model_type", "architectures", "dtype",
    "torch_dtype", "transformers_version", "initializer_range", "eos_token_id", "bos_token_id",
    "pad_token_id", "_name_or_path", "unsloth_fixed", "unsloth_version",
}  # fmt: skip
_TEXT_DEFAULTS: Final[dict[str, Any]] = {
    "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}  # fmt: skip
PREFIX: Final = "language_model."
# The prefixes by which adapters of the whole model name modules of the language model's "model.".
_ADAPTED: Final = ("model.language_model.", "language_model.model.")


def text_of_images(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the language model, if `config` is of a Gemma 3 with images; any other
    config as it is. Raises NotLean."""
    if config.get("model_type") != "gemma3":
        return config
    text: dict[str, Any] = config.get("text_config") or {}
    architecture = "Gemma3ForConditionalGeneration"
    named = config.get("architectures", [architecture])  # absent: served for text (seeing.py)
    if named != [architecture]:
        raise NotLean(f"architectures {named} of gemma3")
    unknown = sorted(set(config) - _IMAGES)
    if unknown or text.get("model_type") != "gemma3_text":
        raise NotLean(f"config keys {unknown} are not understood")
    if config.get("tie_word_embeddings", True) != text.get("tie_word_embeddings", True):
        raise NotLean("two values of tie_word_embeddings")
    return {**_TEXT_DEFAULTS, **text}


def own_name(module: str) -> str:
    """Return the language model's path of a module, given its path in an adapter of the model with
    images; any other path as it is."""
    for prefix in _ADAPTED:
        if module.startswith(prefix):
            return "model." + module.removeprefix(prefix)
    return module


def gemma_config(config: dict[str, Any], base: DecoderConfig) -> DecoderConfig:
    """Return the config of a Gemma. `base`: what is read alike for all families. Raises NotLean."""
    family: str = config["model_type"]
    _check(family, config)
    first = family == "gemma"
    rules = _rules(config) if family == "gemma3_text" else (base.rope, base.rope)
    for rule in rules:
        check_rope(rule)
        if rule.kind not in ("default", "linear"):
            raise NotLean(f"RoPE rule {rule.text} in {family}")
    biased = bool(config.get("attention_bias"))
    return replace(
        base,
        tied_embeddings=config.get("tie_word_embeddings", True),
        qkv_bias=biased,
        output_bias=biased,
        qk_norm=family == "gemma3_text",
        windows=base.windows if first else _windows(family, config),
        rope=rules[0],
        local_rope=None if rules[0] == rules[1] else rules[1],
        names=base.names if first else _SANDWICH,
        norm_offset=1.0,
        activation="gelu_tanh",
        embedding_scale=config["hidden_size"] ** 0.5,
        scale=None if first else config["query_pre_attn_scalar"] ** -0.5,
        softcap=config.get("attn_logit_softcapping"),
        logit_softcap=config.get("final_logit_softcapping"),
    )


def _check(family: str, config: dict[str, Any]) -> None:
    """Raise NotLean for values that are not implemented."""
    # Gemma 1's configs say "gelu", but mean the function that the model was trained with.
    legacy = ("gelu",) if family == "gemma" else ()
    for key in ("hidden_act", "hidden_activation"):
        if config.get(key) not in (None, _ACTIVATION, *legacy):
            raise NotLean(f"{key} {config[key]!r} in {family}")
    if config.get("use_bidirectional_attention"):
        raise NotLean("attention that is not causal")
    if family == "gemma3_text" and config.get("attn_logit_softcapping"):
        raise NotLean(f"attn_logit_softcapping in {family}")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(key) == 0:
            raise NotLean(f"{key} 0")


def _windows(family: str, config: dict[str, Any]) -> tuple[int, ...]:
    """Return the window of each layer; 0 = full attention. Raises NotLean."""
    window, count = config["sliding_window"], config["num_hidden_layers"]
    kinds = config.get("layer_types")
    if kinds is None:
        every = config.get("sliding_window_pattern", _PATTERNS[family])
        if config.get("_sliding_window_pattern", every) != every:
            raise NotLean("_sliding_window_pattern without layer_types")
        kinds = [_KINDS[(layer + 1) % every > 0] for layer in range(count)]
    if len(kinds) != count or set(kinds) - set(_KINDS):
        raise NotLean(f"layer_types {sorted(set(kinds))}")
    if "sliding_attention" in kinds and not window:
        raise NotLean("sliding layers without a window")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _rules(config: dict[str, Any]) -> tuple[RopeRule, RopeRule]:
    """Return Gemma 3's RoPE rules: that of layers with full attention, and that of layers with a
    window. Configs nest both in rope_parameters, or spell them as separate keys."""
    nested = config.get("rope_parameters") or {}
    if set(nested) - set(_KINDS):
        raise NotLean(f"rope_parameters with {sorted(set(nested) - set(_KINDS))}")
    full = {**(nested.get("full_attention") or {}), **(config.get("rope_scaling") or {})}
    local = nested.get("sliding_attention") or {}
    return (
        _rule(full, config.get("rope_theta", _GLOBAL_THETA)),
        _rule(local, config.get("rope_local_base_freq", _LOCAL_THETA)),
    )


def _rule(parameters: dict[str, Any], theta: float) -> RopeRule:
    found = rope_rule({"rope_parameters": parameters or {"rope_type": "default"},
                       "rope_theta": theta})  # fmt: skip
    assert found is not None
    return found
