"""The compiled CPU products with integer weights (quantized.h, w8a8.h) as Python calls.

`integer_kernels_for` returns them if three things hold: the library of library.py is there, its
products are the fastest (library.product_kernels_for), and the processor has the few further
instructions of AVX-512 that they need. The maker of the layers checks all shapes (quantization.py).
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from baton.engine.kernels.cpu.build import missing
from baton.engine.kernels.cpu.library import CpuKernels, product_kernels_for, wide_pointer

logger = logging.getLogger(__name__)
NARROW: Final = 32  # outputs of a panel; panels come in pairs
QUAD: Final = 4  # inputs that are packed together; the size of a group is a multiple of it
LINE: Final = 64  # bytes
MAX_INPUTS: Final = 1 << 16  # of w8a8: so many products uint8 x int8 sum up to 32 bits
PEAK_FLOOR: Final = 1e-30  # avoids a division by 0 for an output whose weights are all 0

_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_int64


class _IntegerArgs(ctypes.Structure):
    """IntegerArgs of quantized.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("x", "panels", "peaks", "bias", "y")),
        *((name, _SIZE) for name in ("rows", "inputs", "outputs", "groups", "bits", "has_zeros")),
        ("wide", _POINTER),
    )


class _IntegerPack(ctypes.Structure):
    """IntegerPack of quantized.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("values", "scales", "zeros", "panels")),
        *((name, _SIZE) for name in ("outputs", "inputs", "groups", "bits")),
    )


class _W8A8Args(ctypes.Structure):
    """W8A8Args of w8a8.h."""

    _fields_ = (
        *((n, _POINTER) for n in ("x", "panels", "extra", "scales", "bias", "y")),
        *((n, _POINTER) for n in ("rounded", "row_scales")),
        *((n, _SIZE) for n in ("rows", "inputs", "outputs", "quads")),
        ("wide", _POINTER),
    )


@dataclass(frozen=True, slots=True)
class PackedIntegers:
    """Weights [outputs, inputs] of 4 or 8 bits in the panels of quantized.h."""

    panels: Tensor  # uint8
    peaks: Tensor  # [outputs] float32
    inputs: int
    groups: int
    bits: Literal[4, 8]
    has_zeros: bool


@dataclass(frozen=True, slots=True)
class PackedInt8:
    """Weights [outputs, inputs] of 8 bits in the panels of w8a8.h."""

    panels: Tensor  # int8
    extra: Tensor  # [outputs] int32
    scales: Tensor  # [outputs] float32
    inputs: int


class IntegerKernels:
    """The library's functions. Stateless; safe from any thread."""

    def __init__(self, kernels: CpuKernels) -> None:
        library = kernels.library
        self._pack = library.baton_pack_integers
        self._linear = library.baton_integer_linear
        self._pack_w8a8 = library.baton_pack_w8a8
        self._pack_w8a8.argtypes = (*[_POINTER] * 3, _SIZE, _SIZE)
        self._w8a8 = library.baton_w8a8_linear
        for function in (self._pack, self._linear, self._pack_w8a8, self._w8a8):
            function.restype = None

    def pack(
        self, values: Tensor, scales: Tensor, zeros: Tensor | None, bits: Literal[4, 8]
    ) -> PackedIntegers:
        """Pack values [outputs, inputs] int8 (4 bits: -8..7) for `linear`.

        scales and zeros are [outputs, groups]; zeros are small integers. The inputs of a group are
        a multiple of QUAD.
        """
        (outputs, inputs), groups = values.shape, scales.shape[1]
        scales = scales.float()
        peaks = scales.abs().amax(1).clamp_(min=PEAK_FLOOR)
        shares = (scales / peaks[:, None]).half().contiguous()
        shifts = None if zeros is None else zeros.half().contiguous()
        lines = inputs // QUAD * (1 if bits == 4 else 2)
        lines += groups * (1 if zeros is None else 2)
        panels = torch.zeros(_panels(outputs), lines, LINE, dtype=torch.uint8)
        values = values.contiguous()
        args = _IntegerPack(
            values.data_ptr(), shares.data_ptr(), None if shifts is None else shifts.data_ptr(),
            panels.data_ptr(), outputs, inputs, groups, bits,
        )  # fmt: skip
        self._pack(ctypes.byref(args))
        return PackedIntegers(panels, peaks, inputs, groups, bits, zeros is not None)

    def linear(
        self,
        x: Tensor,
        weight: PackedIntegers,
        bias: Tensor | None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Tensor:
        """Multiply x [T, inputs] bfloat16; return [T, outputs] as bfloat16, or unrounded as
        float32.

        See quantized.h.
        """
        x = x.contiguous()
        rows, outputs = x.shape[0], weight.peaks.shape[0]
        y = torch.empty(rows, outputs, dtype=dtype)
        args = _IntegerArgs(
            x.data_ptr(), weight.panels.data_ptr(), weight.peaks.data_ptr(),
            None if bias is None else bias.data_ptr(), y.data_ptr(),
            rows, weight.inputs, outputs, weight.groups, weight.bits, weight.has_zeros,
            wide_pointer(y),
        )  # fmt: skip
        self._linear(ctypes.byref(args))
        return y

    def pack_w8a8(self, values: Tensor, scales: Tensor) -> PackedInt8:
        """Pack values [outputs, inputs] int8, with at most MAX_INPUTS inputs, and scales
        [outputs].
        """
        outputs, inputs = values.shape
        values = values.contiguous()
        shape = (_panels(outputs), -(-inputs // QUAD), NARROW, QUAD)
        panels = torch.zeros(shape, dtype=torch.int8)
        extra = torch.empty(outputs, dtype=torch.int32)
        self._pack_w8a8(values.data_ptr(), panels.data_ptr(), extra.data_ptr(), outputs, inputs)
        return PackedInt8(panels, extra, scales.float().contiguous(), inputs)

    def w8a8_linear(
        self,
        x: Tensor,
        weight: PackedInt8,
        bias: Tensor | None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Tensor:
        """Multiply x [T, inputs] bfloat16, rounded to 8 bits per row.

        Return [T, outputs] as bfloat16, or unrounded as float32. See w8a8.h.
        """
        x = x.contiguous()
        rows, outputs, quads = x.shape[0], weight.scales.shape[0], weight.panels.shape[1]
        y = torch.empty(rows, outputs, dtype=dtype)
        rounded = torch.empty(rows, quads, QUAD, dtype=torch.uint8)
        row_scales = torch.empty(rows, dtype=torch.float32)
        args = _W8A8Args(
            x.data_ptr(), weight.panels.data_ptr(), weight.extra.data_ptr(),
            weight.scales.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(),
            rounded.data_ptr(), row_scales.data_ptr(), rows, weight.inputs, outputs, quads,
            wide_pointer(y),
        )  # fmt: skip
        self._w8a8(ctypes.byref(args))
        return y


def _panels(outputs: int) -> int:
    return -(-outputs // (2 * NARROW)) * 2


def integer_kernels_for(dtype: torch.dtype, device: torch.device) -> IntegerKernels | None:
    """Return the kernels if they serve this dtype and device and are the fastest, else None."""
    compiled = product_kernels_for(dtype, device)
    if compiled is None:
        return None
    if lacking := missing(compiled.instructions.integer_flags):
        logger.info("integer weights: torch's kernels, no %s here", ", ".join(lacking))
        return None
    return IntegerKernels(compiled)
