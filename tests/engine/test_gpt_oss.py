"""GPT-OSS on the lean route: transformers' tokens and logits, the universal route's KV."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from baton.engine.models.families.keys import NotLean
from baton.engine.models.families.read import decoder_config
from baton.protocol.errors import ModelRefused
from tests.engine.running import Driver, load, logits_of, relative_error
from tests.golden.gpt_oss_models import GPT_OSS_MODELS, random_sizes, save_gpt_oss
from tests.golden.greedy import our_tokens, random_prompts, transformers_tokens
from tests.tiny_models import VOCAB_SIZE

CONFIGS = Path(__file__).parent / "configs"
PROMPTS = random_prompts(VOCAB_SIZE)
PROMPT = random_prompts(VOCAB_SIZE, (41,))[0]


@torch.inference_mode()
def native_logits(path: Path, ids: Sequence[int]) -> Tensor:
    """Logits [len(ids), vocab] of transformers' own forward."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


@pytest.mark.parametrize("name", GPT_OSS_MODELS)
def test_it_is_transformers_model(name: str, tmp_path: Path) -> None:
    path = save_gpt_oss(tmp_path, **GPT_OSS_MODELS[name])
    expected, logits = transformers_tokens(path, PROMPTS), native_logits(path, PROMPT)
    lean, universal = load(path), load(path, model_impl="transformers")
    assert (lean.info.model_impl, universal.info.model_impl) == ("lean", "transformers")
    assert our_tokens(lean, PROMPTS) == expected
    assert len({token for output in expected for token in output}) > 10  # decisive
    assert relative_error(logits_of(lean, PROMPT), logits) < 1e-5
    chunked = Driver(lean).logits(PROMPT, range(6), [1, 17, 3, 20])
    assert relative_error(chunked, logits) < 1e-5
    # Nodes of both routes serve together.
    assert lean.info.layers == universal.info.layers
    for ours, other in zip(lean.attention_layers, universal.attention_layers, strict=True):
        assert ours.sinks is not None
        assert other.sinks is not None
        assert torch.equal(ours.sinks, other.sinks)
        assert (ours.window, ours.scale) == (other.window, other.scale)
    # Biases that are stacked look like matrices to the universal route.
    counts, theirs = lean.model.parameter_counts, universal.model.parameter_counts
    experts = decoder_config(json.loads((path / "config.json").read_text())).experts
    assert experts is not None
    biases = experts.count * (2 * experts.size + 64) * len(experts.layers)
    assert replace(counts, experts=counts.experts + biases) == theirs
    assert lean.weight_bytes == universal.weight_bytes


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.long] * (seed > 2)) for seed in range(20)]
)
def test_random_configurations(seed: int, tmp_path: Path) -> None:
    path = save_gpt_oss(tmp_path, **random_sizes(seed))
    lean = load(path)
    assert lean.info.model_impl == "lean"
    assert our_tokens(lean, PROMPTS) == transformers_tokens(path, PROMPTS)
    assert relative_error(logits_of(lean, PROMPT), native_logits(path, PROMPT)) < 1e-5


def as_published(path: Path) -> dict[str, Any]:
    """The config, as the family's own checkpoints spell it."""
    config = json.loads((path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    return config | {
        "rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "initial_context_length": 64,
        "experts_per_token": config["num_experts_per_tok"], "router_aux_loss_coef": 0.9,
    }  # fmt: skip


def test_published_keys_are_understood(tmp_path: Path) -> None:
    path = save_gpt_oss(tmp_path)
    published = json.loads((CONFIGS / "gpt-oss-20b.json").read_text())
    del published["quantization_config"]  # as the route reads it
    assert decoder_config(published).windows == (128, 0) * 12
    config = as_published(path)
    assert decoder_config(config) == decoder_config(json.loads((path / "config.json").read_text()))
    config.pop("swiglu_alpha", None)
    experts = decoder_config(config).experts
    assert experts is not None
    assert experts.clamped is not None
    assert experts.clamped.alpha == 1.702


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "layer_types"),
        ({"sliding_window": 0}, "window of 0"),
        ({"experts_per_token": 3}, "differ"),
        ({"num_experts": 5}, "differ"),
        ({"swiglu_limit": None}, "absent"),
        ({"rope_scaling": None}, "RoPE rule"),
        ({"rope_theta": None}, "rope_theta"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"moe_intermediate_size": 48}, "not understood"),
    ],
)
def test_other_configs_are_not_lean(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    config = as_published(save_gpt_oss(tmp_path, num_hidden_layers=3)) | changes
    with pytest.raises(NotLean, match=reason):
        decoder_config({key: value for key, value in config.items() if value is not None})


def test_misshapen_experts_are_refused(tmp_path: Path) -> None:

    path = save_gpt_oss(tmp_path)
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    save_file({**tensors, name: tensors[name][0].clone()}, path / "model.safetensors")
    with pytest.raises(ModelRefused, match=r"experts\.gate_up_proj"):
        load(path, model_impl="lean")
