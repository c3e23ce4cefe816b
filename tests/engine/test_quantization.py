"""Integer weights: the layers against their plain twins, quantization on load, and checkpoints of
every layout that is served, against their dequantized twins."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from baton.engine.checkpoint.quantized_checkpoint import checked, layout_of
from baton.engine.config import AUTO_HEADS
from baton.engine.kernels.cpu.quantized import peaks_and_shares
from baton.engine.quantization import int8_rows
from baton.engine.quantization import integer as quantization
from baton.engine.quantization.int8_rows import W4A8Linear, W8A8Linear, round_rows
from baton.engine.quantization.int_weight import IntWeight
from baton.engine.quantization.integer import (
    Int4Linear,
    NibbleLinear,
    QuantizedFormat,
    Scheme,
    WidenedLinear,
    quantize,
    stack_weights,
)
from baton.protocol.errors import ConfigError, ModelRefused
from tests.engine.quantized_models import (
    RECIPES,
    gptq,
    make_quantized,
    quantized_pair,
    round_to_grid,
    with_groups_of,
)
from tests.engine.running import load, logits_of, relative_error
from tests.golden.random_models import save_random
from tests.tiny_models import VOCAB_SIZE, make_tiny_model

CPU = torch.device("cpu")
PROMPT = torch.randint(5, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(3)).tolist()
# The relative error of one layer's output for random normal weights and inputs (measured: 0.0066,
# 0.0093, 0.087, 0.087).
LAYER_BOUND: dict[Scheme, float] = {"int8": 0.009, "w8a8": 0.013, "int4": 0.11, "w4a8": 0.11}
ROUNDS_ROWS = ("w8a8", "w4a8")


def random_weight(outputs: int = 192, inputs: int = 256) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1)) / 16


def random_rows(count: int, inputs: int = 256) -> torch.Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("scheme", quantization.SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_a_layer_is_its_twin(scheme: Scheme, dtype: torch.dtype, rows: int) -> None:
    weight, x = random_weight(), random_rows(rows).to(dtype)
    bias = torch.randn(192, generator=torch.Generator().manual_seed(4)).to(dtype)
    integers = quantize(weight, scheme)
    layer = QuantizedFormat(dtype, CPU)(integers, bias)
    twin_x = x.float()
    if scheme in ROUNDS_ROWS:
        rounded, scales = round_rows(x)
        twin_x = rounded * scales
    twin = functional.linear(twin_x, integers.dequantized(torch.float32), bias.float())
    out = layer(x)
    assert out.dtype == dtype
    assert out.shape == (rows, 192)
    exact = dtype == torch.float32 and scheme != "w4a8"  # whose scales have 11 bits everywhere
    assert relative_error(out, twin) < (2e-6 if exact else 0.006)
    plain = functional.linear(x.float(), weight, bias.float())
    assert relative_error(out, plain) < LAYER_BOUND[scheme]


def test_formats_choose_by_shape_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "integer_kernels_for", lambda *_: None)
    bf16, fp32 = QuantizedFormat(torch.bfloat16, CPU), QuantizedFormat(torch.float32, CPU)
    assert isinstance(bf16(quantize(random_weight(), "w8a8"), None), W8A8Linear)
    assert isinstance(bf16(quantize(random_weight(), "int8"), None), WidenedLinear)
    assert isinstance(bf16(quantize(random_weight(), "w4a8"), None), W4A8Linear)
    assert isinstance(fp32(quantize(random_weight(), "int4"), None), NibbleLinear)
    assert isinstance(bf16(quantize(random_weight(outputs=40), "int4"), None), NibbleLinear)
    if quantization.works("int4", quantization.try_int4_kernel):
        assert isinstance(bf16(quantize(random_weight(), "int4"), None), Int4Linear)


def test_integer_product_falls_back_to_the_plain_twin() -> None:
    integers, x = quantize(random_weight(), "w8a8"), random_rows(7)
    exact = W8A8Linear(integers, None, int_product=True)(x)
    plain = W8A8Linear(integers, None, int_product=False)(x)
    torch.testing.assert_close(exact, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scheme", ROUNDS_ROWS)
def test_rounded_rows_are_independent_of_their_mates(scheme: Scheme) -> None:
    layer, x = (
        QuantizedFormat(torch.float32, CPU)(quantize(random_weight(), scheme), None),
        (random_rows(33)),
    )
    together = layer(x)
    for row in (0, 7, 32):
        assert torch.equal(layer(x[row : row + 1])[0], together[row])


def test_int4_is_narrow_and_exact_on_its_own_grid() -> None:
    integers = quantize(random_weight(), "int4")
    assert integers.values.min() >= -8
    assert integers.values.max() <= 7
    again = quantize(integers.dequantized(torch.float32), "int4")
    torch.testing.assert_close(
        again.dequantized(torch.float32), integers.dequantized(torch.float32), atol=1e-6, rtol=1e-5
    )
    assert integers.num_bytes == 192 * 256 // 2 + 2 * 192 * 4 * 4


@pytest.mark.parametrize("scheme", quantization.SCHEMES)
@pytest.mark.parametrize("numbers", [1, 3 * 256, 50 * 256])
def test_slabs_are_rounded_as_the_whole(
    scheme: Scheme, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = random_weight()
    before, whole = weight.clone(), quantize(weight, scheme)
    monkeypatch.setattr(quantization, "SLAB_NUMBERS", numbers)
    slabs = quantize(weight, scheme)
    assert torch.equal(weight, before), "the checkpoint's numbers stay"
    assert torch.equal(slabs.values, whole.values)
    assert torch.equal(slabs.scales, whole.scales)
    assert (slabs.zeros is None) == (whole.zeros is None)
    assert slabs.zeros is None or whole.zeros is None or torch.equal(slabs.zeros, whole.zeros)


@pytest.mark.parametrize("scheme", ["int4", "w4a8"])
def test_kernels_hold_scales_of_4_bits_exactly(scheme: Scheme) -> None:
    scales = quantize(random_weight(), scheme).scales
    peaks, shares = peaks_and_shares(scales)
    assert torch.equal(shares.float() * peaks[:, None], scales)


@pytest.mark.parametrize("scheme", ["int4", "w4a8"])
def test_4_bits_refuse_inputs_that_make_no_groups(scheme: Scheme) -> None:
    with pytest.raises(ValueError, match="make no groups"):
        quantize(random_weight(inputs=40), scheme)


def test_stacking_needs_one_format() -> None:
    a, b = quantize(random_weight(64), "int4"), quantize(random_weight(64), "int8")
    assert stack_weights([a, b]) is None
    order = torch.randperm(256)
    assert stack_weights([a, replace(a, order=order)]) is None
    both = stack_weights([replace(a, order=order), replace(a, order=order, zeros=None)])
    assert both is not None
    assert both.shape == (128, 256)
    assert both.zeros is not None
    assert not both.zeros[64:].any()


def test_saturating_kernels_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def saturating(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x.int() @ weight.int().t()).clamp(-(2**15), 2**15 - 1)

    monkeypatch.setattr(int8_rows, "int_product", saturating)
    assert not quantization.works("x", lambda: int8_rows.try_int_product(CPU))

    def missing() -> bool:
        raise NotImplementedError("no such kernel")

    assert not quantization.works("x", missing)


@pytest.mark.parametrize("scheme", quantization.SCHEMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantization_on_load(scheme: str, dtype: str, tmp_path: Path) -> None:
    path = make_tiny_model(
        "qwen3", tmp_path, hidden_size=128, intermediate_size=192, torch_dtype=dtype
    )
    plain, rounded = load(path, dtype=dtype), load(path, dtype=dtype, quantization=scheme)
    exact = load(path)
    error = relative_error(logits_of(rounded, PROMPT), logits_of(exact, PROMPT))
    # Three random layers with sharp weights (measured: 0.02, 0.03, 0.3, 0.3).
    assert 0 < error < {"int8": 0.05, "w8a8": 0.06, "int4": 0.5, "w4a8": 0.5}[scheme]
    assert rounded.weight_bytes < plain.weight_bytes * 0.9
    assert rounded.info.digest != plain.info.digest, "its KV must not be taken for the exact one"
    assert load(path, dtype=dtype, quantization=scheme).info.digest == rounded.info.digest


MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "qwen2_moe": {  # a dense layer between, a shared expert
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96, "decoder_sparse_step": 2,
    },
}  # fmt: skip
# Logits against exact ones (measured: 0.036-0.054, 0.051-0.055, 0.41-0.57): a token that meets
# another expert than before counts too.
MIXTURE_BOUND = {"int8": 0.09, "w8a8": 0.11, "int4": 0.75, "w4a8": 0.75}


def rounded_twin(path: Path, scheme: Scheme, dtype: torch.dtype = torch.float32) -> Path:
    """A checkpoint whose products are plain, of the weights that `scheme` rounds to when they are
    read in `dtype`."""
    tensors = load_file(path / "model.safetensors")
    plain = ("embed_tokens", "norm", "shared_expert_gate", "mlp.gate.", "moe.gate.", "kv_b_proj")
    head = cast(Scheme, AUTO_HEADS[scheme])
    twin = path.with_name(f"{path.name}-{scheme}-{dtype}")
    shutil.copytree(path, twin)
    for name, weight in tensors.items():
        if weight.dim() == 2 and not any(part in name for part in plain):
            its = head if name == "lm_head.weight" else scheme
            tensors[name] = quantize(weight.to(dtype), its).dequantized(torch.float32)
    save_file(tensors, twin / "model.safetensors", {"format": "pt"})
    return twin


@pytest.mark.parametrize("scheme", quantization.SCHEMES)
@pytest.mark.parametrize("family", MIXTURES)
def test_mixtures_of_experts_quantized_on_load(family: str, scheme: Scheme, tmp_path: Path) -> None:
    """All products of experts are rounded, routers are not: the twin is equal, the exact near."""
    path = save_random(
        tmp_path / family, family, hidden_size=128, intermediate_size=192, **MIXTURES[family]
    )
    exact, rounded = load(path), load(path, quantization=scheme)
    assert rounded.info.model_impl == "lean"
    assert rounded.weight_bytes < 0.45 * exact.weight_bytes
    found = logits_of(rounded, PROMPT)
    assert 0 < relative_error(found, logits_of(exact, PROMPT)) < MIXTURE_BOUND[scheme]
    twin = logits_of(load(rounded_twin(path, scheme)), PROMPT)
    if scheme in ROUNDS_ROWS:
        assert relative_error(found, twin) < MIXTURE_BOUND["w8a8"], "activations are rounded too"
    else:
        assert relative_error(found, twin) < 2e-5
        assert found.argmax(-1).equal(twin.argmax(-1))
    half = logits_of(load(path, dtype="bfloat16", quantization=scheme), PROMPT)
    twin = logits_of(load(rounded_twin(path, scheme, torch.bfloat16)), PROMPT)
    # Measured: 0.016-0.066, 0.031-0.079, 0.017-0.046; bfloat16 without rounding: 0.023-0.036.
    assert relative_error(half, twin) < (0.12 if scheme in ROUNDS_ROWS else 0.1)


@pytest.mark.parametrize("name", RECIPES)
def test_checkpoints_equal_their_dequantized_twins(name: str, tmp_path: Path) -> None:
    quantized, twin = make_quantized(name, tmp_path)
    loaded = load(quantized)
    assert loaded.info.model_impl == "lean"
    found, expected = logits_of(loaded, PROMPT), logits_of(load(twin), PROMPT)
    error = relative_error(found, expected)
    if name in ROUNDS_ROWS:
        assert 0 < error < 0.05, "weights as in the twin, activations rounded"
    else:
        assert error < 2e-5
        assert found.argmax(-1).equal(expected.argmax(-1))
    assert loaded.weight_bytes < load(twin).weight_bytes


@pytest.mark.parametrize("name", RECIPES)
def test_the_universal_route_widens_integers(name: str, tmp_path: Path) -> None:
    quantized, twin = make_quantized(name, tmp_path)
    loaded = load(quantized, model_impl="transformers")
    expected = load(twin, model_impl="transformers")
    assert loaded.info.model_impl == "transformers"
    assert relative_error(logits_of(loaded, PROMPT), logits_of(expected, PROMPT)) < 1e-5
    assert loaded.weight_bytes == expected.weight_bytes
    assert loaded.info.digest != load(quantized).info.digest, "w8a8's activations are not rounded"


@pytest.mark.parametrize("kind", ["qwen3_moe", "olmo2"])
def test_other_models_of_integers_take_the_universal_route(kind: str, tmp_path: Path) -> None:
    quantized, twin = make_quantized("gptq-desc-act", tmp_path, kind)
    found = logits_of(load(quantized, model_impl="transformers"), PROMPT)
    assert relative_error(found, logits_of(load(twin, model_impl="transformers"), PROMPT)) < 1e-5


def test_integers_of_transposed_layers_are_refused(tmp_path: Path) -> None:
    quantized, twin = (make_tiny_model("gpt2", tmp_path / name) for name in ("quantized", "twin"))
    quantized_pair("w8a16", quantized, twin)
    with pytest.raises(ModelRefused, match=r"GPT2LMHeadModel .*transposed layers \(Conv1D\)"):
        load(quantized)


@pytest.mark.parametrize("name", ["w4a16", "gptq-asymmetric", "awq", "w8a16"])
def test_checkpoints_in_bfloat16(name: str, tmp_path: Path) -> None:
    quantized, twin = make_quantized(name, tmp_path)
    found = logits_of(load(quantized, dtype="bfloat16"), PROMPT)
    expected = logits_of(load(twin), PROMPT)
    assert relative_error(found, expected) < 0.05


@pytest.mark.parametrize("name", ["w8a8", "w4a8", "gptq", "awq"])
def test_ignored_modules_stay_plain(name: str, tmp_path: Path) -> None:
    quantized, twin = make_quantized(
        name, tmp_path, ignored=("0.self_attn.k_proj", "1.mlp.up_proj")
    )
    found, expected = logits_of(load(quantized), PROMPT), logits_of(load(twin), PROMPT)
    assert relative_error(found, expected) < (0.05 if name in ROUNDS_ROWS else 2e-5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scheme", quantization.SCHEMES)
def test_a_rounded_head(scheme: Scheme, tied: bool, tmp_path: Path) -> None:
    """Plain layers: hidden states and KV stay exact, the logits are the rounded head's."""
    path = make_tiny_model("llama", tmp_path, hidden_size=128, tie_word_embeddings=tied)
    exact, rounded = load(path), load(path, lm_head_quantization=scheme)
    stored = load_file(path / "model.safetensors")
    weight = stored["model.embed_tokens.weight" if tied else "lm_head.weight"]
    head = quantize(weight, scheme)
    assert rounded.rounded_head_bytes == head.num_bytes
    replaced = 0 if tied else weight.nbytes
    assert rounded.weight_bytes == exact.weight_bytes - replaced + head.num_bytes
    assert rounded.info.digest != exact.info.digest
    hidden = torch.randn(7, 128, generator=torch.Generator().manual_seed(5))
    twin = QuantizedFormat(torch.float32, CPU)(head, None)(hidden)
    assert torch.equal(rounded.logits(hidden), twin)
    found, expected = logits_of(rounded, PROMPT), logits_of(exact, PROMPT)
    assert 0 < relative_error(found, expected) < LAYER_BOUND[scheme]


