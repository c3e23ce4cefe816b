"""Random tiny checkpoints of any family, as transformers itself writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny_models import VOCAB_SIZE, write_tiny_tokenizer


def save_random(path: Path, model_type: str, **overrides: Any) -> Path:
    """A random checkpoint of any transformers family, sharpened, with our tokenizer."""
    torch.manual_seed(0)
    path.mkdir(parents=True, exist_ok=True)
    write_tiny_tokenizer(path)
    base = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 256, "pad_token_id": 0,
    }  # fmt: skip
    config = AutoConfig.for_model(model_type, **{**base, **overrides})
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 1.2 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(path)
    return path


def with_random_norms(path: Path) -> Path:
    """Norms and biases that were all alike become random ones."""
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(2)
    for each, tensor in tensors.items():
        if tensor.dim() == 1:
            tensors[each] = tensor + 0.2 * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path
