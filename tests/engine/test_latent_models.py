"""Mixtures with latent attention on the lean route: transformers' tokens and logits, the universal
route's KV, every weight format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.loading.loading import LoadedModel
from baton.engine.models.experts import Experts
from baton.engine.models.families.keys import NotLean
from baton.engine.models.families.read import decoder_config
from baton.engine.models.layers.gates import CompiledGate, SigmoidGate
from baton.engine.quantization.integer import SCHEMES, Scheme
from baton.engine.state.interface import SequenceChunk
from baton.protocol.errors import ModelRefused
from tests.block_lists import held
from tests.engine.quantized_models import RECIPES, quantized_pair
from tests.engine.running import Driver, load, logits_of, native_logits, relative_error
from tests.engine.test_quantization import rounded_twin
from tests.engine.widened_models import widened_pair
from tests.golden.greedy import our_tokens, random_prompts, transformers_tokens
from tests.golden.latent_models import LATENT_MODELS, as_published, save_latent
from tests.tiny_models import VOCAB_SIZE

PROMPTS = random_prompts(VOCAB_SIZE)
PROMPT = random_prompts(VOCAB_SIZE, (41,))[0]
# Every gate, every rope; the rest comes with the long tests.
UNLIKE = {"v3", "v2, groups", "kimi k2"}
EVERY = [
    pytest.param(name, marks=[pytest.mark.long] * (name not in UNLIKE)) for name in LATENT_MODELS
]


@pytest.mark.parametrize("name", EVERY)
def test_it_is_transformers_model(name: str, tmp_path: Path) -> None:
    path = save_latent(tmp_path, name)
    expected, logits = transformers_tokens(path, PROMPTS), native_logits(path, PROMPT)
    universal = load(path, model_impl="transformers")
    lean = load(as_published(path, name))
    assert lean.info.model_impl == "lean"
    assert our_tokens(lean, PROMPTS) == expected
    assert len({token for output in expected for token in output}) > 10  # decisive
    assert relative_error(logits_of(lean, PROMPT), logits) < 1e-5
    # Nodes of both routes serve together, and both are measured alike.
    assert lean.info.layers == universal.info.layers
    assert lean.attention_layers == universal.attention_layers
    counted = replace(lean.model.parameter_counts, last=0, last_experts=0)
    assert counted == universal.model.parameter_counts
    biases = [t for n, t in load_file(path / "model.safetensors").items() if "correction" in n]
    assert lean.weight_bytes == universal.weight_bytes + sum(bias.nbytes for bias in biases)


def prefilled(loaded: LoadedModel, ids: Sequence[int], sizes: Sequence[int]) -> Driver:
    """A driver whose pool holds the prompt's KV, in blocks [0, ...), computed in chunks."""
    driver = Driver(loaded, num_blocks=8)
    driver.logits(ids, range(8), sizes)
    return driver


@torch.inference_mode()
def continued(driver: Driver, ids: Sequence[int], count: int) -> list[int]:
    """Greedy tokens behind a prompt whose KV, but for its last token's, lies in the pool."""
    known = list(ids)
    for _ in range(count):
        start = len(known) - 1
        (logits,) = driver.step([SequenceChunk("s", known[start:], start, held(range(8)))])
        known.append(int(logits[-1].argmax()))
    return known[len(ids) :]


@pytest.mark.parametrize(
    "name", ["v3", "v2, groups", pytest.param("v3, halves", marks=pytest.mark.long)]
)
def test_kv_of_one_route_serves_the_other(name: str, tmp_path: Path) -> None:
    path = save_latent(tmp_path, name)
    loaded = [load(path), load(path, model_impl="transformers")]
    assert [each.info.model_impl for each in loaded] == ["lean", "transformers"]
    drivers = [
        prefilled(each, PROMPT, sizes)
        for each, sizes in zip(loaded, ((41,), (17, 16, 8)), strict=True)
    ]
    ours, theirs = (driver.arena for driver in drivers)
    for layer in range(len(loaded[0].info.layers)):
        torch.testing.assert_close(
            ours.layer(layer)[0], theirs.layer(layer)[0], atol=1e-5, rtol=1e-5
        )
    expected = transformers_tokens(path, [PROMPT])[0]
    for source, target in ((ours, drivers[1]), (theirs, drivers[0])):
        for layer in range(len(loaded[0].info.layers)):
            target.arena.layer(layer)[0].copy_(source.layer(layer)[0])
        assert continued(target, PROMPT, len(expected)) == expected


@pytest.mark.parametrize("name", ["v3", pytest.param("v2, groups", marks=pytest.mark.long)])
def test_in_bfloat16_the_same_as_the_universal_route(name: str, tmp_path: Path) -> None:
    path = save_latent(tmp_path, name, **WIDE)
    exact = logits_of(load(path), PROMPT)
    lean, universal = (
        load(path, dtype="bfloat16"),
        load(path, dtype="bfloat16", model_impl="transformers"),
    )
    # Not of all tokens together: one whose experts are nearly equally good takes others when
    # numbers are rounded, on either route and by each processor's own way of rounding.
    errors = [
        ((logits_of(model, PROMPT) - exact).norm(dim=1) / exact.norm(dim=1)).median()
        for model in (lean, universal)
    ]
    assert errors[0] < 1.5 * errors[1] + 0.01
    if name != "v3":
        return
    # What balances experts decides in its last bits: it is never rounded.
    stored = load_file(path / "model.safetensors")[
        "model.layers.1.mlp.gate.e_score_correction_bias"
    ]
    mixture = lean.model._layers[1].mlp  # type: ignore[attr-defined]
    assert isinstance(mixture, Experts)
    gate = mixture.gate
    if isinstance(gate, CompiledGate):  # whose products of bfloat16 are exact in float32
        assert gate.choice.bias is not None
        assert torch.equal(gate.choice.bias, stored)
        assert not gate.choice.rule.rounded
    else:
        assert isinstance(gate, SigmoidGate)
        assert torch.equal(gate.bias, stored)
        assert gate.router.dtype == torch.float32


