"""Bodies -> what the answer must look like: every spelling, what is combined, who is blamed."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import llguidance
import pytest

from baton.guided.matcher import GrammarCompiler
from baton.guided.trials import GrammarTrials
from baton.parsers.formats import TOOL_FORMATS
from baton.parsers.message import MessageRules
from baton.parsers.parts import Room
from baton.parsers.reasoning import QWEN3
from baton.parsers.registry import Formats
from baton.protocol.errors import InvalidRequest, Overloaded, UnsupportedFeature
from baton.protocol.sampling import GuidedDecoding
from baton.runtime.children import ChildBudget
from router.api.openai.bodies import ChatBody, CompletionBody, parse
from router.api.openai.guided_fields import asked_of, asked_of_chat, check_forced, room_for_content
from router.prompts.grammar_checks import Constraint, GrammarChecker
from router.prompts.off_loop import OffLoop, WorkLane
from router.tenants.turns import MAX_WAITING
from tests.engine.guided_vocabulary import EOS, vocabulary, walk
from tests.front.parsers.spelled import SPELLED, Call
from tests.grammar_texts import byte_tokenizer, check_grammar, takes
from tests.guided_cases import TOOLS

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
LENIENT = {**SCHEMA, "x-guidance": {"lenient": True, "coerce_one_of": True}}


@pytest.fixture(scope="module")
def tokenizer() -> llguidance.LLTokenizer:
    return byte_tokenizer()


def completion(**fields: Any) -> CompletionBody:
    return parse(json.dumps({"prompt": "x", **fields}).encode(), CompletionBody)


def chat(**fields: Any) -> ChatBody:
    messages = [{"role": "user", "content": "x"}]
    return parse(json.dumps({"messages": messages, **fields}).encode(), ChatBody)


def of_chat(body: ChatBody, parser: str | None, message: MessageRules | None) -> Constraint | None:
    formats = Formats(tools=TOOL_FORMATS[parser or "hermes"])
    return asked_of_chat(body, asked_of(body), formats, message)


def response_format(**spec: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", **spec}}


SPELLINGS: list[tuple[dict[str, Any], str, Any, str]] = [
    ({"response_format": {"type": "json_object"}}, "json_object", None, "response_format"),
    ({"response_format": response_format(schema=SCHEMA, strict=True)}, "json_schema", SCHEMA,
     "response_format.json_schema.schema"),
    ({"response_format": response_format(schema=SCHEMA)}, "json_schema", LENIENT,
     "response_format.json_schema.schema"),
    ({"response_format": response_format(json_schema=SCHEMA)}, "json_schema", LENIENT,
     "response_format.json_schema.schema"),
    ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA, "structured_outputs.json"),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None, "json_object": False}},
     "json_schema", SCHEMA, "structured_outputs.json"),
    ({"structured_outputs": {"json_object": True}}, "json_object", None,
     "structured_outputs.json_object"),
    ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"],
     "structured_outputs.choice"),
    ({"structured_outputs": {"structural_tag": {"format": {}}}}, "structural_tag", {"format": {}},
     "structured_outputs.structural_tag"),
    ({"structured_outputs": {"structural_tag": '{"format": {}}'}}, "structural_tag",
     {"format": {}}, "structured_outputs.structural_tag"),
    ({"guided_json": SCHEMA}, "json_schema", SCHEMA, "guided_json"),
    ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA, "guided_json"),
    ({"guided_choice": ["a"]}, "choice", ["a"], "guided_choice"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "kind", "grammar", "blamed"), SPELLINGS)
def test_every_spelling(fields: dict[str, Any], kind: str, grammar: Any, blamed: str) -> None:
    asked = asked_of(completion(**fields))
    assert asked is not None
    assert (asked.guided.kind, asked.field) == (kind, blamed)
    assert (json.loads(asked.guided.grammar) if asked.guided.grammar else None) == grammar
    assert of_chat(chat(**fields), None, None) == asked


def test_texts_and_options() -> None:
    regex = asked_of(completion(guided_regex="a+", guided_decoding_backend="xgrammar"))
    assert regex == Constraint(GuidedDecoding("regex", "a+", backend="xgrammar"), "guided_regex")
    grammar = asked_of(completion(structured_outputs={"grammar": "start: x"}))
    assert grammar == Constraint(GuidedDecoding("ebnf", "start: x"), "structured_outputs.grammar")
    spaced = asked_of(completion(guided_json=SCHEMA, guided_whitespace_pattern=" ?"))
    assert spaced is not None
    assert spaced.guided.whitespace == " ?"
    for given, whitespace in (({"whitespace_pattern": "x"}, "x"),
                              ({"disable_any_whitespace": True}, "")):  # fmt: skip
        asked = asked_of(completion(structured_outputs={"json": SCHEMA, **given}))
        assert asked is not None
        assert asked.guided.whitespace == whitespace
    assert asked_of(completion()) is None
    assert asked_of(completion(response_format={"type": "text"})) is None


def test_objects_are_closed_when_asked() -> None:
    nested = {"properties": {"a": {"items": [SCHEMA, True]}}, "additionalProperties": True}
    given = {"json": nested, "disable_additional_properties": True}
    asked = asked_of(completion(structured_outputs=given))
    assert asked is not None
    closed = {**SCHEMA, "additionalProperties": False}
    assert json.loads(asked.guided.grammar) == {
        "properties": {"a": {"items": [closed, True]}}, "additionalProperties": True
    }  # fmt: skip


# ---- tools ----

NAMED = {"type": "function", "function": {"name": "now"}}
PAINT = TOOLS[1]
WEATHER: Call = ("get_weather", {"city": "Oslo", "days": 3, "metric": True})
THREE: list[Call] = [WEATHER, ("paint", {"color": "red"}), ("now", {})]


def asked_tools(tokenizer: Any, **fields: Any) -> GuidedDecoding:
    asked = of_chat(chat(tools=TOOLS, **fields), "hermes", None)
    assert asked is not None
    check_grammar(asked.guided)
    return asked.guided


def test_choices_of_tools(tokenizer: Any) -> None:
    weather, paint, now = (SPELLED["hermes"]([call]) for call in THREE)
    both = f"{paint}\n{now}"
    required = asked_tools(tokenizer, tool_choice="required")
    assert takes(tokenizer, required, both)
    lone = asked_tools(tokenizer, tool_choice="required", parallel_tool_calls=False)
    assert takes(tokenizer, lone, weather)
    assert not takes(tokenizer, lone, both)
    named = asked_tools(tokenizer, tool_choice=NAMED)
    assert takes(tokenizer, named, now)
    assert not takes(tokenizer, named, paint)
    auto = asked_tools(tokenizer)  # one of them is strict
    assert takes(tokenizer, auto, f"hm {both} so")
    free = [tool for tool in TOOLS if tool is not PAINT]
    assert of_chat(chat(tools=free), "hermes", None) is None
    off = chat(tools=TOOLS, tool_choice="none")
    assert of_chat(off, "hermes", None) is None


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ({"response_format": {"type": "json_object"}}, '{"x": 1}'),
        ({"guided_json": SCHEMA}, '{"a": 1}'),
        ({"guided_regex": "a+"}, "aa"),
        ({"guided_choice": ["yes", "no"]}, "no"),
        ({"guided_grammar": 'root ::= "a" "b"'}, "ab"),
    ],
)
def test_an_answer_in_the_asked_form_or_calls(
    tokenizer: Any, fields: dict[str, Any], answer: str
) -> None:
    guided = asked_tools(tokenizer, **fields)
    assert takes(tokenizer, guided, answer)
    assert takes(tokenizer, guided, SPELLED["hermes"]([("now", {})]))
    assert not takes(tokenizer, guided, "hello")
    must = asked_tools(tokenizer, tool_choice="required", **fields)
    assert not takes(tokenizer, must, answer)


@pytest.mark.parametrize(
    ("fields", "room"),
    [
        ({}, Room.ANY),
        ({"tools": TOOLS}, Room.ANY),
        ({"guided_json": SCHEMA}, Room.ANY),
        ({"tools": TOOLS, "guided_json": SCHEMA}, Room.JSON_INSTEAD),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, Room.JSON_INSTEAD),
        ({"tools": TOOLS, "guided_regex": "<+", "tool_choice": "auto"}, Room.INSTEAD),
        ({"tools": TOOLS, "guided_json": SCHEMA, "tool_choice": "none"}, Room.ANY),
        ({"tools": TOOLS, "guided_json": SCHEMA, "tool_choice": "required"}, Room.NONE),
        ({"tools": TOOLS, "tool_choice": NAMED}, Room.NONE),
    ],
)
def test_what_is_left_to_content(fields: dict[str, Any], room: Room) -> None:
    body = chat(**fields)
    assert room_for_content(body, asked_of(body)) is room


FORMATS = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize(
    ("fields", "blamed"),
    [
        ({"tool_choice": "required"}, "tools"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({}, "tools"),
        (FORMATS, "response_format"),
        ({"tool_choice": "required", **FORMATS}, "tools"),
    ],
)
async def test_calls_are_for_the_backend_that_was_asked_for(
    fields: dict[str, Any], blamed: str
) -> None:
    strict = {
        "name": "now",
        "strict": True,
        "parameters": {"required": ["a"], "properties": {"a": {"not": {}}}},
    }
    worse = [*TOOLS[:2], {"type": "function", "function": strict}]
    checker = GrammarChecker(OffLoop())
    for backend in ("xgrammar", "llguidance", None):
        given = {"guided_decoding_backend": backend} if backend else {}
        asked = of_chat(chat(tools=TOOLS, **given, **fields), "hermes", None)
        assert asked is not None
        assert (asked.guided.backend, asked.field) == (backend or "", blamed)
        await checker.check(asked.guided, asked.field)
        asked = of_chat(chat(tools=worse, **given, **fields), "hermes", None)
        assert asked is not None
        with pytest.raises(InvalidRequest, match=f'^{blamed}: .*keys: \\["not"\\]$'):
            await checker.check(asked.guided, asked.field)
    checker.close()


def test_a_grammar_beside_tools_is_read(tokenizer: Any) -> None:
    fields = {"guided_grammar": 'root ::= "a" "b"', "guided_decoding_backend": "xgrammar"}
    guided = asked_tools(tokenizer, **fields)
    assert takes(tokenizer, guided, "ab")
    walk(GrammarCompiler(vocabulary()).compile(guided), [*b"ab", EOS])


def test_what_cannot_be_combined() -> None:
    tag = {"structural_tag": {"format": {}}}
    with pytest.raises(UnsupportedFeature) as caught:
        of_chat(chat(tools=TOOLS, structured_outputs=tag), "hermes", None)
    assert caught.value.field == "tools"


@pytest.mark.parametrize(
    ("choice", "field"),
    [
        ({"type": "x", "function": {"name": "now"}}, "tool_choice"),
        ({"type": "function", "function": "now"}, "tool_choice"),
        ({"type": "function", "function": {"name": "then"}}, "tool_choice.function.name"),
    ],
)
def test_a_choice_of_no_tool(choice: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_forced(choice, TOOLS)
    assert caught.value.field == field


@pytest.mark.parametrize("opened", [True, False])
def test_a_grammar_begins_where_the_thought_ends(opened: bool) -> None:
    rules = MessageRules(reasoning=QWEN3, opened=opened)
    for fields in ({"guided_regex": "a"}, {"tools": TOOLS, "tool_choice": "required"}):
        asked = of_chat(chat(**fields), None, rules)
        assert asked is not None
        assert asked.guided.starts_after == ("</think>" if opened else "")


# ---- checks ----


async def test_grammars_are_checked_once_and_blamed_on_the_clients_field() -> None:
    checker = GrammarChecker(OffLoop())
    good, bad = GuidedDecoding("regex", "a"), GuidedDecoding("regex", "(")
    await checker.check(good, "guided_regex")
    await checker.check(good, "guided_regex")
    with pytest.raises(InvalidRequest, match=r"^guided_regex: ") as caught:
        await checker.check(bad, "guided_regex")
    assert caught.value.field == "guided_regex"
    unknown = GuidedDecoding("structural_tag", '{"format": {"type": "exclude_token"}}')
    for backend in ("", "llguidance", "xgrammar"):
        with pytest.raises(InvalidRequest, match=r"^x: "):
            await checker.check(replace(bad, backend=backend), "x")
        with pytest.raises(UnsupportedFeature):
            await checker.check(replace(unknown, backend=backend), "x")
    for index in range(300):  # it forgets
        await checker.check(GuidedDecoding("choice", f'["{index}"]'), "x")
    await checker.check(good, "guided_regex")
    checker.close()
    checker.close()


async def test_what_no_grammar_can_follow_is_refused_where_it_is_strict() -> None:
    checker = GrammarChecker(OffLoop())
    schema = {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2]}}

    async def check(**fields: Any) -> None:
        asked = asked_of(completion(guided_decoding_backend="xgrammar", **fields))
        assert asked is not None
        await checker.check(asked.guided, asked.field)

    for fields, field in (
        ({"response_format": response_format(schema=schema, strict=True)},
         "response_format.json_schema.schema"),
        ({"guided_json": schema}, "guided_json"),
        ({"structured_outputs": {"json": schema}}, "structured_outputs.json"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest) as caught:
            await check(**fields)
        assert caught.value.field == field
        assert caught.value.message == f'{field}: Unimplemented keys: ["uniqueItems"]'
    await check(response_format=response_format(schema=schema))  # not strict: as far as it goes
    await check(guided_json=SCHEMA)
    checker.close()


async def test_a_bad_grammar_costs_its_budget_once_and_holds_up_nobody() -> None:
    trials = GrammarTrials(budget=ChildBudget(cpu_s=0.5))
    checker = GrammarChecker(OffLoop(), trials)
    endless = GuidedDecoding("json_schema", '{"type": "integer", "multipleOf": 9999991}')
    asked = [asyncio.create_task(checker.check(endless, f"field{i}")) for i in range(3)]
    await checker.check(GuidedDecoding("regex", "b"), "x")  # beside it
    for index, refused in enumerate(await asyncio.gather(*asked, return_exceptions=True)):
        assert isinstance(refused, InvalidRequest)
        assert refused.field == f"field{index}"
        assert refused.message == f"field{index}: the grammar takes too long to build"
    with pytest.raises(InvalidRequest, match="too long"):
        # A thought before it makes it no other grammar.
        await checker.check(replace(endless, starts_after="</think>"), "guided_json")
    assert trials.children.num_given_up == 1
    checker.close()


async def test_too_many_unknown_grammars_are_told_to_come_again() -> None:
    checker = GrammarChecker(OffLoop())
    most = MAX_WAITING + WorkLane.GRAMMAR.places - 1  # one is left to other keys
    grammars = [GuidedDecoding("regex", f"x{index}") for index in range(most + 8)]
    outcomes = await asyncio.gather(
        *(checker.check(guided, "f") for guided in grammars), return_exceptions=True
    )
    refused = [each for each in outcomes if each is not None]
    assert len(refused) == 8
    assert all(isinstance(each, Overloaded) and each.retry_after_s for each in refused)
    checker.close()
