"""Checkpoints of small floats: read under plain names, equal to the plain model of the numbers that
they stand for, on every route; damaged ones refused with the tensor's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from baton.engine.checkpoint.checkpoint import open_checkpoint
from baton.engine.checkpoint.kinds import widened_kind
from baton.engine.checkpoint.widening import open_tensors
from baton.engine.performance.estimate import rows, sized
from baton.engine.performance.ideal import EstimateOptions
from baton.protocol.errors import ModelRefused
from tests.engine.running import load, logits_of
from tests.engine.widened_models import (
    FORMATS,
    edit_config,
    edit_tensors,
    make_widened,
    packed_experts,
)
from tests.golden.random_models import save_random
from tests.tiny_models import VOCAB_SIZE

CPU = torch.device("cpu")
PROMPT = torch.randint(5, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(3)).tolist()
DOWN = "model.layers.1.mlp.down_proj"


def tensors_of(path: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    reader = open_tensors(open_checkpoint(str(path)), dtype, CPU)
    return {name: reader.read(name) for name in reader.names}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_is_the_twin_s_bit_for_bit(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    path, twin = make_widened(name, tmp_path)
    found, expected = tensors_of(path, dtype), load_file(twin / "model.safetensors")
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor.to(dtype)), key


@pytest.mark.parametrize("name", FORMATS)
def test_the_model_is_the_plain_one_of_the_widened_weights(name: str, tmp_path: Path) -> None:
    path, twin = make_widened(name, tmp_path)
    loaded, plain = load(path), load(twin)
    assert loaded.info.model_impl == plain.info.model_impl == "lean"
    assert torch.equal(logits_of(loaded, PROMPT), logits_of(plain, PROMPT))
    assert loaded.weight_bytes == plain.weight_bytes
    assert loaded.info.digest != plain.info.digest


@pytest.mark.parametrize("name", ["fp8-channel", "fp8-deepseek", "nvfp4", "nf4-nested", "llm-int8"])
def test_the_universal_route_reads_the_same(name: str, tmp_path: Path) -> None:
    path, twin = make_widened(name, tmp_path, kind="qwen3")
    loaded, plain = load(path, model_impl="transformers"), load(twin, model_impl="transformers")
    assert loaded.info.model_impl == "transformers"
    assert torch.equal(logits_of(loaded, PROMPT), logits_of(plain, PROMPT))


@pytest.mark.parametrize("scheme", ["int8", "w8a8", "int4"])
def test_rounded_on_load_as_the_plain_one(scheme: str, tmp_path: Path) -> None:
    path, twin = make_widened("fp8-deepseek", tmp_path)
    loaded, plain = load(path, quantization=scheme), load(twin, quantization=scheme)
    assert torch.equal(logits_of(loaded, PROMPT), logits_of(plain, PROMPT))
    assert loaded.weight_bytes == plain.weight_bytes < load(twin).weight_bytes
    assert loaded.info.digest != load(path).info.digest


def test_modules_that_stay_plain(tmp_path: Path) -> None:
    path, twin = make_widened("fp8-deepseek", tmp_path)
    plain = load_file(twin / "model.safetensors")[f"{DOWN}.weight"].bfloat16()

    def back(tensors: dict[str, Tensor]) -> None:
        tensors[f"{DOWN}.weight"] = plain
        del tensors[f"{DOWN}.weight_scale_inv"]

    edit_tensors(path, back)
    assert torch.equal(tensors_of(path, torch.bfloat16)[f"{DOWN}.weight"], plain)


def test_experts_in_one_tensor(tmp_path: Path) -> None:
    """[experts, out, in], blocks of each expert's own."""
    path, _ = make_widened("fp8-deepseek", tmp_path)
    weight = torch.randn(3, 130, 200).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 2, 2) + 0.5
    edit_tensors(path, lambda t: t.update({"experts.w": weight, "experts.w_scale_inv": scale}))
    found = tensors_of(path, torch.float32)["experts.w"]
    wide = scale.repeat_interleave(128, 1)[:, :130].repeat_interleave(128, 2)[..., :200]
    assert torch.equal(found, weight.float() * wide)


