"""The choice of a mixture's experts in one compiled call (gates.h): its rule, and the call.

Not here: which gates use it (models/layers/gates.py).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from baton.engine.kernels.cpu.library import CpuKernels

_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_int64


class ChoiceFields(ctypes.Structure):
    """ChoiceRule of gates.h."""

    _fields_ = (
        *((name, _SIZE) for name in ("experts", "per_token", "groups", "kept")),
        *((name, _SIZE) for name in ("sigmoid", "normalized", "rounded")),
        ("scaling", ctypes.c_float),
    )


class _ChoiceArgs(ctypes.Structure):
    """ChoiceArgs of gates.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("logits", "bias", "weights", "chosen")),
        ("rows", _SIZE),
        ("rule", ChoiceFields),
    )


@dataclass(frozen=True, slots=True)
class ChoiceRule:
    """How rows choose experts by a router's logits: the numbers of models/layers/gates.py's
    SoftmaxGate and SigmoidGate. `groups` 1: a row chooses out of all experts. `rounded`: logits
    are rounded to bfloat16 first."""

    experts: int
    per_token: int
    normalized: bool
    scaling: float = 1.0
    groups: int = 1
    kept: int = 1
    sigmoid: bool = False
    rounded: bool = False

    @property
    def fields(self) -> ChoiceFields:
        """The rule as the kernels take it."""
        return ChoiceFields(
            self.experts, self.per_token, self.groups, self.kept,
            self.sigmoid, self.normalized, self.rounded, self.scaling,
        )  # fmt: skip


NO_CHOICE: Final = ChoiceRule(0, 0, normalized=False)


class ChoiceKernel:
    """A gate's choice of experts, in one call. Safe from any thread."""

    def __init__(self, kernels: CpuKernels, rule: ChoiceRule, bias: Tensor | None = None) -> None:
        """`bias` [E] float32: added to the scores for the choice alone."""
        self.rule, self.bias = rule, bias
        self._call = kernels.library.baton_choose_experts
        self._call.restype = None

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights [T, K] bfloat16 and the numbers [T, K] int64 of the experts that
        logits [T, E] float32 choose, the best first; of equals the first one goes first."""
        rule, logits = self.rule, logits.contiguous()
        rows = logits.shape[0]
        weights = torch.empty(rows, rule.per_token, dtype=torch.bfloat16)
        chosen = torch.empty(rows, rule.per_token, dtype=torch.int64)
        args = _ChoiceArgs(
            logits.data_ptr(), None if self.bias is None else self.bias.data_ptr(),
            weights.data_ptr(), chosen.data_ptr(), rows, rule.fields,
        )  # fmt: skip
        self._call(ctypes.byref(args))
        return weights, chosen
