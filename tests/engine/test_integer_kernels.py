"""The compiled CPU kernels of integer weights and int8 KV against their torch twins."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from baton.engine.kernels.cpu.build import missing
from baton.engine.kernels.cpu.library import CpuKernels
from baton.engine.kernels.cpu.quantized import FLOATS4, W4A8, IntegerKernels
from baton.engine.quantization import integer as quantization
from baton.engine.quantization.int8_rows import (
    LONGEST_GROUP,
    W4A8Linear,
    W8A8Linear,
    round_rows,
    short_groups,
)
from baton.engine.quantization.int_weight import IntWeight
from baton.engine.quantization.integer import (
    IntegerPanels,
    QuantizedFormat,
    W8A8Panels,
    WidenedLinear,
    quantize,
)
from baton.engine.quantization.linear import in_float32
from tests.engine.running import relative_error

CPU = torch.device("cpu")
# A result is rounded to bfloat16 (0.0017 measured) and its scales to 11 bits; nothing else is.
BOUND = 0.0025


@pytest.fixture(scope="module")
def compiled(cpu_kernels: CpuKernels) -> IntegerKernels:
    """Each instruction set's in turn."""
    if lacking := missing(cpu_kernels.instructions.integer_flags):
        pytest.skip(f"this processor has no {', '.join(lacking)}")
    return IntegerKernels(cpu_kernels)


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def floats(shape: tuple[int, int], groups: int) -> IntWeight:
    """Every E2M1 number, scales of powers of two from 2^-8 to 1."""
    generator = torch.Generator().manual_seed(groups)
    magnitudes = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12], dtype=torch.int8)
    numbers = torch.cat((magnitudes, -magnitudes))
    values = numbers[torch.randint(16, shape, generator=generator)]
    scales = torch.exp2(-torch.randint(9, (shape[0], groups), generator=generator).float())
    return IntWeight(4, values, scales, floats=True)


def integers(
    bits: Literal[-4, 4, 6, 8], shape: tuple[int, int], groups: int, *, zeros: bool
) -> IntWeight:
    """Every number that the bits hold, scales between 0.01 and 1 and so apart within an output."""
    if bits == FLOATS4:
        return floats(shape, groups)
    generator = torch.Generator().manual_seed(bits + groups)
    high = 1 << bits - 1
    values = torch.randint(-high, high, shape, generator=generator).to(torch.int8)
    values[0], values[-1] = -high, high - 1
    sizes = (shape[0], groups)
    scales = 10 ** (-2 * torch.rand(sizes, generator=generator))
    shifts = torch.randint(-high, high, sizes, generator=generator).float() if zeros else None
    return IntWeight(4 if bits == 4 else 8, values, scales, shifts)


@settings(max_examples=90)
@given(
    bits=st.sampled_from([FLOATS4, 4, 6, 8]),
    rows=st.integers(1, 33),
    outputs=st.integers(1, 200),
    grouping=st.tuples(st.integers(1, 5), st.sampled_from([4, 12, 32, 64, 128])),
    extras=st.tuples(st.booleans(), st.booleans()),
)
def test_integer_panels_are_the_dequantized_twin(
    compiled: IntegerKernels,
    bits: Literal[-4, 4, 6, 8],
    rows: int,
    outputs: int,
    grouping: tuple[int, int],
    extras: tuple[bool, bool],
) -> None:
    (groups, size), (zeros, biased) = grouping, extras
    weight = integers(bits, (outputs, groups * size), groups, zeros=zeros)
    x, bias = noise(1, rows, groups * size), noise(2, outputs) if biased else None
    layer = IntegerPanels(compiled, weight, bias)
    assert layer.packed.bits in ((bits,) if bits != 6 else (6, 8))
    y = layer(x)
    assert torch.equal(in_float32(layer, x).bfloat16(), y)
    wide_bias = None if bias is None else bias.float()
    twin = functional.linear(x.float(), weight.dequantized(torch.float32), wide_bias)
    assert y.shape == twin.shape
    # Sums may cancel: what they are made of bounds the error of each.
    parts = functional.linear(x.float().abs(), weight.dequantized(torch.float32).abs())
    # Kernels subtract zero points from sums, so even weights that are all zero leave a rest.
    assert ((y.float() - twin).abs() <= 0.006 * twin.abs() + 0.0006 * parts + 1e-6).all()
    if outputs * rows > 200:
        assert relative_error(y, twin) < 2 * BOUND


