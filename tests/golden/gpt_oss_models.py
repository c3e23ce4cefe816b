"""Tiny random GPT-OSS checkpoints: sinks, windows, biases, routers and experts of any sizes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from tests.golden.random_models import save_random

YARN: Final = {
    "rope_type": "yarn", "rope_theta": 15000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 64, "truncate": False,
}  # fmt: skip
PLAIN: Final = {"rope_type": "default", "rope_theta": 10000.0}
FULL, SLIDING = "full_attention", "sliding_attention"
SMALL: Final[dict[str, Any]] = {
    "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9, "rope_parameters": YARN,
    "swiglu_limit": 1.5,  # some numbers reach it
}  # fmt: skip
# Sizes that the compiled kernels, and groups of integers, take.
WIDE: Final[dict[str, Any]] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
GPT_OSS_MODELS: Final[dict[str, dict[str, Any]]] = {
    "as published": {},
    "many experts, tied": {
        "num_local_experts": 9, "num_experts_per_tok": 4, "tie_word_embeddings": True,
    },
    "no biases, truncated": {
        "attention_bias": False, "rope_parameters": YARN | {"truncate": True}, "swiglu_alpha": 1.1,
    },
    "windows behind": {
        "layer_types": [FULL, FULL, SLIDING], "rope_parameters": PLAIN, "sliding_window": 5,
        "num_key_value_heads": 4,
    },
    "one head of keys": {"num_key_value_heads": 1, "head_dim": 32, "num_experts_per_tok": 4},
}  # fmt: skip


def save_gpt_oss(path: Path, **overrides: Any) -> Path:
    """A random checkpoint, its sinks, norms and biases random too."""
    save_random(path, "gpt_oss", **{**SMALL, **overrides})
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(2)
    for name, tensor in tensors.items():
        if tensor.dim() == 1 or name.endswith("_bias"):
            size = 1.0 if name.endswith("sinks") else 0.2
            tensors[name] = tensor + size * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def random_sizes(seed: int) -> dict[str, Any]:
    """A configuration that transformers can run."""
    rng = random.Random(seed)
    kv_heads, layers = rng.choice([1, 2, 4]), rng.randint(1, 4)
    experts = rng.randint(2, 8)
    rope = rng.choice([PLAIN, YARN, YARN | {"factor": 8.0, "truncate": True, "beta_fast": 8.0}])
    return {
        "num_key_value_heads": kv_heads, "num_attention_heads": kv_heads * rng.choice([1, 2, 4]),
        "head_dim": rng.choice([8, 16, 32]), "hidden_size": rng.choice([32, 48, 80]),
        "intermediate_size": rng.choice([24, 40, 64]), "num_hidden_layers": layers,
        "num_local_experts": experts, "num_experts_per_tok": rng.randint(1, experts),
        "sliding_window": rng.choice([2, 5, 13, 64]), "rope_parameters": rope,
        "layer_types": rng.choice([None, [rng.choice([FULL, SLIDING]) for _ in range(layers)]]),
        "attention_bias": rng.random() < 0.7, "tie_word_embeddings": rng.random() < 0.3,
        "swiglu_limit": rng.choice([0.7, 2.0, 7.0]), "swiglu_alpha": rng.choice([1.702, 1.0]),
    }  # fmt: skip
