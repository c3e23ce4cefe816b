"""Structural tags -> a Lark grammar: free text, and parts of it that must follow schemas.

    {"type": "structural_tag", "structures": [{"begin", "schema", "end"}], "triggers": [...]}
    {"type": "structural_tag", "format": {"type": "triggered_tags", ...}}

The first spelling is the older one. What is not understood raises UnsupportedFeature. Text that is
a special token of the model must be met as that token: where `specials` knows it, the token takes
its place. So formats of tokens are read as those of their texts. Pure; no I/O.

Source: xgrammar's structural tag formats; llguidance's Lark syntax (docs/syntax.md).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import llguidance

from baton.guided.xml_parameters import QWEN, parameters
from baton.protocol.errors import InvalidRequest, UnsupportedFeature

MAX_NESTING: Final = 32
_ANY: Final = "/(.|\\n)*/"
_ALLOWED: Final[dict[str, frozenset[str]]] = {
    "const_string": frozenset({"value"}),
    "json_schema": frozenset({"json_schema", "style"}),
    "qwen_xml_parameter": frozenset({"json_schema"}),
    "any_text": frozenset({"excludes"}),
    "regex": frozenset({"pattern", "excludes"}),  # what the text of a tag must not hold
    "grammar": frozenset({"grammar"}),
    "sequence": frozenset({"elements"}),
    "or": frozenset({"elements"}),
    "optional": frozenset({"content"}),
    "plus": frozenset({"content"}),
    "star": frozenset({"content"}),
    "repeat": frozenset({"content", "min", "max"}),
    "tag": frozenset({"begin", "content", "end"}),
    "triggered_tags": frozenset(
        {"triggers", "tags", "at_least_one", "stop_after_first", "excludes"}
    ),
    "tags_with_separator": frozenset({"tags", "separator", "at_least_one", "stop_after_first"}),
    "dispatch": frozenset({"rules", "loop", "excludes"}),
    "token": frozenset({"token"}),
    "any_tokens": frozenset({"exclude_tokens"}),
    "token_dispatch": frozenset({"rules", "loop", "exclude_tokens"}),
    "token_triggered_tags": frozenset(
        {"trigger_tokens", "tags", "at_least_one", "stop_after_first", "exclude_tokens"}
    ),
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """How parts are spelled: `schema(json_schema)` adds the options of JSON; `specials` are the
    special tokens by their text."""

    schema: Callable[[Any], Any]
    specials: Mapping[str, int] = field(default_factory=dict[str, int])


def lark_of(text: str, dialect: Dialect) -> str:
    """A llguidance grammar for a structural tag given as JSON.

    Raises InvalidRequest (field `guided`) for what is none, UnsupportedFeature for what cannot be
    written.
    """
    writer = _Writer(dialect)
    writer.rules["start"] = writer.format(_format_of(text))
    lines = ["%llguidance {}", *(f"{name}: {body}" for name, body in writer.rules.items())]
    grammars = [{"name": "tags", "lark_grammar": "\n".join(lines) + "\n"}, *writer.embedded]
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def _format_of(text: str) -> dict[str, Any]:
    """The format of a structural tag in either spelling. Raises InvalidRequest."""
    try:
        given: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong(f"it is not JSON: {error}") from error
    tag = _object(given, "it")
    if "format" in tag:
        return _object(tag["format"], "format")
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not structures or not isinstance(triggers, list):
        raise _wrong("it needs either format, or structures and triggers")
    tags: list[dict[str, Any]] = []
    for item in cast("list[object]", structures):
        one = _object(item, "structures")
        schema = one.get("schema", True)
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise _wrong(f"a schema is not JSON: {error}") from error
        content = {"type": "json_schema", "json_schema": schema}
        tags.append({"begin": one.get("begin"), "content": content, "end": one.get("end", "")})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


class _Writer:
    """Rules written so far, by name; `embedded` grammars have a name space of their own."""

    def __init__(self, dialect: Dialect) -> None:
        self.rules: dict[str, str] = {}
        self.embedded: list[dict[str, Any]] = []
        self._dialect = dialect
        self._depth = 0
        self._write: dict[str, Callable[[Mapping[str, Any]], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "qwen_xml_parameter": self._qwen_xml_parameter,
            "any_text": lambda form: self._any(_excludes(form)),
            "regex": self._regex,
            "grammar": self._grammar,
            "sequence": self._sequence,
            "or": self._or,
            "optional": lambda form: self._repeated(form, "?"),
            "plus": lambda form: self._repeated(form, "+"),
            "star": lambda form: self._repeated(form, "*"),
            "repeat": self._repeat,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def format(self, form: Mapping[str, Any]) -> str:
        """The expression of any format. Mutates the rules."""
        form = _known(form)
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise _wrong(f"it is nested more than {MAX_NESTING} deep")
        expression = self._write[form["type"]](form)
        self._depth -= 1
        return expression

    # ---- leaves ----

    def _const_string(self, form: Mapping[str, Any]) -> str:
        return self.literal(_text(form.get("value"), "value"))

    def _json_schema(self, form: Mapping[str, Any]) -> str:
        if form.get("style") not in (None, "json"):
            message = f"structural_tag: style {str(form['style'])[:80]!r} is not supported"
            raise UnsupportedFeature(message, field="guided")
        return self.json(form.get("json_schema", True))

    def _regex(self, form: Mapping[str, Any]) -> str:
        if form.get("excludes"):
            message = "structural_tag: excludes of a regex are supported where it fills a tag"
            raise UnsupportedFeature(message, field="guided")
        return self.regex(_text(form.get("pattern"), "pattern"))

    def _grammar(self, form: Mapping[str, Any]) -> str:
        name = f"g{len(self.embedded)}"
        lark = _text(form.get("grammar"), "grammar")
        self.embedded.append({"name": name, "lark_grammar": lark_text(lark)})
        return f"@{name}"

    def _qwen_xml_parameter(self, form: Mapping[str, Any]) -> str:
        tagged = parameters(_object(form.get("json_schema") or {}, "json_schema"), QWEN)
        return self._group([self.format(one) for one in tagged], " ") if tagged else '""'

    # ---- combinations ----

    def _sequence(self, form: Mapping[str, Any]) -> str:
        elements = [_known(element) for element in _objects(form, "elements")]
        parts: list[str] = []
        for index, element in enumerate(elements):
            before = elements[index - 1] if index else {}
            if before.get("type") == "any_text":
                # Free text is a lexeme of its own that would swallow what follows it.
                if element.get("type") not in ("const_string", "tag"):
                    message = (
                        "structural_tag: any_text is supported before const_string, tag and last"
                    )
                    raise UnsupportedFeature(message, field="guided")
                is_tag = element["type"] == "tag"
                text = _text(element.get("begin" if is_tag else "value"), "value")
                parts.append(self.until(text, _excludes(before)))
                parts += [self._rest(element)] if is_tag else []
            elif element.get("type") != "any_text" or index == len(elements) - 1:
                parts.append(self.format(element))
        return self._group(parts, " ")

    def _or(self, form: Mapping[str, Any]) -> str:
        return self._group([self.format(element) for element in _objects(form, "elements")], " | ")

    def _repeat(self, form: Mapping[str, Any]) -> str:
        least, most = form.get("min", 0), form.get("max", -1)
        if type(least) is not int or type(most) is not int or least < 0:
            raise _wrong("repeat needs whole numbers min and max")
        return self._repeated(form, f"{{{least},{'' if most == -1 else most}}}")

    def _repeated(self, form: Mapping[str, Any], times: str) -> str:
        return f"({self.format(_object(form.get('content'), 'content'))}){times}"

    def _tag(self, form: Mapping[str, Any]) -> str:
        begin = _text(form.get("begin"), "begin")
        return self._group([self.literal(begin), self._rest(form)], " ")

    def _tags_with_separator(self, form: Mapping[str, Any]) -> str:
        one = self.rule(self._group([self._tag(tag) for tag in _objects(form, "tags")], " | "))
        separator = self.literal(_text(form.get("separator"), "separator", empty=True))
        several = one if form.get("stop_after_first") else f"{one} ({separator} {one})*"
        return f"({several})" if form.get("at_least_one") else f"({several})?"

    def _triggered_tags(self, form: Mapping[str, Any]) -> str:
        """Text up to a trigger, then one of its tags; each tag begins with one trigger."""
        given, excludes = form.get("triggers"), _excludes(form)
        if not isinstance(given, list) or not given:
            raise _wrong("triggers must be a list of texts")
        triggers = [_text(trigger, "triggers") for trigger in cast("list[object]", given)]
        followers: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for tag in _objects(form, "tags"):
            begin = _text(tag.get("begin"), "begin")
            trigger = next((text for text in triggers if begin.startswith(text)), None)
            if trigger is None:
                raise _wrong(f"no trigger starts {begin[:80]!r}")
            rest = [self.literal(begin[len(trigger) :]), self._rest(tag)]
            followers[trigger].append(self._group(rest, " "))
        tagged = self.rule(
            self._group(
                [
                    f"{self.until(trigger, excludes)} {self._group(ends, ' | ')}"
                    for trigger, ends in followers.items()
                    if ends
                ],
                " | ",
            )
        )
        if form.get("stop_after_first"):
            return tagged if form.get("at_least_one") else f"({tagged} | {self._any(excludes)})"
        times = "+" if form.get("at_least_one") else "*"
        return f"({tagged}{times} {self._any(excludes)})"

    def _rest(self, tag: Mapping[str, Any]) -> str:
        """Content and end of a tag. Free text goes up to the first occurrence of the end."""
        content, end = _known(_object(tag.get("content"), "content")), tag.get("end", "")
        ends = cast("list[object]", end) if isinstance(end, list) else [end]
        texts = [_text(one, "end", empty=True) for one in ends]
        if content.get("type") == "any_text" and all(texts):
            return self._group([self.until(text, _excludes(content)) for text in texts], " | ")
        if content.get("type") == "regex":
            return self._group([self.match(content, text) for text in texts], " | ")
        closing = self._group([self.literal(text) for text in texts], " | ")
        return self._group([self.format(content), closing], " ")

    # ---- parts ----

    def rule(self, expression: str) -> str:
        """A new rule; its name."""
        name = f"r{len(self.rules)}"
        self.rules[name] = expression
        return name

    def json(self, schema: Any) -> str:
        """A JSON value of a schema."""
        return "%json " + json.dumps(self._dialect.schema(schema), ensure_ascii=False)

    def regex(self, pattern: str) -> str:
        """A text that matches a pattern from end to end."""
        return "/" + llguidance.regex_to_lark(unanchored(pattern), "dw") + "/"

    def match(self, form: Mapping[str, Any], end: str) -> str:
        """A text that matches a pattern, and what follows it: one lexeme, because a pattern alone
        would take as much as it can."""
        at, _ = self._next_special(end)
        first = json.dumps(end[:at], ensure_ascii=False) if at else ""
        text = _without(self.regex(_text(form.get("pattern"), "pattern")), _excludes(form))
        lexeme = self._terminal(f"{text} {first}".rstrip())
        return lexeme if at == len(end) else f"{lexeme} {self.literal(end[at:])}"

    def literal(self, text: str) -> str:
        """This very text; special tokens in it as themselves."""
        parts: list[str] = []
        while text:
            at, special = self._next_special(text)
            if at:
                parts.append(json.dumps(text[:at], ensure_ascii=False))
            if special:
                parts.append(f"<[{self._dialect.specials[special]}]>")
            text = text[at + len(special) :]
        return " ".join(parts) or '""'

    def until(self, end: str, excludes: Sequence[str] = ()) -> str:
        """Any text without `excludes` up to the first `end`, and that."""
        at, special = self._next_special(end)
        if special and at == 0:
            return f"{self._any(excludes)} {self.literal(end)}"
        text = _without(_ANY, excludes)
        return self._terminal(f"{text} {json.dumps(end, ensure_ascii=False)}", lazy=True)

    def _next_special(self, text: str) -> tuple[int, str]:
        """Where the first special token stands, and which; the end and "" without one."""
        found = [
            (at, -len(special), special)
            for special in self._dialect.specials
            if (at := text.find(special)) >= 0
        ]
        if not found:
            return len(text), ""
        at, _, special = min(found)
        return at, special

    def _any(self, excludes: Sequence[str] = ()) -> str:
        return self._terminal(_without(_ANY, excludes))

    def _terminal(self, body: str, lazy: bool = False) -> str:
        """The rule of a lexeme, one for all places that need it."""
        prefix = "l" if lazy else "T"
        for name, known in self.rules.items():
            if known == body and name.startswith(prefix):
                return name.removesuffix("[lazy]")
        name = f"{prefix}{len(self.rules)}"
        self.rules[name + ("[lazy]" if lazy else "")] = body
        return name

    @staticmethod
    def _group(parts: Sequence[str], joint: str) -> str:
        return parts[0] if len(parts) == 1 else f"({joint.join(parts)})"


def lark_text(grammar: str) -> str:
    """Lark of a grammar in Lark or in GBNF (EBNF with `::=`). Raises InvalidRequest."""
    if "::=" not in grammar:
        return grammar
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(grammar)
    except Exception as error:  # its parser raises whatever comes
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequest(
            f"guided: the grammar cannot be read: {why}", field="guided"
        ) from error


def unanchored(pattern: str) -> str:
    """A pattern without `^` and `$` at its ends: it is matched from end to end anyway."""
    pattern = pattern.removeprefix("^")
    body = pattern[:-1]
    escaped = (len(body) - len(body.rstrip("\\"))) % 2 == 1
    return body if pattern.endswith("$") and not escaped else pattern


def _known(form: Mapping[str, Any]) -> dict[str, Any]:
    """A format that has a writer: one of tokens, a `dispatch` or a style becomes an older one that
    says the same. Raises UnsupportedFeature for what is not understood."""
    kind = form.get("type")
    allowed = _ALLOWED.get(kind) if isinstance(kind, str) else None
    plain = {key: value for key, value in form.items() if key != "type"}
    extra = [key for key, value in plain.items() if value and key not in (allowed or ())]
    if allowed is None or extra:
        name = repr(kind) if allowed is None else extra[0]
        raise UnsupportedFeature(f"structural_tag: {name} is not supported", field="guided")
    match kind:
        case "token":
            return {"type": "const_string", "value": plain.get("token")}
        case "any_tokens":
            return {"type": "any_text", "excludes": plain.get("exclude_tokens")}
        case "token_triggered_tags":
            plain["triggers"] = plain.pop("trigger_tokens", None)
            plain["excludes"] = plain.pop("exclude_tokens", None)
            return {"type": "triggered_tags", **plain}
        case "dispatch" | "token_dispatch":
            tags = [{"begin": begin, "content": then, "end": ""} for begin, then in _rules(form)]
            return {
                "type": "triggered_tags",
                "triggers": [tag["begin"] for tag in tags],
                "tags": tags,
                "stop_after_first": plain.get("loop") is False,
                "excludes": plain.get("excludes") or plain.get("exclude_tokens"),
            }
        case "json_schema" if plain.get("style") == "qwen_xml":
            return {"type": "qwen_xml_parameter", "json_schema": plain.get("json_schema")}
        case _:
            return dict(form)


def _rules(form: Mapping[str, Any]) -> list[tuple[object, object]]:
    """Of a `dispatch`: patterns, and what follows each."""
    rules = form.get("rules")
    if not isinstance(rules, list) or not rules:
        raise _wrong("rules must be a list that is not empty")
    for rule in cast("list[object]", rules):
        if not isinstance(rule, list) or len(cast("list[object]", rule)) != 2:
            raise _wrong("each of the rules is a pattern and a format")
    return [(pattern, content) for pattern, content in cast("list[list[object]]", rules)]


def _excludes(form: Mapping[str, Any]) -> list[str]:
    """The texts that must not occur in a text."""
    given = form.get("excludes") or []
    if not isinstance(given, list):
        raise _wrong("excludes must be a list of texts")
    return [_text(one, "excludes") for one in cast("list[object]", given)]


def _without(text: str, excludes: Sequence[str]) -> str:
    """An expression of the texts of `text` in which none of `excludes` occurs."""
    for without in excludes:
        escaped = re.escape(without).replace("/", "\\/")
        text = f"({text} & ~/(.|\\n)*{escaped}(.|\\n)*/)"
    return text


def _object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(f"{name} must be an object")
    return cast("dict[str, Any]", value)


def _objects(form: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    items = form.get(name)
    if not isinstance(items, list) or not items:
        raise _wrong(f"{name} must be a list that is not empty")
    return [_object(item, name) for item in cast("list[object]", items)]


def _text(value: object, name: str, empty: bool = False) -> str:
    """A text, or the text of a token that is named by it."""
    if isinstance(value, dict) and cast("dict[str, object]", value).get("type") == "token":
        value = cast("dict[str, object]", value).get("token")
    if not isinstance(value, str):
        raise UnsupportedFeature(f"structural_tag: {name} must be a text", field="guided")
    if not value and not empty:
        raise _wrong(f"{name} must not be empty")
    return value


def _wrong(why: str) -> InvalidRequest:
    return InvalidRequest(f"structural_tag: {why}", field="guided")
