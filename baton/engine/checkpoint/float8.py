"""Weights of 8-bit floats with scales beside them: fp8 as several tools write it. They are widened,
or kept where a GPU multiplies them (quantization/float8.py).

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
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from baton.engine.checkpoint.kinds import FLOAT8_GROUP, Rounded
from baton.engine.checkpoint.stored import Readable, Slab, StoredTensor, WidenedTensor, refused
from baton.engine.quantization.float8 import Float8Weight, InputRounding

_FLOATS: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
_KEPT_BLOCK: Final = (FLOAT8_GROUP, FLOAT8_GROUP)
_NAN: Final = 0x7F  # of e4m3, without its sign
_SCALES: Final = ("_scale_inv", "_scale")
_STATIC: Final = ".input_scale"
# Tensors without a place in the model: scales of KV and of activations. Of these, kept weights read
# static ones.
UNREAD: Final = (
    ".input_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale", ".prob_scale",
    ".input_scale_ub", ".input_zero_point", ".weight_zero_point", ".input_global_scale",
)  # fmt: skip


def widen_float8(
    config: Mapping[str, Any], stored: Mapping[str, StoredTensor], kept: Rounded | None = None
) -> dict[str, Readable]:
    """Return all tensors under the names of the unquantized checkpoint, 8-bit floats widened.
    `kept`: how inputs are rounded that products multiply by 8-bit floats; these can be read as they
    are, too (WidenedTensor.open_kept). None = no product does.

    Raises ModelRefused for weights without fitting scales.
    """
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
        static = stored.get(name.removesuffix(".weight") + _STATIC)
        rounded = None if kept is None else _InputScales(kept, static)
        found[name] = _widened(name, tensor, stored[scale], block, rounded)
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


@dataclass(frozen=True, slots=True)
class _InputScales:
    """How a product's inputs are rounded, and the tensor of its static scale, if there is one."""

    rounded: Rounded
    static: StoredTensor | None

    def rounding(self, name: str, group: int) -> InputRounding:
        """Read it. Raises ModelRefused for a static scale that is no positive number."""
        if not self.rounded.static:
            return InputRounding(group, ceiling=self.rounded.ceiling)
        assert self.static is not None, "`keep` has asked for it"
        stated = read_scale(name, self.static).max().item()
        if stated <= 0:
            raise refused(name, "the scale of its inputs is not above 0")
        return InputRounding(group, static=stated)

    def keep(self, weight: StoredTensor, rows: int, columns: int) -> bool:
        """Whether a product takes `weight`, of which rows x columns share a scale, see _covered."""
        if weight.dtype != torch.float8_e4m3fn or len(weight.shape) != 2:
            return False
        fits = not columns or (rows, columns) == _KEPT_BLOCK
        return fits and (self.static is not None or not self.rounded.static)


def _widened(
    name: str,
    weight: StoredTensor,
    scale: StoredTensor,
    block: tuple[int, int] | None,
    inputs: _InputScales | None,
) -> WidenedTensor:
    rows, columns = _covered(name, weight.shape, scale.shape, block)

    def open_slabs() -> Slab:
        factors = read_scale(name, scale)
        if factors.numel() > 1:
            factors = factors.view(*weight.shape[:-2], -1, factors.shape[-1] if columns else 1)
        return functools.partial(_slab, weight.read(), factors, rows, columns)

    tensor = WidenedTensor(name, weight.shape, (weight, scale), open_slabs)
    if inputs is None or not inputs.keep(weight, rows, columns):
        return tensor

    def open_kept() -> Float8Weight:
        rounding = inputs.rounding(name, columns or weight.shape[1])
        return _kept(name, weight, read_scale(name, scale), rows, rounding)

    return replace(tensor, open_kept=open_kept)


def _kept(
    name: str, weight: StoredTensor, factors: Tensor, rows: int, rounding: InputRounding
) -> Float8Weight:
    """Read a weight as it is stored. `factors`: a scale for all outputs, or for each `rows` of
    them. Raises ModelRefused if a weight is not finite."""
    values, outputs = weight.read(), weight.shape[0]
    if bool(((values.view(torch.uint8) & _NAN) == _NAN).any()):
        raise refused(name, "some of its weights are not finite")
    rows = rows or outputs
    scales = factors.view(-(-outputs // rows), -1).repeat_interleave(rows, 0)[:outputs]
    return Float8Weight(values, scales.t().contiguous(), rounding)


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
