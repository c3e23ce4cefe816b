"""Mamba's time step is bounded in the tokens of prompts and in no others, however steps cut them:
`generate` bounds a prompt, which it computes at once, and not what it computes token by token."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from baton.engine.attention.torch_cpu import TorchAttention
from baton.engine.config import EngineConfig
from baton.engine.core.assembly import assemble, load_parts
from baton.engine.core.engine import Engine
from baton.engine.loading.loading import LoadedModel, load_model
from baton.engine.memory.kv_cache import KVArena
from baton.engine.memory.layer_groups import one_group
from baton.engine.memory.state_arena import StateArena
from baton.engine.models.recurrent import PromptBounds
from baton.engine.state.batch import flatten
from baton.engine.state.interface import SequenceChunk
from baton.protocol.errors import ModelRefused
from tests.block_lists import held
from tests.engine.driving import run, run_samples, tokens_of
from tests.engine.test_state_models import ask, engine_of
from tests.fakes import fake_engine, model_info, request
from tests.golden.greedy import random_prompts, transformers_tokens
from tests.golden.random_models import save_random
from tests.golden.stateful_models import STATEFUL
from tests.tiny_models import VOCAB_SIZE

LIMITS: dict[str, Any] = {"time_step_limit": (0.3, 0.6)}
SHAPES: dict[str, dict[str, Any]] = {
    "nemotron_h": STATEFUL["nemotron_h"],
    "zamba2": STATEFUL["zamba2"],
    "bamba": STATEFUL["bamba"] | LIMITS,
    "falcon_h1": STATEFUL["falcon_h1"] | LIMITS,
    "granitemoehybrid": STATEFUL["granitemoehybrid"] | LIMITS,
    "mamba2": STATEFUL["mamba2"] | LIMITS,
}
PROMPTS = random_prompts(VOCAB_SIZE, (9, 6))
NEW = 7  # outputs of each
FAR = 1e-2  # of the size of logits: by far more than rounding, by far less than what bounds do
NEAR = 1e-5


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    yield
    logging.getLogger("transformers").setLevel(logging.WARNING)


@dataclass(frozen=True)
class Known:
    """A prompt with the tokens that `generate` writes behind it, and its logits [NEW, vocab]."""

    tokens: list[int]
    num_prompt: int
    logits: Tensor


@dataclass(frozen=True)
class Case:
    """A model and what transformers generates with it."""

    loaded: LoadedModel
    known: list[Known]


@pytest.fixture(scope="module", params=SHAPES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    name: str = request.param
    path = save_random(tmp_path_factory.mktemp(name), name, **SHAPES[name])
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    known: list[Known] = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, min_new_tokens=NEW,
            do_sample=False, eos_token_id=None, pad_token_id=0, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        known.append(Known(found.sequences[0].tolist(), len(prompt), torch.cat(found.logits)))
    return Case(load_model(EngineConfig(str(path), dtype="float32", max_model_len=64)), known)


@torch.inference_mode()
def distance(case: Case, cuts: Sequence[Sequence[int]], prompts: Sequence[int]) -> float:
    """How far our logits are from those of transformers, by their size, if the sequences are
    computed side by side in the chunks between `cuts`, as if `prompts` tokens were their prompts.
    """
    info, size = case.loaded.info, 4
    blocks = -(-max(len(each.tokens) for each in case.known) // size)
    arena = KVArena(one_group(info.layers), blocks * len(cuts), size, info.kv_dtype)
    attention = TorchAttention(arena, case.loaded.attention_layers)
    states = StateArena(info.layers, len(cuts), case.loaded.device)
    farthest = 0.0
    left = [[*cut, len(each.tokens) - 1] for cut, each in zip(cuts, case.known, strict=True)]
    starts = [0] * len(cuts)
    while running := [index for index, stops in enumerate(left) if stops]:
        chunks: list[SequenceChunk] = []
        for index in running:
            stop = left[index].pop(0)
            tokens = case.known[index].tokens[starts[index] : stop]
            table = held(range(index * blocks, (index + 1) * blocks))
            chunks.append(
                SequenceChunk(
                    str(index), tokens, starts[index], table, num_prompt=prompts[index],
                    state_slot=index,
                )
            )  # fmt: skip
            starts[index] = stop
        step = flatten(chunks, attention, size, case.loaded.device, states=states)
        hidden = case.loaded.forward(step.token_ids, step.positions, step.batch)
        logits = case.loaded.logits(hidden)
        for index, span in zip(running, step.batch.spans, strict=True):
            known = case.known[index]
            for row in range(span.num_rows):
                place = span.start + row + 1 - known.num_prompt
                if place >= 0:
                    found, right = logits[span.first_row + row], known.logits[place]
                    far = float((found - right).abs().max() / right.abs().max())
                    farthest = max(farthest, far)
    return farthest


def cuts_of(num_prompt: int) -> st.SearchStrategy[list[int]]:
    return st.sets(st.integers(1, num_prompt + NEW - 2)).map(sorted)


@settings(max_examples=25, deadline=None)
@given(cuts=st.tuples(*(cuts_of(len(prompt)) for prompt in PROMPTS)))
def test_however_steps_cut_a_sequence(case: Case, cuts: tuple[list[int], list[int]]) -> None:
    assert distance(case, cuts, [len(prompt) for prompt in PROMPTS]) < NEAR


def test_what_is_taken_for_something_else_tells(case: Case) -> None:
    """One token taken for an output, or for a prompt's, in chunks and alone."""
    every = [[*range(1, len(each.tokens) - 1)] for each in case.known]
    for cuts in ([[], []], every):
        for other in (-1, 1):
            assert distance(case, cuts, [len(prompt) + other for prompt in PROMPTS]) > FAR


