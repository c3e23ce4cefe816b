"""Every format reads what its models write: however it is cut, whatever stands in it or beside it,
as far as it came."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.parsers.formats import TOOL_FORMATS
from baton.parsers.frames import CallWriter
from baton.parsers.message import MessageRules
from baton.parsers.reasoning import REASONING_FORMATS
from tests.front.parsers.folded import cut, parse
from tests.front.parsers.spelled import PARAMETERS, SPELLED, Call

SCHEMAS = {"f": PARAMETERS, "g": PARAMETERS}
FORMS = sorted({form: name for name, form in reversed(TOOL_FORMATS.items())}.values())
NESTED: dict[str, Any] = {"a": [1, {"b": None, "c": [True, -2.5e3]}], "d": {}, "e": "x, y"}
CALLS: list[Call] = [
    ("f", {"text": 'Zoë says "hi"\\\n{[(', "count": -3, "flag": True, "any": None}),
    ("g", {}),
    ("f", {"items": ["p", "q"], "object": NESTED}),
]
# Formats in which only text follows from what is written: types within lists are not told.
UNTYPED = ("minimax_m3",)


def rules(form: str) -> MessageRules:
    return MessageRules(tools=TOOL_FORMATS[form], schemas=SCHEMAS)


def calls_of(form: str, *pieces: str) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in parse(rules(form), *pieces).calls]


def calls_for(form: str) -> list[Call]:
    return CALLS if form not in UNTYPED else [*CALLS[:2], ("f", {"items": ["p", "q"]})]


def test_all_formats_are_spelled_out() -> None:
    assert sorted(SPELLED) == sorted(TOOL_FORMATS)


@pytest.mark.parametrize("form", FORMS)
def test_several_calls_with_nested_and_nullable_arguments_cut_anywhere(form: str) -> None:
    calls = calls_for(form)
    text = SPELLED[form](calls)
    whole = parse(rules(form), text)
    assert whole.content.strip() == ""
    assert calls_of(form, text) == [(name, dict(arguments)) for name, arguments in calls]
    assert parse(rules(form), *text) == whole
    for place in range(1, len(text)):
        assert parse(rules(form), text[:place], text[place:]) == whole, place


@pytest.mark.parametrize("form", FORMS)
def test_text_before_between_and_after_calls_is_content(form: str) -> None:
    first, second = (SPELLED[form]([call]) for call in (CALLS[0], CALLS[1]))
    writer = TOOL_FORMATS[form].writer
    if isinstance(writer, CallWriter) and writer.frame.bare:  # calls begin the answer, or none do
        assert parse(rules(form), "So: " + first).content == "So: " + first
        text, content = f"{first} and so on", "and so on"
        count = 1
    else:
        start = "<|channel|>commentary<|message|>" if form == "openai" else ""
        end = "<|end|><|start|>assistant" if form == "openai" else ""
        text = f"{start}So:{end}{first}{start and '<|start|>assistant' + start}then{end}{second}"
        text += f"{start and '<|start|>assistant' + start}done"
        content, count = "So:thendone", 2
    folded = parse(rules(form), text)
    assert "".join(folded.content.split()) == "".join(content.split())
    assert len(folded.calls) == count
    assert parse(rules(form), *text) == folded


@pytest.mark.parametrize("form", FORMS)
def test_calls_that_are_not_finished_are_told_as_far_as_they_came(form: str) -> None:
    text = SPELLED[form](calls_for(form))
    whole = parse(rules(form), text).calls
    for length in range(len(text)):
        found = parse(rules(form), text[:length]).calls
        for (name, arguments), (expected, all_of_them) in zip(found, whole, strict=False):
            assert name == expected
            assert all_of_them.startswith(arguments.rstrip("}")), (length, arguments)


@pytest.mark.parametrize("form", FORMS)
def test_text_without_calls_is_content(form: str) -> None:
    for text in ("plain\n text ", "a < b, [c](d) {e}", " ", "x" * 300):
        assert parse(rules(form), text) == parse(rules(form), *text)
        assert parse(rules(form), text).content == text


@pytest.mark.parametrize("form", FORMS)
def test_marks_in_the_strings_of_json_are_text(form: str) -> None:
    marks = "".join(TOOL_FORMATS[form].markers).replace("\n", "")
    arguments = {"object": {"s": f"}}{marks}"}}
    text = SPELLED[form]([("f", arguments), CALLS[1]])
    if '"s": "}}' in text and marks in text and form != "openai":
        assert calls_of(form, text) == [("f", arguments), ("g", {})]


def texts(form: str) -> st.SearchStrategy[str]:
    """What such a format can hold as plain text: not its own marks."""
    marks = [mark for mark in TOOL_FORMATS[form].markers if mark.strip()]
    return st.text(max_size=10).filter(lambda text: not any(mark[0] in text for mark in marks))


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=10)  # of each of 41 formats, which share one reader
@given(data=st.data())
def test_whatever_arguments_are_written_are_read(form: str, data: st.DataObject) -> None:
    text = texts(form)
    values = {
        "text": text,
        "count": st.integers(-(10**9), 10**9),
        "flag": st.booleans(),
        "any": st.none(),
        "items": st.lists(text.filter(str.strip), min_size=1, max_size=3),
        "object": st.fixed_dictionaries({}, optional={
            "a": st.integers(0, 9) | st.none() | st.booleans(), "b": st.lists(st.integers(0, 9)),
        }),
    }  # fmt: skip
    if form in UNTYPED:
        del values["object"]
    arguments = st.fixed_dictionaries({}, optional=values)
    calls = data.draw(st.lists(st.tuples(st.sampled_from(["f", "g"]), arguments), min_size=1,
                               max_size=3))  # fmt: skip
    spelled = SPELLED[form](calls)
    places = data.draw(st.lists(st.integers(0, 10**6), max_size=6))
    assert calls_of(form, *cut(spelled, places)) == calls


BITS = [
    "{", "}", "[", "]", "(", ")", '"', "'", "\\", ",", ":", "=", ";", "\n", " ", "f", "g", "a", "1",
    "-", "{}", '{"a": 1}', '{"name": "f", "arguments": {"a": 1}}', "text", "é", "<", "|",
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=20)
@given(data=st.data())
def test_how_nearly_calls_are_cut_never_changes_the_result(form: str, data: st.DataObject) -> None:
    marks = [mark for mark in TOOL_FORMATS[form].markers if mark]
    spelled = SPELLED[form](calls_for(form))
    at = data.draw(st.integers(0, len(spelled)))
    pieces = data.draw(st.lists(st.sampled_from([*marks, *BITS]), max_size=12))
    text = "".join([*pieces[:4], spelled[:at], *pieces[4:], spelled[at:] if at % 2 else ""])
    places = data.draw(st.lists(st.integers(0, 10**6), max_size=8))
    thinks = data.draw(st.sampled_from([None, "think_tags", "hunyuan_a13b", "cohere_command3"]))
    asked = MessageRules(
        None if thinks is None else REASONING_FORMATS[thinks], opened=bool(thinks),
        tools=TOOL_FORMATS[form], schemas=SCHEMAS,
    )  # fmt: skip
    whole = parse(asked, text)
    assert parse(asked, *cut(text, places)) == whole
    assert parse(asked, *text) == whole
    if form != "openai" and not whole.calls and thinks is None:
        assert whole.content == text


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("pythonic", "[f(a=" + "[" * 2_500),
        ("pythonic", "[f(a=" + "{'b': (" * 4_000),
        ("pythonic", "[f(a='" + "\\n" * 2_500),
        ("olmo3", "<function_calls>" + "f(a=1)\n" * 2_500),
        ("gemma4", "<|tool_call>call:f{" + "a:{" * 4_000),
        ("gemma4", "<|tool_call>call:f{a:" * 2_500),
        ("minimax_m3", ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="f">'
         + "]<]minimax[>[<a>" * 2_500),
        ("glm47", "<tool_call>f" + "<arg_key>a</arg_key><arg_value>{" * 2_500),
        ("glm47", "<tool_call>f<arg_key>" * 2_500),
        ("minicpm5", '<function name="f"><param name="a"><![CDATA[' * 2_500),
        ("openai", "<|channel|>analysis<|message|>" * 2_500),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>" * 1_500),
        ("xlam", "[" * 2_500),
    ],
)  # fmt: skip
def test_long_and_deep_texts_take_linear_time(form: str, text: str) -> None:
    asked = MessageRules(
        REASONING_FORMATS["hunyuan_a13b"], tools=TOOL_FORMATS[form], schemas=SCHEMAS
    )
    whole = parse(asked, text)
    assert parse(asked, *cut(text, range(0, len(text), 11))) == whole
    assert len(whole.content) + sum(len(given) for _, given in whole.calls) <= 2 * len(text)
