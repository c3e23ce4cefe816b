"""Calls in a history, as some templates want them: what each text asks for, and what it gets."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from baton.text.chat_history import (
    arguments_as_text,
    calls_apart,
    calls_in_content,
    numbered_ids,
    one_call_each,
    results_beside_calls,
    rewrites_of,
    thoughts_in_analysis,
)
from baton.text.chat_template import Chat, ChatTemplate


def call(id_: str | None, name: str, **arguments: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "type": "function", "function": {"name": name, "arguments": arguments}
    }  # fmt: skip
    return made if id_ is None else {**made, "id": id_}


A, B = call("a", "f", x=1), call("b", "g")
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "I look.", "reasoning": "hm", "tool_calls": [A, B]},
    {"role": "tool", "tool_call_id": "b", "content": "B"},
    {"role": "tool", "tool_call_id": "a", "content": "A"},
    {"role": "assistant", "content": "", "tool_calls": [call("c", "f")]},
    {"role": "tool", "tool_call_id": "c", "content": "C"},
    {"role": "assistant", "content": "So.", "reasoning": "ok"},
]


def test_messages_are_never_changed_in_place() -> None:
    before = copy.deepcopy(HISTORY)
    for rewrite in (
        one_call_each, calls_apart, thoughts_in_analysis, numbered_ids, arguments_as_text,
        results_beside_calls, calls_in_content,
    ):  # fmt: skip
        rewrite(HISTORY)
    assert before == HISTORY


def test_one_call_each_before_its_result() -> None:
    made = one_call_each(HISTORY)
    assert [m.get("tool_call_id") or [c["id"] for c in m.get("tool_calls", ())] for m in made] == [
        [], ["b"], "b", ["a"], "a", ["c"], "c", []
    ]  # fmt: skip
    assert (made[3]["content"], made[3]["reasoning"]) == ("I look.", "hm")
    assert made[1] == {"role": "assistant", "content": "", "tool_calls": [B]}
    # Results that name no call take their turn; calls without any result are not lost.
    loose = [{**HISTORY[1], "tool_calls": [call(None, "f"), call(None, "g"), call(None, "h")]},
             {"role": "tool", "content": "1"}, {"role": "user", "content": "and?"}]  # fmt: skip
    names = [[c["function"]["name"] for c in m.get("tool_calls", ())] for m in one_call_each(loose)]
    assert names == [["f"], [], ["g"], ["h"], []]
    assert one_call_each(loose[:1])[-1]["tool_calls"] == [call(None, "h")]


def test_what_is_said_beside_calls_comes_before_them() -> None:
    made = calls_apart(HISTORY)
    assert [(m["content"], "tool_calls" in m) for m in made if m["role"] == "assistant"] == [
        ("I look.", False), (None, True), (None, True), ("So.", False)
    ]  # fmt: skip


def test_thoughts_have_the_name_that_gpt_oss_knows() -> None:
    made = thoughts_in_analysis(HISTORY)
    assert (made[1]["content"], made[1]["thinking"]) == ("", "hm\n\nI look.")
    assert (made[-1]["content"], made[-1]["thinking"]) == ("So.", "ok")
    assert "thinking" not in made[4]


def test_kimis_ids_are_numbered_in_the_whole_conversation() -> None:
    made = numbered_ids(HISTORY)
    assert [c["id"] for m in made for c in m.get("tool_calls", ())] == [
        "functions.f:0", "functions.g:1", "functions.f:2"
    ]  # fmt: skip
    assert [m["tool_call_id"] for m in made if m["role"] == "tool"] == [
        "functions.g:1", "functions.f:0", "functions.f:2"
    ]  # fmt: skip
    stray = [{"role": "tool", "tool_call_id": "?", "content": ""}]
    assert numbered_ids(stray) == stray


def test_results_stand_beside_their_calls() -> None:
    weather = {"role": "tool", "tool_call_id": "c", "content": '{"temp": 3, "at": null}'}
    made = results_beside_calls([*HISTORY[:-2], weather, HISTORY[-1]])
    assert [message["role"] for message in made] == ["user", *["assistant"] * 4]
    assert [message["content"] for message in made] == ["hi", "I look.", None, None, "So."]
    assert made[2]["tool_responses"] == [
        {"name": "g", "response": "B"}, {"name": "f", "response": "A"}
    ]  # fmt: skip
    assert made[3]["tool_responses"] == [{"name": "f", "response": {"temp": 3, "at": None}}]
    stray = [{"role": "tool", "tool_call_id": "?", "content": "x"}]
    assert results_beside_calls(stray) == stray


def test_arguments_as_text_are_json() -> None:
    made = arguments_as_text([{"role": "assistant", "tool_calls": [call("a", "f", x="é", y=None)]}])
    assert made[0]["tool_calls"][0]["function"]["arguments"] == '{"x": "é", "y": null}'
    assert made[0]["tool_calls"][0]["id"] == "a"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}{% endif %}", [one_call_each]),
        ("{{ m.tool_calls[0] }}{% for c in message.tool_calls %}{% endfor %}", []),
        ("{% if m['role'] == 'assistant' and message['content'] is none %}{% endif %}",
         [calls_apart]),
        ("<|channel|>{{ message.thinking }}", [thoughts_in_analysis]),
        ("<|tool_calls_section_begin|>", [numbered_ids]),
        ("{{ '\\n' + tool['function']['arguments'] + '\\n' }}", [arguments_as_text]),
        ("{{ '\\n' + tool['function']['arguments'] | tojson + '\\n' }}", []),
        ("{% if message['tool_responses'] %}{% set ns.type = 'tool' %}", [results_beside_calls]),
        ("{% if message['tool_responses'] %}{% if message['role'] != 'tool' %}", []),
        ("{% if message['tool_responses'] %}{% if m.get('role') == 'tool' %}", []),
        ("{{ '<|tool|>' + message['tools'] }}", [calls_in_content]),
        ("<|tool|>{% for call in message.tool_calls %}", []),
        ("{{ messages }}", []),
    ],
)  # fmt: skip
def test_what_a_template_asks_for(source: str, expected: list[Any]) -> None:
    assert list(rewrites_of(source)) == expected


def test_templates_get_what_they_ask_for() -> None:
    first_only = ChatTemplate(
        "{% for message in messages %}{% if message.tool_calls %}"
        "[{{ message.tool_calls[0].function.name }}]{% else %}{{ message.content }}{% endif %}"
        "{% endfor %}",
        {},
    )
    assert first_only.render(Chat(HISTORY)) == "hi[g]B[f]A[f]CSo."
    joined = ChatTemplate(
        "{% for message in messages %}"
        "{% if message['role'] == 'assistant' and message['content'] is none %}"
        "{% for tool in message['tool_calls'] %}"
        "{{ '[' + tool['function']['name'] + tool['function']['arguments'] + ']' }}{% endfor %}"
        "{% else %}{{ message['content'] }}{% endif %}{% endfor %}",
        {},
    )
    assert joined.render(Chat(HISTORY)) == 'hiI look.[f{"x": 1}][g{}]BA[f{}]CSo.'


def test_a_template_that_knows_neither_tools_nor_calls_shows_both() -> None:
    phi = ChatTemplate(
        "{% for message in messages %}{{ message['role'] + ':' + message['content'] }}"
        "{% if 'tools' in message and message['tools'] is not none %}"
        "{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}{% endif %};{% endfor %}",
        {},
    )
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    told = '<|tool|>[{"name": "f", "parameters": {}}]<|/tool|>'
    asked = HISTORY[:1]
    assert phi.render(Chat(asked)) == "user:hi;"
    assert phi.render(Chat(asked, tools)) == f"system:{told};user:hi;"
    system = {"role": "system", "content": "Be brief."}
    assert phi.render(Chat([system, *asked], tools)) == f"system:Be brief.{told};user:hi;"
    called = '<|tool_call|>[{"name": "f", "arguments": {"x": 1}}]<|/tool_call|>'
    made = [{**HISTORY[1], "tool_calls": [A]}, HISTORY[3], {**HISTORY[4], "tool_calls": [A]}]
    assert phi.render(Chat(made)) == f"assistant:I look.{called};tool:A;assistant:{called};"
