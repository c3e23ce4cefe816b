"""Calls that must be made, or be valid if made, in every format: what the grammar takes, random
texts of it, and what the parser makes of them."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.guided.matcher import GrammarCompiler
from baton.parsers import harmony
from baton.parsers.formats import MISTRAL, TOOL_FORMATS
from baton.parsers.frames import CallWriter
from baton.parsers.grammar import ToolFormat, forced, offered
from baton.parsers.message import MessageParser, MessageRules
from baton.parsers.parts import CallArguments, CallStart, Content
from baton.parsers.registry import Choice, formats_of
from baton.protocol.sampling import GuidedDecoding
from tests.engine.guided_vocabulary import EOS, encode, random_output, vocabulary, walk
from tests.front.parsers.spelled import FORCED, SPELLED, Call
from tests.grammar_texts import byte_tokenizer, check_grammar, takes
from tests.guided_cases import TOOLS, check_call

WEATHER: Call = ("get_weather", {"city": "Oslo", "days": 3, "metric": True})
THREE: list[Call] = [WEATHER, ("paint", {"color": "red"}), ("now", {})]


@pytest.fixture(scope="module")
def tokenizer() -> llguidance.LLTokenizer:
    return byte_tokenizer()


FORMS = sorted({form: name for name, form in reversed(TOOL_FORMATS.items())}.values())


def read(form: ToolFormat, text: str, tools: list[dict[str, Any]] = TOOLS) -> list[tuple[str, Any]]:
    """What the parser of the format makes of a text: (name, arguments), no content."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
    machine = MessageParser(MessageRules(tools=form, schemas=schemas))
    parts = [*machine.push(text), *machine.finish()]
    names = [part.name for part in parts if isinstance(part, CallStart)]
    bodies = [""] * len(names)
    for part in parts:
        assert not isinstance(part, Content), part
        if isinstance(part, CallArguments):
            bodies[part.index] += part.text
    return [(name, json.loads(body)) for name, body in zip(names, bodies, strict=True)]


def tagged(form: dict[str, Any]) -> GuidedDecoding:
    return GuidedDecoding("structural_tag", json.dumps({"type": "structural_tag", "format": form}))


@pytest.mark.parametrize("name", FORMS)
def test_what_a_forced_grammar_allows_the_parser_reads(name: str, tokenizer: Any) -> None:
    form, spell = TOOL_FORMATS[name], FORCED[name]
    several = tagged(forced(form, TOOLS, several=True))
    single = tagged(forced(form, TOOLS, several=False))
    one, three = spell([WEATHER]), spell(THREE)
    for guided in (several, single):
        check_grammar(guided)
        assert takes(tokenizer, guided, one)
        for text in ("", "hi", one + " ", spell([("other", WEATHER[1])]),
                     spell([("paint", WEATHER[1])]), "hi " + one):  # fmt: skip
            assert not takes(tokenizer, guided, text), text
    assert not takes(tokenizer, single, three)
    assert read(form, one) == [WEATHER]
    if form is not harmony.FORMAT:  # its turn ends with a call
        assert takes(tokenizer, several, three)
        assert read(form, three) == THREE


@pytest.mark.parametrize("name", FORMS)
def test_an_offered_call_is_a_valid_one_and_text_is_free(name: str, tokenizer: Any) -> None:
    form, spell = TOOL_FORMATS[name], FORCED[name]
    guided = tagged(offered(form, TOOLS, several=True))
    check_grammar(guided)
    call = spell([WEATHER])
    start = "<|channel|>final<|message|>" if form is harmony.FORMAT else ""
    for text in (start, f"{start}hello\nthere", f"{start}a < b", call):
        assert takes(tokenizer, guided, text), text
    for text in (spell([("get_weather", {"color": "red"})]), spell([("other", WEATHER[1])])):
        assert not takes(tokenizer, guided, text), text
    if isinstance(form.writer, CallWriter) and not form.writer.frame.bare:
        assert takes(tokenizer, guided, f"Let me see.\n{call}")


def test_mistrals_newer_tokenizers_write_names_before_arguments(tokenizer: Any) -> None:
    newer = formats_of(Choice("mistral"), None, ["[TOOL_CALLS]", "[ARGS]"]).tools
    assert newer != formats_of(Choice("mistral"), None, ["[TOOL_CALLS]"]).tools == MISTRAL
    text = f"[TOOL_CALLS]get_weather[ARGS]{json.dumps(WEATHER[1])}[TOOL_CALLS]now[ARGS]{{}}"
    assert takes(tokenizer, tagged(forced(newer, TOOLS, several=True)), text)
    assert read(newer, text) == read(MISTRAL, text) == [WEATHER, ("now", {})]


