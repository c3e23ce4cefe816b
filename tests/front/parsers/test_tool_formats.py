"""Tool formats: what each example means, and that how the text is cut never changes it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from baton.parsers.formats import TOOL_FORMATS
from baton.parsers.message import MessageParser, MessageRules
from baton.parsers.parts import CallArguments, CallStart, Content, Part, Reasoning, Room
from baton.parsers.reasoning import DEEPSEEK_R1, QWEN3, REASONING_FORMATS
from tests.front.parsers.examples import (
    A1,
    DS_CALL,
    DS_CALL_END,
    DS_CALLS,
    DS_END,
    DS_SEP,
    EXAMPLES,
    F_LLAMA,
    G_JSON,
    HERMES,
)
from tests.front.parsers.folded import Folded, cut, parse

CODER = (
    "<tool_call>\n<function=f>\n<parameter=count>\n3\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=g>\n</function>\n</tool_call>"
)

SCHEMAS = {
    "f": {
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "flag": {"type": "boolean"},
            "items": {"type": "array"},
            "any": {"type": ["string", "null"]},
            "zip": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "one": {"enum": ["1", "2"]},
            "ref": {"$ref": "#/$defs/z"},
            "deep": {"allOf": [{"oneOf": [{"$ref": "#/$defs/z"}, {"const": "2"}]}]},
            "mixed": {"type": ["string", "integer"]},
            "empty": {},
            "object": {"type": "object"},
            "tag": {"type": "string", "enum": ["</parameter>", "no"]},
            "described": {"description": "a number, or so"},
            "unknown": {"$ref": "#/$defs/none"},
        },
        "$defs": {"z": {"type": "string"}},
    }
}


def tools(name: str) -> MessageRules:
    return MessageRules(tools=TOOL_FORMATS[name], schemas=SCHEMAS)


@pytest.mark.parametrize(("name", "text", "content", "calls"), EXAMPLES)
def test_examples_whole_and_character_by_character(
    name: str, text: str, content: str, calls: list[list[str]]
) -> None:
    expected = Folded(content, "", calls)
    assert parse(tools(name), text) == expected
    assert parse(tools(name), *text) == expected


# Fragments from which texts arise that are nearly calls, or calls within each other.
FRAGMENTS = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<function=", "f>", "<parameter=text>", "<parameter=count>",
        "<parameter=zip>", "<parameter=items>",
        "</parameter>", "</function>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>",
        DS_CALLS, DS_CALL, DS_SEP, DS_CALL_END, DS_END, "function", "```json", "```", "<think>",
        "</think>", '{"name": "f", ', '"arguments": ', '"parameters": ', '{"a": 1}', "{", "}", "[",
        "]", '"', "\\", ",", ":", ";", "\n", " ", "x", "é", "<", "|", "1", '"name"', '"f"', HERMES,
    ]
)  # fmt: skip
TEXTS = st.one_of(
    st.lists(FRAGMENTS, max_size=14).map("".join),
    st.tuples(
        st.sampled_from([text for _, text, _, _ in EXAMPLES]), st.lists(FRAGMENTS, max_size=4)
    ).map(lambda pair: pair[0] + "".join(pair[1])),
)
RULES = st.builds(
    MessageRules,
    reasoning=st.sampled_from([None, *REASONING_FORMATS.values()]),
    opened=st.booleans(),
    tools=st.sampled_from([None, *TOOL_FORMATS.values()]),
    schemas=st.just(SCHEMAS),
    room=st.sampled_from(Room),
)


@given(RULES, TEXTS, st.lists(st.integers(0, 10**6), max_size=12))
def test_how_the_text_is_cut_never_changes_the_result(
    rules: MessageRules, text: str, places: list[int]
) -> None:
    whole = parse(rules, text)
    assert parse(rules, *cut(text, places)) == whole
    assert parse(rules, *text) == whole


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        ("hermes", "<</tool_call>", ""), ("hermes", "<x", ""), ("hermes", " [1]", " [1]"),
        ("mistral", "[TO[", ""), ("mistral", "[[1]]", "[[1]]"), ("mistral", "[", "["),
        ("phi4_mini_json", "false", "false"), ("phi4_mini_json", "fun", ""),
    ],
)  # fmt: skip
def test_what_begins_like_a_call_where_content_is_json(name: str, text: str, content: str) -> None:
    rules = replace(tools(name), room=Room.JSON_INSTEAD)
    assert parse(rules, text).content == parse(rules, *text).content == content


@given(RULES, TEXTS)
def test_nothing_is_lost(rules: MessageRules, text: str) -> None:
    folded = parse(rules, text)
    if rules.room is not Room.ANY:
        return
    if rules.reasoning is None and not folded.calls:
        assert folded.content == text
    if rules.tools is None and rules.reasoning is not None:
        if text.lstrip().startswith("<think>"):
            thought, _, answer = text.lstrip()[len("<think>") :].partition("</think>")
            assert (folded.reasoning, folded.content) == (thought, answer)
        elif not rules.opened:
            assert (folded.reasoning, folded.content) == ("", text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
ARGUMENTS = st.builds(
    json.dumps,
    st.dictionaries(st.text(max_size=6), JSON, max_size=4),
    ensure_ascii=st.booleans(),
    indent=st.sampled_from([None, 1]),
)
NAMES = st.from_regex(r"[A-Za-z_][\w.\-]{0,20}", fullmatch=True).filter(str.isascii)
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=4)


def spelled(form: str, calls: Sequence[tuple[str, str]]) -> str:
    """How a model of this format writes the calls."""
    match form:
        case "hermes":
            return "\n".join(
                f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
                for name, arguments in calls
            )
        case "llama3_json":
            return "; ".join(f'{{"name": "{n}", "parameters": {a}}}' for n, a in calls)
        case "mistral":
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in calls)
        case _:
            each = (f"{DS_CALL}{name}{DS_SEP}{arguments}{DS_CALL_END}" for name, arguments in calls)
            return DS_CALLS + "".join(each) + DS_END


@pytest.mark.parametrize("form", ["hermes", "llama3_json", "mistral", "deepseek_v31"])
@given(calls=CALLS)
def test_arguments_are_passed_on_verbatim(form: str, calls: list[tuple[str, str]]) -> None:
    folded = parse(tools(form), *spelled(form, calls))
    assert folded == Folded("", "", [list(call) for call in calls])


@given(st.dictionaries(st.sampled_from(["text", "new"]), st.text(max_size=12)))
def test_tagged_parameters_become_the_json_of_their_text(values: dict[str, str]) -> None:
    text = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    folded = parse(tools("qwen3_coder"), *f"<tool_call>\n<function=f>\n{text}</function>")
    assert json.loads(folded.calls[0][1]) == values


@given(
    st.dictionaries(st.sampled_from(["zip", "any", "ref", "one", "deep"]), st.text(max_size=12)),
    st.booleans(),
)
def test_what_may_be_a_string_is_one(values: dict[str, str], as_json: bool) -> None:
    """As plain text, as a model writes it by itself, and as JSON, as a forced call has it."""
    written = {key: json.dumps(value) if as_json else value for key, value in values.items()}
    text = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in written.items())
    folded = parse(tools("qwen3_coder"), *f"<tool_call>\n<function=f>\n{text}</function>")
    found = json.loads(folded.calls[0][1])
    for key, value in values.items():
        assume(as_json or not value.strip().startswith('"'))  # it reads as JSON
        nothing = not as_json and value.strip().lower() in ("null", "none")
        assert found[key] == (None if nothing and key in ("zip", "any") else value)


TAGGED = st.recursive(
    st.sampled_from([1, None, True, "", "</parameter>", "\n</parameter>\n", '"</parameter>', "\\"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "</parameter>"]), inner, max_size=2)
    ),
    max_leaves=5,
)


@given(
    st.dictionaries(st.sampled_from(["object", "items", "unknown"]), TAGGED),
    st.sampled_from([None, 2]),
    st.lists(st.integers(0, 10**6), max_size=8),
)
def test_a_json_value_may_hold_the_tag_that_ends_it(
    values: dict[str, Any], indent: int | None, places: list[int]
) -> None:
    text = "".join(
        f"<parameter={key}>\n{json.dumps(value, indent=indent)}\n</parameter>\n"
        for key, value in values.items()
    )
    text = f"<tool_call>\n<function=f>\n{text}</function>\n</tool_call>"
    folded = parse(tools("qwen3_coder"), *cut(text, places))
    assert json.loads(folded.calls[0][1]) == values
    assert folded.content == ""


def test_arguments_stream_while_the_model_still_writes_them() -> None:
    parser = MessageParser(tools("hermes"))
    text = '<tool_call>\n{"name": "f", "arguments": {"a": "long text'
    seen: list[Part] = []
    for character in text:
        seen += parser.push(character)
    assert seen[0] == CallStart(0, "f")
    assert "".join(p.text for p in seen if isinstance(p, CallArguments)) == '{"a": "long text'
    parser = MessageParser(tools("qwen3_coder"))
    seen = list(parser.push("<tool_call>\n<function=f>\n<parameter=text>\nlong text"))
    assert seen == [CallStart(0, "f"), CallArguments(0, '{"text": "long text')]


def test_plain_text_is_not_held_back() -> None:
    parser = MessageParser(tools("hermes"))
    assert parser.push("hello <b") == (Content("hello <b"),)
    assert parser.push(" <tool") == ()
    assert parser.push("box") == (Content(" <toolbox"),)


def test_a_name_is_never_announced_twice_and_never_without_arguments() -> None:
    parser = MessageParser(tools("hermes"))
    assert parser.push('<tool_call>{"name": "f", "arguments": ') == ()
    assert parser.push("{") == (CallStart(0, "f"), CallArguments(0, "{"))


def test_deep_and_long_texts_take_linear_time() -> None:
    deep = '<tool_call>{"name": "f", "arguments": ' + "[" * 100_000
    folded = parse(tools("hermes"), *cut(deep, range(0, 100_000, 7)))
    assert folded.calls == [["f", "[" * 100_000]]
    for value in ("{", '["', '{"a": "', '[","', '"', '[[", "]'):
        half = f"<parameter=object>{value}</parameter>" * 3_000
        text = f"<function=f>{half}</function>"
        folded = parse(tools("qwen3_coder"), *cut(text, range(0, len(text), 9)))
        assert folded.calls[0][1].endswith("}")
    many = '<tool_call>{"x":[' * 10_000
    assert parse(tools("hermes"), *cut(many, range(0, 170_000, 5))).content == many


THOUGHTS: list[tuple[Any, bool, str, str, str]] = [
    (QWEN3, True, "<think>\nhm\n</think>\n\nyes", "\nhm\n", "\n\nyes"),
    (QWEN3, True, "hm</think>yes", "hm", "yes"),
    (QWEN3, True, "hm, still", "hm, still", ""),
    (QWEN3, False, "yes</think>", "", "yes</think>"),
    (QWEN3, False, "\n<think>hm</think>yes", "hm", "yes"),
    (QWEN3, False, "  yes", "", "  yes"),
    (DEEPSEEK_R1, True, "<think>hm", "hm", ""),
    (DEEPSEEK_R1, True, "hm </thin", "hm </thin", ""),
    (DEEPSEEK_R1, True, "</think>yes", "", "yes"),
    (DEEPSEEK_R1, True, "a</think>b</think>c<think>", "a", "b</think>c<think>"),
    (QWEN3, True, "<tool_call>{}", "<tool_call>{}", ""),
]


@pytest.mark.parametrize(("form", "opened", "text", "reasoning", "content"), THOUGHTS)
def test_reasoning(form: Any, opened: bool, text: str, reasoning: str, content: str) -> None:
    rules = MessageRules(reasoning=form, opened=opened)
    expected = Folded(content, reasoning, [])
    assert parse(rules, text) == parse(rules, *text) == expected


def test_a_call_in_mid_thought_is_taken_only_if_it_is_one() -> None:
    rules = MessageRules(reasoning=QWEN3, opened=True, tools=TOOL_FORMATS["hermes"])
    assert parse(rules, "so " + HERMES) == Folded("", "so ", [A1])
    said = "I might write <tool_call> here.</think>ok"
    assert parse(rules, *said) == Folded("ok", "I might write <tool_call> here.", [])
    assert parse(rules, f"hm</think>\n\n{HERMES}") == Folded("", "hm", [A1])


F = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "num_calls"),
    [
        (f"I could write {F} but no.</think>Answer", "Answer", "I could write  but no.", 1),
        (f"so {F}\n</think>\n\nAnswer", "\n\nAnswer", "so ", 1),
        (f"so {F}\n</think>\n\n", "", "so ", 1),
        (f"so {F} and {F} now </think> a</think>b", " a</think>b", "so  and now ", 2),
        (f"so {F} and on", "", "so  and on", 1),
        (f"so {F} and\n", "", "so  and\n", 1),
        (f"so {F} </thi", "", "so  </thi", 1),
        (f"so {F} </thi{F}", "", "so  </thi", 2),
        (f"so {F}</think>\n{F}\n", "", "so ", 2),
        ('so <tool_call>{"name": 3} it</think>A', "A", 'so <tool_call>{"name": 3} it', 0),
    ],
)
def test_a_thought_goes_on_after_a_call_in_it(
    text: str, content: str, reasoning: str, num_calls: int
) -> None:
    rules = MessageRules(reasoning=QWEN3, opened=True, tools=TOOL_FORMATS["hermes"])
    expected = Folded(content, reasoning, [["f", "{}"]] * num_calls)
    assert parse(rules, text) == parse(rules, *text) == expected
    assert parse(rules, *cut(text, range(0, len(text), 7))) == expected


def test_a_thought_after_a_call_is_not_held_back() -> None:
    parser = MessageParser(MessageRules(QWEN3, opened=True, tools=TOOL_FORMATS["hermes"]))
    parser.push(F)
    assert not parser.thinking
    assert parser.push(" but </thin") == (Reasoning(" but"),)
    assert parser.thinking
    assert parser.push("k>A") == (Reasoning(" "), Content("A"))
    assert not parser.thinking


@given(TEXTS, st.sampled_from(list(TOOL_FORMATS.values())))
def test_a_tag_that_closes_a_thought_is_never_content(text: str, tools: Any) -> None:
    rules = MessageRules(reasoning=QWEN3, opened=True, tools=tools, schemas=SCHEMAS)
    assume("</think>" not in text)
    for thought in ("hm ", f"hm {F} so "):
        folded = parse(rules, f"{thought}{text}</think>")
        assert "</think>" not in folded.content


TWICE = {
    form: spelled(form, [("f", '{"a": [1]}'), ("g", "{}")])
    for form in ("hermes", "mistral", "deepseek_v31")
} | {"qwen3_coder": CODER, "llama3_json": "; ".join([F_LLAMA, G_JSON])}


@pytest.mark.parametrize("form", sorted(TWICE))
@pytest.mark.parametrize("room", [Room.INSTEAD, Room.JSON_INSTEAD])
def test_calls_cut_short_instead_of_content_leave_no_markup(form: str, room: Room) -> None:
    rules = MessageRules(tools=TOOL_FORMATS[form], schemas=SCHEMAS, room=room)
    for length in range(len(TWICE[form])):
        text = TWICE[form][:length]
        folded = parse(rules, text)
        assert parse(rules, *text) == folded
        if folded.calls or (room is Room.JSON_INSTEAD and form != "llama3_json"):
            assert folded.content == ("[" if text == "[" else "")
        else:
            assert folded.content == text


@pytest.mark.parametrize("form", sorted(TOOL_FORMATS))
@pytest.mark.parametrize("answer", [' {"a": 1}\n', "[1]", "[", '"<tool_call>"', "1", '{"nam'])
def test_json_instead_of_calls_stays_as_it_is(form: str, answer: str) -> None:
    rules = MessageRules(tools=TOOL_FORMATS[form], room=Room.JSON_INSTEAD)
    assert parse(rules, answer) == parse(rules, *answer) == Folded(answer)


def test_a_call_in_mid_thought_leaves_room_for_an_answer() -> None:
    for room, content in ((Room.JSON_INSTEAD, "{}"), (Room.NONE, "")):
        rules = MessageRules(QWEN3, opened=True, tools=TOOL_FORMATS["hermes"], room=room)
        assert parse(rules, f"so {F} but</think>{{}}") == Folded(content, "so  but", [["f", "{}"]])
        assert parse(rules, f"so {F}</think>{F}\n<tool_ca").content == ""


@pytest.mark.parametrize(
    ("form", "prompt", "kwargs", "opened"),
    [
        ("qwen3", "<|im_start|>assistant\n", {}, True),
        ("qwen3", "<|im_start|>assistant\n", {"enable_thinking": False}, False),
        ("qwen3", "assistant\n<think>\n\n</think>\n\n", {}, False),
        ("deepseek_r1", "what is <think>?<｜Assistant｜>", {}, True),  # noqa: RUF001
        ("deepseek_r1", "<｜Assistant｜></think>", {}, False),  # noqa: RUF001
        ("deepseek_v3", "<｜Assistant｜>", {}, False),  # noqa: RUF001
        ("deepseek_v3", "<｜Assistant｜><think>", {}, True),  # noqa: RUF001
        ("deepseek_v3", "<｜Assistant｜>", {"thinking": True}, True),  # noqa: RUF001
    ],
)
def test_where_an_answer_starts(
    form: str, prompt: str, kwargs: dict[str, Any], opened: bool
) -> None:
    assert REASONING_FORMATS[form].opened(prompt, kwargs) is opened


def test_thinking_is_known_at_any_time() -> None:
    parser = MessageParser(MessageRules(reasoning=QWEN3, opened=True))
    states: list[bool] = []
    for piece in ("<think>", "hm", "</think>", "yes"):
        parser.push(piece)
        states.append(parser.thinking)
    assert states == [True, True, False, False]
    parser.finish()
