"""Weights of 4-bit floats (E2M1) with a scale per group of inputs, widened: MXFP4 and NVFP4.

A byte holds two numbers, the first in its low half. `G` is the number of groups of inputs:

    gpt-oss             NAME_blocks uint8 [experts, out, G, 16], NAME_scales uint8 [experts, out, G]
                        (E8M0); together they store a tensor NAME [experts, in, out]
    compressed-tensors  weight_packed uint8 [out, in / 2], weight_scale [out, G]: E8M0 (MXFP4), or
                        float8, divided by weight_global_scale (NVFP4)
    modelopt            weight uint8 [out, in / 2], weight_scale float8 [out, G]; times
                        weight_scale_2

Source: OCP Microscaling Formats 1.0; transformers integrations/mxfp4.py; compressed_tensors
compressors/nvfp4 and mxfp4; modelopt torch/quantization/qtensor/nvfp4_tensor.py.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from baton.engine.checkpoint.float8 import UNREAD, read_scale
from baton.engine.checkpoint.quantized_checkpoint import StoredTensors
from baton.engine.checkpoint.stored import Readable, Slab, StoredTensor, WidenedTensor, refused
from baton.engine.quantization.int_weight import IntWeight

_MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of E2M1, by its 3 lowest bits
_GROUP_SIZES: Final = (16, 32)  # of NVFP4 and of MXFP4
_BLOCKS, _BLOCK_SCALES = "_blocks", "_scales"
_NO_EXPONENT, _EXPONENT_BIAS = 255, 127  # E8M0: the code of NaN, the bias of exponents
_SHARES: Final = 14  # how many powers of two below 1 are normal numbers of float16


@dataclass(frozen=True, slots=True)
class _Groups:
    """The stored parts of one tensor. `whole`: a second scale for the whole tensor, if there is
    one. `divides`: scales are divided by it, else multiplied."""

    packed: StoredTensor
    scale: StoredTensor
    whole: StoredTensor | None = None
    divides: bool = False

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return (self.packed, self.scale, *(() if self.whole is None else (self.whole,)))


def widen_float4(
    config: Mapping[str, Any], stored: Mapping[str, StoredTensor]
) -> dict[str, Readable]:
    """Return all tensors under the names of the unquantized checkpoint, 4-bit floats widened.
    Raises ModelRefused for weights without fitting scales."""
    found: dict[str, Readable] = {}
    scales: set[str] = set()
    for name, tensor in stored.items():
        plain, names = _names(name, stored)
        if names is None:
            found[name] = tensor
            continue
        scales.update(names)
        if tensor.dtype != torch.uint8 or names[0] not in stored:
            raise refused(plain, f"it is not of bytes with their scales ({names[0]})")
        whole = stored.get(names[-1]) if len(names) > 1 else None
        divides = names[-1].endswith("_global_scale")
        parts = _Groups(tensor, stored[names[0]], whole, divides)
        found[plain] = _experts(plain, parts) if name.endswith(_BLOCKS) else _matrix(plain, parts)
    return {
        name: tensor
        for name, tensor in found.items()
        if name not in scales and not name.endswith(UNREAD)
    }


def _names(name: str, stored: Mapping[str, StoredTensor]) -> tuple[str, Sequence[str] | None]:
    """Return (name of the unquantized tensor, names of its scale and of the whole tensor's scale)
    if tensor `name` holds packed numbers; else (name, None)."""
    if name.endswith(_BLOCKS):
        plain = name.removesuffix(_BLOCKS)
        return plain, (plain + _BLOCK_SCALES,)
    if name.endswith(".weight_packed"):
        plain = name.removesuffix("_packed")
        return plain, (f"{plain}_scale", f"{plain}_global_scale")
    if name.endswith(".weight") and stored[name].dtype == torch.uint8:
        return name, (f"{name}_scale", f"{name}_scale_2")
    return name, None


def _matrix(name: str, parts: _Groups) -> WidenedTensor:
    """Return a matrix [out, in] of packed numbers. Raises ModelRefused for shapes that do not
    fit."""
    packed, scale = parts.packed.shape, parts.scale.shape
    fits = len(packed) == len(scale) == 2 and packed[0] == scale[0]
    if not fits or 2 * packed[1] not in (size * scale[1] for size in _GROUP_SIZES):
        raise refused(name, f"scales {scale} do not fit packed weights {packed}")
    shape = (packed[0], 2 * packed[1])

    def open_slabs() -> Slab:
        bytes_ = parts.packed.read().unflatten(1, (scale[1], -1))
        return functools.partial(_slab, bytes_, _factors(name, parts), False)

    return WidenedTensor(name, shape, parts.parts, open_slabs)


def _experts(name: str, parts: _Groups) -> WidenedTensor:
    """Return the stacked experts [experts, in, out] of gpt-oss. Raises ModelRefused for shapes that
    do not fit."""
    packed, scale = parts.packed.shape, parts.scale.shape
    if len(packed) != 4 or packed[:-1] != scale:
        raise refused(name, f"scales {scale} do not fit blocks {packed}")
    experts, outputs, groups, size = packed
    shape = (experts, groups * size * 2, outputs)

    def open_slabs() -> Slab:
        return functools.partial(_slab, parts.packed.read(), _factors(name, parts), True)

    return WidenedTensor(name, shape, parts.parts, open_slabs, torch.bfloat16)


def expert_matrix(
    name: str, packed: StoredTensor, scale: StoredTensor, rows: slice
) -> WidenedTensor:
    """Return the outputs `rows` of one expert of gpt-oss, a matrix [outputs, in], from `packed`
    uint8 [out, G, 16] and `scale` uint8 [out, G]."""
    outputs, groups, size = packed.shape
    shape = (len(range(outputs)[rows]), groups * size * 2)
    parts = _Groups(packed, scale)

    def open_slabs() -> Slab:
        return functools.partial(_slab, packed.read()[rows], _factors(name, parts)[rows], False)

    return WidenedTensor(name, shape, parts.parts, open_slabs, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Float4Layout:
    """The layout of a product that is kept in MXFP4: weight_blocks uint8 [out, G, 16],
    weight_scales uint8 [out, G]. See quantized_checkpoint.Layout."""

    tensors: tuple[str, ...] = ("weight_blocks", "weight_scales")

    def weight(self, module: str, stored: StoredTensors) -> IntWeight | Tensor:
        """See Layout.weight. The weight is widened to bfloat16 if the kernels could not hold its
        scales exactly."""
        codes = stored.read_as_stored(f"{module}.weight_blocks")
        exponents = stored.read_as_stored(f"{module}.weight_scales")
        if bool((exponents == _NO_EXPONENT).any()):
            raise refused(f"{module}.weight", "a scale of it is not finite")
        values = (_pairs() * 2).to(torch.int8)[codes.int()].flatten(1)
        scales = torch.exp2(exponents.float() - _EXPONENT_BIAS - 1)
        weight = IntWeight(4, values, scales, floats=True)
        # Kernels keep each scale as a float16 share of the greatest scale of its output.
        spread = exponents.amax(1).int() - exponents.amin(1).int()
        return weight if int(spread.max()) <= _SHARES else weight.dequantized(torch.bfloat16)


def float4_layout(names: frozenset[str]) -> Float4Layout | None:
    """Return the layout of MXFP4 if one of the tensors `names` is kept in it, else None."""
    layout = Float4Layout()
    return layout if any(name.endswith("." + layout.tensors[0]) for name in names) else None


def _factors(name: str, parts: _Groups) -> Tensor:
    """Return the scale of each group, float32, times or over the whole tensor's scale. Raises
    ModelRefused if that is not one number, or is a divisor of zero."""
    factors = read_scale(name, parts.scale)
    if parts.whole is None:
        return factors
    whole = read_scale(name, parts.whole)
    if whole.numel() != 1 or (parts.divides and not bool(whole)):
        raise refused(name, "its global scale is not one number that is not zero")
    return factors / whole.view(()) if parts.divides else factors * whole.view(())


def _slab(packed: Tensor, factors: Tensor, transposed: bool, start: int, stop: int) -> Tensor:
    """Widen entries start..stop of packed [..., G, bytes], factors [..., G] to numbers
    [..., G * bytes * 2]; `transposed`: with the last two dimensions exchanged."""
    numbers = _pairs()[packed[start:stop].int()].flatten(-2)
    numbers = (numbers * factors[start:stop].unsqueeze(-1)).flatten(-2)
    return numbers.transpose(1, 2) if transposed else numbers


@functools.cache
def _pairs() -> Tensor:
    """Return the two numbers that each byte holds: [256, 2]."""
    numbers = torch.tensor([*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)])
    bytes_ = torch.arange(256)
    return torch.stack((numbers[bytes_ & 15], numbers[bytes_ >> 4]), -1)
