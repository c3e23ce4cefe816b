"""Tools of /v1/responses that are no plain functions: namespaces, custom tools, OpenAI's own."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.responses.custom_input import CustomInput
from router.api.responses.tools import flat_name
from router.config import RouterConfig
from tests.front.dialects import CONFIG, check_response, events_of, front, prompt_of
from tests.front.fakes import Front
from tests.front.openai_sdk import sdk

PATH = "/v1/responses"
SPAWN: dict[str, Any] = {
    "type": "function",
    "name": "spawn",
    "strict": False,
    "parameters": {"type": "object", "properties": {"task": {"type": "string"}}},
}
AGENTS: dict[str, Any] = {
    "type": "namespace",
    "name": "mcp__agents__",
    "description": "Other agents",
    "tools": [SPAWN, {"type": "custom", "name": "note"}],
}
PATCH: dict[str, Any] = {"type": "custom", "name": "apply_patch", "description": "Edit files"}
SEARCH: dict[str, Any] = {"type": "web_search", "external_web_access": True}
TEXT = 'A "line"\n\tand é 😀 \\'
QUIET = RouterConfig(
    request_timeout_s=20.0, enable_auto_tool_choice=True, tool_call_parser="hermes"
)


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


async def ask(of: Front, **body: Any) -> dict[str, Any]:
    """The response, streamed and whole: both tell the same."""
    async with of.client() as client:
        reply = await client.post(PATH, json={"input": "x", **body})
        streamed = await client.post(PATH, json={"input": "x", "stream": True, **body})
    assert reply.status_code == streamed.status_code == 200, reply.text
    told = check_response(events_of(streamed.text))
    drawn = ("id", "call_id")

    def same(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{k: v for k, v in item.items() if k not in drawn} for item in output]

    assert same(told["output"]) == same(reply.json()["output"])
    assert told.get("baton_notes") == reply.json().get("baton_notes")
    return reply.json()


async def refused(of: Front, **body: Any) -> str:
    async with of.client() as client:
        reply = await client.post(PATH, json={"input": "x", **body})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"].partition("[")[0].partition(".")[0] in error["message"]
    return error["param"]


# ---- namespaces ----


async def test_a_namespaces_tool_is_called_and_told_by_its_own_name() -> None:
    of = front(call("mcp__agents__spawn", '{"task": "a"}'), QUIET)
    found = await ask(of, tools=[AGENTS])
    prompt = prompt_of(of)
    assert '"name": "mcp__agents__spawn"' in prompt
    assert '"name": "mcp__agents__note"' in prompt
    [item] = found["output"]
    assert (item["type"], item["namespace"], item["name"], item["arguments"]) == (
        "function_call", "mcp__agents__", "spawn", '{"task": "a"}'
    )  # fmt: skip
    assert found["tools"] == [AGENTS]
    assert "baton_notes" not in found


async def test_what_an_answer_says_of_a_namespace_can_be_sent_back() -> None:
    of = front("ok", QUIET)
    items = [
        {"role": "user", "content": "go"},
        {"type": "function_call", "call_id": "c", "namespace": "mcp__agents__", "name": "spawn",
         "arguments": '{"task": "a"}'},
        {"type": "function_call_output", "call_id": "c", "output": "done"},
    ]  # fmt: skip
    await ask(of, input=items, tools=[AGENTS])
    assert "CALLmcp__agents__spawn[task=a]<|tool|>done" in prompt_of(of)


async def test_names_of_namespaces_are_whole() -> None:
    assert flat_name("mcp__agents__", "spawn") == "mcp__agents__spawn"
    assert flat_name("multi_agent_v1", "close_agent") == "multi_agent_v1__close_agent"
    assert flat_name(None, "f") == "f"


# ---- custom tools ----


@pytest.mark.parametrize("step", [1, 7, 1000])
async def test_a_custom_tools_input_is_text(step: int) -> None:
    of = front(call("apply_patch", json.dumps({"input": TEXT})), QUIET, step)
    found = await ask(of, tools=[PATCH])
    [item] = found["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", TEXT)
    assert (item["status"], item["id"].startswith("ctc_")) == ("completed", True)
    assert "namespace" not in item
    assert '"name": "apply_patch", "description": "Edit files"' in prompt_of(of)


async def test_a_custom_tool_in_a_namespace_has_both_names() -> None:
    of = front(call("mcp__agents__note", '{"input": "hi"}'), QUIET)
    [item] = (await ask(of, tools=[AGENTS]))["output"]
    assert (item["type"], item["namespace"], item["name"], item["input"]) == (
        "custom_tool_call", "mcp__agents__", "note", "hi"
    )  # fmt: skip


async def test_the_sdk_reads_the_events_of_a_custom_call() -> None:
    of = front(call("apply_patch", '{"input": "a b"}'), QUIET)
    async with sdk(of) as client:
        made = client.responses.create(input="x", tools=[PATCH], stream=True)  # type: ignore[list-item]
        events = [event async for event in await made]
    deltas = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
    [done] = [e for e in events if e.type == "response.custom_tool_call_input.done"]
    assert len(deltas) > 1, "it is told as it comes"
    assert "".join(deltas) == done.input == "a b"


async def test_custom_items_become_calls_and_results() -> None:
    of = front("ok", QUIET)
    items = [
        {"role": "user", "content": "go"},
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": 'say "a"'},
        {"type": "custom_tool_call_output", "call_id": "c", "output": [
            {"type": "input_text", "text": "done"}]},
    ]  # fmt: skip
    await ask(of, input=items, tools=[PATCH])
    assert 'CALLapply_patch[input=say "a"]<|tool|>done' in prompt_of(of)


async def test_a_custom_tools_grammar_is_told_and_noted() -> None:
    of = front("ok", QUIET)
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    found = await ask(of, tools=[{**PATCH, "format": form}])
    assert "start: " in prompt_of(of)
    [note] = found["baton_notes"]
    assert note.startswith("tools[0].format")


@pytest.mark.parametrize("choice", ["required", {"type": "custom", "name": "apply_patch"}])
async def test_a_custom_tool_may_be_forced(choice: Any) -> None:
    of = front(call("apply_patch", '{"input": "a"}'), QUIET)
    [item] = (await ask(of, tools=[PATCH], tool_choice=choice))["output"]
    assert item["input"] == "a"
    guided = of.dispatcher.requests[-1].params.guided
    assert guided is not None
    assert "apply_patch" in guided.grammar


async def test_a_tool_of_a_namespace_may_be_forced() -> None:
    of = front(call("mcp__agents__spawn", "{}"), QUIET)
    choice = {"type": "function", "name": "spawn"}
    [item] = (await ask(of, tools=[AGENTS], tool_choice=choice))["output"]
    assert (item["namespace"], item["name"]) == ("mcp__agents__", "spawn")


async def test_some_tools_of_all_kinds_may_be_allowed() -> None:
    of = front("ok", QUIET)
    agents = {"type": "namespace", "name": AGENTS["name"]}
    some = [{"type": "custom", "name": "apply_patch"}, agents, {"type": "web_search"}]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": some}
    plain = {**SPAWN, "name": "other"}
    await ask(of, tools=[plain, PATCH, AGENTS, SEARCH], tool_choice=choice)
    prompt = prompt_of(of)
    assert '"name": "other"' not in prompt
    for name in ("apply_patch", "mcp__agents__spawn", "mcp__agents__note"):
        assert f'"name": "{name}"' in prompt


# ---- OpenAI's own ----


async def test_openais_own_tools_are_left_out_with_a_note() -> None:
    of = front("ok", QUIET)
    found = await ask(of, tools=[SPAWN, SEARCH])
    assert found["tools"] == [SPAWN]
    assert found["baton_notes"] == ["tools[1]: web_search is not served here and was left out"]
    assert "web_search" not in prompt_of(of)
    found = await ask(front("ok", RouterConfig()), tools=[SEARCH])
    assert found["tools"] == []


async def test_they_are_refused_where_the_server_is_told_so() -> None:
    config = RouterConfig(
        responses_drop_builtin_tools=False, enable_auto_tool_choice=True,
        tool_call_parser="hermes",
    )  # fmt: skip
    assert await refused(front("ok", config), tools=[SPAWN, SEARCH]) == "tools[1].type"


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"name": "f"}], "tools[0].type"),
        ([{"type": "custom"}], "tools[0].name"),
        ([{**PATCH, "format": {"type": "grammar"}}], "tools[0].format"),
        ([{**PATCH, "format": {"type": "odd"}}], "tools[0].format"),
        ([{**PATCH, "format": {}}], "tools[0].format"),
        ([{**PATCH, "format": False}], "tools[0].format"),
        ([{**PATCH, "description": 3}], "tools[0].description"),
        ([{**PATCH, "description": []}], "tools[0].description"),
        ([{**AGENTS, "description": 3}], "tools[0].description"),
        ([SPAWN, {"type": "namespace", "name": "a"}], "tools[1].tools"),
        ([SPAWN, {"type": "namespace", "tools": []}], "tools[1].name"),
        ([SPAWN, {**AGENTS, "tools": [3]}], "tools[1].tools[0]"),
        ([SPAWN, {**AGENTS, "tools": [SPAWN, SEARCH]}], "tools[1].tools[1].type"),
        ([SPAWN, {**AGENTS, "tools": [SPAWN, {**SPAWN, "name": "a b"}]}], "tools[1].tools[1].name"),
        ([AGENTS, {**SPAWN, "name": "mcp__agents__spawn"}], "tools[1].name"),
    ],
)
async def test_refusals_name_the_place_in_the_clients_body(tools: Any, param: str) -> None:
    assert await refused(front("ok", QUIET), tools=tools) == param


async def test_a_choice_of_what_is_not_there_is_refused() -> None:
    of = front("ok", CONFIG)
    for choice in (
        {"type": "custom", "name": "spawn"},
        {"type": "function", "name": "nope"},
        {"type": "web_search"},
    ):
        assert (await refused(of, tools=[SPAWN, SEARCH], tool_choice=choice)).startswith(
            "tool_choice"
        )


# ---- the text in a custom tool's arguments ----


@given(st.text(), st.lists(st.integers(0, 300), max_size=10), st.booleans(), st.booleans())
def test_input_is_the_same_however_it_was_cut(
    text: str, cuts: list[int], ascii_only: bool, spaced: bool
) -> None:
    raw = json.dumps({"input": text}, ensure_ascii=ascii_only, indent=1 if spaced else None)
    borders = sorted({0, len(raw), *(cut % (len(raw) + 1) for cut in cuts)})
    reader = CustomInput()
    told = [reader.push(raw[a:b]) for a, b in itertools.pairwise(borders)]
    assert "".join(told) + reader.finish() == text


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ('{"input": "a\nb"}', "a\nb"),  # models write raw line breaks
        ('{"input": "cut', "cut"),
        ('{"input": "cut\\', "cut"),
        ('{"input": "\\ud83d"}', "�"),
        ('{"input": "\\ud83d', ""),
        ('{"other": 1, "input": "late"}', "late"),
        ('{"text": "a"}', '{"text": "a"}'),
        ("*** Begin Patch", "*** Begin Patch"),
        ("", ""),
    ],
)
def test_input_that_is_not_as_it_should_be(raw: str, text: str) -> None:
    reader = CustomInput()
    assert "".join(map(reader.push, raw)) + reader.finish() == text
