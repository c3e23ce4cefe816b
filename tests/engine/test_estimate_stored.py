"""`baton estimate` of quantized checkpoints: command lines that were copied from `baton up`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from baton.engine.config import Quantization
from baton.engine.performance.estimate import main, sized
from baton.engine.performance.ideal import EstimateOptions
from tests.engine.quantized_models import RECIPES, with_groups_of

CONFIGS = Path(__file__).parent / "configs"
LLAMA = "llama-3-8b"


def config_file(folder: Path, quantized: dict[str, Any] | None, **changes: Any) -> Path:
    """A config.json of Llama 3 8B alone."""
    file = folder / "config.json"
    values = json.loads((CONFIGS / f"{LLAMA}.json").read_text()) | changes
    file.write_text(json.dumps(values | ({"quantization_config": quantized} if quantized else {})))
    return file


@pytest.mark.parametrize("name", ["gptq", "awq", "w4a16", "w8a8", "w4a8"])
def test_the_stored_format_by_its_name_changes_nothing(name: str, tmp_path: Path) -> None:
    file = config_file(tmp_path, RECIPES[name].config)
    plain = sized(EstimateOptions(model=file))
    method = RECIPES[name].config["quant_method"]
    assert sized(EstimateOptions(model=file, quantization=method)) == plain
    assert plain.refused is None
    assert plain.quantization == method


def test_a_format_that_the_checkpoint_does_not_have_is_refused(tmp_path: Path) -> None:
    file = config_file(tmp_path, RECIPES["gptq"].config)
    assert "is gptq" in (sized(EstimateOptions(model=file, quantization="awq")).refused or "")
    file = config_file(tmp_path, None)
    refused = sized(EstimateOptions(model=file, quantization="gguf")).refused
    assert "is not quantized" in (refused or "")


def test_4_bit_floats_are_kept_by_their_name_too() -> None:
    file = CONFIGS / "gpt-oss-20b.json"
    named = sized(EstimateOptions(model=file, quantization="mxfp4"))
    assert named == sized(EstimateOptions(model=file))
    assert named.quantization == "mxfp4 (experts)"


@pytest.mark.parametrize("flag", ["--quantization", "-q"])
def test_every_value_of_the_engine_is_a_value_here(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config_file(tmp_path, RECIPES["gptq"].config)
    for value in (*get_args(Quantization), "gptq_marlin"):
        assert main([str(file), flag, value, "--json"]) == 0
        refused = json.loads(capsys.readouterr().out)["refused"]
        assert (refused is None) == (value in ("none", "gptq", "gptq_marlin"))


DOWN = "model.layers.0.mlp.down_proj"
UNEVEN = f"{DOWN}: groups of 128 do not divide its 14400 inputs"
SHARED = "model.layers.0.mlp.shared_expert.down_proj"


@pytest.mark.parametrize(
    ("name", "plain", "told"),
    [
        ("gptq", {}, UNEVEN),
        ("gptq", {"group_size": -1}, None),
        ("gptq", {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]}, None),
        ("gptq", {"modules_in_block_to_quantize": [["mlp.down_proj"]]}, UNEVEN),
        ("awq", {}, UNEVEN),
        ("awq", {"modules_to_not_convert": ["down_proj"]}, None),
        ("awq", {"modules_to_not_convert": ["lm_head"]}, UNEVEN),
        ("w4a16", {}, UNEVEN),
        ("w4a16", {"ignore": ["re:.*down_proj"]}, None),
        ("w4a16", {"ignore": ["lm_head", DOWN]}, UNEVEN.replace("layers.0", "layers.1")),
        ("w8a8", {}, None),
    ],
)  # fmt: skip
def test_groups_that_do_not_divide_the_inputs(
    name: str, plain: dict[str, Any], told: str | None, tmp_path: Path
) -> None:
    quantized = RECIPES[name].config
    if name != "w8a8":
        quantized = with_groups_of(128, quantized) | plain
    file = config_file(tmp_path, quantized, intermediate_size=14400)
    assert sized(EstimateOptions(model=file)).refused == told


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"moe_intermediate_size": 96}, "model.layers.0.mlp.experts.0.down_proj"),
        ({"shared_expert_intermediate_size": 160}, SHARED),
        ({"num_attention_heads": 6, "head_dim": 16}, "model.layers.0.self_attn.o_proj"),
        ({"hidden_size": 96}, "model.layers.0.self_attn.q_proj"),
        ({"intermediate_size": 96}, "model.layers.1.mlp.down_proj"),
        ({"moe_intermediate_size": 32}, None),  # one group
    ],
)
def test_the_product_is_named(changes: dict[str, Any], told: str | None, tmp_path: Path) -> None:
    """Of a mixture whose second layer is dense."""
    mixture: dict[str, Any] = {
        "model_type": "qwen2_moe", "vocab_size": 320, "hidden_size": 128, "intermediate_size": 128,
        "moe_intermediate_size": 128, "shared_expert_intermediate_size": 64, "num_experts": 4,
        "num_experts_per_tok": 2, "norm_topk_prob": True, "rope_theta": 1e6,
        "mlp_only_layers": [1], "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False,
        "architectures": ["Qwen2MoeForCausalLM"],
        "quantization_config": RECIPES["gptq"].config | {"group_size": 64},
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(mixture | changes))
    refused = sized(EstimateOptions(model=file)).refused
    assert (refused and refused.partition(":")[0]) == told
