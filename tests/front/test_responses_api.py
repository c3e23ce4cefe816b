"""/v1/responses over HTTP: the real OpenAI SDK, whole and streamed; what is asked; refusals."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from baton.protocol.errors import NodeLost, Overloaded
from router.config import RouterConfig
from tests.front.dialects import (
    ANSWER,
    ARGUMENTS,
    CONFIG,
    THOUGHT,
    check_response,
    events_of,
    front,
    prompt_of,
)
from tests.front.fakes import MODEL, TOKENIZER, FakeDispatcher, Front
from tests.front.openai_sdk import sdk

PATH = "/v1/responses"
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": None,
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


async def post(of: Front, **body: Any) -> dict[str, Any]:
    async with of.client() as client:
        reply = await client.post(PATH, json={"input": "weather?", **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


async def stream(of: Front, **body: Any) -> list[dict[str, Any]]:
    async with of.client() as client:
        reply = await client.post(PATH, json={"input": "weather?", "stream": True, **body})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    return events_of(reply.text)


async def refused(of: Front, **body: Any) -> dict[str, Any]:
    async with of.client() as client:
        reply = await client.post(PATH, json={"input": "weather?", **body})
    assert reply.status_code == 400, reply.text
    assert of.dispatcher.requests == []
    return reply.json()["error"]


# ---- the SDK ----


async def test_a_plain_response() -> None:
    of = Front()
    async with sdk(of) as client:
        reply = await client.responses.create(
            model=MODEL, input="hi", metadata={"run": "7"}, temperature=0.5, top_p=0.9
        )
    assert reply.output_text == "hello world"
    assert (reply.status, reply.object, reply.model) == ("completed", "response", MODEL)
    assert reply.id.startswith("resp_")
    assert (reply.metadata, reply.temperature, reply.top_p) == ({"run": "7"}, 0.5, 0.9)
    assert (reply.model_extra or {})["store"] is True
    request = of.dispatcher.requests[0]
    prompt = TOKENIZER.encode("<s><|user|>hi<|assistant|>", add_special_tokens=False)
    assert request.prompt_ids == tuple(prompt)
    assert reply.usage is not None
    assert reply.usage.input_tokens == len(prompt)
    assert reply.usage.input_tokens_details.cached_tokens == 2
    assert reply.usage.output_tokens == len(TOKENIZER.encode("hello world")) + 1
    assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens


@pytest.mark.parametrize("step", [1, 7, 1000])
async def test_the_sdks_own_stream_puts_everything_together(step: int) -> None:
    async with sdk(front(step=step)) as client:
        made = client.responses.stream(model=MODEL, input="weather?", tools=[TOOL])  # type: ignore[list-item]
        async with made as events:
            seen = [event.type async for event in events]
            final = await events.get_final_response()
    thought, message, *calls = final.output
    assert thought.type == "reasoning"
    assert thought.content is not None
    assert thought.content[0].text == THOUGHT
    assert message.type == "message"
    assert final.output_text == "\n\nLet me see."
    assert [c.type for c in calls] == ["function_call"] * 2
    assert {c.arguments for c in calls if c.type == "function_call"} == {ARGUMENTS}
    first = calls[0]
    assert first.type == "function_call"
    assert first.parsed_arguments == {"city": "Oslo"}
    assert seen[-1] == "response.completed"
    assert "response.reasoning_text.delta" in seen
    assert final.usage is not None
    thinking = TOKENIZER.encode(f"<think>{THOUGHT}</think>", add_special_tokens=False)
    assert final.usage.output_tokens_details.reasoning_tokens >= len(thinking)


async def test_a_failure_before_the_first_token_has_its_status() -> None:
    async with sdk(front().failing(Overloaded("full"))) as client:
        for streamed in (False, True):
            with pytest.raises(openai.RateLimitError):
                await client.responses.create(model=MODEL, input="a", stream=streamed)


async def test_a_failure_in_mid_stream_is_an_event() -> None:
    of = Front().failing(NodeLost("10.0.0.7 gone"), at=2)
    async with sdk(of) as client:
        events = [e async for e in await client.responses.create(input="a", stream=True)]
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.code == "server_error"
    assert "10.0.0.7" not in last.response.error.message
    assert last.response.status == "failed"


async def test_a_client_that_leaves_closes_the_dispatcher() -> None:
    of = Front()
    of.dispatcher.stall_at = 2
    async with sdk(of) as client:
        events = await client.responses.create(model=MODEL, input="a", stream=True)
        async for _ in events:
            break
        await events.close()
        await asyncio.wait_for(of.dispatcher.aborted.wait(), 30)
    assert of.dispatcher.closed == 1


# ---- events and objects ----


async def test_streamed_and_whole_say_the_same() -> None:
    streamed = check_response(await stream(front(), tools=[TOOL]))
    whole = await post(front(), tools=[TOOL])
    drawn = {"id", "call_id"}

    def told(response: dict[str, Any]) -> list[dict[str, Any]]:
        return [{k: v for k, v in item.items() if k not in drawn} for item in response["output"]]

    assert told(streamed) == told(whole)
    assert streamed["usage"] == whole["usage"]
    assert [item["type"] for item in whole["output"]] == [
        "reasoning", "message", "function_call", "function_call",
    ]  # fmt: skip
    assert whole["tools"] == [TOOL]
    assert whole["tool_choice"] == "auto"


async def test_a_summary_that_is_asked_for_is_the_thought() -> None:
    events = await stream(front(), tools=[TOOL], reasoning={"summary": "auto", "effort": "low"})
    response = check_response(events)
    thought = response["output"][0]
    assert thought["summary"] == [{"type": "summary_text", "text": THOUGHT}]
    assert "content" not in thought
    kinds = [event["type"] for event in events]
    assert "response.reasoning_summary_part.added" in kinds
    assert "response.reasoning_text.delta" not in kinds
    assert response["reasoning"] == {"effort": "low", "summary": "auto"}


async def test_cut_short_is_incomplete() -> None:
    for body in ({}, {"stream": True}):
        async with Front().client() as client:
            reply = await client.post(PATH, json={"input": "a", "max_output_tokens": 2, **body})
        found = check_response(events_of(reply.text)) if body else reply.json()
        assert found["status"] == "incomplete"
        assert found["incomplete_details"] == {"reason": "max_output_tokens"}
        assert found["output"][0]["status"] == "incomplete"
        assert found["max_output_tokens"] == 2
        assert found["completed_at"] is None


async def test_an_answer_without_words_is_an_empty_message() -> None:
    found = await post(Front(dispatcher=FakeDispatcher("")))
    assert found["output"][0]["content"][0]["text"] == ""
    assert found["status"] == "completed"


async def test_logprobs_come_with_their_text() -> None:
    for body in ({"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}):
        events = await stream(Front(), **body)
        part = check_response(events)["output"][0]["content"][0]
        deltas = [e for e in events if e["type"] == "response.output_text.delta"]
        assert [entry for event in deltas for entry in event["logprobs"]] == part["logprobs"]
        assert len(part["logprobs"]) == len(TOKENIZER.encode("hello world"))
        wanted = body.get("top_logprobs", 0)
        assert all(len(entry["top_logprobs"]) == wanted for entry in part["logprobs"])


# ---- what is asked ----


async def test_items_become_a_conversation() -> None:
    of = front("ok")
    output = [{"type": "input_text", "text": "cold"}, {"type": "input_text", "text": "wet"}]
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
            {"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [
            {"type": "output_text", "text": "Let me see.", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "7"},
        {"type": "function_call_output", "call_id": "c2", "output": output},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
        {"type": "function_call", "call_id": "c3", "name": "h", "arguments": "{}"},
    ]  # fmt: skip
    await post(of, input=items, instructions="Be kind.")
    assert prompt_of(of) == (
        "<|system|>Be kind.<|system|>Be brief.<|user|>weather?"
        "<|assistant|>(hm)Let me see.CALLf[a=1]CALLg<|tool|>7<|tool|>cold\nwet"
        "<|assistant|>(so)CALLh<|assistant|>"
    )


async def test_tools_are_shown_to_the_template_as_a_chats() -> None:
    of = front()
    await post(of, tools=[TOOL])
    assert '{"type": "function", "function": {"name": "get_weather", "strict": true' in prompt_of(
        of
    )
    assert '"description"' not in prompt_of(of)
    found = await post(of, tools=[TOOL], tool_choice="none")
    assert [item["type"] for item in found["output"]] == ["reasoning", "message"]
    found = await post(of, tools=[TOOL], parallel_tool_calls=False)
    assert [item["type"] for item in found["output"]].count("function_call") == 1


async def test_thoughts_may_be_left_out() -> None:
    found = await post(front(), include_reasoning=False)
    assert "reasoning" not in {item["type"] for item in found["output"]}


async def test_effort_reaches_the_template() -> None:
    of = front("ok")
    await post(of, reasoning={"effort": "high"})
    assert prompt_of(of).endswith("EFFORThigh")
    await post(of, reasoning={"effort": "none"})
    assert "<think></think>" in prompt_of(of)
    chat = {"messages": [{"role": "user", "content": "x"}], "reasoning_effort": "none"}
    async with of.client() as client:
        await client.post("/v1/chat/completions", json=chat)
        assert "<think></think>" in prompt_of(of)
        await client.post(
            "/v1/chat/completions",
            json={**chat, "chat_template_kwargs": {"enable_thinking": True}},
        )
        assert "<think></think>" not in prompt_of(of), "what is said by name goes first"


async def test_sampling_fields_arrive() -> None:
    of = Front()
    extras = {"top_k": 3, "seed": 7, "stop": ["x"], "priority": -2, "cache_salt": "tenant"}
    await post(of, max_output_tokens=5, **extras)
    request = of.dispatcher.requests[0]
    assert (request.params.top_k, request.params.seed, request.params.max_tokens) == (3, 7, 5)
    assert (request.priority, request.tenant_salt) == (-2, "tenant")


async def test_what_sdks_send_by_default_changes_nothing() -> None:
    found = await post(
        Front(), store=True, truncation="disabled", background=False, service_tier="auto",
        include=["reasoning.encrypted_content"], user="u", safety_identifier="s",
        prompt_cache_key="k", stream_options={"include_obfuscation": False}, max_tool_calls=3,
        text={"format": {"type": "text"}, "verbosity": "low"}, tool_choice="auto", tools=[],
        previous_response_id=None, unknown=1,
    )  # fmt: skip
    assert found["store"] is True
    assert found["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert (found["user"], found["prompt_cache_key"]) == ("u", "k")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True, "store": False}, "background"),
        ({"background": 1}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0].image_url"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
         "input[0].content[0].text"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "call_id": "c"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"max_output_tokens": "5"}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": ["everything"]}, "include[0]"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"input": "word " * 5000}, "input"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
    ],
)  # fmt: skip
async def test_refusals_name_the_clients_own_field(body: dict[str, Any], param: str) -> None:
    error = await refused(front(), **body)
    assert error["param"] == param
    assert param.partition("[")[0].partition(".")[0] in error["message"]


async def test_invalid_json_is_refused() -> None:
    async with Front().client() as client:
        reply = await client.post(PATH, content=b"{", headers={"content-type": "application/json"})
        other = await client.post(PATH, content=b"{}", headers={"content-type": "text/plain"})
    assert (reply.status_code, other.status_code) == (400, 415)


async def test_tools_without_a_parser_are_refused() -> None:
    error = await refused(front(config=RouterConfig()), tools=[TOOL])
    assert error["param"] == "tools"


async def test_without_parsers_all_is_text() -> None:
    found = await post(front(ANSWER, RouterConfig()))
    assert [item["type"] for item in found["output"]] == ["message"]
    assert found["output"][0]["content"][0]["text"] == ANSWER
    assert CONFIG.reasoning_parser == "qwen3"
