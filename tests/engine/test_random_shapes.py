"""Ten random small shapes of each model with recurrent state or sparse attention: the tokens of
transformers' `generate`, from an engine that computes prompts in chunks, several at once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engine.driving import assert_all_free, run_samples, tokens_of
from tests.engine.test_state_models import ask, engine_of
from tests.golden.greedy import random_prompts, transformers_tokens
from tests.golden.random_shapes import TYPES, random_shape
from tests.tiny_models import VOCAB_SIZE, write_tiny_tokenizer

NUM_SHAPES = 10
NEW_TOKENS = 8
PROMPTS = random_prompts(VOCAB_SIZE, (1, 9, 38))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    yield
    logging.getLogger("transformers").setLevel(logging.WARNING)


def made(model_type: str, seed: int, path: Path) -> Any:
    """A random model of a random shape, every vector random too; it is saved at `path`."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        model_type, vocab_size=VOCAB_SIZE, max_position_embeddings=256, pad_token_id=0,
        **random_shape(model_type, seed),
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.eval().parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 1.2 / parameter.shape[-1] ** 0.5)
        else:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    path.mkdir()
    model.save_pretrained(path)
    write_tiny_tokenizer(path)
    return model


@pytest.mark.soak
@pytest.mark.parametrize("model_type", TYPES)
def test_tokens_are_those_of_generate(model_type: str, tmp_path: Path) -> None:
    wrong: dict[int, Any] = {}
    different = set[tuple[int, ...]]()
    for seed in range(NUM_SHAPES):
        path = tmp_path / str(seed)
        expected = transformers_tokens(made(model_type, seed, path), PROMPTS, NEW_TOKENS)
        engine = engine_of(path)
        for index, prompt in enumerate(PROMPTS):
            ask(engine, str(index), prompt, max_tokens=NEW_TOKENS)
        found = [tokens_of(events) for _, events in sorted(run_samples(engine).items())]
        assert engine.stats.num_chunked_prompts == 1
        assert_all_free(engine)
        different.add(tuple(expected[-1]))
        if found != expected:
            wrong[seed] = random_shape(model_type, seed), found, expected
    assert not wrong
    assert len(different) == NUM_SHAPES  # decisive
