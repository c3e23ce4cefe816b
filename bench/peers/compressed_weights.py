"""A Hugging Face checkpoint with integer weights in the format of `compressed-tensors`, for vLLM.

It rounds to nearest the products of a dense model: int8 per output channel with activations in int8
per token, or int4 in groups of 128, both symmetric. Embeddings and the head stay as they are. One
safetensors file.
Source: compressed-tensors, compressors/pack_quantized.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.peers.protocol import Unsupported

GROUP: Final = 128
NIBBLES: Final = 8  # of one int32
PRODUCT: Final = "_proj.weight"
FORMATS: Final[dict[str, dict[str, Any]]] = {
    "int8": {
        "format": "int-quantized",
        "weights": {"num_bits": 8, "strategy": "channel", "dynamic": False},
        "input_activations": {"num_bits": 8, "strategy": "token", "dynamic": True},
    },
    "int4": {
        "format": "pack-quantized",
        "weights": {"num_bits": 4, "strategy": "group", "group_size": GROUP, "dynamic": False},
    },
}


def convert(model: Path, quantization: str, path: Path) -> None:
    """Write the checkpoint `model` with integer weights into the folder `path`.

    Raises Unsupported.
    """
    config = json.loads((model / "config.json").read_text())
    if quantization not in FORMATS:
        raise Unsupported(f"no {quantization} weights")
    if "num_experts" in config or "n_routed_experts" in config:
        raise Unsupported(f"no {quantization} weights of a mixture")
    tensors = dict[str, Tensor]()
    for name, tensor in load_file(model / "model.safetensors").items():
        if name.endswith(PRODUCT):
            stem = name.removesuffix("weight")
            parts = rounded(tensor) if quantization == "int8" else grouped(tensor)
            tensors |= {f"{stem}{part}": value for part, value in parts.items()}
        else:
            tensors[name] = tensor
    shutil.copytree(model, path, ignore=shutil.ignore_patterns("model.safetensors"))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    told = {"quantization_config": described(quantization)}
    (path / "config.json").write_text(json.dumps(config | told))


def described(quantization: str) -> dict[str, Any]:
    """Return what config.json says of these weights."""
    group = {
        name: {**given, "type": "int", "symmetric": True} if isinstance(given, dict) else given
        for name, given in FORMATS[quantization].items()
    }
    return {
        "quant_method": "compressed-tensors", "format": group["format"],
        "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], **group}},
    }  # fmt: skip


def rounded(weight: Tensor) -> dict[str, Tensor]:
    """Return weights [out, in] as int8 and their scales [out, 1] in the weights' dtype."""
    scale = (weight.float().abs().amax(1, keepdim=True) / 127).to(weight.dtype)
    numbers = (weight.float() / scale.float()).round().clamp(-127, 127)
    return {"weight": numbers.to(torch.int8), "weight_scale": scale}


def grouped(weight: Tensor) -> dict[str, Tensor]:
    """Return weights [out, in] as nibbles in int32 [out, in / 8], the first in the lowest bits.

    Scales are [out, in / 128] in the weights' dtype; a nibble is 8 more than its number.
    """
    groups = weight.float().unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(2, keepdim=True) / 7).to(weight.dtype)
    numbers = (groups / scale.float()).round().clamp(-8, 7).flatten(1).to(torch.int64) + 8
    places = torch.arange(NIBBLES) * 4
    packed = (numbers.unflatten(1, (-1, NIBBLES)) << places).sum(2)
    return {
        "weight_packed": packed.to(torch.int32),  # the highest bit becomes the sign
        "weight_scale": scale.squeeze(2),
        "weight_shape": torch.tensor(weight.shape),
    }
