"""The keys of a config.json that the lean decoder understands, by family (`model_type`).

The lean route serves a checkpoint only if every key is understood. If one is not, the universal
route serves the checkpoint, so that no model ever runs with a feature silently missing.
"""

from __future__ import annotations

from typing import Any, Final

from baton.engine.kernels.rope import LEAN_KINDS, RopeRule, rope_rule

ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
LATENT: Final = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2")  # families with MLA
SIGMOID_MOE: Final = (*LATENT, "glm4_moe")  # families with DeepSeek's mixtures of experts
# Families in which attention_bias says whether there are biases; others must not set it.
_BIASED: Final = ("llama", "qwen3", "qwen3_moe", "gpt_oss", *LATENT)
_QWEN_MOE: Final = {
    "num_key_value_heads", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
}  # fmt: skip
_LATENT_MOE: Final = {
    "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size",
    "routed_scaling_factor", "rms_norm_eps",
}  # fmt: skip
_NOAUX_TC: Final = _LATENT_MOE | {"n_group", "topk_group", "norm_topk_prob"}
_LATENT_OPTIONAL: Final = {
    "qk_head_dim", "num_local_experts", "num_experts", "first_k_dense_replace", "moe_layer_freq",
    "scoring_func", "topk_method", "n_group", "topk_group", "norm_topk_prob",
    "num_mtp_layers",
}  # fmt: skip
COUNTS: Final = ("num_experts", "num_local_experts")  # transformers 5 always writes the latter
_HEADS: Final = {"num_key_value_heads", "head_dim", "rms_norm_eps"}
_ROPE: Final = {"rope_theta", "rope_scaling", "rope_parameters"}
_GEMMA: Final = _ROPE | {
    "hidden_act", "hidden_activation", "attention_bias", "tie_word_embeddings",
    "use_bidirectional_attention", "cache_implementation",
}  # fmt: skip
_GEMMA2: Final = _GEMMA | {"layer_types", "attn_logit_softcapping", "final_logit_softcapping"}
_GLM_MOE: Final = {
    "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size",
    "routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob", "first_k_dense_replace",
    "use_qk_norm",
}  # fmt: skip
# The keys of which one states how many layers of a Qwen3-Next or Qwen3.5 draft tokens.
EXTRA_LAYERS: Final = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers")
_HYBRID: Final = _ROPE | {
    "hidden_act", "partial_rotary_factor", "tie_word_embeddings", "layer_types",
    "full_attention_interval", "attn_output_gate", "output_gate_type", "mamba_ssm_dtype",
    "attention_bias", "use_sliding_window", "mtp_use_dedicated_embeddings", *EXTRA_LAYERS,
}  # fmt: skip
_HYBRID_MOE: Final = _HYBRID | {
    "num_experts", "num_local_experts", "decoder_sparse_step", "mlp_only_layers", "norm_topk_prob",
}  # fmt: skip
_GLM: Final = _ROPE | {"hidden_act", "partial_rotary_factor", "tie_word_embeddings"}
# Families that have a file of their own (gemma.py, fused.py, hybrid.py): the keys that are
# understood in addition to the required ones. The family's file checks their values.
OWN: Final = {
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2 | {
        "rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern",
    },
    "phi3": _ROPE | {
        "hidden_act", "head_dim", "partial_rotary_factor", "sliding_window", "attention_bias",
        "mlp_bias", "lm_head_bias", "full_attn_mod", "interpolate_factor", "tie_word_embeddings",
        "original_max_position_embeddings", "resid_pdrop", "embd_pdrop",
    },
    "glm": _GLM,
    "glm4": _GLM,
    "glm4_moe": _GLM | {*COUNTS, "head_dim", "num_nextn_predict_layers", "num_mtp_layers"},
    "qwen3_next": _HYBRID_MOE,
    "qwen3_5_text": _HYBRID | {"mlp_only_layers"},
    "qwen3_5_moe_text": _HYBRID_MOE,
}  # fmt: skip
# Keys for which transformers has a default that depends on the family. If one is absent, the
# universal route serves the checkpoint.
_REQUIRED: Final = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings",
}  # fmt: skip
_DELTA: Final = _HEADS | {
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "linear_conv_kernel_dim",
}  # fmt: skip
_DELTA_MOE: Final = _DELTA | {
    "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
}  # fmt: skip
REQUIRED_BY_FAMILY: Final = {
    "llama": set[str](),
    "mistral": {"num_key_value_heads", "sliding_window"},
    "qwen2": {"num_key_value_heads"},
    "qwen3": {"num_key_value_heads", "head_dim"},
    "mixtral": {"num_key_value_heads", "num_experts_per_tok", "rms_norm_eps"},
    "qwen2_moe": _QWEN_MOE | {"shared_expert_intermediate_size"},
    "qwen3_moe": _QWEN_MOE,
    "deepseek_v2": _LATENT_MOE | {"first_k_dense_replace", "topk_method"},
    "deepseek_v3": _NOAUX_TC | {"first_k_dense_replace"},
    "glm4_moe_lite": _NOAUX_TC,
    "kimi_k2": _NOAUX_TC | {"first_k_dense_replace"},
    "gemma": _HEADS,
    "gemma2": _HEADS | {
        "query_pre_attn_scalar", "sliding_window", "attn_logit_softcapping",
        "final_logit_softcapping",
    },
    "gemma3_text": _HEADS | {"query_pre_attn_scalar", "sliding_window"},
    "phi3": {"num_key_value_heads", "rms_norm_eps"},
    "glm": _HEADS | {"attention_bias"},
    "glm4": _HEADS | {"attention_bias"},
    "glm4_moe": _GLM_MOE | {"num_key_value_heads", "rms_norm_eps", "attention_bias"},
    "gpt_oss": {
        "num_key_value_heads", "head_dim", "num_experts_per_tok", "sliding_window", "swiglu_limit",
        "rms_norm_eps", "attention_bias",
    },
    "qwen3_next": _DELTA_MOE,
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA_MOE,
}  # fmt: skip
_UNDERSTOOD: Final = _REQUIRED | {
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "tie_word_embeddings",
    "rope_theta", "rope_scaling", "rope_parameters", "attention_bias", "mlp_bias",
    "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "pretraining_tp",
    "num_nextn_predict_layers",
}  # fmt: skip
UNDERSTOOD_BY_FAMILY: Final = {
    "mixtral": {*COUNTS},
    "qwen2_moe": {*COUNTS, "decoder_sparse_step", "mlp_only_layers", "qkv_bias"},
    "qwen3_moe": {*COUNTS, "decoder_sparse_step", "mlp_only_layers"},
    "deepseek_v2": _LATENT_OPTIONAL,
    "deepseek_v3": _LATENT_OPTIONAL | {"rope_interleave"},
    "glm4_moe_lite": _LATENT_OPTIONAL | {
        "rope_interleave", "mlp_layer_types", "partial_rotary_factor",
    },
    "kimi_k2": _LATENT_OPTIONAL,
    "gpt_oss": {*COUNTS, "swiglu_alpha", "experts_per_token", "initial_context_length"},
}  # fmt: skip
# Keys that do not change the forward pass at inference.
_IRRELEVANT: Final = {
    "model_type", "architectures", "transformers_version", "torch_dtype", "dtype", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "attention_dropout",
    "output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward",
    "is_encoder_decoder", "id2label", "label2id", "problem_type", "_name_or_path", "auto_map",
    "unsloth_fixed", "unsloth_version", "output_router_logits", "router_aux_loss_coef",
    "router_jitter_noise", "aux_loss_alpha", "seq_aux", "ep_size",
}  # fmt: skip


