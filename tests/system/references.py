"""The other halves of the great test:
transformers' own `generate`, and one plain engine in this process."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from baton.llm import LLM
from baton.protocol.sampling import SamplingParams
from tests.golden import greedy
from tests.tiny_models import VOCAB_SIZE

Tokens = tuple[int, ...]


def prompts(lengths: Sequence[int], seed: int = 0) -> list[Tokens]:
    """Random prompts of plain tokens (no specials)."""
    draw = random.Random(seed)
    return [tuple(draw.randrange(8, VOCAB_SIZE) for _ in range(length)) for length in lengths]


def transformers_tokens(model: Path, asked: Sequence[Tokens], count: int) -> list[Tokens]:
    """Greedy tokens of transformers' generate in fp32, one prompt at a time, end of sequence
    ignored; computed once for each checkpoint and prompt."""
    known = _known(_digest(model))
    if any(len(known.get(prompt, ())) < count for prompt in asked):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        for prompt in asked:
            if len(known.get(prompt, ())) < count:
                known[prompt] = tuple(greedy.transformers_tokens(loaded, [prompt], count)[0])
    return [known[prompt][:count] for prompt in asked]


@cache
def _known(digest: str) -> dict[Tokens, Tokens]:
    """The longest answer to each prompt, of the checkpoint with this digest."""
    assert digest
    return {}


def _digest(model: Path) -> str:
    """Of all that makes a checkpoint's tokens: its weights, and what they are."""
    digest = hashlib.sha256()
    for file in sorted((*model.glob("*.json"), *model.glob("*.safetensors"))):
        digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


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
