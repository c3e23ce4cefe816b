"""The experts of a mixture layer in one compiled call (experts.h): their weights, and the call.

Not here: which mixture layers use it, which experts a row chooses, and how their results are mixed
(models/experts.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from baton.engine.kernels.cpu.library import CpuKernels
from baton.engine.kernels.cpu.step import StepLinear, StepLinears

_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_int64


class _ExpertsArgs(ctypes.Structure):
    """ExpertsArgs of experts.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("gate_ups", "downs", "x", "chosen", "y", "scratch")),
        *((name, _SIZE) for name in ("rows", "hidden", "inner", "per_token")),
    )


class ExpertKernels:
    """The weights of a layer's experts, ready for one call. Safe from any thread."""

    def __init__(
        self,
        kernels: CpuKernels,
        gate_ups: Sequence[StepLinear],
        downs: Sequence[StepLinear],
        inner: int,
    ) -> None:
        """Take one of each kind per expert: gate_up [H] -> [2 * inner], down [inner] -> [H].

        None has a bias. All gate_ups have one format, and so have all downs. H and inner are
        multiples of 16.
        """
        self._gate_ups, self._downs = StepLinears(gate_ups), StepLinears(downs)
        self._inner, self._count = inner, len(gate_ups)
        self._call = kernels.library.baton_experts
        self._call.restype = None

    def __call__(self, hidden: Tensor, chosen: Tensor) -> Tensor:
        """Return the result of each choice of each row, [T, K, H].

        hidden is [T, H] bfloat16, chosen [T, K] int64: the experts that each row has chosen.
        """
        hidden, chosen = hidden.contiguous(), chosen.contiguous()
        (rows, size), per_token = hidden.shape, chosen.shape[1]
        y = torch.empty(rows, per_token, size, dtype=torch.bfloat16)
        room = torch.empty(rows * per_token * (2 * size + 3 * self._inner), dtype=torch.bfloat16)
        args = _ExpertsArgs(
            self._gate_ups.address, self._downs.address, hidden.data_ptr(), chosen.data_ptr(),
            y.data_ptr(), room.data_ptr(), rows, size, self._inner, per_token,
        )  # fmt: skip
        self._call(ctypes.byref(args))
        return y

    def some(self, hidden: Tensor, chosen: Tensor) -> Tensor:
        """As __call__, with zeros for choices that are none of these experts: their number or more.
        Those are not computed."""
        rows, choices = (chosen < self._count).nonzero(as_tuple=True)
        y = hidden.new_zeros(*chosen.shape, hidden.shape[1])
        if len(rows):
            y[rows, choices] = self(hidden[rows], chosen[rows, choices][:, None])[:, 0]
        return y
