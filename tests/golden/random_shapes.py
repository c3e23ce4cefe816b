"""Random small shapes of the models with recurrent state, and of those that attend to a part of
their keys: heads, dims, patterns of layers, convolutions, groups, experts, from one seed each."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Final

from tests.golden.sparse_models import INDEXED
from tests.golden.stateful_models import STATEFUL

Shape = dict[str, Any]
SPARSE: Final = ("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4", "llama4_text")


def random_shape(model_type: str, seed: int) -> Shape:
    """What a config of `model_type` has beyond its family's defaults; the same for a seed."""
    draw = Random(f"{model_type} {seed}")
    kv_heads = draw.choice((1, 2))
    shape: Shape = {
        "hidden_size": draw.choice((32, 48, 64)), "intermediate_size": draw.choice((48, 80, 96)),
        "num_attention_heads": kv_heads * draw.choice((1, 2, 3)), "num_key_value_heads": kv_heads,
        "head_dim": draw.choice((8, 16, 24)), "num_hidden_layers": draw.randint(2, 5),
        "tie_word_embeddings": draw.random() < 0.3,
    }  # fmt: skip
    shape |= _OWN[model_type](draw, shape)
    return {key: value for key, value in shape.items() if value is not None}


def _turns(draw: Random, count: int, kinds: tuple[str, ...]) -> list[str]:
    """A pattern of layers that has each of `kinds`."""
    layers = [*kinds, *(draw.choice(kinds) for _ in range(count - len(kinds)))]
    draw.shuffle(layers)
    return layers


def _experts(draw: Random) -> Shape:
    count = draw.choice((2, 4, 6))
    return {
        "num_experts": count, "num_experts_per_tok": draw.randint(1, min(3, count)),
        "moe_intermediate_size": draw.choice((16, 24, 48)),
        "shared_expert_intermediate_size": draw.choice((16, 40)),
        "norm_topk_prob": draw.random() < 0.5,
    }  # fmt: skip


def _delta(draw: Random, shape: Shape) -> Shape:
    """The gated delta rule beside full attention."""
    keys = draw.choice((1, 2, 3))
    shared = draw.choice((0.25, 0.5, 1.0))
    return {
        "linear_num_key_heads": keys, "linear_num_value_heads": keys * draw.choice((1, 2, 3)),
        "linear_key_head_dim": draw.choice((8, 16, 24)),
        "linear_value_head_dim": draw.choice((8, 12, 16)),
        "linear_conv_kernel_dim": draw.choice((2, 3, 4)), "attention_bias": draw.random() < 0.5,
        "layer_types": _turns(
            draw, shape["num_hidden_layers"], ("linear_attention", "full_attention")
        ),
        "head_dim": 16 if shared == 0.25 else shape["head_dim"],
        "rope_parameters": {
            "rope_type": "default", "rope_theta": draw.choice((1e4, 5e6)),
            "partial_rotary_factor": shared,
        },
    }  # fmt: skip


def _delta_experts(draw: Random, shape: Shape) -> Shape:
    return _delta(draw, shape) | _experts(draw)


def _mamba(draw: Random, shape: Shape) -> Shape:
    """The scan of Mamba 2 under Bamba's names: heads times their size is twice the width."""
    heads = draw.choice((2, 4, 8))
    return {
        "mamba_n_heads": heads, "mamba_d_head": shape["hidden_size"] * 2 // heads,
        "mamba_d_state": draw.choice((8, 16, 24)), "mamba_n_groups": draw.choice((1, 2)),
        "mamba_d_conv": draw.choice((2, 3, 4)), "mamba_chunk_size": draw.choice((4, 16, 32)),
        "mamba_conv_bias": draw.random() < 0.5, "mamba_proj_bias": draw.random() < 0.5,
        "mamba_expand": 2,
    }  # fmt: skip


def _bamba(draw: Random, shape: Shape) -> Shape:
    count = shape["num_hidden_layers"]
    attending = sorted(draw.sample(range(count), draw.randint(1, count - 1)))
    return _mamba(draw, shape) | {"attn_layer_indices": attending}