class NotLean(Exception):
    """The reason why a checkpoint needs the universal route. The loader catches it."""


def check_understood(family: str, config: dict[str, Any]) -> None:
    """Raise NotLean unless each key is known and has a value that the lean decoder implements."""
    if family not in ARCHITECTURES:
        raise NotLean(f"model_type {family!r} has no lean decoder")
    architectures = config.get("architectures") or [ARCHITECTURES[family]]
    if ARCHITECTURES[family] not in architectures:
        raise NotLean(f"architecture {architectures[0]} is not {ARCHITECTURES[family]}")
    understood = _UNDERSTOOD | UNDERSTOOD_BY_FAMILY.get(family, set())
    if family in OWN:
        understood = _REQUIRED | OWN[family]
    understood = understood | _IRRELEVANT | REQUIRED_BY_FAMILY[family]
    unknown = sorted(key for key in config if key not in understood)
    if unknown:
        raise NotLean(f"config keys {unknown} are not understood")
    required = _REQUIRED | REQUIRED_BY_FAMILY[family]
    missing = sorted(key for key in required if key not in config)
    if missing:
        raise NotLean(f"config keys {missing} are absent")
    if family not in OWN:
        _check_values(family, config)


def _check_values(family: str, config: dict[str, Any]) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise NotLean(f"hidden_act {config['hidden_act']!r}")
    if config.get("pretraining_tp", 1) != 1:
        raise NotLean("pretraining_tp above 1")
    if family not in _BIASED and config.get("attention_bias"):
        raise NotLean(f"attention_bias in {family}")
    if family in UNDERSTOOD_BY_FAMILY and "rope_theta" not in {**config, **rope_of(config)}:
        raise NotLean("rope_theta is absent")
    if family != "llama" and config.get("mlp_bias"):
        raise NotLean(f"mlp_bias in {family}")
    if family in ("llama", *LATENT) and (config.get("sliding_window") or config.get("layer_types")):
        raise NotLean(f"windows in {family}")
    check_rope(rope_rule(config))


def check_rope(rule: RopeRule | None) -> None:
    """Raise NotLean for a rule that `inverse_frequencies` cannot compute."""
    if rule is None:
        return
    parameters = {name for name, value in rule.parameters if value is not None}
    if dict(rule.parameters).get("partial_rotary_factor") == 1:  # all dims are rotated
        parameters -= {"partial_rotary_factor"}
    needed, allowed = LEAN_KINDS.get(rule.kind, (set[str](), set[str]()))
    if rule.kind not in LEAN_KINDS or not needed <= parameters <= needed | allowed:
        raise NotLean(f"RoPE rule {rule.text}")


def rope_of(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("rope_parameters") or {}
