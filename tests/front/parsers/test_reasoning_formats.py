"""Reasoning of every format: its tags, in an answer or at its prompt's end; gpt-oss's channels."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.parsers import harmony
from baton.parsers.formats import TOOL_FORMATS
from baton.parsers.message import MessageParser, MessageRules
from baton.parsers.parts import CallStart, Reasoning
from baton.parsers.reasoning import OPENAI_GPTOSS, REASONING_FORMATS
from tests.front.parsers.folded import Folded, cut, parse

TAGGED = sorted(name for name, form in REASONING_FORMATS.items() if form.whole is None)


@pytest.mark.parametrize("name", TAGGED)
def test_tags_in_the_answer_or_at_the_prompts_end(name: str) -> None:
    form = REASONING_FORMATS[name]
    for opening in form.open:
        for closing in form.close:
            text = f"{opening}hm, so{closing}yes"
            for pieces in ([text], [*text]):
                found = parse(MessageRules(reasoning=form), *pieces)
                assert found == Folded("yes", "hm, so"), (opening, closing)
        assert form.opened(f"<assistant>{opening}\n", {})
        assert form.opened_by(f"{opening}hm")
    for closing in form.close:
        assert not form.opened(f"<assistant>{form.open[0]}{closing}\n\n", {})
        assert not form.opened_by(f"{form.open[0]}hm{closing}yes")
    opened = MessageRules(reasoning=form, opened=True)
    assert parse(opened, f"hm{form.close[0]}yes") == Folded("yes", "hm")
    assert parse(opened, "hm, sti") == Folded("", "hm, sti")


@pytest.mark.parametrize("name", TAGGED)
def test_an_answer_without_thoughts_is_content(name: str) -> None:
    form = REASONING_FORMATS[name]
    rules = MessageRules(reasoning=form, opened=form.opened("assistant\n", {"thinking": False,
                                                            "enable_thinking": False}))  # fmt: skip
    if not rules.opened:
        assert parse(rules, "yes <b") == parse(rules, *"yes <b") == Folded("yes <b")


AROUND = [
    ("hunyuan_a13b", "<think>\nhm\n</think>\n<answer>\nyes\n</answer>", "\nhm\n", "yes"),
    ("hunyuan_a13b", "<think>\nhm\n</think>\n<answer>\na <ans \n b", "\nhm\n", "a <ans \n b"),
    ("ernie45", "<think>hm\n</think>\n\n<response>\nyes\n</response>\n", "hm\n", "yes"),
    ("granite", "<think>hm</think>\n<response>a\nb</response>", "hm", "a\nb"),
    ("granite", "Here's my thought process: hm Here is my response: yes", " hm ", " yes"),
    (
        "cohere_command3",
        "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>yes <|END_RESPONSE|>",
        "hm",
        "yes",
    ),
    (
        "solar_open",
        "<|think|>hm<|end|><|begin|>assistant<|content|>yes<|end|>",
        "hm",
        "yes",
    ),
    ("gemma4", "<|channel>thought\n<channel|>yes", "", "yes"),
]


@pytest.mark.parametrize(("name", "text", "reasoning", "content"), AROUND)
def test_tags_around_an_answer_are_none_of_it(
    name: str, text: str, reasoning: str, content: str
) -> None:
    form = REASONING_FORMATS[name]
    for tools in (None, TOOL_FORMATS["hermes"]):
        rules = MessageRules(reasoning=form, tools=tools)
        expected = Folded(content, reasoning)
        found = parse(rules, text)
        assert (found.content.strip(), found.reasoning) == (content.strip(), reasoning)
        assert parse(rules, *text) == found
        for place in range(len(text)):
            assert parse(rules, text[:place], text[place:]) == found
        assert found.calls == expected.calls


def test_calls_after_and_within_a_thought() -> None:
    rules = MessageRules(
        reasoning=REASONING_FORMATS["kimi_k2"], tools=TOOL_FORMATS["kimi_k2"], opened=True
    )
    call = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
    )
    assert parse(rules, f"hm</think>{call}") == Folded("", "hm", [["f", "{}"]])
    assert parse(rules, *f"hm {call} so</think>yes") == Folded("yes", "hm  so", [["f", "{}"]])


# ---- harmony ----

ANALYSIS = "<|channel|>analysis<|message|>The user asks.<|end|>"
TO_WEATHER = "<|channel|>commentary to=functions.get_weather "
TWO_CALLS = "".join(
    f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{{}}"
    for name in "ab"
)
WEATHER = '{"location": "San Francisco"}'
HARMONY: list[tuple[str, str, str, list[list[str]]]] = [
    (f"{ANALYSIS}<|start|>assistant<|channel|>final<|message|>2 + 2 = 4.<|return|>",
     "The user asks.", "2 + 2 = 4.", []),
    (f"{ANALYSIS}<|start|>assistant{TO_WEATHER}<|constrain|>json<|message|>{WEATHER}<|call|>",
     "The user asks.", "", [["get_weather", WEATHER]]),
    # The recipient before the channel, and no space or <|constrain|>; no thought.
    (f" to=functions.get_weather<|channel|>commentary json<|message|>{WEATHER}",
     "", "", [["get_weather", WEATHER]]),
    (f"<|channel|>analysis to=functions.f code<|message|>{WEATHER}", "", "", [["f", WEATHER]]),
    (f"<|channel|>commentary to=f<|message|>{WEATHER}<|call|>", "", "", [["f", WEATHER]]),
    # What it is about to do, then two calls.
    (f"{ANALYSIS}<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>{TWO_CALLS}",
     "The user asks.", "I look.", [["a", "{}"], ["b", "{}"]]),
    # A tool that it knows by itself, and nobody has offered.
    ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", "print(1)", "", []),
    # Several messages of one kind do not run into each other.
    ((f"{ANALYSIS}<|start|>assistant{ANALYSIS}<|start|>assistant<|channel|>commentary<|message|>So."
     "<|end|><|start|>assistant<|channel|>final<|message|>Yes."),
     "The user asks.\nThe user asks.", "So.\nYes.", []),
    # Cut short: in a thought, in a header, in a call; and a message that goes on.
    ("<|channel|>analysis<|message|>The us", "The us", "", []),
    (f"{ANALYSIS}<|start|>assistant<|channel|>comm", "The user asks.", "", []),
    ('<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a', "", "",
     [["f", '{"a']]),
    ("the rest of an answer.<|return|>", "", "the rest of an answer.", []),
    (" plain, <b> and\n", "", " plain, <b> and\n", []),
    (f"{ANALYSIS}<|channel|>final<|message|>yes", "The user asks.", "yes", []),
]  # fmt: skip
GPTOSS = MessageRules(
    reasoning=OPENAI_GPTOSS, tools=harmony.FORMAT, schemas={"f": {}, "get_weather": {}}
)


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), HARMONY)
def test_channels(text: str, reasoning: str, content: str, calls: list[list[str]]) -> None:
    expected = Folded(content, reasoning, calls)
    found = parse(GPTOSS, text)
    assert (found.reasoning, found.calls) == (expected.reasoning, expected.calls)
    assert found.content.strip() == content.strip()
    for place in range(len(text)):
        assert parse(GPTOSS, text[:place], text[place:]) == found


@given(
    st.lists(st.sampled_from([*harmony.MARKERS, "analysis", "final", " to=functions.f", "{}", "x"]),
             max_size=12).map("".join),
    st.lists(st.integers(0, 10**6), max_size=6),
)  # fmt: skip
def test_how_channels_are_cut_changes_nothing(text: str, places: list[int]) -> None:
    assert parse(GPTOSS, *cut(text, places)) == parse(GPTOSS, text)


def test_channels_stream_and_say_what_is_thought() -> None:
    parser = MessageParser(GPTOSS)
    assert parser.push("<|channel|>analysis<|message|>so") == (Reasoning("so"),)
    assert parser.thinking
    parser.push("<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>")
    assert not parser.thinking
    (call,) = parser.push('{"a"')[-1:]
    assert parser.num_calls == 1
    assert not isinstance(call, CallStart)


def test_channels_are_told_by_the_answer_alone() -> None:
    assert not OPENAI_GPTOSS.opened("what is <think>", {})
    assert not OPENAI_GPTOSS.opened_by("<think>")


def test_without_tools_a_call_is_no_call() -> None:
    rules = MessageRules(reasoning=OPENAI_GPTOSS)
    text = f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{WEATHER}<|call|>"
    found = parse(rules, text)
    assert not found.calls
    assert json.loads(found.reasoning) == json.loads(WEATHER)
