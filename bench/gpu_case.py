"""A Triton kernel beside its torch twin, as one call each, and the shape that cases are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from baton.engine.kernels.delta_rule import DeltaSizes
from baton.engine.kernels.gpu.prefill_attention import TileSizes

TOLERANCE: Final = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
NAMES: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
QWEN3_NEXT: Final = DeltaSizes(16, 32, 128, 128, 4)


@dataclass(frozen=True, slots=True)
class KernelCase:
    """A kernel and its twin: `ours` and `twin` must give the same tensors.

    `tolerance` 0 = equal bits, else a share of the twin's greatest magnitude. `num_bytes` and
    `num_flops` are the least that one call must move and compute.
    """

    name: str
    ours: Callable[[], Sequence[Tensor]]
    twin: Callable[[], Sequence[Tensor]]
    tolerance: float
    num_bytes: int = 0
    num_flops: int = 0

    def error(self) -> float:
        """Return the greatest difference over the twin's greatest magnitude.

        It is infinite for NaN and for different shapes.
        """
        worst = 0.0
        for got, want in zip(self.ours(), self.twin(), strict=True):
            if got.shape != want.shape or not bool(torch.isfinite(got.double()).all()):
                return float("inf")
            if want.numel():
                far = (got.double() - want.double()).abs().max()
                worst = max(worst, float(far / want.double().abs().max().clamp(min=1e-30)))
        return worst


@dataclass(frozen=True, slots=True)
class CaseShape:
    """The model and the step from which cases are made."""

    device: torch.device
    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 8
    dim: int = 128
    value_dim: int = 128
    intermediate: int = 3072
    vocab: int = 151_936
    block_size: int = 16
    rows: int = 32
    contexts: tuple[int, ...] = (1024,) * 32
    prefills: tuple[tuple[int, int], ...] = ((0, 1024), (512, 512))  # tokens there, new ones
    window: int = 300
    experts: int = 16
    linear: DeltaSizes = QWEN3_NEXT
    tiles: TileSizes | None = None
    splits: int | None = None


def small(device: torch.device) -> CaseShape:
    """Return a shape for the interpreter: odd sizes, several tiles and splits of each kind."""
    return CaseShape(
        device, hidden=48, heads=4, kv_heads=2, dim=24, value_dim=20, intermediate=40, vocab=9001,
        block_size=4, rows=3, contexts=(0, 90), prefills=((21, 18),), window=7, experts=3,
        linear=DeltaSizes(1, 2, 20, 36, 3), tiles=TileSizes(16, 16), splits=2,
    )  # fmt: skip


def widths(device: torch.device) -> CaseShape:
    """Return a shape with a model's widths and few tokens, for compiling without running."""
    return CaseShape(
        device, hidden=256, intermediate=256, vocab=16_384, contexts=(40, 40), experts=4,
        prefills=((8, 130),), linear=DeltaSizes(2, 4, 128, 128, 4),
    )  # fmt: skip


def noise(shape: CaseShape, seed: int, *size: int) -> Tensor:
    """Return normal numbers, the same at every call on one kind of device."""
    generator = torch.Generator(shape.device).manual_seed(seed)
    return torch.randn(*size, generator=generator, device=shape.device)
