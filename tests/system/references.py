"""The other halves of the great test:
transformers' own `generate`, and one plain engine in this process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from baton.llm import LLM
from baton.protocol.sampling import SamplingParams
from tests.tiny_models import VOCAB_SIZE

Tokens = tuple[int, ...]


def prompts(lengths: Sequence[int], seed: int = 0) -> list[Tokens]:
    """Random prompts of plain tokens (no specials)."""
    draw = random.Random(seed)
    return [tuple(draw.randrange(8, VOCAB_SIZE) for _ in range(length)) for length in lengths]


def transformers_tokens(model: Path, asked: Sequence[Tokens], count: int) -> list[Tokens]:
    """Greedy tokens of transformers' generate in fp32,
    one prompt at a time, end of sequence ignored."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    found: list[Tokens] = []
    for prompt in asked:
        ids = torch.tensor([prompt])
        out = loaded.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        found.append(tuple(out[0, len(prompt) :].tolist()))
    return found


def one_engine_tokens(
    model: Path, asked: Sequence[Tokens], params: SamplingParams, model_impl: str = "auto"
) -> list[Tokens]:
    """Tokens of `LLM`, one engine in this process; computed once for each question."""
    return list(_one_engine_tokens(model, tuple(asked), params, model_impl))


@cache
def _one_engine_tokens(
    model: Path, asked: tuple[Tokens, ...], params: SamplingParams, model_impl: str
) -> tuple[Tokens, ...]:
    llm = LLM(model=str(model), model_impl=model_impl, num_kv_blocks=64, threads=1)
    return tuple(tuple(out.token_ids) for out in llm.generate([list(p) for p in asked], params))
