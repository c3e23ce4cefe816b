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
from baton.engine.memory import huge_pages

logger = logging.getLogger(__name__)
NARROW: Final = 32  # outputs of a panel; panels come in pairs
QUAD: Final = 4  # inputs that are packed together; the size of a group is a multiple of it
LINE: Final = 64  # bytes
MAX_INPUTS: Final = 1 << 16  # of w8a8: sums of uint8 x int8 products fit 32 bits
HALF_BITS: Final = 15  # the greatest of an output's scales is held as at most 2 ** 15
FLOATS4: Final = -4  # quantized.h's: in place of a number of bits
W4A8: Final = 48  # likewise: 4 bits by rows rounded to int8
QUAD_BYTES: Final[dict[int, int]] = {
    FLOATS4: 64,
    4: 64,
    W4A8: 64,
    6: 96,
    8: 128,
}  # of NARROW outputs
PEAK_FLOOR: Final = 1e-30  # an output of weights that are all 0 has no scale to divide by

_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_int64


class _IntegerArgs(ctypes.Structure):
    """IntegerArgs of quantized.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("x", "panels", "peaks", "bias", "y")),
        *((name, _SIZE) for name in ("rows", "inputs", "outputs", "groups", "bits", "has_zeros")),
        ("stride", _SIZE),
        ("wide", _POINTER),
        ("integers", _SIZE),
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
        *((n, _SIZE) for n in ("integers", "stride")),
    )


@dataclass(frozen=True, slots=True)
class PackedIntegers:
    """Weights [outputs, inputs] of 4, 6 or 8 bits, FLOATS4 or W4A8, in quantized.h's panels."""

    panels: Tensor  # uint8
    peaks: Tensor  # [outputs] float32
    inputs: int
    groups: int
    bits: Literal[-4, 4, 6, 8, 48]
    has_zeros: bool

    @property
    def outputs(self) -> int:
        """Width of the product."""
        return self.peaks.shape[0]


@dataclass(frozen=True, slots=True)
class PackedInt8:
    """Weights [outputs, inputs] of 8 bits in the panels of w8a8.h."""

    panels: Tensor  # int8
    extra: Tensor  # [outputs] int32
    scales: Tensor  # [outputs] float32
    inputs: int

    @property
    def outputs(self) -> int:
        """Width of the product."""
        return self.scales.shape[0]