def _falcon_h1(draw: Random, shape: Shape) -> Shape:
    own = _mamba(draw, shape)
    return own | {
        "mamba_d_ssm": own["mamba_n_heads"] * own["mamba_d_head"],
        "mamba_rms_norm": draw.random() < 0.5, "mamba_norm_before_gate": draw.random() < 0.5,
        "ssm_in_multiplier": draw.choice((1.0, 0.7)), "key_multiplier": draw.choice((1.0, 0.6)),
    }  # fmt: skip


def _granite(draw: Random, shape: Shape) -> Shape:
    kinds = ("linear_attention", "full_attention")
    return _mamba(draw, shape) | {
        "layer_types": _turns(draw, shape["num_hidden_layers"], kinds),
        "num_local_experts": draw.choice((0, 4)), "num_experts_per_tok": draw.choice((1, 2)),
        "shared_intermediate_size": draw.choice((32, 96)), "attention_multiplier": 0.3,
        "position_embedding_type": draw.choice((None, "rope")),
    }  # fmt: skip


def _kimi(draw: Random, shape: Shape) -> Shape:
    count, heads = shape["num_hidden_layers"], shape["num_attention_heads"]
    return {
        "layer_types": _turns(draw, count, ("linear_attention", "full_attention")),
        "linear_head_dim": draw.choice((8, 16, 24)), "linear_num_heads": draw.choice((2, 3, 4)),
        "linear_conv_kernel_dim": draw.choice((2, 3, 4)), "num_key_value_heads": heads,
        "kv_lora_rank": draw.choice((16, 32)), "qk_rope_head_dim": draw.choice((4, 8)),
        "qk_nope_head_dim": draw.choice((8, 16)), "v_head_dim": draw.choice((8, 12, 16)),
        "num_local_experts": 4, "num_experts_per_tok": draw.choice((1, 2)),
        "moe_intermediate_size": draw.choice((16, 48)), "head_dim": None,
        "mlp_layer_types": [draw.choice(("dense", "sparse")) for _ in range(count)],
    }  # fmt: skip


def _nemotron(draw: Random, shape: Shape) -> Shape:
    kinds = ("linear_attention", "mlp", "full_attention", "moe")
    heads, count = draw.choice((2, 4, 8)), draw.randint(4, 6)
    return {
        "layers_block_type": _turns(draw, count, kinds), "num_hidden_layers": count,
        "mamba_num_heads": heads, "mamba_head_dim": shape["hidden_size"] * 2 // heads,
        "ssm_state_size": draw.choice((8, 16, 24)), "n_groups": draw.choice((1, 2)),
        "conv_kernel": draw.choice((2, 3, 4)), "chunk_size": draw.choice((4, 16, 32)),
        "n_routed_experts": 4, "num_experts_per_tok": draw.choice((1, 2)),
        "moe_intermediate_size": draw.choice((16, 48)), "use_conv_bias": draw.random() < 0.5,
        "moe_shared_expert_intermediate_size": draw.choice((24, 40)),
        "attention_bias": draw.random() < 0.5,
    }  # fmt: skip


def _zamba2(draw: Random, shape: Shape) -> Shape:
    heads, attending = draw.choice((2, 4, 8)), shape["num_attention_heads"]
    count = draw.randint(3, 5)
    return {
        # As published, the first layer is plain.
        "layers_block_type": ["mamba", *_turns(draw, count - 1, ("mamba", "hybrid"))],
        "num_hidden_layers": count, "mamba_d_state": draw.choice((8, 16)),
        "n_mamba_heads": heads, "mamba_ngroups": draw.choice((1, 2)),
        "mamba_d_conv": draw.choice((2, 3, 4)), "chunk_size": draw.choice((4, 16, 32)),
        "adapter_rank": draw.choice((4, 8)), "num_key_value_heads": attending,
        "hidden_size": 24 * attending, "head_dim": None, "mamba_expand": 2,
        "tie_word_embeddings": True,
        "use_shared_attention_adapter": draw.random() < 0.5,
    }  # fmt: skip


def _mamba2(draw: Random, shape: Shape) -> Shape:
    heads = draw.choice((2, 4, 8))
    return {
        "num_heads": heads, "head_dim": shape["hidden_size"] * 2 // heads,
        "state_size": draw.choice((8, 16, 24)), "n_groups": draw.choice((1, 2)),
        "conv_kernel": draw.choice((2, 3, 4)), "chunk_size": draw.choice((4, 16, 32)),
        "use_bias": draw.random() < 0.5, "use_conv_bias": draw.random() < 0.5,
    }  # fmt: skip


