"""The experts of a mixture layer in one compiled call (experts.h): their weights, and the call.

Not here: which mixture layers use them (models/experts.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.kernels.cpu.library import CpuKernels
from baton.engine.kernels.cpu.step_linears import StepLinear, StepLinears

_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_int64


class _ExpertsArgs(ctypes.Structure):
    """ExpertsArgs of experts.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("gate_ups", "downs", "x", "chosen", "weights")),
        *((name, _POINTER) for name in ("y", "scratch")),
        *((name, _SIZE) for name in ("rows", "hidden", "inner", "per_token")),
        *((name, ctypes.c_float) for name in ("limit", "alpha")),
        *((name, _POINTER) for name in ("shared", "shared_gate")),
    )


@dataclass(frozen=True, slots=True)
class SharedAnswers:
    """What the expert says that all rows share, `rows` [T, H], and the weight `gate` [1, H] of its
    gate: the answers are multiplied by sigmoid(hidden . gate). None = they count as they are."""

    rows: Tensor
    gate: Tensor | None = None

    def gated(self, hidden: Tensor) -> Tensor:
        """Return the answers times what the gate says of hidden [T, H], by torch."""
        if self.gate is None:
            return self.rows
        return functional.linear(hidden, self.gate).sigmoid() * self.rows


class ExpertKernels:
    """The weights of a layer's experts, ready for one call. Safe from any thread."""

    def __init__(
        self,
        kernels: CpuKernels,
        gate_ups: Sequence[StepLinear],
        downs: Sequence[StepLinear],
        inner: int,
        clamped: tuple[float, float] | None = None,
    ) -> None:
        """Take one of each kind per expert: gate_up [H] -> [2 * inner], down [inner] -> [H].

        All gate_ups have one format, and so have all downs. H and inner are multiples of 16.
        `clamped`: limit and alpha of the gating where it is not SwiGLU.
        """
        self.gate_ups, self.downs = StepLinears(gate_ups), StepLinears(downs)
        self.inner, self._count = inner, len(gate_ups)
        self.clamped = clamped
        self._call = kernels.library.baton_experts
        self._call.restype = None

    def __call__(self, hidden: Tensor, chosen: Tensor) -> Tensor:
        """Return the result of each choice of each row, [T, K, H].

        hidden is [T, H] bfloat16, chosen [T, K] int64: the experts that each row has chosen.
        """
        y = torch.empty(*chosen.shape, hidden.shape[1], dtype=torch.bfloat16)
        self._run(hidden, chosen, None, y)
        return y

    def summed(
        self,
        hidden: Tensor,
        weights: Tensor,
        chosen: Tensor,
        shared: SharedAnswers | None = None,
    ) -> Tensor:
        """Return each row's results, weighted and summed in the order of its choices, [T, H], and
        what is `shared` added.

        weights is [T, K] bfloat16; the others are as in __call__.
        """
        y = torch.empty(hidden.shape, dtype=torch.bfloat16)
        self._run(hidden, chosen, weights.contiguous(), y, shared)
        return y

    def _run(
        self,
        hidden: Tensor,
        chosen: Tensor,
        weights: Tensor | None,
        y: Tensor,
        shared: SharedAnswers | None = None,
    ) -> None:
        hidden, chosen = hidden.contiguous(), chosen.contiguous()
        (rows, size), per_token = hidden.shape, chosen.shape[1]
        added = None if shared is None else shared.rows.contiguous()
        gate = None if shared is None or shared.gate is None else shared.gate.contiguous()
        room = torch.empty(rows * per_token * (2 * size + 3 * self.inner), dtype=torch.bfloat16)
        args = _ExpertsArgs(
            self.gate_ups.address, self.downs.address, hidden.data_ptr(), chosen.data_ptr(),
            None if weights is None else weights.data_ptr(), y.data_ptr(), room.data_ptr(),
            rows, size, self.inner, per_token, *(self.clamped or (0.0, 0.0)),
            None if added is None else added.data_ptr(),
            None if gate is None else gate.data_ptr(),
        )  # fmt: skip
        self._call(ctypes.byref(args))

    def some(self, hidden: Tensor, chosen: Tensor) -> Tensor:
        """As __call__, with zeros for choices that are none of these experts: their number or more.
        Those are not computed."""
        rows, choices = (chosen < self._count).nonzero(as_tuple=True)
        y = hidden.new_zeros(*chosen.shape, hidden.shape[1])
        if len(rows):
            y[rows, choices] = self(hidden[rows], chosen[rows, choices][:, None])[:, 0]
        return y
