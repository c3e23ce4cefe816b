"""Replies and events are what OpenAI's SDK says they are: validated by its own types, whole."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.front.dialects import ANSWER, CALL, events_of, front
from tests.front.fakes import Front

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
# Optional in OpenAI's schema, but never null.
NEVER_NULL = ("user", "usage", "prompt_cache_key", "safety_identifier")
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "get_weather"},
    {"type": "custom", "name": "note"},
    {"type": "namespace", "name": "n", "description": "", "tools": [
        {"type": "function", "name": "f"}]},
]  # fmt: skip
NOTE = '<tool_call>\n{"name": "note", "arguments": {"input": "a"}}\n</tool_call>'
BODIES: list[dict[str, Any]] = [
    {},
    {"tools": TOOLS, "top_logprobs": 1},
    {"reasoning": {"effort": "low", "summary": "auto"}, "tools": TOOLS, "tool_choice": "auto"},
    {"max_output_tokens": 3, "user": "u", "prompt_cache_key": "k", "safety_identifier": "s"},
]


def check(response: dict[str, Any]) -> None:
    Response.model_validate(response)
    for name in NEVER_NULL:
        assert response.get(name, "absent") is not None, name


@pytest.mark.parametrize("body", BODIES)
async def test_responses(body: dict[str, Any]) -> None:
    for answer in (ANSWER, f"{NOTE}{CALL}", ""):
        async with front(answer).client() as client:
            asked = {"input": "x", **body}
            whole = await client.post("/v1/responses", json=asked)
            streamed = await client.post("/v1/responses", json={**asked, "stream": True})
        check(whole.json())
        for event in events_of(streamed.text):
            EVENTS.validate_python(event)
            if "response" in event:
                check(event["response"])
                ended = event["type"] in ("response.completed", "response.incomplete")
                assert ("usage" in event["response"]) == ended


async def test_chats_tell_of_refusals_log_probabilities_too() -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 1
    }  # fmt: skip
    async with Front().client() as client:
        whole = await client.post("/v1/chat/completions", json=body)
        streamed = await client.post("/v1/chat/completions", json={**body, "stream": True})
    ChatCompletion.model_validate(whole.json())
    [choice] = whole.json()["choices"]
    assert choice["logprobs"]["refusal"] is None
    told = 0
    for frame in streamed.text.split("\n\n")[:-2]:
        chunk = orjson.loads(frame.removeprefix("data: "))
        ChatCompletionChunk.model_validate(chunk)
        for logprobs in (each["logprobs"] for each in chunk["choices"]):
            told += logprobs is not None
            assert logprobs is None or logprobs["refusal"] is None
    assert told
