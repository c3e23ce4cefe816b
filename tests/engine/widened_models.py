"""Tiny checkpoints whose weights are small floats, packed as each tool writes them, each with its
plain twin of the numbers that they stand for.

The packing is written from the formats' own descriptions, independently of baton.engine.checkpoint:
a reader that widens wrongly gives other logits than the twin.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny_models import make_tiny_model

SHAPE: Final[dict[str, Any]] = {
    "hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "num_hidden_layers": 2,
}  # fmt: skip
FP8_MAX: Final = 448.0

# (module, weight [out, in]) -> its tensors, and the numbers that they stand for in float32.
Packer = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]


def float8(strategy: str, *, inverse: bool = False, block: int = 128, group: int = 32) -> Packer:
    """`strategy`: tensor, channel, group, block. Static scales of activations lie beside."""

    def pack(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        outputs, inputs = weight.shape
        rows, columns = {
            "tensor": (outputs, inputs), "channel": (1, inputs), "group": (1, group),
            "block": (block, block),
        }[strategy]  # fmt: skip
        scale = torch.zeros(-(-outputs // rows), -(-inputs // columns))
        stored, plain = torch.zeros_like(weight), torch.zeros_like(weight)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                at = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
                scale[i, j] = weight[at].abs().max().clamp(min=1e-9) / FP8_MAX
                stored[at] = (weight[at] / scale[i, j]).to(torch.float8_e4m3fn).float()
                plain[at] = stored[at] * scale[i, j]
        name = f"{module}.weight_scale_inv" if inverse else f"{module}.weight_scale"
        tensors = {
            f"{module}.weight": stored.to(torch.float8_e4m3fn),
            name: scale.view(()) if strategy == "tensor" else scale,
            f"{module}.input_scale": torch.ones(()),
        }
        return tensors, plain

    return pack


def _uneven(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Blocks of 48 x 80, which divide neither side."""
    outputs, inputs = weight.shape
    scale = torch.rand(-(-outputs // 48), -(-inputs // 80)) / 100 + 0.001
    wide = scale.repeat_interleave(48, 0)[:outputs].repeat_interleave(80, 1)[:, :inputs]
    stored = (weight / wide).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    tensors = {f"{module}.weight": stored, f"{module}.weight_scale_inv": scale}
    return tensors, stored.float() * wide


def compressed_floats(bits: int, strategy: str, form: str, **weights: Any) -> dict[str, Any]:
    """As llm-compressor writes it."""
    described = {"num_bits": bits, "type": "float", "symmetric": True, "strategy": strategy}
    inputs = {"num_bits": bits, "type": "float", "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": described | weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed",
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Format:
    """One kind of checkpoint: its quantization_config, how a module's weight is packed, and the
    kind that Baton names."""

    config: dict[str, Any]
    pack: Packer
    kind: str


FORMATS: Final = {
    "fp8-tensor": Format(
        compressed_floats(8, "tensor", "float-quantized"), float8("tensor"), "fp8"
    ),
    "fp8-channel": Format(
        compressed_floats(8, "channel", "float-quantized"), float8("channel"), "fp8"
    ),
    "fp8-group": Format(
        compressed_floats(8, "group", "naive-quantized", group_size=32), float8("group"), "fp8"
    ),
    "fp8-block": Format(
        compressed_floats(8, "block", "float-quantized", block_structure=[128, 128]),
        float8("block"), "fp8",
    ),
    "fp8-deepseek": Format(
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
         "weight_block_size": [128, 128]},
        float8("block", inverse=True), "fp8",
    ),
    "fp8-small-blocks": Format(
        {"quant_method": "fp8", "weight_block_size": [48, 80]},
        _uneven, "fp8",
    ),
    "fp8-static": Format(
        {"quant_method": "fp8", "activation_scheme": "static"}, float8("tensor"), "fp8"
    ),
    "fp8-modelopt": Format(
        {"quant_method": "modelopt", "quant_algo": "FP8"}, float8("tensor"), "fp8"
    ),
}  # fmt: skip


def make_widened(name: str, path: Path, kind: str = "llama", **overrides: Any) -> tuple[Path, Path]:
    """(checkpoint of FORMATS[name], its plain twin): the projections packed, the rest as it was."""
    format_ = FORMATS[name]
    packed_path, twin = path / "packed", path / "twin"
    for each in (packed_path, twin):
        make_tiny_model(kind, each, **(SHAPE | overrides))
    plain = load_file(twin / "model.safetensors")
    packed = dict(plain)
    for key, weight in list(plain.items()):
        if key.endswith("_proj.weight"):
            tensors, numbers = format_.pack(key.removesuffix(".weight"), weight)
            del packed[key]
            packed.update(tensors)
            plain[key] = numbers.contiguous()
    save_file(packed, packed_path / "model.safetensors", {"format": "pt"})
    save_file(plain, twin / "model.safetensors", {"format": "pt"})
    edit_config(packed_path, quantization_config=format_.config)
    return packed_path, twin


def edit_config(path: Path, **changes: Any) -> None:
    """Set keys of config.json."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def edit_tensors(path: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the tensors of a checkpoint of one file."""
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
