"""The vLLM peer: what it asks of vLLM, and the integer weights that it makes for it."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.peers import vllm_cpu
from bench.peers.compressed_weights import GROUP, convert, grouped, rounded
from bench.peers.protocol import Setup, Unsupported


@dataclass(frozen=True, slots=True)
class Params:
    temperature: float
    max_tokens: int
    ignore_eos: bool
    detokenize: bool


class FakeLLM:
    """vLLM's class, as far as the peer uses it: each token is one more than the one before."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        LOADED.append(self)

    def generate(
        self, inputs: list[dict[str, list[int]]], params: Params, use_tqdm: bool
    ) -> list[SimpleNamespace]:
        assert not use_tqdm
        assert (params.temperature, params.ignore_eos, params.detokenize) == (0.0, True, False)
        ends = [each["prompt_token_ids"][-1] for each in inputs]
        answers = [tuple(range(end + 1, end + 1 + params.max_tokens)) for end in ends]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=each)]) for each in answers]


LOADED: list[FakeLLM] = []


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> list[FakeLLM]:
    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = FakeLLM, Params  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    LOADED.clear()
    return LOADED


def test_all_prompts_are_asked_at_once_without_a_prefix_cache(fake_vllm: list[FakeLLM]) -> None:
    generate = vllm_cpu.load(Setup(Path("/models/m"), "none", 3))
    assert generate([[5, 6], [9]], 2).tokens == [[7, 8], [10, 11]]
    (loaded,) = fake_vllm
    assert loaded.options["model"] == "/models/m"
    assert loaded.options["enable_prefix_caching"] is False
    assert os.environ["OMP_NUM_THREADS"] == "3"


def checkpoint(folder: Path, **config: object) -> dict[str, Tensor]:
    """Write a model of one product; return its tensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    (folder / "tokenizer.json").write_text("{}")
    torch.manual_seed(0)
    tensors = {
        "model.layers.0.mlp.up_proj.weight": torch.randn(24, 2 * GROUP).bfloat16(),
        "model.norm.weight": torch.randn(2 * GROUP).bfloat16(),
        "lm_head.weight": torch.randn(8, 2 * GROUP).bfloat16(),
    }
    save_file(tensors, folder / "model.safetensors")
    return tensors


@pytest.mark.parametrize(("quantization", "made"), [("int8", "int8"), ("w8a8", "int8")])
def test_integer_weights_are_made_once(
    fake_vllm: list[FakeLLM], tmp_path: Path, quantization: str, made: str
) -> None:
    given = checkpoint(tmp_path / "m")
    for _ in range(2):
        vllm_cpu.load(Setup(tmp_path / "m", quantization, 2))
    path = tmp_path / f"m-{made}-compressed"
    assert [each.options["model"] for each in fake_vllm] == [str(path)] * 2
    assert sorted(each.name for each in path.iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json"
    ]  # fmt: skip
    found = load_file(path / "model.safetensors")
    assert torch.equal(found["lm_head.weight"], given["lm_head.weight"])
    assert found["model.layers.0.mlp.up_proj.weight"].dtype == torch.int8
    told = json.loads((path / "config.json").read_text())["quantization_config"]
    group = told["config_groups"]["group_0"]
    assert group["weights"]["strategy"] == "channel"
    assert group["input_activations"]["strategy"] == "token"


def test_int8_is_within_half_a_step() -> None:
    weight = torch.randn(16, 96).bfloat16()
    parts = rounded(weight)
    scale = parts["weight_scale"].float()
    again = parts["weight"].float() * scale
    assert ((again - weight.float()).abs() <= scale * 1.01).all()  # the largest is cut to 127 steps
    near = weight.float().abs() <= 126 * scale
    assert ((again - weight.float()).abs() <= 0.501 * scale)[near].all()


def test_nibbles_stand_in_the_order_of_their_columns() -> None:
    weight = torch.randn(4, 2 * GROUP).bfloat16()
    parts = grouped(weight)
    assert parts["weight_packed"].shape == (4, 2 * GROUP // 8)
    assert parts["weight_shape"].tolist() == [4, 2 * GROUP]
    columns = [(parts["weight_packed"] >> 4 * place & 15) - 8 for place in range(8)]
    numbers = torch.stack(columns, 2).flatten(1).float()
    scale = parts["weight_scale"].float().repeat_interleave(GROUP, 1)
    assert parts["weight_scale"].shape == (4, 2)
    assert ((numbers * scale - weight.float()).abs() <= 0.55 * scale).all()


def test_int4_does_not_answer_for_w4a8(fake_vllm: list[FakeLLM], tmp_path: Path) -> None:
    checkpoint(tmp_path / "m")
    with pytest.raises(Unsupported, match="no w4a8 weights"):
        vllm_cpu.load(Setup(tmp_path / "m", "w4a8", 2))
    assert [each.name for each in tmp_path.iterdir()] == ["m"]
    vllm_cpu.load(Setup(tmp_path / "m", "int4", 2))
    assert fake_vllm[0].options["model"] == str(tmp_path / "m-int4-compressed")


def test_weights_that_it_does_not_have(tmp_path: Path) -> None:
    checkpoint(tmp_path / "m", num_experts=4)
    with pytest.raises(Unsupported, match="no int8 weights of a mixture"):
        convert(tmp_path / "m", "int8", tmp_path / "out")
    with pytest.raises(Unsupported, match="no Q4_0 weights"):
        convert(tmp_path / "m", "Q4_0", tmp_path / "out")
    assert not (tmp_path / "out").exists()
