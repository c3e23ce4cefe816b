"""Checkpoints of 8-bit floats on a device that multiplies them: what is kept and what is widened,
how inputs are rounded, the product beside its formula, whole models beside the widened ones, ranks,
adapters, experts, sizes. The device is a CPU; its kernels are the twins and torch's own product."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from baton.engine.checkpoint.checkpoint import open_checkpoint
from baton.engine.checkpoint.kinds import Rounded, rounded_inputs
from baton.engine.checkpoint.tensors import TensorReader
from baton.engine.checkpoint.widening import open_tensors
from baton.engine.kernels.gpu import support
from baton.engine.quantization.float8 import (
    Float8Format,
    Float8Linear,
    Float8Weight,
    InputRounding,
    ScaledLinear,
    round_inputs,
    stack_float8,
)
from baton.engine.quantization.parts import float8_inputs, float8_outputs
from baton.protocol.errors import ModelRefused
from tests.engine.float8_device import multiplying
from tests.engine.running import load, relative_error
from tests.engine.widened_models import (
    compressed_floats,
    edit_config,
    edit_tensors,
    make_widened,
)
from tests.tiny_models import VOCAB_SIZE

CPU = torch.device("cpu")
DEMO = Path(__file__).parents[2] / "demo_model"
PROMPT = torch.randint(5, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(3)).tolist()
DOWN = "model.layers.1.mlp.down_proj"
WHOLE, BLOCKS = ("fp8-tensor", "fp8-channel"), ("fp8-block", "fp8-deepseek")
STATIC = ("fp8-static", "fp8-modelopt")
KEPT = (*WHOLE, *BLOCKS, *STATIC)
# Of the logits of random models, whose weights are sharpened, against the widened ones.
MOST_ERROR = 0.12


@pytest.fixture
def device() -> Iterator[None]:
    """What is loaded in this test is kept in 8 bits."""
    with multiplying():
        yield


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def weight_of(outputs: int, inputs: int, rounding: InputRounding, seed: int = 1) -> Float8Weight:
    values = random(outputs, inputs, seed=seed).to(torch.float8_e4m3fn)
    groups = -(-inputs // rounding.group)
    scales = random(groups, outputs, seed=seed + 1).abs() + 0.5
    return Float8Weight(values, scales, rounding)


# ---- which devices ----


@pytest.mark.parametrize(
    ("capability", "cuda", "serves"),
    [
        ((8, 9), "13.0", True),
        ((9, 0), "13.0", True),
        ((8, 6), "13.0", False),
        ((9, 4), None, False),
    ],
)
def test_cards_of_8_9_and_above_multiply(
    capability: tuple[int, int], cuda: str | None, serves: bool
) -> None:
    """AMD's have another e4m3."""
    with (
        mock.patch.object(support, "_found", return_value=(True, "")),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
        mock.patch.object(torch.version, "cuda", cuda),
    ):
        assert support.float8_serves(torch.device("cuda")) is serves
        assert not support.float8_serves(CPU)


def test_without_kernels_no_card_multiplies() -> None:
    with mock.patch.object(support, "_found", return_value=(False, "off")):
        assert not support.float8_serves(torch.device("cuda"))


# ---- products ----


