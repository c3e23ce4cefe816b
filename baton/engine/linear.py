"""The one seam for weight formats: `choose_linear` picks, once at start, how x W^T + b is done.

float32 and everything on a GPU: `functional.linear`. bfloat16 on a CPU: weights reordered for
oneDNN, which was 1.4-1.8x `functional.linear` at 4-32 rows, where this torch build and machine can
do it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

logger = logging.getLogger(__name__)


class Linear(Protocol):
    """A linear layer whose weights are held in some format."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out], both in the model's dtype."""
        ...


LinearFormat = Callable[[Tensor, Tensor | None], Linear]  # (weight [out, in], bias [out]) -> Linear


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """Weights as the checkpoint stores them: `weight` [out, in]."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        return functional.linear(x, self.weight, self.bias)


class PackedLinear:
    """Weights reordered once into the layout that oneDNN multiplies from. CPU, bfloat16."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")


def choose_linear(dtype: torch.dtype, device: torch.device) -> LinearFormat:
    """The fastest format that works here for this dtype; tried on a small product, logged."""
    if device.type == "cpu" and dtype == torch.bfloat16 and _packing_works():
        logger.info("linear layers: bfloat16 weights packed for oneDNN")
        return PackedLinear
    logger.info("linear layers: torch, %s on %s", dtype, device.type)
    return PlainLinear


def _packing_works() -> bool:
    """Whether oneDNN's packed product exists here and agrees with torch's."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 64, generator=generator).bfloat16()
    weight = torch.randn(48, 64, generator=generator).bfloat16()
    bias = torch.randn(48, generator=generator).bfloat16()
    try:
        packed = PackedLinear(weight, bias)(x)
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        logger.info("oneDNN cannot pack bfloat16 weights here: %s", error)
        return False
    return torch.allclose(packed.float(), functional.linear(x, weight, bias).float(), atol=0.25)