def test_scales_that_are_powers_of_two(tmp_path: Path) -> None:
    """MXFP8: E8M0 as bytes, or as the dtype that safetensors has for it."""
    config = {"type": "float", "num_bits": 8, "strategy": "group", "group_size": 32}
    path, _ = make_widened("fp8-group", tmp_path)
    edit_config(
        path,
        quantization_config={
            "quant_method": "compressed-tensors", "format": "mxfp8-quantized",
            "config_groups": {"group_0": {"weights": config}},
        },
    )  # fmt: skip
    for dtype in (torch.uint8, torch.float8_e8m0fnu):
        exponents = torch.randint(110, 130, (128, 6), dtype=torch.uint8)

        tensors = load_file(path / "model.safetensors")
        tensors[f"{DOWN}.weight_scale"] = exponents.view(dtype)
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        stored = load_file(path / "model.safetensors")[f"{DOWN}.weight"].float()
        factors = (2.0 ** (exponents.float() - 127)).repeat_interleave(32, 1)
        assert torch.equal(tensors_of(path, torch.float32)[f"{DOWN}.weight"], stored * factors)


def make_gpt_oss(path: Path) -> tuple[Path, Path]:
    """A tiny gpt-oss with experts in MXFP4, and its plain twin in bfloat16."""
    small = {
        "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
        "hidden_size": 64, "intermediate_size": 96, "sliding_window": 9,
    }  # fmt: skip
    twin = save_random(path / "twin", "gpt_oss", **small)
    return packed_experts(path, twin)


def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    """Exact in bfloat16, as transformers' own widening has them; tokens as the plain model's."""
    path, twin = make_gpt_oss(tmp_path)
    stored = load_file(path / "model.safetensors")
    for dtype in (torch.bfloat16, torch.float32):
        found, expected = tensors_of(path, dtype), load_file(twin / "model.safetensors")
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(found[key].float(), tensor.to(dtype).float()), key
            if f"{key}_blocks" in stored:
                assert torch.equal(found[key].float(), tensor)
                theirs = convert_moe_packed_tensors(
                    stored[f"{key}_blocks"], stored[f"{key}_scales"], dtype=dtype
                )
                assert torch.equal(found[key], theirs)
    for impl in ("lean", "transformers"):
        loaded, plain = load(path, model_impl=impl), load(twin, model_impl=impl)
        assert loaded.info.model_impl == impl
        assert torch.equal(logits_of(loaded, PROMPT), logits_of(plain, PROMPT))
        assert loaded.info.digest != plain.info.digest


def broken(value: float) -> Any:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[f"{DOWN}.weight_scale_inv"][0, 0] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (broken(float("nan")), "down_proj.weight: a scale of it is not finite"),
        (broken(float("inf")), "down_proj.weight: a scale of it is not finite"),
        (
            lambda t: t.update({f"{DOWN}.weight_scale_inv": torch.ones(3, 5)}),
            r"down_proj.weight: scales \(3, 5\) do not fit weights \(128, 192\)",
        ),
        (lambda t: t.pop(f"{DOWN}.weight_scale_inv"), "down_proj.weight: .*no scale of it"),
        (
            lambda t: t[f"{DOWN}.weight"].view(torch.uint8).fill_(0x7F),
            "down_proj.weight: some of its weights are not finite",
        ),
    ],
)
def test_damaged_tensors_are_refused_by_name(edit: Any, reason: str, tmp_path: Path) -> None:
    path, _ = make_widened("fp8-deepseek", tmp_path)
    edit_tensors(path, edit)
    with pytest.raises(ModelRefused, match=reason):
        load(path)


@pytest.mark.parametrize(
    ("name", "part", "damage", "reason"),
    [
        ("nvfp4", "weight_scale", lambda t: t[:, :3].clone(), "down_proj.weight: scales"),
        ("nvfp4", "weight_scale", lambda t: t.view(torch.uint8).fill_(0x7F).view(t.dtype),
         "down_proj.weight: a scale of it is not finite"),
        ("nvfp4", "weight_global_scale", torch.zeros_like, "down_proj.weight: its global scale"),
        ("nvfp4", "weight_global_scale", lambda t: t.expand(2).clone(), "its global scale"),
        ("nvfp4", "weight_packed", lambda t: t.float(), "down_proj.weight: it is not of bytes"),
        ("nvfp4-modelopt", "weight_scale_2", lambda t: t * float("nan"), "not finite"),
        ("mxfp4", "weight_scale", lambda t: t.fill_(255), "a scale of it is not finite"),
        ("mxfp4", "weight_packed", lambda t: t[0].clone(), "do not fit packed weights"),
        ("nf4", "weight.absmax", lambda t: t * float("nan"), "a scale of it is not finite"),
        ("nf4", "weight.absmax", lambda t: t[1:].clone(), "its parts of sizes"),
        ("nf4", "weight.quant_map", lambda t: t[:3].clone(), "its parts of sizes"),
        ("nf4", "weight", lambda t: t[:9].clone(), "its parts of sizes"),
        ("nf4-nested", "weight.nested_absmax", lambda t: t * float("inf"), "not finite"),
        ("nf4-nested", "weight.absmax", lambda t: t.float(), "rounded twice"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", lambda t: t[:9].clone(),
         "its quant_state cannot be read"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4",
         lambda t: torch.tensor(list(b'{"shape": [0, 5], "blocksize": 64}'), dtype=torch.uint8),
         "its quant_state is of shape"),
        ("llm-int8", "SCB", lambda t: t[1:].clone(), "there is no SCB beside it that fits"),
        ("llm-int8", "SCB", lambda t: t * float("nan"), "down_proj.weight: .* not finite"),
        ("llm-int8", "weight_format", torch.ones_like, "its layout is not by rows"),
    ],
)  # fmt: skip
def test_damaged_groups_are_refused_by_name(
    name: str, part: str, damage: Any, reason: str, tmp_path: Path
) -> None:
    path, _ = make_widened(name, tmp_path)
    edit_tensors(path, lambda t: t.update({f"{DOWN}.{part}": damage(t[f"{DOWN}.{part}"])}))
    with pytest.raises(ModelRefused, match=reason):
        load(path)


