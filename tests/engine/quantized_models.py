"""Tiny quantized checkpoints, packed bit by bit as each tool writes them, each with its plain twin.

The numbers are rounded here, independently of baton.engine.quantization.integer; the twin holds the
dequantized weights, so a loader that reads the layout wrongly gives other logits.
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

from tests.golden.random_models import save_random
from tests.tiny_models import KINDS, make_tiny_model

SHAPE: Final[dict[str, Any]] = {
    "hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "num_hidden_layers": 2,
}  # fmt: skip
MIXTURE: Final[dict[str, Any]] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
}  # fmt: skip
GROUP: Final = 32


@dataclass(frozen=True, slots=True)
class Rounded:
    """Unsigned integers q [out, in];
    w = (q - zeros) * scales, both [out, groups]; `groups` [in]: each input's."""

    q: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor

    @property
    def weight(self) -> Tensor:
        return (self.q - self.zeros[:, self.groups]) * self.scales[:, self.groups]


def round_to_grid(
    weight: Tensor, bits: int, group: int, *, symmetric: bool, groups: Tensor | None = None
) -> Rounded:
    """Round weight [out, in] to `bits` per group; `groups` assigns inputs freely (desc_act)."""
    outputs, inputs = weight.shape
    if groups is None:
        groups = torch.arange(inputs) // group
    count, top = inputs // group, 2**bits - 1
    scales, zeros = torch.zeros(outputs, count), torch.zeros(outputs, count)
    for g in range(count):
        part = weight[:, groups == g]
        if symmetric:
            scales[:, g] = part.abs().amax(1) / (2 ** (bits - 1) - 1)
            zeros[:, g] = 2 ** (bits - 1)
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales[:, g] = (high - low) / top
            zeros[:, g] = (-low / scales[:, g]).round()
    scales = scales.half().float()  # as stored
    q = (weight / scales[:, groups] + zeros[:, groups]).round().clamp(0, top)
    return Rounded(q, scales, zeros, groups)


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Unsigned [rows, n] -> int32 [rows, n * bits / 32], lowest bits first."""
    per_word = 32 // bits
    words = torch.zeros(numbers.shape[0], numbers.shape[1] // per_word, dtype=torch.int64)
    for i in range(per_word):
        words |= numbers[:, i::per_word].long() << bits * i
    return torch.where(words >= 2**31, words - 2**32, words).int()


Packer = Callable[[str, Rounded], dict[str, Tensor]]


def gptq(bits: int, *, v2: bool = False) -> Packer:
    def packer(module: str, r: Rounded) -> dict[str, Tensor]:
        zeros = (r.zeros if v2 else r.zeros - 1).long() % 2**bits
        return {
            f"{module}.qweight": pack(r.q, bits).t().contiguous(),
            f"{module}.qzeros": pack(zeros.t(), bits),
            f"{module}.scales": r.scales.t().half().contiguous(),
            f"{module}.g_idx": r.groups.int(),
            f"{module}.bias": torch.zeros(r.q.shape[0]).half(),
        }

    return packer


def awq(module: str, r: Rounded) -> dict[str, Tensor]:
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def packed(numbers: Tensor) -> Tensor:  # [rows, out], outputs of each word shuffled
        return pack(numbers.unflatten(1, (-1, 8))[:, :, order].flatten(1), 4)

    return {
        f"{module}.qweight": packed(r.q.t()),
        f"{module}.qzeros": packed(r.zeros.t()),
        f"{module}.scales": r.scales.t().half().contiguous(),
    }


def compressed_int8(bits: int) -> Packer:
    """Numbers of so many bits, an int8 each."""

    def packer(module: str, r: Rounded) -> dict[str, Tensor]:
        return {
            f"{module}.weight": (r.q - (1 << bits - 1)).to(torch.int8),
            f"{module}.weight_scale": r.scales.clone(),
        }

    return packer


def compressed_packed(bits: int, *, symmetric: bool = True) -> Packer:
    def packer(module: str, r: Rounded) -> dict[str, Tensor]:
        tensors = {
            f"{module}.weight_packed": pack(r.q, bits),
            f"{module}.weight_scale": r.scales.half(),
            f"{module}.weight_shape": torch.tensor(r.q.shape),
        }
        if not symmetric:
            tensors[f"{module}.weight_zero_point"] = pack(r.zeros.t(), bits).t().contiguous()
        return tensors

    return packer


def compressed_config(
    form: str, bits: int, strategy: str, *, activations: bool, symmetric: bool = True
) -> dict[str, Any]:
    """As llm-compressor writes it."""
    inputs = {
        "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True,
        "group_size": None, "observer": None,
    }  # fmt: skip
    weights = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy,
        "group_size": GROUP if strategy == "group" else None, "dynamic": False, "actorder": None,
    }  # fmt: skip
    group = {
        "targets": ["Linear"], "weights": weights, "output_activations": None,
        "input_activations": inputs if activations else None,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed",
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recipe:
    """One kind of checkpoint: its config, its rounding, its packing."""

    config: dict[str, Any]
    bits: int
    group: int | None  # None: one per output
    symmetric: bool
    packer: Packer
    shuffled: bool = False  # desc_act: groups are no runs of inputs


RECIPES: Final = {
    "w8a8": Recipe(
        compressed_config("int-quantized", 8, "channel", activations=True),
        8, None, True, compressed_int8(8),
    ),
    "w4a8": Recipe(
        compressed_config("int-quantized", 4, "group", activations=True),
        4, GROUP, True, compressed_int8(4),
    ),
    "w8a16": Recipe(
        compressed_config("int-quantized", 8, "channel", activations=False),
        8, None, True, compressed_int8(8),
    ),
    "w8a16-packed": Recipe(
        compressed_config("pack-quantized", 8, "channel", activations=False),
        8, None, True, compressed_packed(8),
    ),
    "w4a16": Recipe(
        compressed_config("pack-quantized", 4, "group", activations=False),
        4, GROUP, True, compressed_packed(4),
    ),
    "w4a16-asymmetric": Recipe(
        compressed_config("pack-quantized", 4, "group", activations=False, symmetric=False),
        4, GROUP, False, compressed_packed(4, symmetric=False),
    ),
    "gptq": Recipe(
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
        4, GROUP, True, gptq(4),
    ),
    "gptq-asymmetric-v2": Recipe(
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False,
         "checkpoint_format": "gptq_v2"},
        4, GROUP, False, gptq(4, v2=True),
    ),
    "gptq-asymmetric": Recipe(
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False},
        4, GROUP, False, gptq(4),
    ),
    "gptq-desc-act": Recipe(
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": True},
        4, GROUP, True, gptq(4), shuffled=True,
    ),
    "gptq-8bit": Recipe(
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "desc_act": False, "sym": True},
        8, GROUP, True, gptq(8),
    ),
    "awq": Recipe(
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True,
         "version": "gemm", "modules_to_not_convert": None},
        4, GROUP, False, awq,
    ),
}  # fmt: skip


def with_groups_of(size: int, config: dict[str, Any]) -> dict[str, Any]:
    """A recipe's quantization_config that states another group size."""
    if config["quant_method"] != "compressed-tensors":
        return config | {"group_size": size}
    group = config["config_groups"]["group_0"]
    weights = group["weights"] | {"group_size": size}
    return config | {"config_groups": {"group_0": group | {"weights": weights}}}


