"""Weights of 8-bit floats (e4m3), and linear layers that multiply them by inputs of 8-bit floats.

    scales of a weight            scales of its inputs
    one per output                one per token; or one that the checkpoint states
    one per 128 x 128 block       one per token and group of 128 inputs

y[t, o] = sum over groups g of (sum over i in g of x8[t, i] * w8[o, i]) * xs[g, t] * ws[g, o], in
float32. Only some GPUs multiply 8-bit floats (kernels/gpu/support.py); for all other devices such
weights are widened while they are read (checkpoint/float8.py).
Source: vLLM's quantization/input_quant_fp8.py, DeepSeek-V3's inference/kernel.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.kernels.gpu.support import float8_serves, triton_serves
from baton.engine.quantization.integer import works
from baton.engine.quantization.linear import Linear

MOST: Final = 448.0  # the greatest number of e4m3
LEAST_PEAK: Final = 1e-12  # a row of zeros gets a scale, too
LEAST_GROUP: Final = 32  # inputs: the shortest side of tensor cores' products
SCALED_MULTIPLE: Final = 16  # torch._scaled_mm wants such numbers of inputs and of outputs


@dataclass(frozen=True, slots=True)
class InputRounding:
    """How the inputs of a product are rounded: a scale for each row and run of `group` inputs.

    `static`: the scale, if the checkpoint states it; None = the run's greatest magnitude becomes
    MOST. `ceiling`: the greatest magnitude that counts (fbgemm_fp8).
    """

    group: int
    static: float | None = None
    ceiling: float | None = None


@dataclass(frozen=True, slots=True)
class Float8Weight:
    """w[o, i] = values[o, i] * scales[i // rounding.group, o].

    values [out, in] float8_e4m3fn, scales [groups, out] float32. The last group may be shorter.
    """

    values: Tensor
    scales: Tensor
    rounding: InputRounding

    @property
    def shape(self) -> torch.Size:
        """[out, in]."""
        return self.values.shape

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight as layers keep it."""
        return self.values.nbytes + self.scales.nbytes

    def to(self, device: torch.device) -> Float8Weight:
        """Return the weight on `device`."""
        return replace(self, values=self.values.to(device), scales=self.scales.to(device))

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in] in `dtype`, computed in float32."""
        return widened(self.values, self.scales.t(), self.rounding.group).to(dtype)


def widened(values: Tensor, scales: Tensor, group: int) -> Tensor:
    """Return values [rows, in] times scales [rows, groups], float32."""
    return values.float() * scales.repeat_interleave(group, 1)[:, : values.shape[1]]


def stack_float8(parts: Sequence[Float8Weight]) -> Float8Weight | None:
    """Return the parts stacked along their outputs; None if their inputs are rounded differently.
    Of several static scales the greatest serves, as in vLLM: no part's inputs are cut off."""
    first = parts[0].rounding
    for part in parts[1:]:
        other = part.rounding
        if (first.group, first.ceiling) != (other.group, other.ceiling):
            return None
        if (first.static is None) != (other.static is None):
            return None
    stated = [part.rounding.static for part in parts if part.rounding.static is not None]
    return Float8Weight(
        # torch joins bytes on every device, 8-bit floats only on some.
        torch.cat([part.values.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn),
        torch.cat([part.scales for part in parts], 1),
        replace(first, static=max(stated) if stated else None),
    )


Rounds = Callable[[Tensor, InputRounding], tuple[Tensor, Tensor]]


def round_inputs(x: Tensor, rounding: InputRounding) -> tuple[Tensor, Tensor]:
    """Round x [T, in] to float8_e4m3fn [T, in] and scales [groups, T] float32; beyond MOST it is
    clamped."""
    rows, inputs = x.shape
    group = rounding.group
    wide = functional.pad(x.float(), (0, -inputs % group)).unflatten(1, (-1, group))
    if rounding.static is None:
        scales = wide.abs().amax(2).clamp(max=rounding.ceiling, min=LEAST_PEAK) / MOST
    else:
        scales = torch.full(wide.shape[:2], rounding.static, device=x.device)
    values = (wide / scales[:, :, None]).clamp_(-MOST, MOST).to(torch.float8_e4m3fn)
    return values.view(rows, -1)[:, :inputs].contiguous(), scales.t().contiguous()


class Float8Linear:
    """The product in float32: the twin of TritonFloat8Linear and ScaledLinear. Any device."""

    def __init__(self, weight: Float8Weight, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        values, scales = round_inputs(x, self.weight.rounding)
        rows = widened(values, scales.t(), self.weight.rounding.group)
        bias = None if self.bias is None else self.bias.float()
        return functional.linear(rows, self.weight.dequantized(torch.float32), bias).to(x.dtype)


class ScaledLinear:
    """A weight with one group of inputs, multiplied by torch._scaled_mm; `rounds` rounds inputs."""

    def __init__(self, weight: Float8Weight, bias: Tensor | None, rounds: Rounds) -> None:
        self.weight, self.bias = weight, bias
        self._rounds = rounds

    @staticmethod
    def takes(weight: Float8Weight) -> bool:
        """Whether the library's product supports the sizes of `weight`."""
        sizes = [size % SCALED_MULTIPLE for size in weight.shape]
        return len(weight.scales) == 1 and not any(sizes)

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        values, scales = self._rounds(x, self.weight.rounding)
        y = torch.ops.aten._scaled_mm(
            values,
            self.weight.values.t(),
            scales.view(-1, 1),
            self.weight.scales,
            out_dtype=x.dtype,
        )
        return y if self.bias is None else y + self.bias


class Float8Format:
    """Makes linear layers of 8-bit floats for one dtype and device; tests torch's product once."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._triton = triton_serves(device)
        self._scaled = float8_serves(device) and works(
            "torch._scaled_mm", lambda: try_scaled(dtype, device)
        )

    def __call__(self, weight: Float8Weight, bias: Tensor | None) -> Linear:
        """Return the fastest layer that this machine has for `weight`; bias [out] or None."""
        scaled = self._scaled and ScaledLinear.takes(weight)
        if not self._triton:
            if scaled:
                return ScaledLinear(weight, bias, round_inputs)
            return Float8Linear(weight, bias)
        from baton.engine.kernels.gpu import float8_linear  # imports triton

        if scaled:
            return ScaledLinear(weight, bias, float8_linear.round_inputs)
        return float8_linear.TritonFloat8Linear(weight, bias)


def try_scaled(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch._scaled_mm takes a scale per row and output, and gives the twin's sums."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(48, 64, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(1, 48, generator=generator) + 0.5
    weight = Float8Weight(values, scales, InputRounding(64)).to(device)
    x = torch.randn(37, 64, generator=generator).to(device, dtype)
    layer, twin = ScaledLinear(weight, None, round_inputs), Float8Linear(weight, None)
    return all(
        torch.allclose(layer(x[:n]).float(), twin(x[:n]).float(), atol=0.1, rtol=0.02)
        for n in (1, 37)
    )
