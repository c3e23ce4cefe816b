"""Tiny random models of Qwen3-Next and Qwen3.5: each kind of MLP, gates, rotated share, images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from tests.golden.random_models import save_random, with_random_norms
from tests.golden.stateful_models import DELTA, MOE
from tests.tiny_models import VOCAB_SIZE, write_tiny_tokenizer

_THIRDS: Final[dict[str, Any]] = {
    "linear_num_value_heads": 6, "linear_num_key_heads": 2, "linear_key_head_dim": 24,
    "linear_value_head_dim": 12, "linear_conv_kernel_dim": 3,
}  # fmt: skip
HYBRID_MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "qwen3 next": ("qwen3_next", {**DELTA, **MOE}),
    "qwen3 next, half dense": (
        "qwen3_next",
        {**DELTA, **MOE, **_THIRDS, "decoder_sparse_step": 2, "norm_topk_prob": False},
    ),
    "qwen3.5": ("qwen3_5_text", {**DELTA, "tie_word_embeddings": True}),
    "qwen3.5, biased": (
        "qwen3_5_text",
        {
            **DELTA, **_THIRDS, "attention_bias": True, "num_hidden_layers": 4, "layer_types": None,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1], "mrope_interleaved": True,
            },
        },
    ),
    "qwen3.5 moe": ("qwen3_5_moe_text", {**DELTA, **MOE}),
    "qwen3 next, attention alone": (
        "qwen3_next", {**DELTA, **MOE, "layer_types": ["full_attention"] * 3},
    ),
}  # fmt: skip
# Four key heads, so that four ranks can share them; segments of unequal sizes.
RANKED: Final[dict[str, Any]] = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
}  # fmt: skip
_WITH_IMAGES: Final[dict[str, tuple[Any, Any]]] = {
    "qwen3_5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
    "qwen3_5_moe": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration),
}


def save_hybrid(path: Path, name: str, **overrides: Any) -> Path:
    """HYBRID_MODELS[name], its norms and other vectors random too."""
    family, sizes = HYBRID_MODELS[name]
    return with_random_norms(save_random(path, family, **{**sizes, **overrides}))


def save_with_images(path: Path, family: str) -> Path:
    """A tiny Qwen3.5 with a model of images and a layer that drafts, as published: the experts of a
    layer are one tensor, gate before up."""
    config, made = _WITH_IMAGES[family]
    text = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 256, **DELTA, **(MOE if family.endswith("moe") else {}),
        **({} if family.endswith("moe") else {"intermediate_size": 96}),
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
        "out_hidden_size": 64, "num_position_embeddings": 16,
    }  # fmt: skip
    torch.manual_seed(0)
    model = made(config(text_config=text, vision_config=vision))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 1.2 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(path)
    write_tiny_tokenizer(path)
    tensors = load_file(path / "model.safetensors")
    tensors["mtp.fc.weight"] = torch.randn(64, 128)
    save_file(_stacked(tensors), path / "model.safetensors", {"format": "pt"})
    described = json.loads((path / "config.json").read_text())
    described["text_config"] |= {"attn_output_gate": True, "mamba_ssm_dtype": "float32"}
    described["text_config"] |= {"mtp_num_hidden_layers": 1, "full_attention_interval": 4}
    (path / "config.json").write_text(json.dumps(described))
    return with_random_norms(path)


def _stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts that have tensors of their own, as one tensor per layer."""
    kept = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    whole = {name: tensor for name, tensor in tensors.items() if name.endswith("_proj")}
    layers = {name.partition("experts.")[0] for name in tensors if ".experts.0." in name}
    for layer in layers:
        prefix, count = layer + "experts.", MOE["num_experts"]
        each = [
            [tensors[f"{prefix}{index}.{part}_proj.weight"] for index in range(count)]
            for part in ("gate", "up", "down")
        ]
        gates, ups, downs = (torch.stack(part) for part in each)
        kept[prefix + "gate_up_proj"] = torch.cat((gates, ups), dim=1)
        kept[prefix + "down_proj"] = downs
    return kept | whole