def test_which_head_goes_with_which_weights(tmp_path: Path) -> None:
    path = make_tiny_model("qwen3", tmp_path, hidden_size=128, intermediate_size=192)
    assert load(path).rounded_head_bytes == 0
    assert load(path, quantization="int4", lm_head_quantization="none").rounded_head_bytes == 0
    eight = load(path, lm_head_quantization="int8").rounded_head_bytes
    four = load(path, lm_head_quantization="int4").rounded_head_bytes
    assert 0 < four < eight
    for scheme in quantization.SCHEMES:  # of 8 bits beside all of them
        assert load(path, quantization=scheme).rounded_head_bytes == eight
    assert load(path, quantization="int8", lm_head_quantization="int4").rounded_head_bytes == four


def test_a_plain_head_of_a_quantized_checkpoint_can_be_rounded(tmp_path: Path) -> None:
    quantized, twin = make_quantized("awq", tmp_path)
    assert load(quantized).rounded_head_bytes == 0
    loaded = load(quantized, lm_head_quantization="int8")
    assert loaded.rounded_head_bytes
    expected = logits_of(load(twin, lm_head_quantization="int8"), PROMPT)
    assert relative_error(logits_of(loaded, PROMPT), expected) < 2e-5


def test_a_head_that_is_stored_quantized_is_served_as_it_is(tmp_path: Path) -> None:
    quantized, twin = make_quantized("gptq", tmp_path)
    tensors, plain = (
        load_file(quantized / "model.safetensors"),
        load_file(twin / "model.safetensors"),
    )
    rounded = round_to_grid(tensors.pop("lm_head.weight"), 4, 32, symmetric=True)
    save_file(tensors | gptq(4)("lm_head", rounded), quantized / "model.safetensors")
    save_file(plain | {"lm_head.weight": rounded.weight}, twin / "model.safetensors")
    assert load(quantized).rounded_head_bytes
    found, expected = logits_of(load(quantized), PROMPT), logits_of(load(twin), PROMPT)
    assert relative_error(found, expected) < 2e-5


