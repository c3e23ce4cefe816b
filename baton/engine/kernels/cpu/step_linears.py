"""The weights of a compiled step's products, in the form of step_integers.h.

Not here: which formats of a model's layers they are (models/compiled_step.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from baton.engine.kernels.cpu.quantized import PackedInt8, PackedIntegers

_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_int64


class LinearFields(ctypes.Structure):
    """StepLinear of step_integers.h."""

    _fields_ = tuple((name, _POINTER) for name in ("panels", "bias", "integers"))


class _StepIntegers(ctypes.Structure):
    """StepIntegers of step_integers.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("panels", "scales", "extra")),
        *((name, _SIZE) for name in ("groups", "bits", "has_zeros", "outputs", "stride")),
        ("next", _POINTER),
    )


@dataclass(frozen=True, slots=True)
class StepLinear:
    """The weights of a product, in bfloat16 (CpuKernels.pack) or integers, and its bias.

    Several PackedIntegers have outputs side by side and differ in format; experts have one. The
    bias is [outputs] bfloat16, or None.
    """

    weights: Tensor | PackedInt8 | tuple[PackedIntegers, ...]
    bias: Tensor | None


class StepLinears:
    """The weights of several products as C structs, one StepLinear after the other at `address`.
    None stands where a layer has no such product.
    """

    def __init__(self, linears: Sequence[StepLinear | None]) -> None:
        self._kept = tuple(linears)
        self._integers = [None if each is None else _integers(each.weights) for each in linears]
        self.array = (LinearFields * len(linears))(*map(self._pointers, linears, self._integers))
        self.address = ctypes.addressof(self.array)

    @staticmethod
    def _pointers(
        linear: StepLinear | None, integers: ctypes.Array[_StepIntegers] | None
    ) -> LinearFields:
        if linear is None:
            return LinearFields()
        weights, bias = linear.weights, linear.bias
        return LinearFields(
            weights.data_ptr() if isinstance(weights, Tensor) else None,
            None if bias is None else bias.data_ptr(),
            ctypes.addressof(integers) if integers else None,
        )


def _integers(
    weights: Tensor | PackedInt8 | tuple[PackedIntegers, ...],
) -> ctypes.Array[_StepIntegers] | None:
    """The parts of a product, each of which points to the one behind it."""
    if isinstance(weights, Tensor):
        return None
    if isinstance(weights, PackedInt8):
        panels, outputs = weights.panels.data_ptr(), weights.outputs
        part = _StepIntegers(
            panels, weights.scales.data_ptr(), weights.extra.data_ptr(), 1, 8, 0, outputs, outputs
        )
        return (_StepIntegers * 1)(part)
    stride = sum(part.outputs for part in weights)
    parts = (_StepIntegers * len(weights))(
        *(
            _StepIntegers(
                part.panels.data_ptr(), part.peaks.data_ptr(), None,
                part.groups, part.bits, part.has_zeros, part.outputs, stride,
            )
            for part in weights
        )
    )  # fmt: skip
    for index in range(len(weights) - 1):
        parts[index].next = ctypes.addressof(parts[index + 1])
    return parts
