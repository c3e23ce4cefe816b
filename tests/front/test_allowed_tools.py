"""tool_choice `allowed_tools` and the counting of a response's prompt, by HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from baton.protocol.errors import InvalidRequest
from router.api.openai.bodies import ChatBody
from router.api.openai.chat_rules import ALLOWED_FIELD, apply_allowed
from tests.front.fakes import TOKENIZER
from tests.front.test_tools_api import ASK, CONFIG, front

NAMES = ("get_weather", "get_time", "book")
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in NAMES
]
FLAT = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in NAMES]


def named(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name}} for name in names]


def choice(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named(*names)}}


def body_of(given: Any, tools: Any = TOOLS) -> ChatBody:
    return ChatBody(messages=ASK, tools=tools, tool_choice=given)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_the_others_are_left_out_in_the_order_of_the_tools(mode: str) -> None:
    body = body_of(choice(mode, "book", "get_weather", "book"))
    apply_allowed(body)
    assert (body.tools, body.tool_choice) == ([TOOLS[0], TOOLS[2]], mode)


@pytest.mark.parametrize("given", [None, "auto", "required", named("book")[0]])
def test_other_choices_stay_as_they_are(given: Any) -> None:
    body = body_of(given)
    apply_allowed(body)
    assert (body.tools, body.tool_choice) == (TOOLS, given)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"type": "allowed_tools"}, ALLOWED_FIELD),
        ({"type": "allowed_tools", "allowed_tools": ["book"]}, ALLOWED_FIELD),
        (choice("none", "book"), f"{ALLOWED_FIELD}.mode"),
        (choice("auto"), f"{ALLOWED_FIELD}.tools"),
        (choice("auto", "book", "fly"), f"{ALLOWED_FIELD}.tools[1]"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ["book"]}},
         f"{ALLOWED_FIELD}.tools[0]"),
    ],
)  # fmt: skip
def test_faults_are_told_by_field(given: Any, field: str) -> None:
    for tools in (TOOLS, [*TOOLS, {"type": "function"}]):
        with pytest.raises(InvalidRequest) as caught:
            apply_allowed(body_of(given, tools))
        assert caught.value.field == field
    if field.endswith("[1]"):
        with pytest.raises(InvalidRequest):
            apply_allowed(body_of(given, None))


async def test_a_chat_sees_and_calls_only_what_is_allowed() -> None:
    door = front()
    async with door.client() as client:
        for mode in ("auto", "required"):
            body = {"messages": ASK, "tools": TOOLS, "tool_choice": choice(mode, "get_time")}
            reply = await client.post("/v1/chat/completions", json=body)
            assert reply.status_code == 200, reply.text
    auto, required = door.dispatcher.requests
    for request in (auto, required):
        text = TOKENIZER.decode(request.prompt_ids, skip_special_tokens=False)
        assert "get_time" in text
        assert "get_weather" not in text
    assert auto.params.guided is None
    assert required.params.guided is not None
    assert "get_time" in required.params.guided.grammar
    assert "book" not in required.params.guided.grammar


async def test_a_response_takes_its_own_form_and_tells_it_back() -> None:
    door = front()
    flat = [{"type": "function", "name": "get_time"}]
    given = {"type": "allowed_tools", "mode": "required", "tools": flat}
    async with door.client() as client:
        body = {"input": "weather?", "tools": FLAT, "tool_choice": given}
        reply = await client.post("/v1/responses", json=body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["tool_choice"] == given
        wrong = {**given, "mode": "none"}
        told = await client.post("/v1/responses", json={**body, "tool_choice": wrong})
        assert (told.status_code, told.json()["error"]["param"]) == (400, "tool_choice.mode")
    (request,) = door.dispatcher.requests
    assert request.params.guided is not None
    assert "get_time" in request.params.guided.grammar


async def test_the_prompt_of_a_response_is_counted_without_being_run() -> None:
    door = front(config=CONFIG)
    body = {"input": "weather?", "tools": FLAT, "instructions": "be brief"}
    async with door.client() as client:
        counted = await client.post("/v1/responses/input_tokens", json=body)
        assert counted.status_code == 200
        assert not door.dispatcher.requests
        answered = await client.post("/v1/responses", json=body)
        wrong = await client.post("/v1/responses/input_tokens", json={"input": 3})
    tokens = answered.json()["usage"]["input_tokens"]
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": tokens}
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "input")
