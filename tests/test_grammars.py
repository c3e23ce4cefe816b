"""Grammar texts: what a client asked for as llguidance reads it, and what is refused by field."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest

from baton.guided.grammar_text import json_schema
from baton.guided.spec import MAX_GRAMMAR_BYTES, check_size, lenient
from baton.guided.structural_tags import Dialect, lark_of
from baton.guided.structural_tags import unanchored as bare
from baton.protocol.errors import InvalidRequest, UnsupportedFeature
from baton.protocol.sampling import GuidedDecoding
from tests.grammar_texts import byte_tokenizer, check_grammar, takes


@pytest.fixture(scope="module")
def tokenizer() -> llguidance.LLTokenizer:
    return byte_tokenizer()


def tag(form: dict[str, Any]) -> GuidedDecoding:
    return GuidedDecoding("structural_tag", json.dumps({"type": "structural_tag", "format": form}))


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "pattern": pattern}


def one(form: str, **fields: Any) -> dict[str, Any]:
    return {"type": form, **fields}


PAIR = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
        "additionalProperties": False}  # fmt: skip
FREE = one("triggered_tags", triggers=["<f", "[X]"], tags=[
    one("tag", begin="<f=1>", content=regex("a+"), end="</f>"),
    one("tag", begin="[X]", content=one("json_schema", json_schema=PAIR), end=["!", "?"]),
])  # fmt: skip
XML = {
    "type": "object",
    "properties": {
        "city": {"type": "string"}, "unit": {"type": "string", "enum": ["C", "F"]},
        "code": {"type": "string", "pattern": "^[A-Z]{2}"}, "days": {"$ref": "#/$defs/n"},
        "note": {"type": "string", "minLength": 1, "maxLength": 3}, "any": True,
        "fixed": {"type": "string", "const": "x"}, "odd": {"type": "string", "enum": [1]},
        "tail": {"type": "string", "pattern": "x$"}, "more": {"type": "string", "minLength": 2},
        "empty": {"title": "?"}, "zip": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["city"],
    "$defs": {"n": {"type": "integer"}},
}  # fmt: skip


def parameter(name: str, value: str) -> str:
    return f"<parameter={name}>\n{value}\n</parameter>\n"


MATCHES: list[tuple[GuidedDecoding, list[str], list[str]]] = [
    (GuidedDecoding("json_object", ""), ['{"b": [1]}', "{}"], ["[]", "1"]),
    (GuidedDecoding("json_schema", json.dumps(PAIR)), ['{"a":true}', '{ "a": false\n}'],
     ['{"a":  true}', '{"a":1}', "{}"]),
    (GuidedDecoding("json_schema", json.dumps(PAIR), whitespace=""), ['{"a":true}'],
     ['{"a": true}']),
    (GuidedDecoding("json_schema", json.dumps(PAIR), whitespace="\t"), ['{\t"a":true}'],
     ['{ "a": true}']),
    (GuidedDecoding("json_schema", "true"), ["3", '"x"'], ["x"]),
    (GuidedDecoding("regex", r"^\d{2}/\w\$$"), ["12/a$"], ["1२/a$", "12/a"]),
    (GuidedDecoding("choice", '["a", "ab", "\\"é😀"]'), ["a", "ab", '"é😀'], ["b", "abb"]),
    (GuidedDecoding("ebnf", 'root ::= "a" | "b" root'), ["a", "bba"], ["b"]),
    (GuidedDecoding("ebnf", 'start: "x" NUM\nNUM: /[0-9]+/'), ["x12"], ["x"]),
    (tag(const('a"[X]b')), ['a"[X]b'], ["a"]),
    (tag(one("any_text")), ["", "hé\n"], []),
    (tag(one("sequence", elements=[const("a"), regex("b+")])), ["abb"], ["a"]),
    (tag(one("or", elements=[const("a"), one("grammar", grammar='root ::= "b" "c"')])),
     ["a", "bc"], ["b"]),
    (tag(one("sequence", elements=[one("any_text"), const("!"), const("b"), one("any_text")])),
     ["a!bc", "!b"], ["a!", "a!a!b"]),
    (tag(one("tag", begin="a", content=regex(".*"), end="x[X]y")), ["aax[X]y"], ["aax"]),
    (tag(one("tag", begin="a", content=regex("b*"), end="[X]")), ["ab[X]"], ["ab"]),
    (tag(one("optional", content=const("a"))), ["", "a"], ["aa"]),
    (tag(one("plus", content=const("a"))), ["a", "aaa"], [""]),
    (tag(one("star", content=const("a"))), ["", "aaa"], ["b"]),
    (tag(one("repeat", content=const("a"), min=1, max=2)), ["a", "aa"], ["", "aaa"]),
    (tag(one("repeat", content=const("a"), min=2, max=-1)), ["aa", "aaaa"], ["a"]),
    (tag(one("tag", begin="<t>", content=one("any_text"), end="</t>")), ["<t>x<y</t>"],
     ["<t>x", "<t>x</t>y"]),
    (tag(one("tag", begin="<t>", content=one("any_text"), end="</x>")), ["<t>xy</x>"], ["<t>x"]),
    (tag(one("tags_with_separator", separator=", ", tags=[
        one("tag", begin="a", content=regex("1*"), end="."),
        one("tag", begin="b", content=const("2"), end="")])), ["", "a11.", "a., b2, a."],
     ["a.b2", "a"]),
    (tag(one("tags_with_separator", separator="", at_least_one=True, stop_after_first=True, tags=[
        one("tag", begin="a", content=const("1"), end="")])), ["a1"], ["", "a1a1"]),
    (tag(FREE), ["", "hi", "x<f=1>aa</f>y[X]{\"a\":true}?", "<f=1>a</f>"],
     ["<f=2>", "<f=1>b</f>", "[X]1!"]),
    (tag({**FREE, "stop_after_first": True}), ["x", "x<f=1>a</f>"], ["<f=1>a</f>x"]),
    (tag({**FREE, "at_least_one": True}), ["x<f=1>a</f>y"], ["x"]),
    (tag({**FREE, "at_least_one": True, "stop_after_first": True}), ["<f=1>a</f>"], ["x"]),
    (GuidedDecoding("structural_tag", json.dumps({
        "type": "structural_tag", "triggers": ["<f"], "structures": [
            {"begin": "<f>", "schema": PAIR, "end": "</f>"},
            {"begin": "<fs>", "schema": json.dumps(PAIR), "end": "</f>"}, {"begin": "<fx>"}]})),
     ["a<f>{\"a\":true}</f>", "<fs>{\"a\":true}</f>b", "<fx>12"], ["<f>1</f>", "<fy>"]),
    (tag(one("qwen_xml_parameter", json_schema=XML)),
     [parameter("city", "Os<lo\n"), parameter("city", "a") + parameter("unit", "C")
      + parameter("code", "NOx") + parameter("days", "3") + parameter("note", "abc")
      + parameter("any", "[") + parameter("fixed", "x") + parameter("odd", "?")
      + parameter("tail", "x") + parameter("more", "long") + parameter("empty", "12 [")
      + parameter("zip", '"12"')],
     ["", parameter("unit", "C"), parameter("city", "a") + parameter("unit", "K"),
      parameter("city", "a") + parameter("note", "abcd"),
      parameter("city", "a") + parameter("days", "x"),
      parameter("city", "a") + parameter("zip", "12")]),
    (tag(one("qwen_xml_parameter", json_schema={})), [""], ["x"]),
    (tag(one("json_schema", json_schema=PAIR, style="qwen_xml")), [parameter("a", "true")], [""]),
    (tag(one("json_schema", json_schema=PAIR, style="json")), ['{"a":true}'], ["true"]),
    (tag(one("any_text", excludes=["a/b", "x", "\n "])), ["", "a", "/b\n"],
     ["xa", "a/b", "ca/bc", "\n "]),
    (tag(one("tag", begin="<t>", content=one("any_text", excludes=["b"]), end="</t>")),
     ["<t>x<y</t>"], ["<t>b</t>", "<t>x</t>y"]),
    (tag(one("sequence", elements=[one("any_text", excludes=["b"]), const("!")])), ["a!"],
     ["b!", "a"]),
    (tag(one("sequence", elements=[one("any_text"), one("tag", begin="<t>", content=regex("a+"),
     end="</t>")])), ["b<t>aa</t>", "<t>a</t>"], ["b", "b<t>a</t>c"]),
    (tag({**FREE, "excludes": ["no"]}), ["n", "n<f=1>a</f>o"], ["no", "no<f=1>a</f>", "[X]1"]),
    (tag(one("dispatch", rules=[["<a", const("!")], ["[X]", regex("b+")]])),
     ["", "x<a!y<a!", "[X]bb", "<a![X]b"], ["<ab", "[X]a", "x<a"]),
    (tag(one("dispatch", rules=[["<a", const("!")]], loop=False)), ["x", "x<a!"], ["<a!x"]),
    (tag(one("dispatch", rules=[["<a", const("!")]], excludes=["b"])), ["x<a!"], ["b<a!", "<a!b"]),
    (tag(one("token", token="[X]")), ["[X]"], ["", "[X][X]"]),
    (tag(one("any_tokens", exclude_tokens=["</x>"])), ["", "ab"], ["[X]", "a</x>"]),
    (tag(one("tag", begin=one("token", token="[X]"), content=one("any_tokens"),
             end=one("token", token="</x>"))), ["[X]ab</x>", "[X]</x>"], ["[X]", "a</x>"]),
    (tag(one("token_triggered_tags", trigger_tokens=["[X]"], tags=[
        one("tag", begin=one("token", token="[X]"), content=regex("a+"), end="!")])),
     ["", "b[X]aa!c"], ["[X]b!", "[X]"]),
    (tag(one("token_dispatch", rules=[["[X]", const("!")]])), ["", "a[X]!b[X]!"], ["[X]a"]),
]  # fmt: skip


@pytest.mark.parametrize(("guided", "matching", "others"), MATCHES)
def test_what_a_grammar_takes(
    tokenizer: llguidance.LLTokenizer,
    guided: GuidedDecoding,
    matching: list[str],
    others: list[str],
) -> None:
    for text in matching:
        assert takes(tokenizer, guided, text), text
    for text in others:
        assert not takes(tokenizer, guided, text), text
    check_grammar(guided)


def test_a_schemas_own_options_have_precedence() -> None:
    own = json_schema({"x-guidance": {"whitespace_pattern": "x"}}, None)
    assert own == {"x-guidance": {"whitespace_pattern": "x"}}
    ignoring = json_schema(lenient({"not": {}}), "")
    assert ignoring["x-guidance"] == {
        "whitespace_flexible": False, "lenient": True, "coerce_one_of": True,
    }  # fmt: skip
    check_grammar(GuidedDecoding("json_schema", json.dumps(ignoring)))


def nested(depth: int) -> dict[str, Any]:
    return const("a") if depth == 0 else one("plus", content=nested(depth - 1))


REFUSED: list[tuple[GuidedDecoding, type[InvalidRequest], str]] = [
    (GuidedDecoding("regex", "a", backend="own"), InvalidRequest, "no backend"),
    (GuidedDecoding("regex", "é" * (MAX_GRAMMAR_BYTES // 2 + 1)), InvalidRequest, "at most"),
    (GuidedDecoding("regex", ""), InvalidRequest, "empty"),
    (GuidedDecoding("json_object", "", whitespace="x" * 257), InvalidRequest, "options"),
    (GuidedDecoding("regex", "a", starts_after="x" * 257), InvalidRequest, "options"),
    (GuidedDecoding("regex", "["), InvalidRequest, "invalid regex"),
    (GuidedDecoding("json_schema", "{"), InvalidRequest, "not JSON"),
    (GuidedDecoding("json_schema", "[" * 100_000), InvalidRequest, "not JSON"),
    (GuidedDecoding("json_schema", "3"), InvalidRequest, "object or a boolean"),
    (GuidedDecoding("json_schema", "false"), InvalidRequest, "not"),
    (GuidedDecoding("json_schema", '{"not": {}}'), InvalidRequest, "Unimplemented keys"),
    (GuidedDecoding("choice", "[]"), InvalidRequest, "1 to"),
    (GuidedDecoding("choice", '"a"'), InvalidRequest, "1 to"),
    (GuidedDecoding("choice", '["a", ""]'), InvalidRequest, "none empty"),
    (GuidedDecoding("choice", "[1]"), InvalidRequest, "none empty"),
    (GuidedDecoding("ebnf", "root ::= x"), InvalidRequest, "cannot be read"),
    (GuidedDecoding("ebnf", "start: x"), InvalidRequest, "unknown name"),
    (GuidedDecoding("structural_tag", "{"), InvalidRequest, "not JSON"),
    (GuidedDecoding("structural_tag", "[]"), InvalidRequest, "must be an object"),
    (GuidedDecoding("structural_tag", "{}"), InvalidRequest, "needs either"),
    (GuidedDecoding("structural_tag", json.dumps(
        {"triggers": ["a"], "structures": [{"begin": "a", "schema": "{"}]})), InvalidRequest,
     "not JSON"),
    (tag({"type": "exclude_token"}), UnsupportedFeature, "'exclude_token'"),
    (tag({"type": "dispatch"}), InvalidRequest, "rules must be"),
    (tag({"type": "dispatch", "rules": [["a"]]}), InvalidRequest, "each of the rules"),
    (tag({"type": "any_text", "max_tokens": 3}), UnsupportedFeature, "max_tokens"),
    (tag({"type": "any_text", "excludes": 3}), InvalidRequest, "excludes must be"),
    (tag(one("tag", begin="a", content=one("any_text", max_chars=3), end="b")), UnsupportedFeature,
     "max_chars"),
    (tag({**regex("a"), "excludes": ["b"]}), UnsupportedFeature, "fills a tag"),
    (GuidedDecoding("free", ""), InvalidRequest, "no grammar"),
    (tag({"type": "json_schema", "style": "glm_xml"}), UnsupportedFeature, "style 'glm_xml'"),
    (tag({"type": "token", "token": 7}), UnsupportedFeature, "must be a text"),
    (tag(one("tag", begin={"type": "token"}, content=const("a"), end="")), UnsupportedFeature,
     "begin"),
    (tag(one("sequence", elements=[one("any_text"), regex("a")])), UnsupportedFeature,
     "before const_string"),
    (tag(const("")), InvalidRequest, "must not be empty"),
    (tag(one("or", elements=[])), InvalidRequest, "elements"),
    (tag(one("repeat", content=const("a"), min=-1)), InvalidRequest, "repeat"),
    (tag(nested(40)), InvalidRequest, "nested"),
    (tag({**FREE, "triggers": []}), InvalidRequest, "triggers"),
    (tag({**FREE, "triggers": ["<g"]}), InvalidRequest, "no trigger"),
]  # fmt: skip


@pytest.mark.parametrize(("guided", "error", "words"), REFUSED)
def test_what_is_refused(guided: GuidedDecoding, error: type[InvalidRequest], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        check_grammar(guided)
    assert type(caught.value) is error
    assert caught.value.field == "guided"
    assert "\n" not in caught.value.message


def test_a_grammar_of_any_kind_has_a_size() -> None:
    check_size(GuidedDecoding("json_object", ""))
    check_size(GuidedDecoding("regex", "a" * MAX_GRAMMAR_BYTES, backend="xgrammar"))


def test_anchors_at_the_ends_say_nothing() -> None:
    assert bare("^a$") == "a"
    assert bare(r"a\$") == r"a\$"
    assert bare(r"a\\$") == r"a\\"
    assert bare("") == ""


def test_text_without_special_tokens_is_spelled_out() -> None:
    text = lark_of(tag(const("[X]")).grammar, Dialect(lambda schema: schema))
    assert r"\"[X]\"" in text