def test_floats_of_four_bits_are_exact(compiled: IntegerKernels) -> None:
    """Each weight by itself: row i of the inputs is 1 at input i."""
    weight = floats((70, 64), 2)
    y = IntegerPanels(compiled, weight, None)(torch.eye(64).bfloat16())
    assert torch.equal(y.t().float(), weight.dequantized(torch.float32))
    layer = QuantizedFormat(torch.float32, CPU)(weight, None)
    assert isinstance(layer, WidenedLinear)
    assert torch.equal(layer(torch.eye(64)).t(), weight.dequantized(torch.float32))
    other = integers(4, (70, 64), 2, zeros=False)
    assert quantization.stack_weights([weight, other]) is None
    both = quantization.stack_weights([weight, weight])
    assert both is not None
    assert both.floats


@pytest.mark.parametrize("scheme", quantization.SCHEMES)
def test_real_weights_lose_only_the_last_bits(
    compiled: IntegerKernels, scheme: quantization.Scheme
) -> None:
    weight, x, bias = quantize(noise(3, 300, 512), scheme), noise(4, 40, 512), noise(5, 300)
    layer = QuantizedFormat(torch.bfloat16, CPU)(weight, bias)
    if scheme == "w8a8":
        assert isinstance(layer, W8A8Panels)
        assert torch.equal(layer(x), W8A8Linear(weight, bias, int_product=False)(x))
    elif scheme == "w4a8":
        assert isinstance(layer, IntegerPanels)
        assert torch.equal(layer(x), W4A8Linear(weight, bias)(x))
        rounded = replace(weight, int8_activations=False).dequantized(torch.float32)
        twin = functional.linear(x.float(), rounded, bias.float())
        assert relative_error(layer(x), twin) < 4 * BOUND  # of rounding the rows
    else:
        assert isinstance(layer, IntegerPanels)
        twin = functional.linear(x.float(), weight.dequantized(torch.float32), bias.float())
        assert relative_error(layer(x), twin) < BOUND


@settings(max_examples=40)
@given(
    rows=st.integers(1, 33),
    inputs=st.one_of(st.integers(1, 300), st.sampled_from([64, 128, 192])),  # which tiles take
    outputs=st.integers(1, 140),
    biased=st.booleans(),
)
def test_w8a8_panels_are_the_plain_twin_exactly(
    compiled: IntegerKernels, rows: int, inputs: int, outputs: int, biased: bool
) -> None:
    generator = torch.Generator().manual_seed(inputs)
    values = torch.randint(-128, 128, (outputs, inputs), generator=generator).to(torch.int8)
    values[0], values[-1] = -128, 127  # the greatest sums
    scales = torch.rand(outputs, 1, generator=generator)
    weight = IntWeight(8, values, scales, int8_activations=True)
    x, bias = noise(6, rows, inputs), noise(7, outputs) if biased else None
    x[0] = 3.0
    layer = W8A8Panels(compiled, weight, bias)
    y = layer(x)
    assert torch.equal(in_float32(layer, x).bfloat16(), y)
    assert torch.equal(y, W8A8Linear(weight, bias, int_product=False)(x))


