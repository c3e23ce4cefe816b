"""Drafts change no token of a model with recurrent state: a refused one leaves no trace in it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.engine.config import EngineConfig
from baton.engine.core.assembly import assemble, load_parts
from baton.engine.core.engine import Engine
from baton.engine.loading.loading import load_model
from baton.engine.running.speculation import load_proposer
from baton.engine.sampling.proposer import DraftAsk
from baton.protocol.errors import ConfigError
from tests.engine.driving import assert_all_free, run_samples, tokens_of
from tests.engine.test_state_models import NEW_TOKENS, SHORT, ask, engine_of
from tests.golden.greedy import random_prompts, transformers_tokens
from tests.golden.random_models import save_random
from tests.golden.stateful_models import STATEFUL
from tests.tiny_models import VOCAB_SIZE, make_tiny_model

PROMPTS = random_prompts(VOCAB_SIZE, (5, 17, 33))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    yield
    logging.getLogger("transformers").setLevel(logging.WARNING)


class Oracle:
    """Drafts none, two, or nothing but right tokens."""

    def __init__(self, outputs: dict[str, list[int]]) -> None:
        self._outputs = outputs

    def propose(self, asks: Sequence[DraftAsk]) -> list[list[int]]:
        return [self._drafts(ask) for ask in asks]

    def forget(self, request_id: str) -> None:
        pass

    def _drafts(self, ask: DraftAsk) -> list[int]:
        drafts = self._outputs[ask.request_id][ask.position :][: ask.max_drafts]
        right = (0, 2, len(drafts))[len(ask.history) % 3]
        return [(token + (index >= right)) % VOCAB_SIZE for index, token in enumerate(drafts)]


def speculating(path: Path, outputs: dict[str, list[int]], **options: Any) -> Engine:
    """An engine whose drafts come from an Oracle."""
    given: dict[str, Any] = {
        "dtype": "float32", "device": "cpu", "max_model_len": 128, "block_size": 4,
        "num_kv_blocks": 200, "max_num_batched_tokens": 16, "max_num_seqs": 4,
        "check_invariants": True, "speculative_method": "ngram",
    }  # fmt: skip
    parts = load_parts(EngineConfig(str(path), **(given | options)))
    return assemble(replace(parts, active=replace(parts.active, proposer=Oracle(outputs))))


@pytest.mark.parametrize(
    "model_type",
    [
        model_type if model_type in SHORT else pytest.param(model_type, marks=pytest.mark.long)
        for model_type in STATEFUL
    ],
)
def test_tokens_are_those_without_drafts(model_type: str, tmp_path: Path) -> None:
    path = save_random(tmp_path, model_type, **STATEFUL[model_type])
    expected = transformers_tokens(path, PROMPTS, NEW_TOKENS)
    outputs = {str(index): tokens for index, tokens in enumerate(expected)}
    seen = dict.fromkeys(("num_accepted_tokens", "num_rollbacks", "num_preemptions"), 0)
    for options in ({}, {"preemption_mode": "recompute", "num_kv_blocks": 24}):
        engine = speculating(path, outputs, **options)
        for name, prompt in zip(outputs, PROMPTS, strict=True):
            ask(engine, name, prompt, n=2 if name == "1" else 1)
        for (name, _), events in run_samples(engine).items():
            assert tokens_of(events) == outputs[name]
        assert_all_free(engine)
        states = engine.tables.states
        assert states.num_free == states.num_slots == 8
        for each in seen:
            seen[each] += getattr(engine.stats, each)
    assert all(seen.values()), seen


def test_many_seeds_and_temperatures(tmp_path: Path) -> None:
    path = save_random(tmp_path, "lfm2", **STATEFUL["lfm2"])
    sampled = {
        f"{temperature} {seed}": {"temperature": temperature, "seed": seed, "max_tokens": 12}
        for temperature in (0.7, 1.1)
        for seed in range(100)
    }

    def answers(engine: Engine) -> dict[str, list[int]]:
        for name, params in sampled.items():
            ask(engine, name, PROMPTS[0], **params)
        return {name: tokens_of(events) for (name, _), events in run_samples(engine).items()}

    options = {"max_num_seqs": 16, "max_num_batched_tokens": 128}
    plain = answers(engine_of(path, **options))
    engine = speculating(path, plain, **options)
    assert answers(engine) == plain
    assert engine.stats.num_accepted_tokens > 200 < engine.stats.num_rollbacks
    assert len({tuple(tokens) for tokens in plain.values()}) > 50  # they do differ


@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_methods_that_need_no_oracle(method: str, tmp_path: Path) -> None:
    path = save_random(tmp_path / "m", "qwen3_next", **STATEFUL["qwen3_next"])
    options: dict[str, Any] = {"speculative_method": method}
    if method == "draft":
        options["speculative_model"] = str(make_tiny_model("llama", tmp_path / "draft"))
    few = {"logit_bias": tuple((token, 50.0) for token in (7, 8, 9)), "temperature": 1.0}

    def answers(engine: Engine) -> list[list[int]]:
        for index, prompt in enumerate(PROMPTS):
            ask(engine, str(index), prompt, max_tokens=40, seed=index, **few)
        return [tokens_of(events) for _, events in sorted(run_samples(engine).items())]

    engine = engine_of(path, **options)
    assert answers(engine) == answers(engine_of(path))
    assert engine.stats.num_accepted_tokens
    assert engine.stats.num_rollbacks
    assert_all_free(engine)


def test_a_draft_model_with_state_is_refused(tmp_path: Path) -> None:
    path = save_random(tmp_path, "mamba2", **STATEFUL["mamba2"])
    config = EngineConfig(str(path), dtype="float32", max_model_len=128, num_kv_blocks=8)
    draft = load_model(config)
    asked = replace(config, block_size=4, speculative_method="draft", speculative_model=str(path))
    with pytest.raises(ConfigError, match="keeps recurrent state, and cannot go back") as caught:
        load_proposer(asked, draft.info, draft)
    assert caught.value.field == "speculative_model"
