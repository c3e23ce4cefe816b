"""Matchers against what their grammars say."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from baton.guided.matcher import GrammarCompiler
from baton.parsers.formats import TOOL_FORMATS
from baton.parsers.grammar import forced, offered
from baton.protocol.errors import InvalidRequest
from baton.protocol.sampling import GuidedDecoding
from tests.engine.guided_vocabulary import END, EOS, allowed, random_output, vocabulary, walk
from tests.front.parsers.spelled import FORCED
from tests.guided_cases import CHOICES, GBNF, GBNF_REGEX, SCHEMAS, check_json, check_regex


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(vocabulary())


@pytest.mark.parametrize("name", SCHEMAS)
def test_any_walk_through_a_schema_validates(compiler: GrammarCompiler, name: str) -> None:
    start = compiler.compile(GuidedDecoding("json_schema", json.dumps(SCHEMAS[name])))
    texts = {random_output(start.clone(), seed) for seed in range(12)}
    for text in texts:
        check_json(text.decode(), SCHEMAS[name])
    assert len(texts) > 1


@pytest.mark.parametrize(
    ("day", "accepted"),
    [("2024-02-29", True), ("2023-02-29", True), ("2023-04-31", False), ("2023-13-01", False)],
)
def test_dates_are_days_of_their_month_and_of_no_calendar(
    compiler: GrammarCompiler, day: str, accepted: bool
) -> None:
    """docs/structured_output.md says so."""
    guided = GuidedDecoding("json_schema", '{"type": "string", "format": "date"}')
    text = [*f'"{day}"'.encode(), EOS]
    taken = compiler.compile(guided).accepts(text) == len(text)
    assert taken is accepted


@pytest.mark.parametrize(
    ("guided", "pattern"),
    [
        (GuidedDecoding("regex", r"[a-c]{3}-\d{2}(x|yz)?"), r"[a-c]{3}-\d{2}(x|yz)?"),
        (GuidedDecoding("choice", json.dumps(CHOICES)), "|".join(map(re.escape, CHOICES))),
        (GuidedDecoding("ebnf", GBNF), GBNF_REGEX),
        (GuidedDecoding("ebnf", 'start: "a" tail?\ntail: /[bc]{1,3}/'), "a[bc]{0,3}"),
    ],
)
def test_any_walk_through_a_grammar_matches(
    compiler: GrammarCompiler, guided: GuidedDecoding, pattern: str
) -> None:
    start = compiler.compile(guided)
    texts = {random_output(start.clone(), seed).decode() for seed in range(20)}
    for text in texts:
        check_regex(text, pattern)
    assert len(texts) > 1


def test_what_fails_with_the_first_mask_fails_with_the_grammar(compiler: GrammarCompiler) -> None:
    """Not in the engine's thread, when others' tokens wait for it."""
    with pytest.raises(InvalidRequest, match="no text matches the grammar") as caught:
        compiler.compile(GuidedDecoding("json_schema", '{"$ref": "#"}'))
    assert caught.value.field == "guided"


def test_the_end_is_allowed_where_the_grammar_may_end_and_nowhere_else(
    compiler: GrammarCompiler,
) -> None:
    matcher = compiler.compile(GuidedDecoding("regex", "ab?"))
    assert allowed(matcher) == {ord("a")}
    walk(matcher, b"a")
    assert allowed(matcher) == {ord("b"), EOS, END}
    walk(matcher, b"b")
    assert allowed(matcher) == {EOS, END}
    for end in (EOS, END):
        assert matcher.clone().advance(end)
    assert not matcher.clone().advance(ord("b"))
    assert matcher.error == ""


def test_a_clone_goes_its_own_way_and_looking_ahead_changes_nothing(
    compiler: GrammarCompiler,
) -> None:
    matcher = walk(compiler.compile(GuidedDecoding("regex", "(ab|cd){2}")), b"ab")
    other = walk(matcher.clone(), b"c")
    assert allowed(other) == {ord("d")}
    assert matcher.accepts(list(b"cdx")) == 2
    assert matcher.accepts(list(b"x")) == 0
    assert allowed(matcher) == {ord("a"), ord("c")}
    walk(matcher, b"ab")


def test_merged_tokens_are_taken_where_they_fit(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    matcher = compiler.compile(GuidedDecoding("json_schema", json.dumps(schema), whitespace=""))
    tokens = vocabulary().tokens
    path = [tokens.index(text) for text in (b'{"', b"a", b'":', b"true", b"}")]
    assert walk(matcher, [*path, END]) is matcher


def test_special_tokens_are_no_text(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(GuidedDecoding("regex", ".{1,9}"))
    assert not allowed(matcher) & {266, 268, EOS}
    walk(matcher, b"[CALL]")


TAGS: dict[str, Any] = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["[CALL]", "<f"],
        "tags": [
            {"begin": "[CALL]x", "content": {"type": "json_schema",
             "json_schema": {"enum": [1]}}, "end": "!"},
            {"begin": "<f=g>", "content": {"type": "regex", "pattern": "a{2}"}, "end": "</f>"},
        ],
    },
}  # fmt: skip


def test_special_tokens_that_a_tag_spells_out_are_met_as_tokens(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(GuidedDecoding("structural_tag", json.dumps(TAGS)))
    walk(matcher, [*b"hi ", 268, *b"x"])
    assert allowed(matcher) == {ord("1")}
    walk(matcher, b"1! <f=g>aa")
    assert allowed(matcher) == {ord("<")}
    walk(matcher, [*b"</f> bye", EOS])


def test_text_between_tags_is_free(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(GuidedDecoding("structural_tag", json.dumps(TAGS)))
    assert EOS in allowed(matcher)
    walk(matcher, b"a < b")
    assert len(allowed(matcher)) > 150


@pytest.mark.parametrize(
    "guided",
    [
        GuidedDecoding("json_schema", '{"type": "strin"}'),
        GuidedDecoding("regex", "("),
        GuidedDecoding("ebnf", "root ::= x"),
        GuidedDecoding("structural_tag", '{"type": "structural_tag", "format": {"type": "x"}}'),
    ],
)
def test_what_is_no_grammar_is_refused_by_field(
    compiler: GrammarCompiler, guided: GuidedDecoding
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compiler.compile(guided)
    assert caught.value.field == "guided"


ONES = '{"type": "array", "items": {"const": 1}}'


def test_white_space_in_json_is_bounded(compiler: GrammarCompiler) -> None:
    matcher = walk(compiler.compile(GuidedDecoding("json_schema", ONES)), b"[")
    for count in range(100):
        spaces = allowed(matcher) & set(b" \t\r\n")
        if not spaces:
            assert count >= 1
            return
        assert matcher.advance(max(spaces, key=b"\n \t\r".index))
    raise AssertionError("white space without end")


FIELDS = {
    "type": "object", "required": ["a", "b"],
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "string"}}},
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "f", "parameters": FIELDS}}
LIST = '["x", "y"]'
INNER = f'{{"a": 1, "b": {LIST}}}'


def _tagged(form: Any) -> GuidedDecoding:
    tag = {"type": "structural_tag", "format": form}
    return GuidedDecoding("structural_tag", json.dumps(tag))


def _calls(make: Any, name: str) -> tuple[GuidedDecoding, str, str]:
    text = FORCED[name]([("f", json.loads(INNER))])
    return _tagged(make(TOOL_FORMATS[name], [TOOL], True)), text, INNER if INNER in text else LIST


SPACED = {
    "schema": (GuidedDecoding("json_schema", json.dumps(FIELDS)), INNER, INNER),
    "object": (GuidedDecoding("json_object", ""), INNER, INNER),
    **{
        f"{make.__name__} {name}": _calls(make, name)
        for make in (forced, offered)
        for name in (
            "hermes", "llama3_json", "mistral", "kimi_k2", "deepseek_v3", "apertus", "openai",
            "qwen3_coder", "glm47", "deepseek_v32", "pythonic",
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SPACED)
def test_no_json_runs_into_white_space(compiler: GrammarCompiler, name: str) -> None:
    """A model that cannot stop would fill its answer with it, up to max_tokens."""
    guided, text, inner = SPACED[name]
    start = compiler.compile(guided)
    begin, end = text.index(inner), text.index(inner) + len(inner)
    for place in range(begin, end):
        prefix = [*text[:place].encode()]
        if start.clone().accepts(prefix) < len(prefix):
            continue  # no such space is written
        in_string = text[begin:place].count('"') % 2 == 1
        for space in (b"\n", b" ", b"\t", b"\r\n"):
            run = [*space * 100]
            taken = start.clone().accepts([*prefix, *run]) - len(prefix)
            assert in_string or taken <= 40, (text[:place], space)