@settings(max_examples=60)
@given(
    # From 36 on, all rows meet bytes that nibbles became once.
    rows=st.one_of(st.integers(1, 40), st.integers(34, 100)),
    outputs=st.integers(1, 140),
    # The sums of groups of 64, of 128 and of 256 inputs are what fits a word.
    grouping=st.tuples(st.integers(1, 4), st.sampled_from([4, 8, 32, 64, 72, 128, 256, 576])),
    extras=st.tuples(st.booleans(), st.booleans()),
)
def test_w4a8_panels_are_the_plain_twin_exactly(
    compiled: IntegerKernels,
    rows: int,
    outputs: int,
    grouping: tuple[int, int],
    extras: tuple[bool, bool],
) -> None:
    (groups, size), (zeros, biased) = grouping, extras
    weight = integers(4, (outputs, groups * size), groups, zeros=zeros)
    weight = replace(weight, int8_activations=True)
    x, bias = noise(6, rows, groups * size), noise(7, outputs) if biased else None
    x[0] = 3.0  # the greatest sums
    if rows > 1:
        x[1] = -3.0
    layer, twin = IntegerPanels(compiled, weight, bias), W4A8Linear(weight, bias)
    assert layer.packed.bits == W4A8
    assert torch.equal(layer(x), twin(x))
    assert torch.equal(layer.wide(x), twin.wide(x))
    # The formula in float64; scales are rounded to 11 bits.
    rounded, scales = round_rows(x)
    numbers, plain = (rounded * scales).double(), weight.dequantized(torch.float32).double()
    exact, parts = numbers @ plain.T, numbers.abs() @ plain.abs().T
    shift = 0 if bias is None else bias.double()
    assert ((layer.wide(x).double() - exact - shift).abs() <= 0.0006 * parts + 1e-5).all()


@pytest.mark.parametrize(("inputs", "cut"), [(4096, 1), (4100, 5), (12288, 3), (4099, 4099)])
def test_long_groups_are_cut(compiled: IntegerKernels, inputs: int, cut: int) -> None:
    """A group's sum of the greatest products is still an exact float32."""
    values = torch.full((70, inputs), 7, dtype=torch.int8)
    values[::2] = -8
    scales = torch.rand(70, 1, generator=torch.Generator().manual_seed(0))
    weight = IntWeight(4, values, scales, torch.full((70, 1), 8.0), int8_activations=True)
    assert short_groups(weight).num_groups == cut
    assert short_groups(weight).group_size <= LONGEST_GROUP
    x = torch.ones(3, inputs).bfloat16()
    if IntegerPanels.takes(weight):
        assert torch.equal(
            IntegerPanels(compiled, weight, None).wide(x), W4A8Linear(weight, None).wide(x)
        )
    twin = (x.float() @ weight.dequantized(torch.float32).T).double()
    assert relative_error(W4A8Linear(weight, None).wide(x), twin) < BOUND


@pytest.mark.parametrize("scheme", quantization.SCHEMES)
def test_a_row_depends_on_no_other(compiled: IntegerKernels, scheme: quantization.Scheme) -> None:
    layer = QuantizedFormat(torch.bfloat16, CPU)(quantize(noise(8, 150, 384), scheme), None)
    x = noise(9, 600, 384)  # more than a slab
    whole = layer(x)
    for count in range(1, 34):
        assert torch.equal(layer(x[5 : 5 + count]), whole[5 : 5 + count])
    for first, last in ((0, 1), (500, 513), (580, 600)):
        assert torch.equal(layer(x[first:last]), whole[first:last])


@pytest.mark.parametrize("bits", [FLOATS4, 4, 6, 8])
@pytest.mark.parametrize("groups", [1, 3])
def test_a_row_of_many_is_a_row_of_few(
    compiled: IntegerKernels, bits: Literal[-4, 4, 6, 8], groups: int
) -> None:
    """Many rows may meet weights that were widened once for all of them."""
    weight = integers(bits, (90, 192), groups, zeros=bits != FLOATS4)
    layer, x = IntegerPanels(compiled, weight, noise(16, 90)), noise(17, 131, 192)
    few = torch.cat([layer(rows) for rows in x.split(5)])
    assert torch.equal(layer(x), few)
    assert torch.equal(layer.wide(x), torch.cat([layer.wide(rows) for rows in x.split(5)]))