class IntegerKernels:
    """The library's functions. Stateless; safe from any thread."""

    def __init__(self, kernels: CpuKernels) -> None:
        library = kernels.library
        self._pack = library.baton_pack_integers
        self._linear = library.baton_integer_linear
        self._packs_sixes = bool(library.baton_packs_sixes())
        self._pack_w8a8 = library.baton_pack_w8a8
        self._pack_w8a8.argtypes = (*[_POINTER] * 3, _SIZE, _SIZE)
        self._w8a8 = library.baton_w8a8_linear
        for function in (self._pack, self._linear, self._pack_w8a8, self._w8a8):
            function.restype = None

    def pack(
        self, values: Tensor, scales: Tensor, zeros: Tensor | None, bits: Literal[-4, 4, 8, 48]
    ) -> PackedIntegers:
        """Pack values [outputs, inputs] int8 (4 bits: -8..7; FLOATS4: see IntWeight.floats).

        scales and zeros are [outputs, groups]; the zeros are numbers of float16, of W4A8
        integers. The inputs of a group are a multiple of QUAD. 8 bits that 6 can hold are packed
        in 6 where the library has these.
        """
        (outputs, inputs), groups = values.shape, scales.shape[1]
        packed = 6 if bits == 8 and self._packs_sixes and _fit_sixes(values, groups) else bits
        peaks, shares = peaks_and_shares(scales.float())
        shifts = None if zeros is None else zeros.half().contiguous()
        lines = inputs // QUAD * QUAD_BYTES[packed] // LINE
        lines += groups * (1 if zeros is None else 2)
        panels = huge_pages.zeros(_panels(outputs), lines, LINE, dtype=torch.uint8)
        values = values.contiguous()
        args = _IntegerPack(
            values.data_ptr(), shares.data_ptr(), None if shifts is None else shifts.data_ptr(),
            panels.data_ptr(), outputs, inputs, groups, packed,
        )  # fmt: skip
        self._pack(ctypes.byref(args))
        return PackedIntegers(panels, peaks, inputs, groups, packed, zeros is not None)

    def linear(
        self,
        x: Tensor,
        weight: PackedIntegers,
        bias: Tensor | None,
        dtype: torch.dtype = torch.bfloat16,
        integers: bool = False,
    ) -> Tensor:
        """Multiply x [T, inputs] bfloat16; return [T, outputs] as bfloat16, or unrounded as
        float32. `integers`: x holds integers of int8, so W4A8 does not round it.

        See quantized.h.
        """
        x = x.contiguous()
        rows, outputs = x.shape[0], weight.outputs
        y = torch.empty(rows, outputs, dtype=dtype)
        args = _IntegerArgs(
            x.data_ptr(), weight.panels.data_ptr(), weight.peaks.data_ptr(),
            None if bias is None else bias.data_ptr(), y.data_ptr(),
            rows, weight.inputs, outputs, weight.groups, weight.bits, weight.has_zeros, outputs,
            wide_pointer(y), integers,
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
        panels = huge_pages.zeros(*shape, dtype=torch.int8)
        extra = torch.empty(outputs, dtype=torch.int32)
        self._pack_w8a8(values.data_ptr(), panels.data_ptr(), extra.data_ptr(), outputs, inputs)
        return PackedInt8(panels, extra, scales.float().contiguous(), inputs)

    def w8a8_linear(
        self,
        x: Tensor,
        weight: PackedInt8,
        bias: Tensor | None,
        dtype: torch.dtype = torch.bfloat16,
        integers: bool = False,
    ) -> Tensor:
        """Multiply x [T, inputs] bfloat16, rounded to 8 bits per row; with `integers` x holds
        integers of int8 already.

        Return [T, outputs] as bfloat16, or unrounded as float32. See w8a8.h.
        """
        x = x.contiguous()
        rows, outputs, quads = x.shape[0], weight.outputs, weight.panels.shape[1]
        y = torch.empty(rows, outputs, dtype=dtype)
        rounded = torch.empty(rows, quads, QUAD, dtype=torch.uint8)
        row_scales = torch.empty(rows, dtype=torch.float32)
        args = _W8A8Args(
            x.data_ptr(), weight.panels.data_ptr(), weight.extra.data_ptr(),
            weight.scales.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(),
            rounded.data_ptr(), row_scales.data_ptr(), rows, weight.inputs, outputs, quads,
            wide_pointer(y), integers,
        )  # fmt: skip
        self._w8a8(ctypes.byref(args))
        return y


def peaks_and_shares(scales: Tensor) -> tuple[Tensor, Tensor]:
    """scales [outputs, groups] float32 -> peaks [outputs] and scales over them, float16.

    Scales that a power of two makes float16 numbers are held exactly, others with 11 bits; that is
    so down to 2 ** -29 of the output's greatest one.
    """
    most = scales.abs().amax(1, keepdim=True).clamp_(min=PEAK_FLOOR)
    powers = torch.exp2(torch.frexp(most).exponent.float() - HALF_BITS)
    shares = (scales / powers).half()
    exact = (shares.float() * powers == scales).all(1, keepdim=True)
    peaks = torch.where(exact, powers, most * 2.0**-HALF_BITS)
    return peaks.flatten(), (scales / peaks).half().contiguous()


def _fit_sixes(values: Tensor, groups: int) -> bool:
    """Whether all are of -32..31, and each group fills whole lines."""
    low, high = values.aminmax()
    return values.shape[1] // groups % (2 * QUAD) == 0 and int(low) >= -32 and int(high) < 32


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