def by_formula(x: Tensor, weight: Float8Weight) -> Tensor:
    """Group by group, in float64, from the inputs' own greatest numbers."""
    rounding, total = weight.rounding, torch.zeros(len(x), weight.shape[0], dtype=torch.float64)
    for index, first in enumerate(range(0, x.shape[1], rounding.group)):
        part = x[:, first : first + rounding.group].float()
        peaks = part.abs().amax(1, keepdim=True)
        if rounding.ceiling is not None:
            peaks = peaks.clamp(max=rounding.ceiling)
        scale = peaks / 448 if rounding.static is None else torch.tensor(rounding.static)
        rounded = (part / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double()
        values = weight.values[:, first : first + rounding.group].double()
        total += rounded @ values.T * scale * weight.scales[index]
    return total


ROUNDINGS = {
    "per token": InputRounding(320), "in groups": InputRounding(128),
    "in cut groups": InputRounding(32), "static": InputRounding(320, static=0.01),
    "capped": InputRounding(320, ceiling=1.5),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROUNDINGS)
@pytest.mark.usefixtures("device")
def test_layers_compute_the_formula(name: str, dtype: torch.dtype) -> None:
    """The last group may be shorter. torch's product serves one group, the twin several."""
    weight, bias = weight_of(48, 320, ROUNDINGS[name]), random(48, seed=5).to(dtype)
    x = 3 * random(7, 320, seed=6).to(dtype)
    layer = Float8Format(dtype, CPU)(weight, bias)
    assert isinstance(layer, ScaledLinear if len(weight.scales) == 1 else Float8Linear)
    expected = by_formula(x, weight) + bias.double()
    bound = 1e-6 if dtype == torch.float32 else 5e-3
    assert layer(x).dtype == dtype
    assert relative_error(layer(x), expected) < bound
    assert relative_error(Float8Linear(weight, bias)(x), expected) < bound


@pytest.mark.usefixtures("device")
def test_sizes_that_torch_does_not_take_are_left_to_the_kernel() -> None:
    weight = weight_of(40, 72, InputRounding(72))
    assert isinstance(Float8Format(torch.bfloat16, CPU)(weight, None), Float8Linear)


def test_torchs_product_is_not_used_if_it_is_wrong(caplog: pytest.LogCaptureFixture) -> None:
    with multiplying(), mock.patch.object(ScaledLinear, "__call__", lambda _, x: x[:, :48]):
        layer = Float8Format(torch.float32, CPU)(weight_of(48, 64, InputRounding(64)), None)
    assert isinstance(layer, Float8Linear)
    assert "torch._scaled_mm gives wrong sums" in caplog.text


def test_torchs_product_is_not_used_if_it_refuses() -> None:
    """Such as for an output in another dtype than bfloat16, on some cards."""
    with multiplying(), mock.patch.object(ScaledLinear, "__call__", side_effect=ValueError):
        layer = Float8Format(torch.float32, CPU)(weight_of(48, 64, InputRounding(64)), None)
    assert isinstance(layer, Float8Linear)


def test_a_row_of_zeros_and_great_numbers_are_rounded() -> None:
    x = torch.zeros(3, 64)
    x[1, 5], x[2, 0], x[2, 1] = -1e4, 2.0, 0.5
    values, scales = round_inputs(x, InputRounding(64))
    wide = values.float() * scales.T
    assert torch.equal(wide[0], x[0])
    torch.testing.assert_close(wide, x, rtol=1e-6, atol=0)
    clamped, _ = round_inputs(x, InputRounding(64, static=0.001))
    assert (clamped.float() * 0.001).abs().max() == pytest.approx(0.448)


def test_parts_are_stacked_if_inputs_are_rounded_alike() -> None:
    plain, others = InputRounding(128), (
        InputRounding(64), InputRounding(128, ceiling=2.0), InputRounding(128, static=0.5),
    )  # fmt: skip
    first, second = weight_of(32, 256, plain), weight_of(48, 256, plain, seed=3)
    whole = stack_float8([first, second])
    assert whole is not None
    both = torch.cat([first.dequantized(torch.float32), second.dequantized(torch.float32)])
    assert torch.equal(whole.dequantized(torch.float32), both)
    for other in others:
        assert stack_float8([first, weight_of(32, 256, other)]) is None
    static = [weight_of(32, 256, InputRounding(256, static=each)) for each in (0.25, 0.75, 0.5)]
    stacked = stack_float8(static)
    assert stacked is not None
    assert stacked.rounding.static == 0.75


# ---- loading ----


def reader_of(path: Path, *, kept: bool = True) -> TensorReader:
    with multiplying():
        return open_tensors(open_checkpoint(str(path)), torch.float32, CPU, kept=kept)


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_stands_for_the_widened_numbers(name: str, tmp_path: Path) -> None:
    path, twin = make_widened(name, tmp_path, hidden_size=160)
    reader, expected = reader_of(path), load_file(twin / "model.safetensors")
    assert reader.names == expected.keys()
    for key, tensor in expected.items():
        assert reader.keeps(key) is key.endswith("_proj.weight")
        if reader.keeps(key):
            weight = reader.kept(key)
            assert isinstance(weight, Float8Weight)
            assert torch.equal(weight.dequantized(torch.float32), tensor), key
            assert weight.rounding.static == (1.0 if name in STATIC else None)
            assert weight.rounding.group == (128 if name in BLOCKS else tensor.shape[1])
        assert torch.equal(reader.read(key), tensor), key
    assert not any(map(reader_of(path, kept=False).keeps, expected))


def to_e5m2(tensors: dict[str, Tensor]) -> None:
    tensors[f"{DOWN}.weight"] = tensors[f"{DOWN}.weight"].to(torch.float8_e5m2)


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("fp8-channel", to_e5m2), ("fp8-small-blocks", None), ("fp8-group", None),
        ("fp8-static", lambda t: t.pop(f"{DOWN}.input_scale")),
    ],
)  # fmt: skip
def test_what_no_product_takes_is_widened(name: str, edit: Any, tmp_path: Path) -> None:
    path, _ = make_widened(name, tmp_path)
    if edit is not None:
        edit_tensors(path, edit)
    assert not reader_of(path).keeps(f"{DOWN}.weight")
    with multiplying():
        load(path)


