"""Several prompts in one body of /v1/completions: one answer each, and the usage of all."""

from __future__ import annotations

from typing import Any

import pytest

from tests.front.fakes import TOKENIZER, FakeDispatcher, Front
from tests.front.test_http_api import COMPLETIONS, events_of

ANSWERS = {"one": "hi", "three": "a much longer answer", "eleven": "hello"}


def tokens(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=True))


def front() -> Front:
    scripts = {tokens(prompt): answer for prompt, answer in ANSWERS.items()}
    return Front(dispatcher=FakeDispatcher(scripts=scripts))


def expected_usage() -> dict[str, Any]:
    prompts = sum(len(tokens(prompt)) for prompt in ANSWERS)
    answered = sum(len(tokens(answer)) + 1 for answer in ANSWERS.values())  # and each one's end
    return {
        "prompt_tokens": prompts,
        "completion_tokens": answered,
        "total_tokens": prompts + answered,
        "prompt_tokens_details": {"cached_tokens": 2 * len(ANSWERS)},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_usage_is_the_sum_over_all_prompts() -> None:
    async with front().client() as client:
        reply = await client.post(COMPLETIONS, json={"prompt": list(ANSWERS), "max_tokens": 40})
    body = reply.json()
    assert [choice["text"] for choice in body["choices"]] == list(ANSWERS.values())
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"] == expected_usage()


@pytest.mark.parametrize("continuous", [False, True])
async def test_so_is_a_stream_s(continuous: bool) -> None:
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    body = {"prompt": list(ANSWERS), "max_tokens": 40, "stream": True, "stream_options": options}
    async with front().client() as client:
        reply = await client.post(COMPLETIONS, json=body)
    *chunks, done = events_of(reply.content)
    assert done == "[DONE]"
    texts = dict.fromkeys(range(len(ANSWERS)), "")
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == list(ANSWERS.values())
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], expected_usage())
