"""Events of both dialects are well-formed however the answer was cut, and always tell the same."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.parsers import formats, reasoning
from baton.parsers.message import MessageParser, MessageRules
from baton.parsers.parts import CallArguments, CallStart, Content, Part, Reasoning
from baton.protocol.errors import Unavailable
from baton.protocol.request import FinishReason, Request
from baton.protocol.sampling import SamplingParams
from router.api.anthropic.answer import MessageAnswer
from router.api.anthropic.events import MessageEvents, input_of
from router.api.responses.answer import ResponseAnswer, response_head
from router.api.responses.events import ResponseEvents
from router.request.completion import Completion, Delta, OutputRules
from tests.front.dialects import ANSWER, CALL, check_message, check_response, responses_call
from tests.front.fakes import TOKENIZER

RULES = MessageRules(reasoning=reasoning.QWEN3, opened=False, tools=formats.HERMES)
PIECES = (
    "<think>", "</think>", "hm", "\n\n", " ", "Let me see.", CALL, CALL[:-20], "<tool_call>",
    '<tool_call>\n{"name": "f", "arguments": 3}\n</tool_call>', "ä€😀", "{",
)  # fmt: skip
USAGE: dict[str, Any] = {"output_tokens": 1}
answers = st.one_of(st.just(ANSWER), st.lists(st.sampled_from(PIECES), max_size=8).map("".join))


def parts_of(text: str, cuts: list[int]) -> list[Part]:
    parser = MessageParser(RULES)
    borders = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    parts: list[Part] = []
    for start, end in itertools.pairwise(borders):
        parts += parser.push(text[start:end])
    return [*parts, *parser.finish()]


def names() -> Any:
    return map("call_{}".format, itertools.count()).__next__


def response_events(parts: list[Part], summarized: bool, cut_short: bool) -> list[dict[str, Any]]:
    machine = ResponseEvents({"id": "resp_1"}, names(), summarized)
    events = machine.begin()
    for part in parts:
        events += machine.part(part)
    return events + machine.end(cut_short, USAGE, 1) + machine.last()


def message_events(parts: list[Part]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    machine = MessageEvents({"id": "msg_1"}, names())
    events = machine.begin(USAGE)
    for part in parts:
        events += machine.part(part)
    return events + machine.end("end_turn", None, USAGE), machine.message


def told(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output without its drawn ids."""
    return [{key: value for key, value in item.items() if key != "id"} for item in output]


@given(answers, st.lists(st.integers(0, 400), max_size=30), st.booleans(), st.booleans())
def test_a_response_is_well_formed_and_the_same_however_it_was_cut(
    text: str, cuts: list[int], summarized: bool, cut_short: bool
) -> None:
    whole = check_response(response_events(parts_of(text, []), summarized, cut_short))
    pieces = check_response(response_events(parts_of(text, cuts), summarized, cut_short))
    assert told(pieces["output"]) == told(whole["output"])
    assert whole["output"], "an answer has an item, be it empty"
    assert [item["status"] for item in whole["output"][:-1]] == ["completed"] * (
        len(whole["output"]) - 1
    )
    assert whole["output"][-1]["status"] == ("incomplete" if cut_short else "completed")
    if cut_short:
        assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    for item in whole["output"]:
        if item["type"] == "reasoning":
            assert bool(item["summary"]) == summarized


@given(answers, st.lists(st.integers(0, 400), max_size=30))
def test_a_message_is_well_formed_and_the_same_however_it_was_cut(
    text: str, cuts: list[int]
) -> None:
    events, whole = message_events(parts_of(text, []))
    assert check_message(events) == whole
    events, pieces = message_events(parts_of(text, cuts))
    assert check_message(events) == pieces == whole


@given(answers, st.lists(st.integers(0, 400), max_size=30), st.integers(0, 40))
def test_a_response_may_fail_anywhere(text: str, cuts: list[int], at: int) -> None:
    machine = ResponseEvents({"id": "resp_1"}, names(), summarized=False)
    events = machine.begin()
    for part in parts_of(text, cuts)[:at]:
        events += machine.part(part)
    events += machine.fail("server_error", "gone")
    response = check_response(events)
    assert response["error"] == {"code": "server_error", "message": "gone"}
    assert "usage" not in response


def test_every_kind_of_part_has_its_item() -> None:
    parts: list[Part] = [
        Reasoning("a"), Content("b"), CallStart(0, "f"), CallArguments(0, "{}"), CallStart(1, "g"),
        Content("c"), Reasoning("d"),
    ]  # fmt: skip
    response = check_response(response_events(parts, summarized=False, cut_short=False))
    kinds = [item["type"] for item in response["output"]]
    assert kinds == ["reasoning", "message", "function_call", "function_call", "message",
                     "reasoning"]  # fmt: skip
    calls = [i for i in response["output"] if i["type"] == "function_call"]
    assert [(c["name"], c["arguments"], c["call_id"]) for c in calls] == [
        ("f", "{}", "call_0"),
        ("g", "", "call_1"),
    ]
    _, message = message_events(parts)
    assert message["content"] == [
        {"type": "thinking", "thinking": "a", "signature": ""},
        {"type": "text", "text": "b"},
        {"type": "tool_use", "id": "call_0", "name": "f", "input": {}},
        {"type": "tool_use", "id": "call_1", "name": "g", "input": {}},
        {"type": "text", "text": "c"},
        {"type": "thinking", "thinking": "d", "signature": ""},
    ]


def test_an_ended_answer_takes_no_more() -> None:
    machine = ResponseEvents({"id": "resp_1"}, names(), summarized=False)
    with pytest.raises(AssertionError, match="new"):
        machine.part(Content("a"))
    machine.begin()
    machine.end(False, USAGE, 1)
    with pytest.raises(AssertionError, match="ended -> ended"):
        machine.end(False, USAGE, 1)
    message = MessageEvents({"id": "msg_1"}, names())
    message.begin(USAGE)
    message.fail({"type": "error"})
    with pytest.raises(AssertionError, match="ended"):
        message.part(Content("a"))


@pytest.mark.parametrize("dialect", ["responses", "anthropic"])
def test_an_aborted_request_is_a_failure(dialect: str) -> None:
    """In both dialects no word for it exists: it is told as an error, also in mid-stream."""
    request = Request("r", (1, 2), SamplingParams(seed=1))
    completion = Completion(request, "m", OutputRules(), TOKENIZER)
    call = responses_call(b'{"input": "a"}')
    head = response_head("resp_1", 1, call, completion)
    answer = (
        ResponseAnswer(head, call, completion, names())
        if dialect == "responses"
        else MessageAnswer("msg_1", completion, names())
    )
    events = answer.take(Delta(0, (3,), "a"))
    with pytest.raises(Unavailable) as found:
        answer.take(Delta(1, (), "", FinishReason.ABORT))
    events += answer.broken(found.value)
    assert events[-1]["type"] in ("response.failed", "error")
    if dialect == "responses":
        check_response(events)
        assert answer.whole()["status"] == "failed"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {}),
        (" ", {}),
        ('{"a": 1}', {"a": 1}),
        ("[1]", {"raw_arguments": "[1]"}),
        ('{"a": ', {"raw_arguments": '{"a": '}),
    ],
)
def test_arguments_as_an_object(arguments: str, expected: dict[str, Any]) -> None:
    assert input_of(arguments) == expected
