"""EAGLE-3 heads: the head's own numbers, outputs that it never changes, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.state.batch import Batch, flatten
from baton.engine.state.interface import SequenceChunk
from baton.llm import LLM
from baton.protocol.errors import ConfigError
from baton.protocol.sampling import SamplingParams
from tests.block_lists import held
from tests.engine.driving import assert_all_free
from tests.engine.running import Driver, load, relative_error
from tests.engine.test_draft_heads import LONG, PROMPTS, llm, tokens
from tests.golden.draft_models import eagle3_logits, save_eagle3
from tests.golden.latent_models import save_latent
from tests.tiny_models import make_tiny_model

TAPS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("target"), num_hidden_layers=5)


@pytest.fixture(scope="module")
def head(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random head that knows 200 of 320 tokens."""
    return save_eagle3(tmp_path_factory.mktemp("head"), target, 200)


def drafting(target: Path, head: Path, **config: Any) -> LLM:
    method: dict[str, Any] = {"speculative_method": "eagle3", "speculative_model": str(head)}
    return llm(target, check_invariants=True, **method, **config)


@torch.inference_mode()
@pytest.mark.parametrize(("draft_vocab", "deterministic"), [(0, False), (200, False), (200, True)])
def test_the_head_is_what_its_checkpoint_says(
    target: Path, draft_vocab: int, deterministic: bool, tmp_path: Path
) -> None:
    path = save_eagle3(tmp_path, target, draft_vocab)
    options: dict[str, Any] = {"speculative_method": "eagle3", "speculative_model": str(path)}
    loaded = load(target, deterministic=deterministic, **options)
    assert loaded.head is not None
    assert loaded.head.taps == (2, 2, 2)
    driver, ids = Driver(loaded), [*LONG, 5]
    chunks = [SequenceChunk("s", ids[by : 70 + by], 0, held(range(12))) for by in (0, 1)]
    plain, shifted = (flatten([chunk], driver.attention, 8, loaded.device) for chunk in chunks)
    batch = Batch(plain.batch.spans, plain.batch.tables, plain.batch.attention, taps=(2,))
    hidden = loaded.forward(plain.token_ids, plain.positions, batch)
    states = loaded.head.states(hidden, batch.tapped)
    states = loaded.head.forward(states, shifted.token_ids, shifted.positions, shifted.batch)
    found = loaded.head.logits(states)
    tapped = batch.tapped[2]
    if deterministic:  # whose tapped rows come of several tiles
        untiled = load(target, **options)
        again = flatten(chunks[:1], Driver(untiled).attention, 8, untiled.device)
        plainly = replace(again.batch, taps=(2,))
        untiled.forward(again.token_ids, again.positions, plainly)
        tapped = plainly.tapped[2]
    wanted = eagle3_logits(path, target, [tapped] * 3, torch.tensor(ids[1:]))
    known = wanted > -1e29
    assert int(known.sum()) == 70 * (draft_vocab or 320)
    assert torch.equal(found > -1e29, known)
    assert relative_error(found[known], wanted[known]) < 1e-5


@pytest.mark.parametrize(
    "seeds", [range(10), pytest.param(range(200), marks=pytest.mark.soak)], ids=["few", "200"]
)
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_seeded_outputs_are_equal(
    target: Path, head: Path, seeds: range, temperature: float
) -> None:
    params = [
        SamplingParams(
            seed=seed, temperature=temperature, max_tokens=20, n=1 + seed % 2,
            allowed_token_ids=(5, 6, 7) if seed == 9 else (),
        )
        for seed in seeds
    ]  # fmt: skip
    prompts = [PROMPTS[seed % 4] for seed in seeds]
    wanted = llm(target, num_kv_blocks=1280).generate(prompts, params)
    fast = drafting(target, head, num_kv_blocks=1280, max_num_batched_tokens=64)
    assert tokens(fast.generate(prompts, params)) == tokens(wanted)
    assert fast.engine.stats.num_drafted_tokens > 100
    assert_all_free(fast.engine)


def test_other_sizes_than_the_target_s(tmp_path: Path) -> None:
    """Latents in the target's layers, keys and values of heads in the head's."""
    target = save_latent(tmp_path / "v3", "v3")
    llama = make_tiny_model("llama", tmp_path / "llama", num_key_value_heads=1)
    own: dict[str, Any] = {"norm_before_residual": True, TAPS: [0, 1, 2]}
    head = save_eagle3(tmp_path / "head", llama, 0, **own)
    params = SamplingParams(seed=1, temperature=0.7, max_tokens=20, ignore_eos=True)
    fast = drafting(target, head)
    assert tokens(fast.generate(PROMPTS, params)) == tokens(llm(target).generate(PROMPTS, params))
    assert [layer.kind for layer in fast.engine.info.layers] == ["mla"] * 3 + ["full"]
    assert fast.engine.stats.num_drafted_tokens > 50


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "no EAGLE-3 head"),
        ({"num_hidden_layers": 2}, "no EAGLE-3 head"),
        ({"vocab_size": 100}, "vocabulary of 100, the model has 320"),
        ({"target_hidden_size": 32}, "width 32, the model has 64"),
        ({TAPS: [1, 2, 5]}, "layers 0 to 4"),
        ({"eagle_config": {TAPS: [1, 2, 9]}}, "layers 0 to 4"),
        ({"made_up": 1}, "made_up"),
    ],
    ids=str,
)
def test_what_is_no_head_for_this_model(
    target: Path, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = save_eagle3(tmp_path, target)
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | changes))
    with pytest.raises(ConfigError, match=reason) as caught:
        load(target, speculative_method="eagle3", speculative_model=str(path))
    assert caught.value.field == "speculative_model"


def test_options(target: Path, head: Path) -> None:
    with pytest.raises(ConfigError, match="come together"):
        load(target, speculative_method="eagle3")
    options: dict[str, Any] = {"speculative_method": "eagle3", "speculative_model": str(head)}
    other = head.parent / "without"
    other.mkdir()
    tensors = load_file(head / "model.safetensors")
    del tensors["fc.weight"]
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    (other / "config.json").write_text((head / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"missing.*fc"):
        load(target, **{**options, "speculative_model": str(other)})