# Sizes of whole vectors, and of whole groups of integers.
WIDE: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 192, "q_lora_rank": 64, "kv_lora_rank": 64,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "head_dim": 32, "v_head_dim": 32,
    "moe_intermediate_size": 64,
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_rounded_on_load(scheme: Scheme, dtype: str, tmp_path: Path) -> None:
    """All products but kv_b_proj, whose halves are absorbed."""
    path = save_latent(tmp_path / "model", "v3", **WIDE)
    rounded = load(path, dtype=dtype, quantization=scheme)
    assert rounded.info.model_impl == "lean"
    assert rounded.weight_bytes < 0.7 * load(path, dtype=dtype).weight_bytes
    twin = load(rounded_twin(path, scheme, getattr(torch, dtype)))
    error = relative_error(logits_of(rounded, PROMPT), logits_of(twin, PROMPT))
    # Rounded activations (w8a8), or bfloat16, send some tokens to other experts (measured: 0.19).
    assert error < (2e-5 if dtype == "float32" and scheme in ("int8", "int4") else 0.3)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.long] * (n not in ("w4a16", "awq"))) for n in RECIPES],
)
def test_quantized_checkpoints(name: str, tmp_path: Path) -> None:
    """kv_b_proj too is stored as integers: it is widened when it is read."""
    make = lambda path: save_latent(path, "v3", **WIDE)  # noqa: E731
    quantized, twin = quantized_pair(name, make(tmp_path / "quantized"), make(tmp_path / "twin"))
    loaded = load(quantized)
    assert loaded.info.model_impl == "lean"
    found, expected = logits_of(loaded, PROMPT), logits_of(load(twin), PROMPT)
    assert relative_error(found, expected) < (0.3 if name in ("w8a8", "w4a8") else 2e-5)


@pytest.mark.parametrize("scheme", ["none", "int8"])
def test_published_as_8_bit_floats(scheme: str, tmp_path: Path) -> None:
    """DeepSeek's own blocks, all products; as they are, and rounded while they are read."""
    path, twin = widened_pair(
        "fp8-deepseek",
        save_latent(tmp_path / "packed", "v3", **WIDE),
        save_latent(tmp_path / "twin", "v3", **WIDE),
        ("_proj.weight", "_mqa.weight"),
    )
    loaded, plain = load(path, quantization=scheme), load(twin, quantization=scheme)
    assert loaded.info.model_impl == "lean"
    assert torch.equal(logits_of(loaded, PROMPT), logits_of(plain, PROMPT))


def test_layers_that_draft_are_not_read(tmp_path: Path) -> None:
    path = save_latent(tmp_path, "v3")
    expected = logits_of(load(path), PROMPT)
    tensors = load_file(path / "model.safetensors")
    drafts = {"model.layers.3.eh_proj.weight": torch.ones(2, 2)}
    save_file({**tensors, **drafts}, path / "model.safetensors", {"format": "pt"})
    assert torch.equal(logits_of(load(path), PROMPT), expected)
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**values, "num_nextn_predict_layers": 0}))
    with pytest.raises(ModelRefused, match=r"not understood.*eh_proj"):
        load(path, model_impl="lean")


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("v3", {"topk_method": "greedy"}, "topk_method"),
        ("v3", {"n_group": 3}, "groups"),
        ("v3", {"topk_group": 1, "num_experts_per_tok": 3}, "groups"),
        ("v3", {"n_group": 8, "topk_group": 4}, "one expert"),
        ("v3", {"n_shared_experts": 0}, "shared"),
        ("v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("v3", {"num_key_value_heads": 2}, "latents"),
        ("v3", {"q_lora_rank": None, "attention_bias": True}, "attention_bias"),
        ("v3", {"num_local_experts": 4}, "differ"),
        ("v3", {"sliding_window": 9}, "windows"),
        ("v3", {"made_up": 1}, "made_up"),
        ("v2, groups", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("v2, groups", {"topk_method": "noaux_tc"}, "topk_method"),
        ("glm4 lite", {"partial_rotary_factor": 0.5}, "rotated"),
        ("glm4 lite", {"mlp_layer_types": None, "first_k_dense_replace": 2}, "do not fit"),
    ],
)
def test_what_the_lean_route_does_not_compute(
    name: str, changes: dict[str, Any], reason: str
) -> None:
    family, sizes = LATENT_MODELS[name]
    base: dict[str, Any] = {
        "model_type": family, "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6, "routed_scaling_factor": 2.5,
        "norm_topk_prob": family != "deepseek_v2",
        "n_group": 1, "topk_group": 1, "rope_theta": 10000.0,
    }  # fmt: skip
    assert decoder_config({**base, **sizes}).latent is not None
    with pytest.raises(NotLean, match=reason):
        decoder_config({**base, **sizes, **changes})