def make_plain(kind: str, path: Path) -> Path:
    """A tiny model or mixture with weights as they are, of SHAPE."""
    if kind in KINDS:
        return make_tiny_model(kind, path, **SHAPE)
    return save_random(path, kind, **SHAPE, **MIXTURE)


def make_quantized(
    name: str, path: Path, kind: str = "llama", ignored: tuple[str, ...] = ()
) -> tuple[Path, Path]:
    """(quantized checkpoint, its plain twin) of RECIPES[name], of a tiny model or a mixture;
    modules ending in one of `ignored` stay plain."""
    quantized, twin = path / "quantized", path / "twin"
    for each in (quantized, twin):
        make_plain(kind, each)
    return quantized_pair(name, quantized, twin, ignored)


def quantized_pair(
    name: str,
    quantized: Path,
    twin: Path,
    ignored: tuple[str, ...] = (),
    products: tuple[str, ...] = ("_proj",),
) -> tuple[Path, Path]:
    """As make_quantized, out of two copies of one plain checkpoint, which are overwritten; modules
    ending in one of `products` become integers."""
    recipe = RECIPES[name]
    plain = load_file(twin / "model.safetensors")
    packed = dict(plain)
    generator = torch.Generator().manual_seed(1)
    for key, weight in list(plain.items()):
        module = key.removesuffix(".weight")
        if not module.endswith(products) or module.endswith(ignored or ("\0",)):
            continue
        group = recipe.group or weight.shape[1]
        groups = torch.arange(weight.shape[1]) // group
        if recipe.shuffled:
            groups = groups[torch.randperm(weight.shape[1], generator=generator)]
        rounded = round_to_grid(
            weight, recipe.bits, group, symmetric=recipe.symmetric, groups=groups
        )
        del packed[key]
        packed.update(recipe.packer(module, rounded))
        plain[key] = rounded.weight
    save_file(packed, quantized / "model.safetensors", {"format": "pt"})
    save_file(plain, twin / "model.safetensors", {"format": "pt"})
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = recipe.config
    (quantized / "config.json").write_text(json.dumps(config))
    return quantized, twin
