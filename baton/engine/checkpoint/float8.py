"""Weights of 8-bit floats with scales beside them, widened: fp8 as several tools write it.

    weight         float8 [out, in], or of all experts [experts, out, in]
    weight_scale   a single scale; one per output, [out] or [out, 1]; one per group of inputs
                   [out, G]; or one per block [ceil(out / 128), ceil(in / 128)]. DeepSeek calls it
                   `weight_scale_inv`, but it is a factor too. Float, or E8M0 (a power of two,
                   MXFP8)

w = weight * scale, computed in float32. Source: DeepSeek-V3 inference/kernel.py (weight_dequant),
transformers integrations/finegrained_fp8.py, compressed_tensors quantization/lifecycle/forward.py.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from baton.engine.checkpoint.stored import Readable, Slab, StoredTensor, WidenedTensor, refused

_FLOATS: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES: Final = ("_scale_inv", "_scale")
# Tensors that are not read: scales of activations and of KV, which Baton does not round by them.
UNREAD: Final = (
    ".input_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale", ".prob_scale",
    ".input_scale_ub", ".input_zero_point", ".weight_zero_point", ".input_global_scale",
)  # fmt: skip


def widen_float8(
    config: Mapping[str, Any], stored: Mapping[str, StoredTensor]
) -> dict[str, Readable]:
    """Return all tensors under the names of the unquantized checkpoint, 8-bit floats widened.
    Raises ModelRefused for weights without fitting scales."""
    block = _block_of(config)
    found: dict[str, Readable] = {}
    scales: set[str] = set()
    for name, tensor in stored.items():
        if tensor.dtype not in _FLOATS or name.endswith(UNREAD):
            found[name] = tensor
            continue
        scale = next((name + end for end in _SCALES if name + end in stored), None)
        if scale is None:
            raise refused(name, "it is of 8-bit floats, but there is no scale of it")
        scales.add(scale)
        found[name] = _widened(name, tensor, stored[scale], block)
    return {
        name: tensor
        for name, tensor in found.items()
        if name not in scales and not name.endswith(UNREAD)
    }


def read_scale(name: str, stored: StoredTensor) -> Tensor:
    """Read the scales of tensor `name` as float32. Raises ModelRefused if one is not finite."""
    scale = stored.read()
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    scale = scale.float()
    if not bool(torch.isfinite(scale).all()):
        raise refused(name, "a scale of it is not finite")
    return scale


def _block_of(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the size of a block that shares a scale, (outputs, inputs); None if the config states
    none. Raises ModelRefused for one that is not two sizes."""
    groups = config.get("config_groups") or {}
    declared = [(group.get("weights") or {}).get("block_structure") for group in groups.values()]
    declared.append(config.get("weight_block_size"))
    sizes = next((each for each in declared if each), None)
    if sizes is None:
        return None
    if isinstance(sizes, str):  # "128x128", as older tools write it
        sizes = [int(part) for part in sizes.split("x") if part.isdigit()]
    valid = isinstance(sizes, list) and len(sizes) == 2
    if not valid or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise refused("weight_block_size", f"{sizes} are no two sizes")
    return sizes[0], sizes[1]


def _widened(
    name: str, weight: StoredTensor, scale: StoredTensor, block: tuple[int, int] | None
) -> WidenedTensor:
    rows, columns = _covered(name, weight.shape, scale.shape, block)

    def open_slabs() -> Slab:
        factors = read_scale(name, scale)
        if factors.numel() > 1:
            factors = factors.view(*weight.shape[:-2], -1, factors.shape[-1] if columns else 1)
        return functools.partial(_slab, weight.read(), factors, rows, columns)

    return WidenedTensor(name, weight.shape, (weight, scale), open_slabs)


def _covered(
    name: str, weight: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int] | None
) -> tuple[int, int]:
    """Return how many outputs and how many inputs share a scale. 0 inputs = all inputs; (0, 0) =
    the whole tensor has one scale.

    Raises ModelRefused for scales that do not fit.
    """
    if all(size == 1 for size in scale):
        return 0, 0
    *lead, outputs, inputs = weight if len(weight) > 1 else (0, 0)
    if scale in ((*lead, outputs), (*lead, outputs, 1)) and outputs:
        return 1, 0
    if block is not None and outputs:
        rows, columns = block
        if scale == (*lead, -(-outputs // rows), -(-inputs // columns)):
            return rows, columns
    elif len(scale) == len(weight) > 1 and scale[:-1] == weight[:-1] and not inputs % scale[-1]:
        return 1, inputs // scale[-1]
    raise refused(name, f"scales {scale} do not fit weights {weight}")


def _slab(
    weight: Tensor, factors: Tensor, rows: int, columns: int, start: int, stop: int
) -> Tensor:
    """Widen entries start..stop of `weight`. `factors`: one scale, or [..., row blocks, column
    blocks]. `rows`, `columns`: see _covered."""
    numbers = weight[start:stop].float()
    if factors.numel() == 1:
        return numbers * factors.view(())
    if weight.dim() == 2:
        factors = factors[torch.arange(start, stop) // rows]
    else:
        places = torch.arange(weight.shape[-2]) // rows
        factors = factors[start:stop].index_select(-2, places)
    if columns:
        factors = factors.repeat_interleave(columns, -1)[..., : weight.shape[-1]]
    return numbers * factors