def group_of(strategy: str, inputs: dict[str, Any] | None, block: Any = None) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "block_structure": block}
    return {"weights": weights, "input_activations": inputs}


DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, Rounded()),
        ({"quant_method": "fp8", "activation_scheme": "static"}, Rounded(static=True)),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, Rounded(static=True)),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, Rounded(ceiling=1200.0)),
        (compressed_floats(8, "channel", "float-quantized"), Rounded()),
        ([group_of("tensor", DYNAMIC | {"dynamic": False})], Rounded(static=True)),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, Rounded()),
        ({"quant_method": "fp8", "weight_block_size": [64, 128]}, None),
        (
            {
                "quant_method": "fp8",
                "weight_block_size": [128, 128],
                "activation_scheme": "static",
            },
            None,
        ),
        ([group_of("block", DYNAMIC, "128x128")], Rounded()),
        ([group_of("block", DYNAMIC | {"dynamic": False}, [128, 128])], None),
        ([group_of("channel", None)], None),
        ([group_of("channel", DYNAMIC | {"num_bits": 4})], None),
        ([group_of("group", DYNAMIC)], None),
        ([group_of("channel", DYNAMIC), group_of("tensor", DYNAMIC | {"dynamic": False})], None),
        ([], None),
    ],
)
def test_how_a_config_wants_inputs_rounded(config: Any, expected: Rounded | None) -> None:
    if isinstance(config, list):
        groups = {f"group_{i}": each for i, each in enumerate(config)}
        config = {"quant_method": "compressed-tensors", "config_groups": groups}
    assert rounded_inputs(config) == expected


def test_fbgemms_ceiling_is_read(tmp_path: Path) -> None:
    path, _ = make_widened("fp8-channel", tmp_path)
    edit_config(
        path, quantization_config={"quant_method": "fbgemm_fp8", "activation_scale_ub": 9.0}
    )
    weight = reader_of(path).kept(f"{DOWN}.weight")
    assert isinstance(weight, Float8Weight)
    assert weight.rounding == InputRounding(192, ceiling=9.0)


@pytest.mark.parametrize(
    ("name", "edit", "reason"),
    [
        ("fp8-deepseek", lambda t: t[f"{DOWN}.weight"].view(torch.uint8)[3, 5:6].fill_(0xFF),
         "down_proj.weight: some of its weights are not finite"),
        ("fp8-deepseek", lambda t: t[f"{DOWN}.weight_scale_inv"].fill_(torch.inf),
         "down_proj.weight: a scale of it is not finite"),
        ("fp8-static", lambda t: t[f"{DOWN}.input_scale"].fill_(0),
         "down_proj.weight: the scale of its inputs is not above 0"),
        ("fp8-static", lambda t: t[f"{DOWN}.input_scale"].fill_(torch.nan), "is not finite"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("device")
def test_damaged_weights_are_refused_by_name(
    name: str, edit: Any, reason: str, tmp_path: Path
) -> None:
    path, _ = make_widened(name, tmp_path)
    edit_tensors(path, edit)
    with pytest.raises(ModelRefused, match=reason):
        load(path)


# ---- parts for ranks ----


def test_some_outputs_are_those_of_the_whole() -> None:
    whole = weight_of(40, 352, InputRounding(128))
    wide = whole.dequantized(torch.float32)
    for outputs in (slice(7, 33), torch.tensor([3, 39, 4])):
        part = float8_outputs(whole, outputs)
        assert torch.equal(part.dequantized(torch.float32), wide[outputs])
        assert part.values.untyped_storage().nbytes() == part.values.nbytes


def test_blocks_that_ranks_share_are_cut() -> None:
    """The last block is short."""
    whole = weight_of(40, 320, InputRounding(128))
    wide, x = whole.dequantized(torch.float32), random(5, 320)
    parts = [float8_inputs(whole, slice(first, first + 160)) for first in (0, 160)]
    assert [part.rounding.group for part in parts] == [32, 32]
    joined = torch.cat([part.dequantized(torch.float32) for part in parts], 1)
    assert torch.equal(joined, wide)
    total = torch.stack(
        [Float8Linear(part, None)(rows) for part, rows in zip(parts, x.chunk(2, 1), strict=True)]
    ).sum(0)
    assert relative_error(total, x @ wide.T) < 0.04
    by_output = weight_of(40, 320, InputRounding(320))
    assert float8_inputs(by_output, slice(0, 80)).rounding == InputRounding(80)
    with pytest.raises(ValueError, match="its groups of 128 inputs would be cut into 16"):
        float8_inputs(whole, slice(80, 160))
