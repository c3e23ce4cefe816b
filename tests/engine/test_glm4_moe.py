"""GLM-4.5 (`glm4_moe`) on the lean route: transformers' tokens, and its layer that drafts.

transformers' own layer for multi-token prediction says what a layer that drafts computes.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpLayer

from baton.engine.state.batch import flatten
from baton.engine.state.interface import SequenceChunk
from baton.llm import LLM
from baton.protocol.sampling import SamplingParams
from tests.block_lists import held
from tests.engine.running import Driver, load, logits_of, native_logits, relative_error
from tests.golden.draft_models import add_mtp
from tests.golden.greedy import our_tokens, random_prompts, transformers_tokens
from tests.golden.latent_models import save_latent
from tests.golden.random_models import save_random, with_random_norms
from tests.tiny_models import VOCAB_SIZE

PROMPTS = random_prompts(VOCAB_SIZE)
MIXTURE: dict[str, Any] = {
    "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_routed_experts": 8,
    "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "air": {**MIXTURE, "attention_bias": True},
    "normed": {**MIXTURE, "attention_bias": True, "use_qk_norm": True},
}


def save(path: Path, kind: str) -> Path:
    return with_random_norms(save_random(path, "glm4_moe", num_mtp_layers=0, **KINDS[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_transformers_model(kind: str, tmp_path: Path) -> None:
    path = save(tmp_path, kind)
    expected, logits = transformers_tokens(path, PROMPTS), native_logits(path, PROMPTS[2])
    lean, universal = load(path), load(path, model_impl="transformers")
    assert lean.info.model_impl == "lean"
    assert our_tokens(lean, PROMPTS) == expected
    assert len({token for output in expected for token in output}) > 10  # decisive
    assert relative_error(logits_of(lean, PROMPTS[2]), logits) < 1e-5
    # Nodes of both routes serve together, and both are measured alike.
    assert lean.info.layers == universal.info.layers
    assert lean.attention_layers == universal.attention_layers
    counted = replace(lean.model.parameter_counts, last=0, last_experts=0)
    assert counted == universal.model.parameter_counts


def test_a_config_as_it_is_published(tmp_path: Path) -> None:
    path = save(tmp_path, "air")
    written, file = load(path), path / "config.json"
    values = json.loads(file.read_text())
    rope = values.pop("rope_parameters")
    values |= {"rope_theta": rope["rope_theta"], "rope_scaling": None, "partial_rotary_factor": 0.5}
    values |= {"num_nextn_predict_layers": 1}
    del values["head_dim"]
    file.write_text(json.dumps(values))
    published = load(path)
    assert published.info.model_impl == "lean"
    assert published.info.layers == written.info.layers
    assert our_tokens(published, PROMPTS, 4) == our_tokens(written, PROMPTS, 4)


def test_bfloat16_follows_float32(tmp_path: Path) -> None:
    path = save(tmp_path, "normed")
    exact, half = load(path), load(path, dtype="bfloat16")
    outputs = zip(our_tokens(exact, PROMPTS, 4), our_tokens(half, PROMPTS, 4), strict=True)
    assert sum(a[0] == b[0] for a, b in outputs) >= 3


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_its_layer_that_drafts_changes_no_token(tmp_path: Path, temperature: float) -> None:
    path = add_mtp(save(tmp_path, "normed"))
    params = SamplingParams(temperature=temperature, seed=2, max_tokens=20, ignore_eos=True)
    sizes: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 64, "block_size": 8}
    plain = LLM(str(path), **sizes)
    fast = LLM(str(path), speculative_method="mtp", check_invariants=True, **sizes)
    found, wanted = (each.generate(PROMPTS, params) for each in (fast, plain))
    assert [out.token_ids for out in found] == [out.token_ids for out in wanted]
    assert fast.engine.stats.num_drafted_tokens > 50
    assert len(fast.engine.info.layers) == 4


def with_copied_block(path: Path) -> Path:
    """Make the layer that drafts a copy of the last layer, but for its own norms and product."""
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.startswith("model.layers.2.")]:
        tensors[name.replace(".2.", ".3.", 1)] = tensors[name].clone()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def reference(path: Path, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The hidden states of ids[:-1], and the logits of transformers' layer that drafts behind
    them."""
    causal: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    own = load_file(path / "model.safetensors")
    last, positions = causal.model.layers[-1], torch.arange(len(ids) - 1)[None]
    layer = MtpLayer(causal.config, type(last), type(causal.model.norm), 2)
    layer.mtp_block = last
    names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    parts = (layer.enorm, layer.hnorm, layer.eh_proj, layer.post_norm)
    for name, part in zip(names, parts, strict=True):
        assert part is not None
        part.weight.data = own[f"model.layers.3.{name}.weight"]
    hidden = causal.model(ids[None, :-1], use_cache=False).last_hidden_state
    rotation = causal.model.rotary_emb(hidden, positions)
    embedded = causal.model.embed_tokens(ids[None, 1:])
    states = layer(embedded, hidden, rotation, None, positions, None)
    return hidden[0], causal.lm_head(states)[0]


@torch.inference_mode()
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_the_layer_that_drafts_is_transformers_own(family: str, tmp_path: Path) -> None:
    made = save(tmp_path, "air") if family == "glm4_moe" else save_latent(tmp_path, "v3")
    path = with_copied_block(add_mtp(made))
    ids = torch.tensor(PROMPTS[2])
    hidden, wanted = reference(path, ids)
    loaded = load(path, speculative_method="mtp")
    assert loaded.head is not None
    count = len(ids) - 1
    chunk = SequenceChunk("s", ids[1:].tolist(), 0, held(range(12)))
    step = flatten([chunk], Driver(loaded).attention, 8, loaded.device)
    states = loaded.head.states(hidden, {})
    states = loaded.head.forward(states.clone(), step.token_ids, torch.arange(count), step.batch)
    assert relative_error(loaded.head.logits(states), wanted) < 1e-5