def test_values_that_hold_their_own_closing_tag(tokenizer: Any) -> None:
    tag = "</parameter>"
    closed = {"type": "object", "properties": {"s": {"const": tag}}, "additionalProperties": False}
    properties = {
        "e": {**closed, "required": ["s"]},
        "choice": {"type": "string", "enum": [tag, "no"]},
        "maybe": {"anyOf": [{"type": "string", "maxLength": 20}, {"type": "null"}]},
        "pattern": {"type": "string", "pattern": "^a.*$"},
    }
    parameters = {"type": "object", "properties": properties, "required": ["e"]}
    function = {"name": "f", "strict": True, "parameters": parameters}
    form = TOOL_FORMATS["qwen3_coder"]
    guided = tagged(forced(form, [{"function": function}], several=False))
    check_grammar(guided)

    def text(**values: str) -> str:
        return SPELLED["qwen3_coder"]([("f", values)])

    value = {"e": {"s": tag}, "choice": tag, "maybe": tag, "pattern": "ab"}
    said = {**{key: json.dumps(each) for key, each in value.items()}, "pattern": "ab"}
    assert takes(tokenizer, guided, text(**said))
    machine = MessageParser(MessageRules(tools=form, schemas={"f": parameters}))
    parts = [*machine.push(text(**said)), *machine.finish()]
    assert not any(isinstance(part, Content) for part in parts)
    arguments = "".join(part.text for part in parts if isinstance(part, CallArguments))
    assert json.loads(arguments) == value
    for wrong in ({"choice": tag}, {"choice": "no"}, {"maybe": tag}, {"pattern": f"a{tag}"}):
        assert not takes(tokenizer, guided, text(**{"e": said["e"], **wrong})), wrong


DEEP: dict[str, Any] = {"type": "object", "properties": {}}
for _ in range(3):
    DEEP = {"type": "object", "properties": {f"p{at}": DEEP for at in range(6)}}


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "pythonic", "gemma4", "minimax_m3"])
def test_grammars_stay_near_the_size_of_their_schemas(name: str, tokenizer: Any) -> None:
    shared = {"big": {"enum": ["x" * 9_000]}}
    properties = {"a": {"$ref": "#/$defs/big"}, "deep": DEEP, "n": {"type": "integer"}}
    many = {f"q{at}": {"type": "integer"} for at in range(20)}
    parameters = {"type": "object", "properties": {**properties, **many}, "$defs": shared}
    function = {"name": "f", "parameters": parameters}
    guided = tagged(forced(TOOL_FORMATS[name], [{"function": function}], several=False))
    assert len(guided.grammar) < 5 * len(json.dumps(parameters))
    check_grammar(guided)
    values = {"a": "x" * 9_000, "deep": {"p1": {"p2": {}}}, "n": 3, "q7": 7}
    if name not in ("gemma4", "minimax_m3", "qwen3_coder"):  # what is not a plain text is JSON
        assert takes(tokenizer, guided, FORCED[name]([("f", values)]))


@pytest.mark.parametrize("name", ["qwen3_coder", "glm47", "minimax_m2", "gemma4"])
def test_free_text_ends_where_its_end_first_stands(name: str, tokenizer: Any) -> None:
    parameters = {"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"]}
    function = {"name": "f", "strict": True, "parameters": parameters}
    guided = tagged(forced(TOOL_FORMATS[name], [{"function": function}], several=False))
    close = {"glm47": "</arg_value>", "gemma4": '<|"|>'}.get(name, "</parameter>")
    assert takes(tokenizer, guided, SPELLED[name]([("f", {"s": "a <b\n\n c"})]))
    assert not takes(tokenizer, guided, SPELLED[name]([("f", {"s": f"a{close}b"})]))


@pytest.mark.parametrize("name", FORMS)
def test_the_parser_reads_every_call_that_the_grammar_writes(name: str) -> None:
    guided, free = (
        tagged(make(TOOL_FORMATS[name], TOOLS, several=True)) for make in (forced, offered)
    )
    compiler = GrammarCompiler(vocabulary())
    start = compiler.compile(guided)
    for may_start in (start.clone(), compiler.compile(free)):
        walk(may_start, [*encode(FORCED[name]([WEATHER])), EOS])
    # What a model thinks before has no end of its own here.
    begun = "<|channel|>commentary" if name == "openai" else ""
    start = walk(start, encode(begun))
    for seed in range(4):
        text = begun + random_output(start.clone(), seed, True, 8000).decode()
        calls = read(TOOL_FORMATS[name], text)
        assert calls
        for called, arguments in calls:
            check_call(called, json.dumps(arguments))


TOKENIZER = byte_tokenizer()
DEEP_TOOL: dict[str, Any] = {
    "function": {
        "name": "f",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "maybe": {"type": ["string", "null"]},
                "deep": {
                    "type": "object",
                    "properties": {
                        "numbers": {"type": "array", "items": {"type": "integer"}},
                        "flag": {"type": ["boolean", "null"]},
                    },
                    "required": ["numbers", "flag"],
                },
            },
            "required": ["text", "maybe", "deep"],
        },
    }
}


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=15)
@given(data=st.data())
def test_what_is_taken_is_read_as_the_same_call(name: str, data: st.DataObject) -> None:
    form = TOOL_FORMATS[name]
    marks = {mark[0] for mark in form.markers if mark.strip()}
    # A grammar of JSON takes other letters as they are, which json.dumps would escape.
    letters = st.characters(min_codepoint=32, max_codepoint=126) | st.just("\n")
    text = data.draw(st.text(letters, max_size=12).filter(lambda text: not marks & {*text}))
    numbers = data.draw(st.lists(st.integers(-99, 99), min_size=1, max_size=3))
    flag = data.draw(st.sampled_from([True, False, None]))
    arguments = {"text": text, "maybe": None, "deep": {"numbers": numbers, "flag": flag}}
    guided = tagged(forced(form, [DEEP_TOOL], several=False))
    call = FORCED[name]([("f", arguments)])
    assert takes(TOKENIZER, guided, call)
    assert read(form, call, [DEEP_TOOL]) == [("f", arguments)]
