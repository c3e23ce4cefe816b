"""Tools and reasoning over HTTP: the real OpenAI SDK, streamed and whole; what templates get."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.protocol.errors import ConfigError
from router.config import RouterConfig
from tests.front.dialects import ANSWER, ARGUMENTS, CALL, CONFIG, THOUGHT, front, prompt_of
from tests.front.fakes import MODEL, TOKENIZER, Front
from tests.front.openai_sdk import sdk

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ASK: list[Any] = [{"role": "user", "content": "weather?"}]


async def post(of: Front, **body: Any) -> dict[str, Any]:
    async with of.client() as client:
        reply = await client.post("/v1/chat/completions", json={"messages": ASK, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("step", [1, 5, 1000])
async def test_the_sdks_own_stream_puts_calls_together(step: int) -> None:
    async with sdk(front(step=step)) as client:
        stream = client.chat.completions.stream(model=MODEL, messages=ASK, tools=[TOOL])  # type: ignore[list-item]
        async with stream as events:
            names = [e.name async for e in events if e.type == "tool_calls.function.arguments.done"]
            final = await events.get_final_completion()
    choice = final.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "\n\nLet me see."
    assert names == ["get_weather", "get_weather"]
    calls = choice.message.tool_calls or []
    assert [call.function.arguments for call in calls] == [ARGUMENTS, ARGUMENTS]
    assert len({call.id for call in calls}) == 2
    assert calls[0].function.parsed_arguments == {"city": "Oslo"}


async def test_deltas_come_as_the_model_writes() -> None:
    async with sdk(front()) as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=ASK,
            tools=[TOOL],  # type: ignore[list-item]
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    thoughts = [delta.model_extra or {} for delta in deltas]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(extra.get(name) or "" for extra in thoughts) == THOUGHT
    made = [call for delta in deltas for call in delta.tool_calls or []]
    starts = [call for call in made if call.id is not None]
    assert [(s.index, s.type, s.function and s.function.name) for s in starts] == [
        (0, "function", "get_weather"),
        (1, "function", "get_weather"),
    ]
    assert all(s.function and s.function.arguments == "" for s in starts)
    pieces = [c.function.arguments for c in made if c.index == 0 and c.id is None and c.function]
    assert "".join(piece or "" for piece in pieces) == ARGUMENTS
    assert len(pieces) > 3
    assert all(delta.content is None for delta in deltas[1:] if delta.tool_calls)
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    thinking = TOKENIZER.encode(f"<think>{THOUGHT}</think>", add_special_tokens=False)
    assert usage.completion_tokens_details.reasoning_tokens == len(thinking)


async def test_a_whole_reply_says_the_same() -> None:
    reply = await post(front(), tools=[TOOL])
    choice = reply["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["role"], message["content"]) == ("assistant", "\n\nLet me see.")
    assert message["reasoning"] == message["reasoning_content"] == THOUGHT
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "get_weather", "arguments": ARGUMENTS}
    ] * 2
    assert all(call["id"].startswith("call_") for call in message["tool_calls"])
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    only = await post(front(CALL, RouterConfig(
        enable_auto_tool_choice=True, tool_call_parser="hermes")), tools=[TOOL])  # fmt: skip
    assert only["choices"][0]["message"]["content"] is None
    assert only["choices"][0]["message"]["reasoning"] is None


async def test_what_the_client_does_not_want() -> None:
    one = (await post(front(), tools=[TOOL], parallel_tool_calls=False))["choices"][0]
    assert len(one["message"]["tool_calls"]) == 1
    quiet = (await post(front(), tools=[TOOL], include_reasoning=False))["choices"][0]["message"]
    assert quiet["reasoning"] is None
    assert quiet["content"] == "\n\nLet me see."
    none = (await post(front(), tools=[TOOL], tool_choice="none"))["choices"][0]
    assert none["finish_reason"] == "stop"
    assert none["message"]["content"] == ANSWER.partition("</think>")[2]
    without = (await post(front()))["choices"][0]
    assert without["message"]["content"] == ANSWER.partition("</think>")[2]


async def test_an_answer_cut_short_keeps_its_half_call() -> None:
    count = len(TOKENIZER.encode(ANSWER, add_special_tokens=False)) - 25
    choice = (await post(front(), tools=[TOOL], max_tokens=count))["choices"][0]
    assert choice["finish_reason"] == "length"
    last = choice["message"]["tool_calls"][-1]["function"]["arguments"]
    assert ARGUMENTS.startswith(last)
    assert last != ARGUMENTS


async def test_a_stop_string_ends_a_call_too() -> None:
    choice = (await post(front(), tools=[TOOL], stop=['"Oslo']))["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", '"Oslo')
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city":  '


async def test_mistrals_ids_have_nine_letters_and_digits() -> None:
    config = RouterConfig(enable_auto_tool_choice=True, tool_call_parser="mistral")
    reply = await post(front('[TOOL_CALLS]f{"a": 1}', config), tools=[TOOL])
    call = reply["choices"][0]["message"]["tool_calls"][0]
    assert len(call["id"]) == 9
    assert call["id"].isalnum()


async def test_the_template_gets_tools_calls_and_results() -> None:
    of = front("ok")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    bare = {"function": {"name": "g", "arguments": ""}}
    history = [
        *ASK,
        {"role": "assistant", "reasoning": "hm", "content": None, "tool_calls": [call, bare]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "sun"}]},
    ]
    await post(of, messages=history, tools=[TOOL])
    text = prompt_of(of)
    assert text.startswith("TOOLS" + json.dumps([TOOL], ensure_ascii=False))
    assert text.endswith("<|assistant|>(hm)CALLf[a=[1]]CALLg<|tool|>sun<|assistant|>")


async def test_chat_template_kwargs_reach_only_a_template_that_reads_them() -> None:
    of = front("yes")
    given = {"enable_thinking": False, "unknown": 1, "bos_token": "x", "range": 3}
    reply = await post(of, chat_template_kwargs=given)
    assert prompt_of(of).endswith("<|assistant|><think></think>")
    assert reply["choices"][0]["message"] == {
        "role": "assistant", "content": "yes", "refusal": None, "reasoning": None,
        "reasoning_content": None,
    }  # fmt: skip
    thinking = await post(of)
    assert thinking["choices"][0]["message"]["reasoning"] == "yes"
    assert thinking["choices"][0]["message"]["content"] is None
    assert thinking["usage"]["completion_tokens_details"] == {
        "reasoning_tokens": thinking["usage"]["completion_tokens"]
    }


async def test_continue_final_message() -> None:
    of = front(" 42")
    messages = [*ASK, {"role": "assistant", "content": "It is"}]
    reply = await post(of, messages=messages, continue_final_message=True)
    assert prompt_of(of).endswith("<|user|>weather?<|assistant|>It is")
    assert reply["choices"][0]["message"]["content"] == " 42"
    messages[-1]["content"] = "<think>so"
    reply = await post(of, messages=messages, continue_final_message=True)
    assert reply["choices"][0]["message"]["reasoning"] == " 42"


def test_automatic_calls_need_a_parser() -> None:
    with pytest.raises(ConfigError) as caught:
        RouterConfig(enable_auto_tool_choice=True).check()
    assert caught.value.field == "tool_call_parser"
    CONFIG.check()


async def test_tokenize_renders_as_a_chat_does() -> None:
    of = front("x")
    async with of.client() as client:
        asked = {"messages": ASK, "tools": [TOOL]}
        tokens = (await client.post("/tokenize", json=asked)).json()["tokens"]
    await post(of, tools=[TOOL], tool_choice="none")
    assert tuple(tokens) == of.dispatcher.requests[-1].prompt_ids


async def test_the_first_token_of_a_thought_is_the_first_token() -> None:
    of = front()
    of.dispatcher.stall_at = 1
    async with sdk(of) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=ASK, stream=True)
        assert (await anext(aiter(stream))).choices[0].delta.role == "assistant"
        text = of.metrics.render().decode()
        await stream.close()
    assert 'time_to_first_token_seconds_count{model_name="tiny"} 1.0' in text


async def test_logprobs_of_tokens_that_only_lead_to_a_call_are_not_lost() -> None:
    async with sdk(front()) as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=ASK,
            tools=[TOOL],  # type: ignore[list-item]
            stream=True,
            logprobs=True,
        )
        told = [
            entry
            async for chunk in stream
            for entry in (chunk.choices[0].logprobs and chunk.choices[0].logprobs.content) or []
        ]
    assert b"".join(bytes(entry.bytes or []) for entry in told).decode() == ANSWER + "</s>"


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
async def test_a_forced_call_cut_short_shows_no_markup(choice: Any) -> None:
    """However early `length` comes: the answer is calls or nothing, never their markup."""
    answer = f"{CALL}\n{CALL}" if choice == "required" else CALL
    ids = TOKENIZER.encode(answer, add_special_tokens=False)
    seen: set[int] = set()
    async with front(answer, RouterConfig(request_timeout_s=20.0)).client() as client:
        for count in range(1, len(ids)):
            body = {"messages": ASK, "tools": [TOOL], "tool_choice": choice, "max_tokens": count}
            (made,) = (await client.post("/v1/chat/completions", json=body)).json()["choices"]
            assert made["finish_reason"] == "length"
            assert not made["message"]["content"]
            calls = [call["function"] for call in made["message"].get("tool_calls") or []]
            assert all(call["name"] == "get_weather" for call in calls)
            assert all(ARGUMENTS.startswith(call["arguments"]) for call in calls)
            seen.add(len(calls))
            text = (await client.post("/v1/chat/completions", json={**body, "stream": True})).text
            told = [json.loads(line[6:])["choices"][0] for line in text.split("\n\n")[:-2]]
            assert not any(each["delta"].get("content") for each in told)
            pieces = [c["function"] for each in told for c in each["delta"].get("tool_calls", ())]
            written = "".join(piece.get("arguments") or "" for piece in pieces)
            assert written == "".join(call["arguments"] for call in calls)
            assert told[-1]["finish_reason"] == "length"
    assert seen == ({0, 1, 2} if choice == "required" else {0, 1})


async def test_forced_calls_are_all_there_is_whatever_format_was_asked_for() -> None:
    """As vLLM has it: the format is the content's, and such an answer has none."""
    door = front(CALL, RouterConfig(request_timeout_s=20.0))
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    reply = await post(door, tools=[TOOL], tool_choice="required", response_format=schema)
    assert reply["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    guided = door.dispatcher.requests[0].params.guided
    assert guided is not None
    assert guided.kind == "structural_tag"
    assert '"or"' not in guided.grammar


async def test_calls_instead_of_a_format_cut_short_show_no_markup() -> None:
    """Under `auto` the grammar is an answer in that form, or calls: never both."""
    answer = f"{CALL}\n{CALL}"
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    config = RouterConfig(
        enable_auto_tool_choice=True, tool_call_parser="hermes", request_timeout_s=20.0
    )
    seen: set[int] = set()
    async with front(answer, config).client() as client:
        for count in range(1, len(TOKENIZER.encode(answer, add_special_tokens=False))):
            body = {"messages": ASK, "tools": [TOOL], "max_tokens": count}
            reply = await client.post(
                "/v1/chat/completions", json={**body, "response_format": schema}
            )
            (made,) = reply.json()["choices"]
            assert made["finish_reason"] == "length"
            assert not made["message"]["content"]
            seen.add(len(made["message"].get("tool_calls") or []))
    assert seen == {0, 1, 2}
    reply = await post(front('{"a": 1}', config), tools=[TOOL], response_format=schema)
    assert reply["choices"][0]["message"]["content"] == '{"a": 1}'


def named(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name}} for name in names]


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"tools": named("get weather")}, "tools[0].function.name"),
        ({"tools": named("ok", "")}, "tools[1].function.name"),
        ({"tools": named("x" * 257)}, "tools[0].function.name"),
        ({"tools": named("é")}, "tools[0].function.name"),
        ({"tools": named("a", "b", "a")}, "tools[2].function.name"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"functions": [{"name": "f"}], "function_call": "auto"}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
    ],
)
async def test_tools_that_no_call_could_name(fields: dict[str, Any], where: str) -> None:
    door = front()
    async with door.client() as client:
        reply = await client.post("/v1/chat/completions", json={"messages": ASK, **fields})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, where)
    assert not door.dispatcher.requests


async def test_names_longer_and_with_dots_are_taken_as_elsewhere() -> None:
    await post(front(), tools=named("x" * 256, "mcp.server-1_tool"))


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_the_dialects_blame_their_own_spelling(path: str) -> None:
    tools = {
        "/v1/responses": [{"type": "function", "name": "a b"}],
        "/v1/messages": [{"name": "a b", "input_schema": {"type": "object"}}],
    }[path]
    body = {"model": MODEL, "input": "x", "messages": ASK, "max_tokens": 5, "tools": tools}
    async with front().client() as client:
        reply = await client.post(path, json=body)
    assert reply.status_code == 400
    assert "tools[0].name" in reply.text
    assert "function" not in reply.text
