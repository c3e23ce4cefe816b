"""Tiny random checkpoints of the models that keep recurrent state beside KV: what they override."""

from __future__ import annotations

from typing import Any, Final

TURNS: Final = ["linear_attention", "full_attention", "linear_attention"]
MAMBA: Final[dict[str, Any]] = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2,
    "mamba_expand": 2, "mamba_chunk_size": 16,
}  # fmt: skip
DELTA: Final[dict[str, Any]] = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "layer_types": TURNS,
}  # fmt: skip
MOE: Final[dict[str, Any]] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
}  # fmt: skip
# transformers bounds their time step in chunks, not in steps of one token. A bound that half of the
# steps meet makes each token that is computed the other way tell.
BOUNDED: Final[dict[str, Any]] = {"time_step_min": 0.05}
STATEFUL: Final[dict[str, dict[str, Any]]] = {
    "qwen3_next": {**DELTA, **MOE},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **MOE},
    "kimi_linear": {
        "layer_types": TURNS, "linear_head_dim": 16, "linear_num_heads": 4, "kv_lora_rank": 32,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_local_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_key_value_heads": 4,
    },
    "granitemoehybrid": {
        **MAMBA, "layer_types": TURNS, "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 96,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
        "num_hidden_layers": 4, "ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 16,
        "n_groups": 2, "chunk_size": 16, "n_routed_experts": 4, "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 40, **BOUNDED,
    },
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_hidden_layers": 4,
        "mamba_d_state": 16, "n_mamba_heads": 8, "mamba_ngroups": 2, "chunk_size": 16,
        "adapter_rank": 8, "head_dim": 32, "num_key_value_heads": 4, **BOUNDED,
    },
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "mamba2": {
        "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv"], "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_dense_layers": 1,
    },
    "olmo_hybrid": {
        "layer_types": TURNS, "linear_num_key_heads": 4, "linear_num_value_heads": 4,
        "linear_key_head_dim": 12, "linear_value_head_dim": 24,
    },
}  # fmt: skip