def test_a_mixer_with_other_scans_is_refused() -> None:
    class Mixer(nn.Module):
        time_step_limit = (0.1, 1.0)

        def forward(self, rows: Tensor) -> Tensor:
            return rows

    with pytest.raises(ModelRefused, match="Mixer bounds its time step in an unknown way"):
        PromptBounds(Mixer())


# ---- blocks and states of other requests ----


@pytest.mark.parametrize("differ", [True, False])
def test_outputs_are_found_as_outputs_alone(differ: bool) -> None:
    engine, _ = fake_engine(info=model_info(outputs_differ=differ))  # blocks of 4 tokens
    prompt = tuple(range(3, 13))
    engine.add(request("first", prompt, max_tokens=12))
    outputs = tokens_of(run(engine)["first"])
    engine.add(request("next", (*prompt, *outputs)))
    assert run(engine)["next"][0].num_cached_tokens == (8 if differ else 20)
    asked = request("again", prompt, outputs=outputs, max_tokens=20)
    reservation = engine.reserve(asked, 21)
    assert reservation is not None
    assert reservation.start_token == (8 if differ else 20)
    engine.cancel(reservation)
    found = engine.stats.num_prefix_hit_tokens
    engine.add(asked)
    run(engine)
    assert engine.stats.num_prefix_hit_tokens - found == 20


@pytest.mark.parametrize("differ", [True, False])
def test_a_third_turn(differ: bool, tmp_path: Path) -> None:
    """The second prompt that goes on behind an answer has a state, and KV, of prompts alone; with
    those of outputs it would have others."""
    path = save_random(tmp_path, "zamba2", **STATEFUL["zamba2"])
    options = {"num_state_checkpoints": 8, "state_checkpoint_spacing": 1}
    config = engine_of(path, **options).config
    parts = load_parts(config)
    assert parts.info.outputs_differ
    engine = assemble(replace(parts, info=replace(parts.info, outputs_differ=differ)))
    fresh = engine_of(path)

    def told(asked: Engine, prompt: list[int]) -> tuple[list[int], list[float]]:
        ask(asked, "turn", prompt, logprobs=0)
        events = run_samples(asked)["turn", 0]
        return tokens_of(events), [event.logprobs[0][0].logprob for event in events]

    prompt, _ = random_prompts(VOCAB_SIZE, (13, 1))
    prompt += told(engine, prompt)[0]
    for turn in ([9], [8, 7, 6]):
        (tokens, found), (_, right) = told(engine, [*prompt, *turn]), told(fresh, [*prompt, *turn])
        same = all(abs(a - b) < 1e-4 for a, b in zip(found, right, strict=True))
    assert engine.stats.num_checkpoint_hits >= 2
    assert same == differ
    if differ:
        assert [tokens] == transformers_tokens(path, [[*prompt, 8, 7, 6]], len(tokens))