def test_rows_of_a_wider_tensor_and_rows_without_numbers(compiled: IntegerKernels) -> None:
    weight, wide = quantize(noise(10, 70, 64), "w8a8"), noise(11, 3, 256)
    layer = W8A8Panels(compiled, weight, None)
    assert torch.equal(layer(wide[:, 64:128]), layer(wide[:, 64:128].contiguous()))
    panels = IntegerPanels(compiled, quantize(noise(10, 70, 64), "int4"), None)
    assert torch.equal(panels(wide[:, 64:128]), panels(wide[:, 64:128].contiguous()))
    assert layer(wide[:0, :64]).shape == panels(wide[:0, :64]).shape == (0, 70)
    zeros = torch.zeros(2, 64).bfloat16()
    assert not layer(zeros).any()
    assert not panels(zeros).any()
    zeros[1, 7] = torch.nan  # a row that is lost says so
    for each in (layer, panels):
        assert not each(zeros)[0].any()
        assert each(zeros)[1].isnan().all()


@pytest.mark.parametrize("bits", [4, 8])
def test_greatest_sums_and_rows_of_a_few_great_numbers(
    compiled: IntegerKernels, bits: Literal[4, 8]
) -> None:
    """As integers no sum may overflow; and numbers a thousand times the others drown none."""
    low = -(1 << bits - 1)
    values = torch.full((40, 512), low, dtype=torch.int8)
    values[20:] = -low - 1
    layer = IntegerPanels(compiled, IntWeight(bits, values, torch.ones(40, 1)), None)
    equal = torch.full((2, 512), 3.0).bfloat16()
    assert torch.equal(layer(equal).float(), (equal.float() @ values.float().T).bfloat16().float())
    weight, x = integers(bits, (40, 512), 4, zeros=True), noise(15, 9, 512)
    x[:, 7::128] *= 1000
    twin = functional.linear(x.float(), weight.dequantized(torch.float32))
    assert relative_error(IntegerPanels(compiled, weight, None)(x), twin) < BOUND


def test_weights_of_zeros_are_zeros(compiled: IntegerKernels) -> None:
    weight = IntWeight(8, torch.zeros(5, 8, dtype=torch.int8), torch.zeros(5, 2))
    assert not IntegerPanels(compiled, weight, None)(noise(12, 3, 8)).any()


def test_what_the_kernels_do_not_know_is_torchs(compiled: IntegerKernels) -> None:
    made = QuantizedFormat(torch.bfloat16, CPU)
    odd = IntWeight(8, torch.ones(8, 6, dtype=torch.int8), torch.ones(8, 1))
    assert isinstance(made(odd, None), WidenedLinear)
    grouped = IntWeight(8, torch.ones(8, 8, dtype=torch.int8), torch.ones(8, 2), None, None, True)
    assert not W8A8Panels.takes(grouped)
    assert QuantizedFormat(torch.float32, CPU)(quantize(noise(13, 64, 64), "int8"), None)


@pytest.mark.parametrize("scheme", quantization.SCHEMES)
def test_kernels_of_torch_are_tried_only_where_they_serve(
    compiled: IntegerKernels, monkeypatch: pytest.MonkeyPatch, scheme: quantization.Scheme
) -> None:
    """A log of kernels that are wrong here, and of no use, would only alarm."""
    tried: list[str] = []
    monkeypatch.setattr(quantization, "try_int4_kernel", lambda: tried.append("int4"))
    monkeypatch.setattr(quantization, "try_int8_kernel", lambda: tried.append("int8"))
    monkeypatch.setattr(quantization, "try_int_product", lambda _: tried.append("product"))
    assert QuantizedFormat(torch.bfloat16, CPU)(quantize(noise(15, 64, 64), scheme), None)
    assert not tried
    monkeypatch.setattr(quantization, "integer_kernels_for", lambda *_: None)
    plain = QuantizedFormat(torch.bfloat16, CPU)
    for _ in range(2):
        assert plain(quantize(noise(15, 64, 64), scheme), None)
    assert tried == {"int8": ["int8"], "int4": ["int4"], "w8a8": ["product"], "w4a8": []}[scheme]


def test_kernels_that_are_wrong_are_not_used(
    compiled: IntegerKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_linear = IntegerKernels.linear

    def halved(*given: object) -> Tensor:
        return true_linear(*given) / 2  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(IntegerKernels, "linear", halved)
    assert not quantization.try_panels(compiled)
    layer = QuantizedFormat(torch.bfloat16, CPU)(quantize(noise(14, 64, 64), "int8"), None)
    assert isinstance(layer, WidenedLinear)
