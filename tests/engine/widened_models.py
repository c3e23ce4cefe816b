"""Tiny checkpoints whose weights are small floats, packed as each tool writes them, each with its
plain twin of the numbers that they stand for.

The packing is written from the formats' own descriptions, independently of baton.engine.checkpoint:
a reader that widens wrongly gives other logits than the twin.
"""

from __future__ import annotations

import json
import shutil
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
        padding = (0, -inputs % columns, 0, -outputs % rows)
        padded = torch.nn.functional.pad(weight, padding)
        blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        scale = blocks.abs().amax((1, 3)).clamp(min=1e-9) / FP8_MAX
        wide = scale.repeat_interleave(rows, 0)[:outputs]
        wide = wide.repeat_interleave(columns, 1)[:, :inputs]
        stored = (weight / wide).to(torch.float8_e4m3fn)
        name = f"{module}.weight_scale_inv" if inverse else f"{module}.weight_scale"
        tensors = {
            f"{module}.weight": stored,
            name: scale.view(()) if strategy == "tensor" else scale,
            f"{module}.input_scale": torch.ones(()),
        }
        return tensors, stored.float() * wide

    return pack


def _uneven(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Blocks of 48 x 80, which divide neither side."""
    outputs, inputs = weight.shape
    scale = torch.rand(-(-outputs // 48), -(-inputs // 80)) / 100 + 0.001
    wide = scale.repeat_interleave(48, 0)[:outputs].repeat_interleave(80, 1)[:, :inputs]
    stored = (weight / wide).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    tensors = {f"{module}.weight": stored, f"{module}.weight_scale_inv": scale}
    return tensors, stored.float() * wide


E2M1: Final = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def nearest(numbers: Tensor, table: Tensor) -> Tensor:
    """Index of the entry of `table` that is nearest to each number."""
    return (numbers.unsqueeze(-1) - table).abs().argmin(-1)


def low_first(indices: Tensor) -> Tensor:
    """4-bit numbers [..., n] -> bytes [..., n / 2], the first in the low half."""
    return (indices[..., 0::2] | indices[..., 1::2] << 4).to(torch.uint8)


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """weight [..., in] -> indices [..., G, 32], exponents uint8 [..., G], numbers [..., in]."""
    groups = weight.unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1).clamp(min=1e-9).log2().floor().int() - 2
    scale = torch.exp2(exponents.float())
    indices = nearest(groups / scale[..., None], E2M1)
    numbers = (E2M1[indices] * scale[..., None]).flatten(-2)
    return indices, (exponents + 127).to(torch.uint8), numbers


def mxfp4_packed(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    indices, exponents, numbers = mxfp4(weight)
    tensors = {
        f"{module}.weight_packed": low_first(indices.flatten(-2)),
        f"{module}.weight_scale": exponents,
    }
    return tensors, numbers


def nvfp4(tool: str) -> Packer:
    """`tool`: compressed (its global scale divides) or modelopt (its second scale multiplies)."""

    def pack(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        groups = weight.unflatten(1, (-1, 16))
        whole = FP8_MAX * 6 / weight.abs().max()
        scale = (groups.abs().amax(-1) / 6 * whole).to(torch.float8_e4m3fn)
        second = 1 / whole
        factors = scale.float() / whole if tool == "compressed" else scale.float() * second
        indices = nearest(groups / factors.clamp(min=1e-9)[..., None], E2M1)
        packed = low_first(indices.flatten(1))
        tensors = {f"{module}.weight_scale": scale, f"{module}.input_scale": torch.ones(())}
        if tool == "compressed":
            tensors[f"{module}.weight_packed"] = packed
            tensors[f"{module}.weight_global_scale"] = whole.view(1)
            tensors[f"{module}.input_global_scale"] = torch.ones(1)
        else:
            tensors |= {f"{module}.weight": packed, f"{module}.weight_scale_2": second}
        return tensors, (E2M1[indices] * factors[..., None]).flatten(1)

    return pack


NF4: Final = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
])  # fmt: skip
FP4: Final = (
    torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3]) / 12
)


def bits4(kind: str, *, nested: bool = False, block: int = 64) -> Packer:
    """`nested`: the factors of blocks are rounded to 8 bits, too (double quantization)."""
    table = {"nf4": NF4, "fp4": FP4}[kind]

    def pack(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        flat = weight.flatten()
        count = -(-flat.numel() // block)
        blocks = torch.nn.functional.pad(flat, (0, count * block - flat.numel())).view(-1, block)
        largest = blocks.abs().amax(1).clamp(min=1e-9)
        said: dict[str, Any] = {
            "quant_type": kind, "blocksize": block, "dtype": "float32",
            "shape": list(weight.shape),
        }  # fmt: skip
        name = f"{module}.weight"
        tensors = {f"{name}.quant_map": table.clone(), f"{name}.absmax": largest}
        if nested:
            offset = largest.mean().item()
            inner = torch.nn.functional.pad(largest - offset, (0, -count % 256)).view(-1, 256)
            outer = inner.abs().amax(1).clamp(min=1e-9)
            code = torch.linspace(-1, 1, 256)
            rounded = nearest(inner / outer[:, None], code).flatten()[:count].to(torch.uint8)
            largest = code[rounded.int()] * outer[torch.arange(count) // 256] + offset
            said |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            tensors |= {
                f"{name}.absmax": rounded, f"{name}.nested_absmax": outer,
                f"{name}.nested_quant_map": code,
            }  # fmt: skip
        indices = nearest(blocks / largest[:, None], table)
        numbers = (table[indices] * largest[:, None]).flatten()[: flat.numel()].view_as(weight)
        halves = indices.flatten()[: flat.numel()]
        tensors[name] = (halves[0::2] << 4 | halves[1::2]).to(torch.uint8).view(-1, 1)
        state = json.dumps(said).encode()
        tensors[f"{name}.quant_state.bitsandbytes__{kind}"] = torch.tensor(
            list(state), dtype=torch.uint8
        )
        return tensors, numbers

    return pack


def bits8(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    largest = weight.abs().amax(1)
    stored = (weight / largest[:, None] * 127).round().to(torch.int8)
    tensors = {
        f"{module}.weight": stored, f"{module}.SCB": largest,
        f"{module}.weight_format": torch.zeros((), dtype=torch.uint8),
    }  # fmt: skip
    return tensors, stored * largest[:, None] * 7.874015718698502e-3


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
    "mxfp4": Format(
        compressed_floats(4, "group", "mxfp4-pack-quantized", group_size=32),
        mxfp4_packed, "mxfp4",
    ),
    "nvfp4": Format(
        compressed_floats(4, "tensor_group", "nvfp4-pack-quantized", group_size=16),
        nvfp4("compressed"), "nvfp4",
    ),
    "nf4": Format(
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        bits4("nf4"), "bitsandbytes 4-bit",
    ),
    "nf4-nested": Format(
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
         "bnb_4bit_use_double_quant": True},
        bits4("nf4", nested=True), "bitsandbytes 4-bit",
    ),
    "fp4": Format(
        {"quant_method": "bitsandbytes", "_load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        bits4("fp4", block=128), "bitsandbytes 4-bit",
    ),
    "llm-int8": Format(
        {"quant_method": "bitsandbytes", "load_in_8bit": True}, bits8, "bitsandbytes 8-bit"
    ),
    "nvfp4-modelopt": Format(
        {"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4("modelopt"), "nvfp4"
    ),
}  # fmt: skip


def make_widened(name: str, path: Path, kind: str = "llama", **overrides: Any) -> tuple[Path, Path]:
    """(checkpoint of FORMATS[name], its plain twin): the projections packed, the rest as it was."""
    packed_path, twin = path / "packed", path / "twin"
    for each in (packed_path, twin):
        make_tiny_model(kind, each, **(SHAPE | overrides))
    return widened_pair(name, packed_path, twin)


def widened_pair(
    name: str, packed_path: Path, twin: Path, ends: tuple[str, ...] = ("_proj.weight",)
) -> tuple[Path, Path]:
    """As make_widened, out of two copies of one plain checkpoint, which are overwritten."""
    format_ = FORMATS[name]
    plain = load_file(twin / "model.safetensors")
    packed = dict(plain)
    for key, weight in list(plain.items()):
        if key.endswith(ends):
            tensors, numbers = format_.pack(key.removesuffix(".weight"), weight)
            del packed[key]
            packed.update(tensors)
            plain[key] = numbers.contiguous()
    save_file(packed, packed_path / "model.safetensors", {"format": "pt"})
    save_file(plain, twin / "model.safetensors", {"format": "pt"})
    edit_config(packed_path, quantization_config=format_.config)
    return packed_path, twin


def packed_experts(path: Path, twin: Path) -> tuple[Path, Path]:
    """Return a copy of the gpt-oss `twin` in path/packed, its experts in MXFP4 as published, and
    `twin`, whose experts become the same numbers in its own dtype."""
    packed = path / "packed"
    shutil.copytree(twin, packed)
    plain = load_file(twin / "model.safetensors")
    tensors = dict(plain)
    for name in [name for name in plain if name.endswith(("gate_up_proj", "down_proj"))]:
        indices, exponents, numbers = mxfp4(plain[name].float().transpose(1, 2).contiguous())
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = low_first(indices), exponents
        plain[name] = numbers.transpose(1, 2).contiguous()
        del tensors[name]
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    save_file(plain, twin / "model.safetensors", {"format": "pt"})
    edit_config(packed, quantization_config={"quant_method": "mxfp4"})
    return packed, twin


def edit_config(path: Path, **changes: Any) -> None:
    """Set keys of config.json."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def edit_tensors(path: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the tensors of a checkpoint of one file."""
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