def test_a_file_that_ends_is_refused(tmp_path: Path) -> None:
    path, _ = make_widened("fp8-deepseek", tmp_path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelRefused, match="safetensors"):
        load(path)


def group(**weights: Any) -> dict[str, Any]:
    return {"weights": {"num_bits": 8, "type": "float", "strategy": "channel", **weights}}


def compressed(*groups: dict[str, Any], **values: Any) -> dict[str, Any]:
    named = {f"group_{i}": each for i, each in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "config_groups": named, **values}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (compressed(group(), group(type="int")), "integers and floats"),
        (compressed(group(), sparsity_config={"format": "sparse-24"}), "sparse-24"),
        (compressed(group(symmetric=False)), "zero points"),
        (compressed(group(num_bits=4, group_size=16), group()), "fp8 and nvfp4"),
        (compressed(group(num_bits=6, group_size=32)), "6-bit floats in groups of 32"),
        ({"quant_method": "bitsandbytes"}, "neither load_in_4bit nor load_in_8bit"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "modelopt checkpoints of W4A8"),
    ],
)
def test_variants_that_are_not_read_are_named(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelRefused, match=reason):
        widened_kind(config)


def test_block_sizes_that_are_none(tmp_path: Path) -> None:
    path, _ = make_widened("fp8-deepseek", tmp_path)
    for sizes in ([128], [0, 128], "wide", {"a": 1}):
        edit_config(path, quantization_config={"quant_method": "fp8", "weight_block_size": sizes})
        with pytest.raises(ModelRefused, match="are no two sizes"):
            load(path)


@pytest.mark.parametrize("name", ["fp8-deepseek", "nvfp4", "nf4"])
def test_estimate_says_what_is_read_and_how_it_is_kept(name: str, tmp_path: Path) -> None:
    path, _ = make_widened(name, tmp_path)
    said = dict(rows(sized(EstimateOptions(model=path))))
    assert "refused by Baton" not in said
    kind = FORMATS[name].kind
    assert f"weights are stored as {kind}, read and kept as float32" in said["note"]
    rounded = dict(rows(sized(EstimateOptions(model=path, quantization="int8"))))
    assert f"weights are stored as {kind}, read and kept as int8" in rounded["note"]


SIZES = st.sampled_from([32, 64, 96, 128, 160])


@pytest.mark.long
@settings(
    max_examples=20, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(
    name=st.sampled_from(sorted(FORMATS)),
    kind=st.sampled_from(["llama", "qwen2", "qwen3", "mistral"]),
    shape=st.fixed_dictionaries(
        {
            "hidden_size": SIZES, "intermediate_size": SIZES, "tie_word_embeddings": st.booleans()
        }
    ),
    impl=st.sampled_from(["auto", "transformers"]),
)  # fmt: skip
def test_random_configurations(
    name: str, kind: str, shape: dict[str, Any], impl: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    """Equal to the twin, or refused by a name."""
    folder = tmp_path_factory.mktemp("random")
    path, twin = make_widened(name, folder, kind, num_hidden_layers=1, **shape)
    try:
        loaded = load(path, model_impl=impl)
    except ModelRefused:
        return
    assert torch.equal(logits_of(loaded, PROMPT), logits_of(load(twin, model_impl=impl), PROMPT))