def _lfm2(draw: Random, shape: Shape) -> Shape:
    return {
        "layer_types": _turns(draw, shape["num_hidden_layers"], ("conv", "full_attention")),
        "conv_L_cache": draw.choice((2, 3, 5)), "conv_bias": draw.random() < 0.5,
        "hidden_size": shape["num_attention_heads"] * shape["head_dim"], "head_dim": None,
    }  # fmt: skip


def _lfm2_moe(draw: Random, shape: Shape) -> Shape:
    dense = draw.randint(0, shape["num_hidden_layers"] - 1)
    experts = _experts(draw)
    del experts["shared_expert_intermediate_size"]
    return _lfm2(draw, shape) | experts | {"num_dense_layers": dense}


def _olmo(draw: Random, shape: Shape) -> Shape:
    heads = draw.choice((2, 3, 4))
    return {
        "layer_types": _turns(
            draw, shape["num_hidden_layers"], ("linear_attention", "full_attention")
        ),
        "linear_num_key_heads": heads, "linear_num_value_heads": heads,
        "linear_key_head_dim": draw.choice((8, 12)),
        "linear_value_head_dim": draw.choice((16, 24)),
        "linear_conv_kernel_dim": draw.choice((2, 3, 4)),
        "linear_allow_neg_eigval": draw.random() < 0.5,
        "hidden_size": shape["num_attention_heads"] * shape["head_dim"], "head_dim": None,
    }  # fmt: skip


def _indexed(draw: Random, shape: Shape) -> Shape:
    heads, count = draw.choice((2, 4)), shape["num_hidden_layers"]
    return INDEXED | {
        "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": None,
        # Few heads score many keys with zero exactly, and which of them is chosen is no rule.
        "index_topk": draw.choice((3, 7, 20)), "index_n_heads": draw.choice((16, 24)),
        "index_head_dim": draw.choice((16, 24)), "kv_lora_rank": draw.choice((16, 32)),
        "q_lora_rank": draw.choice((16, 24)), "v_head_dim": draw.choice((8, 12, 16)),
        "first_k_dense_replace": draw.randint(0, count), "n_shared_experts": draw.choice((1, 2)),
        "moe_intermediate_size": draw.choice((16, 48)),
    }  # fmt: skip


def _glm5(draw: Random, shape: Shape) -> Shape:
    later = [draw.choice(("full", "shared")) for _ in range(shape["num_hidden_layers"] - 1)]
    return _indexed(draw, shape) | {"indexer_types": ["full", *later]}


def _llama4(draw: Random, shape: Shape) -> Shape:
    count = shape["num_hidden_layers"]
    return {
        "attention_chunk_size": draw.choice((5, 10, 16)), "floor_scale": draw.choice((3, 6)),
        "no_rope_layers": [draw.choice((0, 1)) for _ in range(count)], "attn_scale": 0.4,
        "intermediate_size_mlp": draw.choice((48, 96)), "num_local_experts": draw.choice((2, 4)),
        "num_experts_per_tok": draw.choice((1, 2)), "use_qk_norm": draw.random() < 0.5,
        "interleave_moe_layer_step": draw.choice((1, 2)), "attention_bias": draw.random() < 0.5,
    }  # fmt: skip


_OWN: Final[dict[str, Callable[[Random, Shape], Shape]]] = {
    "axk2": _indexed, "bamba": _bamba, "deepseek_v32": _indexed, "falcon_h1": _falcon_h1,
    "glm_moe_dsa": _glm5, "granitemoehybrid": _granite, "hy_v4": _indexed, "kimi_linear": _kimi,
    "lfm2": _lfm2, "lfm2_moe": _lfm2_moe, "llama4_text": _llama4, "mamba2": _mamba2,
    "nemotron_h": _nemotron, "olmo_hybrid": _olmo, "qwen3_5_moe_text": _delta_experts,
    "qwen3_5_text": _delta, "qwen3_next": _delta_experts, "zamba2": _zamba2,
}  # fmt: skip
TYPES: Final = (*STATEFUL, *SPARSE)
