"""/v1/messages over HTTP: events and objects, what templates get, refusals, errors in its words.

The real Anthropic SDK is in tests/clients.
"""

from __future__ import annotations

from typing import Any

import pytest

from baton.protocol.errors import DeadlineExceeded, InternalError, NodeLost, Overloaded, Unavailable
from router.config import RouterConfig
from tests.front.dialects import ANSWER, THOUGHT, check_message, events_of, front, prompt_of
from tests.front.fakes import MODEL, TOKENIZER, FakeDispatcher, FakeRegistry, Front

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
ASK = [{"role": "user", "content": "weather?"}]
TOOL: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
THINK = {"type": "enabled", "budget_tokens": 1024}


async def post(of: Front, path: str = PATH, **body: Any) -> dict[str, Any]:
    common = {"model": MODEL, "messages": ASK}
    limit = {"max_tokens": 500} if path == PATH else {}
    async with of.client() as client:
        reply = await client.post(path, json={**common, **limit, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


async def stream(of: Front, **body: Any) -> list[dict[str, Any]]:
    common = {"messages": ASK, "max_tokens": 500, "stream": True}
    async with of.client() as client:
        reply = await client.post(PATH, json={**common, **body})
    assert reply.status_code == 200, reply.text
    return events_of(reply.text)


async def test_a_plain_message() -> None:
    of = Front()
    found = await post(of, system="Be kind.", max_tokens=50, metadata={"user_id": "u"})
    assert found["content"] == [{"type": "text", "text": "hello world"}]
    assert (found["type"], found["role"], found["model"]) == ("message", "assistant", MODEL)
    assert (found["stop_reason"], found["stop_sequence"]) == ("end_turn", None)
    assert found["id"].startswith("msg_")
    num_prompt = len(of.dispatcher.requests[0].prompt_ids)
    usage = found["usage"]
    assert usage["cache_read_input_tokens"] == 2
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == num_prompt
    assert usage["output_tokens"] == len(TOKENIZER.encode("hello world")) + 1
    assert prompt_of(of) == "<s><|system|>Be kind.<|user|>weather?<|assistant|>"


@pytest.mark.parametrize("step", [1, 7, 1000])
async def test_streamed_and_whole_say_the_same(step: int) -> None:
    body: dict[str, Any] = {"tools": [TOOL], "thinking": THINK}
    events = await stream(front(step=step), **body)
    streamed = check_message(events)
    whole = await post(front(), **body)
    for message in (streamed, whole):
        blocks = message["content"]
        assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
        assert blocks[0]["thinking"] == THOUGHT
        assert blocks[1]["text"] == "\n\nLet me see."
        assert [(b["name"], b["input"]) for b in blocks[2:]] == [
            ("get_weather", {"city": "Oslo"})
        ] * 2
        assert blocks[2]["id"].startswith("toolu_")
        assert blocks[2]["id"] != blocks[3]["id"]
        assert message["stop_reason"] == "tool_use"
    assert streamed["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert events[1] == {"type": "ping"}
    assert events[0]["message"]["usage"]["cache_read_input_tokens"] == 2


async def test_thinking_is_off_unless_asked_for() -> None:
    asked: list[dict[str, Any]] = [
        {},
        {"thinking": {"type": "disabled"}},
        {"thinking": {"type": "adaptive", "display": "omitted"}},
    ]
    for body in asked:
        of = front("<think>hm</think>yes")
        found = await post(of, **body)
        assert found["content"] == [{"type": "text", "text": "yes"}]
        off = body.get("thinking", {}).get("type") != "adaptive"
        assert prompt_of(of).endswith("<think></think>") == off
        assert found["usage"]["output_tokens_details"]["thinking_tokens"] > 0


async def test_a_stop_sequence_is_told() -> None:
    for body in ({}, {"stream": True}):
        of = Front(dispatcher=FakeDispatcher("one. two. three"))
        sent = {"messages": ASK, "max_tokens": 50, "stop_sequences": [". th", "no"], **body}
        async with of.client() as client:
            reply = await client.post(PATH, json=sent)
        found = check_message(events_of(reply.text)) if body else reply.json()
        assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", ". th")
        assert found["content"][0]["text"] == "one. two"


async def test_a_limit_is_told() -> None:
    found = await post(Front(), max_tokens=2)
    assert found["stop_reason"] == "max_tokens"
    assert found["usage"]["output_tokens"] == 2


async def test_a_limit_beyond_the_room_is_the_room() -> None:
    of = Front(dispatcher=FakeDispatcher("word " * 200))
    found = await post(of, max_tokens=100_000)
    assert found["stop_reason"] == "model_context_window_exceeded"
    request = of.dispatcher.requests[0]
    assert request.params.max_tokens + len(request.prompt_ids) == 128
    enough = await post(Front(), max_tokens=100_000)
    assert enough["stop_reason"] == "end_turn"


async def test_a_call_that_is_cut_short_is_told_as_it_stands() -> None:
    text = ANSWER[ANSWER.index("<tool_call>") : ANSWER.index("Oslo", 30)]
    found = await post(front(text), tools=[TOOL])
    assert found["content"][-1]["type"] == "tool_use"
    assert "raw_arguments" in found["content"][-1]["input"]


async def test_blocks_become_a_conversation() -> None:
    of = front("ok")
    ephemeral = {"cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [
            {"type": "text", "text": "weather?"}, {"type": "text", "text": "now", **ephemeral}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
            {"type": "tool_use", "id": "t2", "name": "g", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "7"},
            {"type": "tool_result", "tool_use_id": "t2", "is_error": True,
             "content": [{"type": "text", "text": "cold"}, {"type": "text", "text": "wet"}]},
            {"type": "tool_result", "tool_use_id": "t3"},
            {"type": "text", "text": "and?"}]},
    ]  # fmt: skip
    await post(of, messages=messages, system=[{"type": "text", "text": "Be kind.", **ephemeral}])
    assert prompt_of(of) == (
        "<|system|>Be kind.<|user|>weather?\nnow<|assistant|>(hm)Let me see.CALLf[a=1]CALLg"
        "<|tool|>7<|tool|>cold\nwet<|tool|><|user|>and?<|assistant|><think></think>"
    )


async def test_a_begun_answer_goes_on() -> None:
    of = front("ok")
    await post(of, messages=[*ASK, {"role": "assistant", "content": "It is"}])
    assert prompt_of(of) == "<|user|>weather?<|assistant|>It is"


async def test_tools_and_choices_are_a_chats() -> None:
    of = front()
    await post(of, tools=[TOOL])
    assert (
        '{"type": "function", "function": {"name": "get_weather", "description": "The weather.",'
        ' "parameters": {"type": "object"'
    ) in prompt_of(of)
    found = await post(of, tools=[TOOL], tool_choice={"type": "none"})
    assert [block["type"] for block in found["content"]] == ["text"]
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    found = await post(of, tools=[TOOL], tool_choice=choice)
    assert [block["type"] for block in found["content"]] == ["text", "tool_use"]


async def test_sampling_fields_arrive() -> None:
    of = Front()
    await post(of, max_tokens=5, temperature=0.5, top_k=3, top_p=0.9)
    params = of.dispatcher.requests[0].params
    assert (params.temperature, params.top_k, params.top_p) == (0.5, 3, 0.9)
    assert params.max_tokens == 5


async def test_tokens_are_counted_as_they_are_rendered() -> None:
    of = front("ok")
    body: dict[str, Any] = {"system": "Be kind.", "tools": [TOOL], "thinking": THINK}
    counted = await post(of, COUNT, **body)
    await post(of, **body)
    assert counted == {"input_tokens": len(of.dispatcher.requests[0].prompt_ids)}
    assert len(of.dispatcher.requests) == 1


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [3]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
         "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
         "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
         "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [
            {"type": "tool_use", "id": "t", "name": "f", "input": "x"}]}]},
         "messages[0].content[0].input"),
        ({"system": 3}, "system"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [{"input_schema": {}}]}, "tools[0]"),
        ({"tools": [{"name": ""}]}, "tools[0]"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"temperature": -1}, "temperature"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids is not supported"),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, "messages"),
    ],
)  # fmt: skip
async def test_refusals_are_anthropics(body: dict[str, Any], field: str) -> None:
    of = front()
    sent = {"model": MODEL, "messages": ASK, "max_tokens": 500, **body}
    async with of.client() as client:
        reply = await client.post(PATH, json=sent)
    assert reply.status_code == 400, reply.text
    found = reply.json()
    assert found["type"] == "error"
    assert found["error"]["type"] == "invalid_request_error"
    assert field in found["error"]["message"]
    assert found["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
    assert of.dispatcher.requests == []


async def test_a_missing_limit_is_refused() -> None:
    async with Front().client() as client:
        reply = await client.post(PATH, json={"messages": ASK})
    assert reply.status_code == 400
    assert "max_tokens" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Overloaded("queue full"), 429, "rate_limit_error"),
        (Unavailable("no decode node"), 503, "overloaded_error"),
        (DeadlineExceeded("too late"), 504, "timeout_error"),
        (InternalError("secret path /x"), 500, "api_error"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_failures_before_the_first_token(
    error: Exception, status: int, kind: str, streamed: bool
) -> None:
    body = {"messages": ASK, "max_tokens": 5, "stream": streamed}
    async with Front().failing(error).client() as client:
        reply = await client.post(PATH, json=body)
    assert reply.status_code == status
    assert reply.json()["error"]["type"] == kind
    assert "secret" not in reply.text
    assert ("retry-after" in reply.headers) == (status in (429, 503))
    assert int(reply.headers["content-length"]) == len(reply.content)


async def test_requests_are_named_as_its_sdk_expects() -> None:
    async with Front().client(**{"x-request-id": "mine"}) as client:
        for streamed in (False, True):
            body = {"messages": ASK, "max_tokens": 5, "stream": streamed}
            reply = await client.post(PATH, json=body)
            assert reply.headers["request-id"] == reply.headers["x-request-id"] == "mine"
        elsewhere = await client.get("/v1/models")
    assert "request-id" not in elsewhere.headers


async def test_a_failure_in_mid_stream_is_an_error_event() -> None:
    events = await stream(Front().failing(NodeLost("10.0.0.7 gone"), at=2))
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "overloaded_error"
    assert "10.0.0.7" not in str(events)
    assert any(event["type"] == "content_block_delta" for event in events)


async def test_http_errors_on_these_routes_are_anthropics() -> None:
    big = b" " * ((8 << 20) + 1)
    json = {"content-type": "application/json"}
    async with Front().client() as client:
        replies = {
            405: await client.get(PATH),
            404: await client.post(PATH + "/batches", json={}),
            413: await client.post(PATH, content=big, headers=json),
            415: await client.post(PATH, content=b"{}", headers={"content-type": "text/plain"}),
            400: await client.post(PATH, content=b"{", headers=json),
        }
        elsewhere = await client.post("/v1/messagesx", json={})
        absent = await client.post(PATH, json={"model": "x", "messages": ASK, "max_tokens": 1})
    for status, reply in replies.items():
        assert reply.status_code == status
        assert reply.json()["type"] == "error"
    assert "code" in elsewhere.json()["error"]
    assert (absent.status_code, absent.json()["error"]["type"]) == (404, "not_found_error")
    async with Front(registry=FakeRegistry(None)).client() as client:
        reply = await client.post(PATH, json={"messages": ASK, "max_tokens": 1})
    assert reply.status_code == 503


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"x-api-key": "right"}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({"authorization": "Bearer right"}, 200),
        ({"authorization": "Bearer right", "x-api-key": "right"}, 200),
        ({"authorization": "Bearer right", "x-api-key": "wrong"}, 401),
        ({"authorization": "Bearer wrong", "x-api-key": "right"}, 401),
        ({"authorization": "Basic right", "x-api-key": "right"}, 401),
    ],
)
async def test_keys_either_way(headers: dict[str, str], status: int) -> None:
    of = Front(config=RouterConfig(api_key=("right",)))
    headers = {"anthropic-version": "2023-06-01", **headers}
    async with of.client(**headers) as client:
        reply = await client.post(PATH, json={"messages": ASK, "max_tokens": 5})
    assert reply.status_code == status
    if status == 401:
        assert reply.json()["error"]["type"] == "authentication_error"


async def test_two_keys_of_one_kind_are_refused() -> None:
    of = Front(config=RouterConfig(api_key=("right",)))
    async with of.client() as client:
        twice = [("x-api-key", "right"), ("x-api-key", "right")]
        reply = await client.post(PATH, json={"messages": ASK, "max_tokens": 5}, headers=twice)
    assert reply.status_code == 400
    assert "x-api-key" in reply.json()["error"]["message"]