COMPRESSED = RECIPES["w8a8"].config
GROUP_0 = COMPRESSED["config_groups"]["group_0"]


def changed(**group: Any) -> dict[str, Any]:
    return COMPRESSED | {"config_groups": {"group_0": GROUP_0 | group}}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({}, "unknown"),
        (RECIPES["gptq"].config | {"bits": 3}, "3 bits"),
        (RECIPES["gptq"].config | {"checkpoint_format": "marlin"}, "marlin"),
        (RECIPES["gptq"].config | {"dynamic": {"-:x": {}}}, "dynamic"),
        (RECIPES["awq"].config | {"version": "gemv"}, "gemv"),
        (RECIPES["awq"].config | {"zero_point": False}, "zero_point=False"),
        (COMPRESSED | {"format": "float-quantized"}, "float-quantized"),
        (COMPRESSED | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
        (COMPRESSED | {"config_groups": {}}, "without config_groups"),
        (changed(input_activations=GROUP_0["input_activations"] | {"dynamic": False}), "dynamic"),
        (changed(weights=GROUP_0["weights"] | {"type": "float"}), "type float"),
        (changed(weights=GROUP_0["weights"] | {"strategy": "block"}), "by block"),
        (changed(weights=GROUP_0["weights"] | {"strategy": "group"}), "beside anything"),
        (changed(weights=GROUP_0["weights"] | {"num_bits": 4, "symmetric": False}), "beside any"),
        (changed(output_activations={"num_bits": 8}), "quantized outputs"),
    ],
)
def test_what_is_not_served_is_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelRefused, match=named):
        layout_of(config)


