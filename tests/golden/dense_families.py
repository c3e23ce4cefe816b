"""Tiny random models of Gemma 1 to 3, Phi-3 and GLM-4: each norm, window, rope, rotated share."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Final

from tests.golden.random_models import save_random, with_random_norms

_SHORT: Final = [1.0 + index / 8 for index in range(6)]
LONGROPE: Final = {
    "type": "longrope", "short_factor": _SHORT, "long_factor": [4.0] * 6,
}  # fmt: skip
_GEMMA: Final[dict[str, Any]] = {"sliding_window": 9, "query_pre_attn_scalar": 20}
_GEMMA3: Final = {**_GEMMA, "sliding_window_pattern": 2}
DENSE_MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "gemma": ("gemma", {"num_key_value_heads": 1, "tie_word_embeddings": False}),
    "gemma 2": (
        "gemma2",
        {
            **_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
            "tie_word_embeddings": False,
        },
    ),
    "gemma 2, no caps": (
        "gemma2",
        {**_GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma 3": ("gemma3_text", _GEMMA3),
    "gemma 3, linear": (
        "gemma3_text",
        {
            **_GEMMA3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 5e5,
            "rope_local_base_freq": 3000.0, "attention_bias": True, "tie_word_embeddings": False,
            "final_logit_softcapping": 2.0,
        },
    ),
    "phi 3": ("phi3", {"sliding_window": 9, "num_key_value_heads": 4}),
    "phi 4 mini": (
        "phi3",
        {
            "partial_rotary_factor": 0.75, "original_max_position_embeddings": 64,
            "rope_scaling": LONGROPE, "tie_word_embeddings": True,
        },
    ),
    "glm": ("glm", {"attention_bias": True}),
    "glm 4": ("glm4", {"attention_bias": False, "partial_rotary_factor": 0.25}),
    "glm 4, yarn": (
        "glm4",
        {
            "attention_bias": True, "tie_word_embeddings": True,
            "rope_scaling": {
                "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
            },
        },
    ),
}  # fmt: skip


def save_dense(path: Path, name: str, **overrides: Any) -> Path:
    """DENSE_MODELS[name], its norms and biases random too."""
    family, sizes = DENSE_MODELS[name]
    return with_random_norms(save_random(path, family, **{**sizes, **overrides}))


def random_shape(seed: int) -> tuple[str, dict[str, Any]]:
    """A family of DENSE_MODELS and a random shape of it."""
    choose = random.Random(seed)
    name = choose.choice(sorted(DENSE_MODELS))
    heads = choose.choice([2, 4, 6])
    dim = choose.choice([16, 32]) if name != "phi 4 mini" else 16
    shape: dict[str, Any] = {
        "num_attention_heads": heads, "num_key_value_heads": choose.choice([1, 2, heads]),
        "head_dim": dim, "num_hidden_layers": choose.choice([1, 2, 4]),
        "intermediate_size": choose.choice([40, 96]), "rms_norm_eps": choose.choice([1e-5, 1e-6]),
        "hidden_size": heads * dim if name.startswith("phi") else heads * choose.choice([8, 24]),
        "tie_word_embeddings": choose.random() < 0.5,
    }  # fmt: skip
    if name.startswith("gemma 3"):
        shape["sliding_window_pattern"] = choose.choice([2, 3])
    if name.startswith(("gemma 2", "gemma 3")):
        shape |= {"sliding_window": choose.choice([5, 16]), "query_pre_attn_scalar": dim + 3}
    if name == "phi 3":
        shape |= {
            "sliding_window": choose.choice([None, 7]),
            "partial_rotary_factor": choose.choice([0.5, 1.0]),
        }
    if name in ("glm", "glm 4"):
        shape |= {"partial_rotary_factor": choose.choice([0.25, 0.5, 1.0])}
    if name.startswith("glm"):
        shape |= {"attention_bias": choose.random() < 0.5}
    return name, shape
