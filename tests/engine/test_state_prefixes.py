"""Prompts that begin alike resume from a checkpoint of state, with the tokens of transformers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.engine.core.engine import Engine
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from tests.engine.driving import assert_all_free, run_samples, tokens_of
from tests.engine.test_state_models import NEW_TOKENS, SHORT, ask, engine_of
from tests.golden.greedy import random_prompts, transformers_tokens
from tests.golden.random_models import save_random
from tests.golden.stateful_models import STATEFUL
from tests.tiny_models import VOCAB_SIZE

SHARED = 24  # tokens with which all prompts but the last begin: 6 blocks
LONG, OTHER, THIRD, FAR = (
    [*[9 + i * i % 31 for i in range(SHARED)], *rest]
    for rest in random_prompts(VOCAB_SIZE, (17, 11, 8, 5))
)
FAR[0] += 1


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    yield
    logging.getLogger("transformers").setLevel(logging.WARNING)


def engine_with_checkpoints(path: Path, **options: Any) -> Engine:
    given = {"num_state_checkpoints": 4, "state_checkpoint_spacing": 4}
    return engine_of(path, **(given | options))


def answers(engine: Engine, *prompts: list[int], **params: Any) -> list[list[int]]:
    """The tokens of all prompts together, of all their samples."""
    for index, prompt in enumerate(prompts):
        ask(engine, str(index), prompt, **params)
    return [tokens_of(events) for _, events in sorted(run_samples(engine).items())]


@pytest.mark.parametrize(
    "model_type",
    [
        model_type if model_type in SHORT else pytest.param(model_type, marks=pytest.mark.long)
        for model_type in STATEFUL
    ],
)
def test_prompts_that_begin_alike_share_a_state(model_type: str, tmp_path: Path) -> None:
    path = save_random(tmp_path, model_type, **STATEFUL[model_type])
    prompts = [LONG, OTHER, THIRD, FAR]
    long, other, third, far = transformers_tokens(path, prompts, NEW_TOKENS)
    engine = engine_with_checkpoints(path)
    stats = engine.stats
    assert answers(engine, LONG) == [long]  # a checkpoint at its end
    assert answers(engine, OTHER) == [other]  # and one where it leaves the first prompt
    assert (stats.num_checkpoint_hits, stats.num_checkpoints_stored) == (0, 3)
    assert answers(engine, THIRD, LONG, FAR, n=2) == [third, third, long, long, far, far]
    assert stats.num_checkpoint_hits == 2
    assert stats.num_prefix_hit_tokens == SHARED + (len(LONG) - 1) // 4 * 4
    assert_all_free(engine)


@pytest.mark.parametrize("model_type", ["qwen3_next", "zamba2"])
def test_a_preempted_request_goes_on_from_a_checkpoint(model_type: str, tmp_path: Path) -> None:
    path = save_random(tmp_path, model_type, **STATEFUL[model_type])
    prompts = [LONG, OTHER, THIRD, FAR]
    engine = engine_with_checkpoints(path, preemption_mode="recompute", num_kv_blocks=26)
    assert answers(engine, *prompts) == transformers_tokens(path, prompts, NEW_TOKENS)
    assert engine.stats.num_preemptions
    assert engine.stats.num_checkpoint_hits
    assert_all_free(engine)


@pytest.mark.parametrize(
    "params",
    [
        {"skip_reading_prefix_cache": True},
        {"prompt_logprobs": 1},
    ],
)
def test_what_reads_no_prefix_resumes_from_none(params: dict[str, Any], tmp_path: Path) -> None:
    path = save_random(tmp_path, "mamba2", **STATEFUL["mamba2"])
    expected = transformers_tokens(path, [LONG], NEW_TOKENS)
    engine = engine_with_checkpoints(path)
    assert answers(engine, LONG) == answers(engine, LONG, **params) == expected
    assert engine.stats.num_checkpoint_hits == 0


def test_an_exact_request_makes_no_checkpoint_and_uses_none(tmp_path: Path) -> None:
    path = save_random(tmp_path, "mamba2", **STATEFUL["mamba2"])
    expected = transformers_tokens(path, [LONG], NEW_TOKENS)
    engine = engine_with_checkpoints(path)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    for plain, stored in ((False, 0), (True, 1), (False, 1)):
        if plain:
            assert answers(engine, LONG) == expected
        else:
            engine.add(Request("exact", tuple(LONG), params, resume="exact"))
            assert [tokens_of(run_samples(engine)["exact", 0])] == expected
        assert engine.stats.num_checkpoints_stored == stored
        assert engine.stats.num_checkpoint_hits == 0


def test_without_prefix_caching_no_state_is_kept(tmp_path: Path) -> None:
    path = save_random(tmp_path, "mamba2", **STATEFUL["mamba2"])
    engine = engine_with_checkpoints(path, enable_prefix_caching=False)
    assert answers(engine, LONG) == answers(engine, LONG)
    assert engine.arena.states is not None
    assert engine.arena.states.num_checkpoints == engine.stats.num_checkpoints_stored == 0
