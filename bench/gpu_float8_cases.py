"""Products of 8-bit floats on a GPU beside their torch twins, for bench/gpu_cases.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from baton.engine.kernels.gpu import float8_linear
from baton.engine.kernels.gpu.support import float8_serves
from baton.engine.models.experts import Expert, Experts
from baton.engine.models.experts_gpu import stacked
from baton.engine.models.layers.gates import SoftmaxGate
from baton.engine.quantization.float8 import (
    SCALED_MULTIPLE,
    Float8Linear,
    Float8Weight,
    InputRounding,
    ScaledLinear,
    round_inputs,
)
from bench.gpu_case import NAMES, TOLERANCE, CaseShape, KernelCase, noise

BLOCK = 128


def float8_cases(shape: CaseShape, dtype: torch.dtype) -> Iterator[KernelCase]:
    """Yield the rounding of inputs, products with every kind of scale, and a mixture's experts.
    There are none on a GPU that does not multiply 8-bit floats."""
    if shape.device.type == "cuda" and not float8_serves(shape.device):
        return
    name, inputs, in_blocks = NAMES[dtype], 3 * shape.hidden, InputRounding(BLOCK)
    x = 3 * noise(shape, 30, shape.rows, inputs).to(dtype)
    bias = noise(shape, 31, shape.intermediate).to(dtype)
    for label, rounding in (
        ("per token", InputRounding(inputs)), ("capped", InputRounding(inputs, ceiling=2.0)),
        ("static", InputRounding(inputs, static=0.01)), ("per group", in_blocks),
        ("per cut group", InputRounding(BLOCK // 4)),
    ):  # fmt: skip
        yield KernelCase(
            f"fp8 rounding {label}, {name}",
            lambda rounding=rounding: _bytes(*float8_linear.round_inputs(x, rounding)),
            lambda rounding=rounding: _bytes(*round_inputs(x, rounding)), 0.0,
            x.nbytes * 3 // 2,
        )  # fmt: skip
        weight = _weight(shape, 32, (shape.intermediate, inputs), rounding)
        layer = float8_linear.TritonFloat8Linear(weight, bias)
        yield _product(f"fp8 linear {label}, {name}", layer, x)
    many = 3 * noise(shape, 36, sum(new for _, new in shape.prefills), inputs).to(dtype)
    outputs = -(-shape.intermediate // SCALED_MULTIPLE) * SCALED_MULTIPLE
    for label, rounding in (("per token", InputRounding(inputs)), ("of blocks", in_blocks)):
        weight = _weight(shape, 37, (outputs, inputs), rounding)
        layer = float8_linear.TritonFloat8Linear(weight, None)
        yield _product(f"fp8 linear {label}, prefill, {name}", layer, many)
        if ScaledLinear.takes(weight):
            library = ScaledLinear(weight, None, float8_linear.round_inputs)
            yield _product(f"torch._scaled_mm, {name}", library, x)
            yield _product(f"torch._scaled_mm, prefill, {name}", library, many)
    yield from _expert_cases(shape, dtype)


def _product(
    name: str, layer: ScaledLinear | float8_linear.TritonFloat8Linear, x: torch.Tensor
) -> KernelCase:
    twin, weight = Float8Linear(layer.weight, layer.bias), layer.weight
    flops = 2 * len(x) * weight.values.numel()
    return KernelCase(
        name, lambda: [layer(x)], lambda: [twin(x)], TOLERANCE[x.dtype], weight.num_bytes, flops
    )


def _expert_cases(shape: CaseShape, dtype: torch.dtype) -> Iterator[KernelCase]:
    width, size, count = 3 * shape.hidden, shape.intermediate // 2, shape.experts
    hidden = noise(shape, 33, shape.rows, width).to(dtype)
    router = noise(shape, 34, count, width).to(dtype)
    for label, group in (("per token", None), ("of blocks", BLOCK)):
        each = tuple(
            Expert(
                Float8Linear(_weight(shape, 40 + index, (2 * size, width),
                                     InputRounding(group or width)), None),
                Float8Linear(_weight(shape, 60 + index, (width, size),
                                     InputRounding(group or size)), None),
            )
            for index in range(count)
        )  # fmt: skip
        layer = Experts(SoftmaxGate(router, 2, True), each, None)
        together = stacked(layer)
        yield KernelCase(
            f"fp8 grouped experts {label}, {NAMES[dtype]}",
            lambda together=together: [together(hidden, ())],
            lambda layer=layer: [layer(hidden, ())],
            # The inputs of the second product may be rounded to a neighbour.
            max(TOLERANCE[dtype], 1e-2), 3 * count * size * width,
            12 * shape.rows * size * width,
        )  # fmt: skip


def _weight(
    shape: CaseShape, seed: int, size: tuple[int, int], rounding: InputRounding
) -> Float8Weight:
    values = noise(shape, seed, *size).to(torch.float8_e4m3fn)
    groups = -(-size[1] // rounding.group)
    scales = (noise(shape, seed + 20, groups, size[0]).abs() + 0.5) / size[1] ** 0.5
    return Float8Weight(values, scales, rounding)


def _bytes(values: torch.Tensor, scales: torch.Tensor) -> list[torch.Tensor]:
    return [values.view(torch.uint8), scales]