def test_groups_that_name_modules(tmp_path: Path) -> None:
    quantized, twin = make_quantized("w8a16", tmp_path)
    path = quantized / "config.json"
    config = json.loads(path.read_text())
    groups = config["quantization_config"]["config_groups"]
    groups["group_0"]["targets"] = ["re:.*self_attn.*", "model.layers.0.mlp.up_proj"]
    path.write_text(json.dumps(config))
    with pytest.raises(ModelRefused, match="no group names it"):
        load(quantized)
    groups["group_1"] = groups["group_0"] | {"targets": ["re:.*mlp.*"]}
    path.write_text(json.dumps(config))
    assert relative_error(logits_of(load(quantized), PROMPT), logits_of(load(twin), PROMPT)) < 2e-5


def test_groups_of_unequal_sizes_are_refused(tmp_path: Path) -> None:
    quantized, _ = make_quantized("gptq", tmp_path)
    tensors = load_file(quantized / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.g_idx"][0] = 1
    save_file(tensors, quantized / "model.safetensors")
    with pytest.raises(ModelRefused, match="groups differ in size"):
        load(quantized)


@pytest.mark.parametrize("name", ["gptq", "awq", "w4a16"])
@pytest.mark.parametrize("impl", ["lean", "transformers"])
def test_groups_that_do_not_divide_the_inputs_are_refused(
    name: str, impl: str, tmp_path: Path
) -> None:
    """By the config on the lean route, by the tensors on the universal one, in the same words."""
    quantized, _ = make_quantized(name, tmp_path)
    path = quantized / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = with_groups_of(128, RECIPES[name].config)  # 192 inputs of down
    path.write_text(json.dumps(config))
    told = r"model\.layers\.\d\.mlp\.down_proj: groups of 128 do not divide its 192 inputs"
    with pytest.raises(ModelRefused, match=told):
        load(quantized, model_impl=impl)


def test_what_does_not_go_together(tmp_path: Path) -> None:
    quantized, twin = make_quantized("gptq", tmp_path)
    with pytest.raises(ConfigError, match="quantized already"):
        load(quantized, quantization="int8")
    with pytest.raises(ModelRefused, match="only the lean route rounds weights"):
        load(make_tiny_model("gpt2", tmp_path / "gpt2"), quantization="int8")
    with pytest.raises(ModelRefused, match="only the lean route rounds weights"):
        load(tmp_path / "gpt2", lm_head_quantization="int8")
    odd = make_tiny_model("llama", tmp_path / "narrow", hidden_size=72, head_dim=16)
    with pytest.raises(ModelRefused, match="lm_head cannot be quantized") as refused:
        load(odd, lm_head_quantization="int4")
    assert refused.value.field == "lm_head_quantization"
    with pytest.raises(ModelRefused, match="cannot be quantized to int4"):
        load(make_tiny_model("llama", tmp_path / "odd", intermediate_size=72), quantization="int4")
    with pytest.raises(ConfigError, match="quantization must be one of"):
        load(twin, quantization="int3")


@pytest.mark.parametrize(("bits", "zero"), [(4, 9), (4, -9), (8, 129), (8, -200)])
def test_zeros_that_the_bits_cannot_hold_are_refused(bits: Literal[4, 8], zero: float) -> None:
    values, zeros = torch.zeros(4, 6, dtype=torch.int8), torch.zeros(4, 2)
    weight = IntWeight(bits, values, torch.ones(4, 2), zeros)
    zeros[1, 1] = 8
    assert checked("m", weight) is weight
    zeros[2, 1] = zero
    with pytest.raises(ModelRefused, match=f"m: zeros beyond {bits} bits"):
        checked("m", weight)


def test_scales_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ModelRefused, match="do not fit"):
        checked("m", IntWeight(8, torch.zeros(4, 6, dtype=torch.int8), torch.ones(4, 4)))
