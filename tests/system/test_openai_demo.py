"""The real `openai` client against real processes serving the demo model:
32 at once, both kinds, streamed or not.

The greedy answers equal transformers.generate on the same prompts, token for token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from baton.client import AsyncClient
from baton.protocol.sampling import SamplingParams
from tests.system.processes import Processes

pytestmark = [pytest.mark.slow, pytest.mark.long]

MODEL = Path(__file__).parents[2] / "demo_model"
MAX_TOKENS = 48
CONCURRENT = 32
TERMS = (
    "PagedAttention",
    "prefill",
    "decode",
    "the KV cache",
    "TTFT",
    "a block table",
    "GQA",
    "MBU",
)


@dataclass(frozen=True)
class Expected:
    """What transformers answers: token ids, their text, and why it ended."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


@dataclass(frozen=True)
class Served:
    http: openai.AsyncOpenAI
    grpc: AsyncClient
    name: str


def questions() -> list[str]:
    """Of one term after the other, so that each kind of request asks with each verb."""
    verbs = ("What is", "Explain", "Define", "Why")
    return [f"{verbs[(i + j) % 4]} {term}?" for i, term in enumerate(TERMS) for j in range(4)]


@pytest.fixture(scope="module")
def chats() -> dict[str, tuple[list[int], Expected]]:
    """Per question: the prompt's ids by transformers' own chat template, and its answer."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    answers: dict[str, tuple[list[int], Expected]] = {}
    for question in questions():
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        answers[question] = _answer(model, tokenizer, tokenizer(text)["input_ids"])
    return answers


def _answer(model: Any, tokenizer: Any, ids: list[int]) -> tuple[list[int], Expected]:
    prompt = torch.tensor([ids])
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    new = tuple(out[0, len(ids) :].tolist())
    ended = new[-1] in model.generation_config.eos_token_id
    text = tokenizer.decode(new, skip_special_tokens=True)
    return ids, Expected(new, text, "stop" if ended else "length")


@asynccontextmanager
async def served(directory: Path) -> AsyncIterator[Served]:
    async with Processes(MODEL, directory, forked=True) as processes:
        prefill, decode = await processes.nodes(1, 1, ["--num-kv-blocks", "256"])
        router = await processes.router(prefill, decode)
        http = openai.AsyncOpenAI(
            base_url=f"http://{router.address}/v1", api_key="none", max_retries=0
        )
        async with http, AsyncClient(str(router.ready["grpc_address"])) as grpc:
            models = await http.models.list()
            yield Served(http, grpc, models.data[0].id)


async def test_32_concurrent_chats_and_completions_equal_transformers(
    chats: dict[str, tuple[list[int], Expected]], tmp_path: Path
) -> None:
    assert len(chats) == CONCURRENT
    async with served(tmp_path) as s:
        kinds = (chat, chat_streamed, completion, completion_streamed)
        answers = await asyncio.gather(
            *(kinds[i % 4](s, asked, ids) for i, (asked, (ids, _)) in enumerate(chats.items()))
        )
        assert answers == [
            (expected.text, expected.finish_reason, len(expected.token_ids))
            for _, expected in chats.values()
        ]
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
        for ids, expected in list(chats.values())[::8]:
            generation = await s.grpc.generate(ids, params)
            assert generation.token_ids == expected.token_ids


Answer = tuple[str, str | None, int]


async def chat(s: Served, question: str, ids: list[int]) -> Answer:
    reply = await s.http.chat.completions.create(
        model=s.name,
        messages=[{"role": "user", "content": question}],
        temperature=0.0,
        max_tokens=MAX_TOKENS,
    )
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(ids)
    choice = reply.choices[0]
    return choice.message.content or "", choice.finish_reason, reply.usage.completion_tokens


async def chat_streamed(s: Served, question: str, ids: list[int]) -> Answer:
    stream = await s.http.chat.completions.create(
        model=s.name,
        messages=[{"role": "user", "content": question}],
        temperature=0.0,
        max_tokens=MAX_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, reason, tokens = "", None, 0
    async for chunk in stream:
        if chunk.usage is not None:
            assert chunk.usage.prompt_tokens == len(ids)
            tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    return text, reason, tokens


async def completion(s: Served, _question: str, ids: list[int]) -> Answer:
    reply = await s.http.completions.create(
        model=s.name, prompt=ids, temperature=0.0, max_tokens=MAX_TOKENS
    )
    assert reply.usage is not None
    return reply.choices[0].text, reply.choices[0].finish_reason, reply.usage.completion_tokens


async def completion_streamed(s: Served, _question: str, ids: list[int]) -> Answer:
    stream = await s.http.completions.create(
        model=s.name,
        prompt=ids,
        temperature=0.0,
        max_tokens=MAX_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, reason, tokens = "", None, 0
    async for chunk in stream:
        tokens = chunk.usage.completion_tokens if chunk.usage is not None else tokens
        for choice in chunk.choices:
            text += choice.text
            reason = choice.finish_reason or reason
    return text, reason, tokens
