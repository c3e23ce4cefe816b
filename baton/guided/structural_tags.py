"""Structural tags -> a Lark grammar: free text, and parts of it that must follow schemas.

    {"type": "structural_tag", "structures": [{"begin", "schema", "end"}], "triggers": [...]}
    {"type": "structural_tag", "format": {"type": "triggered_tags", ...}}

The first spelling is the older one; tag_formats.py reads both. Where a text is a special token of
the model, the grammar must contain the token and not its text: `specials` has these tokens. Pure;
no I/O.

Source: llguidance's Lark syntax (docs/syntax.md).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import llguidance

from baton.guided.spec import FIELD
from baton.guided.tag_formats import (
    excludes_of,
    format_of_tag,
    known,
    object_of,
    objects_of,
    text_of,
    wrong,
)
from baton.guided.xml_parameters import QWEN, parameters
from baton.protocol.errors import InvalidRequest, UnsupportedFeature

MAX_NESTING: Final = 32
_ANY: Final = "/(.|\\n)*/"


@dataclass(frozen=True, slots=True)
class Dialect:
    """How parts are written.

    `schema(json_schema)` adds the options of JSON. `specials` maps texts of special tokens to their
    ids.
    """

    schema: Callable[[Any], Any]
    specials: Mapping[str, int] = field(default_factory=dict[str, int])


def lark_of(text: str, dialect: Dialect) -> str:
    """Return llguidance's grammar for a structural tag given as JSON.

    Raises InvalidRequest (field `guided`) for a text that is no structural tag, UnsupportedFeature
    for one that cannot be written.
    """
    writer = _Writer(dialect)
    writer.rules["start"] = writer.format(format_of_tag(text))
    lines = ["%llguidance {}", *(f"{name}: {body}" for name, body in writer.rules.items())]
    grammars = [{"name": "tags", "lark_grammar": "\n".join(lines) + "\n"}, *writer.embedded]
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


class _Writer:
    """Writes rules, by name; each of the `embedded` grammars has its own name space."""

    def __init__(self, dialect: Dialect) -> None:
        self.rules: dict[str, str] = {}
        self.embedded: list[dict[str, Any]] = []
        self._dialect = dialect
        self._depth = 0
        self._write: dict[str, Callable[[Mapping[str, Any]], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "qwen_xml_parameter": self._qwen_xml_parameter,
            "any_text": lambda form: self._any(excludes_of(form)),
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
        """Return the expression of any format, and add the rules that it needs."""
        form = known(form)
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise wrong(f"it is nested more than {MAX_NESTING} deep")
        expression = self._write[form["type"]](form)
        self._depth -= 1
        return expression

    # ---- leaves ----

    def _const_string(self, form: Mapping[str, Any]) -> str:
        return self.literal(text_of(form.get("value"), "value"))

    def _json_schema(self, form: Mapping[str, Any]) -> str:
        if form.get("style") not in (None, "json"):
            message = f"structural_tag: style {str(form['style'])[:80]!r} is not supported"
            raise UnsupportedFeature(message, field=FIELD)
        return self.json(form.get("json_schema", True))

    def _regex(self, form: Mapping[str, Any]) -> str:
        if form.get("excludes"):
            message = "structural_tag: excludes of a regex are supported where it fills a tag"
            raise UnsupportedFeature(message, field=FIELD)
        return self.regex(text_of(form.get("pattern"), "pattern"))

    def _grammar(self, form: Mapping[str, Any]) -> str:
        name = f"g{len(self.embedded)}"
        lark = text_of(form.get("grammar"), "grammar")
        self.embedded.append({"name": name, "lark_grammar": lark_text(lark)})
        return f"@{name}"

    def _qwen_xml_parameter(self, form: Mapping[str, Any]) -> str:
        tagged = parameters(object_of(form.get("json_schema") or {}, "json_schema"), QWEN)
        return self._group([self.format(one) for one in tagged], " ") if tagged else '""'

    # ---- combinations ----

    def _sequence(self, form: Mapping[str, Any]) -> str:
        elements = [known(element) for element in objects_of(form, "elements")]
        parts: list[str] = []
        for index, element in enumerate(elements):
            before = elements[index - 1] if index else {}
            if before.get("type") == "any_text":
                # Free text is one lexeme, which would swallow what follows it.
                if element.get("type") not in ("const_string", "tag"):
                    message = (
                        "structural_tag: any_text is supported before const_string, tag and last"
                    )
                    raise UnsupportedFeature(message, field=FIELD)
                is_tag = element["type"] == "tag"
                text = text_of(element.get("begin" if is_tag else "value"), "value")
                parts.append(self.until(text, excludes_of(before)))
                parts += [self._rest(element)] if is_tag else []
            elif element.get("type") != "any_text" or index == len(elements) - 1:
                parts.append(self.format(element))
        return self._group(parts, " ")

    def _or(self, form: Mapping[str, Any]) -> str:
        return self._group(
            [self.format(element) for element in objects_of(form, "elements")], " | "
        )

    def _repeat(self, form: Mapping[str, Any]) -> str:
        least, most = form.get("min", 0), form.get("max", -1)
        if type(least) is not int or type(most) is not int or least < 0:
            raise wrong("repeat needs whole numbers min and max")
        return self._repeated(form, f"{{{least},{'' if most == -1 else most}}}")

    def _repeated(self, form: Mapping[str, Any], times: str) -> str:
        return f"({self.format(object_of(form.get('content'), 'content'))}){times}"

    def _tag(self, form: Mapping[str, Any]) -> str:
        begin = text_of(form.get("begin"), "begin")
        return self._group([self.literal(begin), self._rest(form)], " ")

    def _tags_with_separator(self, form: Mapping[str, Any]) -> str:
        one = self.rule(self._group([self._tag(tag) for tag in objects_of(form, "tags")], " | "))
        separator = self.literal(text_of(form.get("separator"), "separator", empty=True))
        several = one if form.get("stop_after_first") else f"{one} ({separator} {one})*"
        return f"({several})" if form.get("at_least_one") else f"({several})?"

    def _triggered_tags(self, form: Mapping[str, Any]) -> str:
        """Write text up to a trigger, then one of its tags; each tag begins with one trigger."""
        given, excludes = form.get("triggers"), excludes_of(form)
        if not isinstance(given, list) or not given:
            raise wrong("triggers must be a list of texts")
        triggers = [text_of(trigger, "triggers") for trigger in cast("list[object]", given)]
        followers: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for tag in objects_of(form, "tags"):
            begin = text_of(tag.get("begin"), "begin")
            trigger = next((text for text in triggers if begin.startswith(text)), None)
            if trigger is None:
                raise wrong(f"no trigger starts {begin[:80]!r}")
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
        """Write content and end of a tag. Free text ends at the first occurrence of the end."""
        content, end = known(object_of(tag.get("content"), "content")), tag.get("end", "")
        ends = cast("list[object]", end) if isinstance(end, list) else [end]
        texts = [text_of(one, "end", empty=True) for one in ends]
        if content.get("type") == "any_text" and all(texts):
            return self._group([self.until(text, excludes_of(content)) for text in texts], " | ")
        if content.get("type") == "regex":
            return self._group([self.match(content, text) for text in texts], " | ")
        closing = self._group([self.literal(text) for text in texts], " | ")
        return self._group([self.format(content), closing], " ")

    # ---- parts ----

    def rule(self, expression: str) -> str:
        """Add a rule and return its name."""
        name = f"r{len(self.rules)}"
        self.rules[name] = expression
        return name

    def json(self, schema: Any) -> str:
        """Return the expression of a JSON value that fits a schema."""
        return "%json " + json.dumps(self._dialect.schema(schema), ensure_ascii=False)

    def regex(self, pattern: str) -> str:
        """Return the expression of a text that matches a pattern from end to end."""
        return "/" + llguidance.regex_to_lark(unanchored(pattern), "dw") + "/"

    def match(self, form: Mapping[str, Any], end: str) -> str:
        """Return the expression of a text that matches a pattern, followed by `end`.

        Both are one lexeme, because the pattern alone would take as much text as it can.
        """
        at, _ = self._next_special(end)
        first = json.dumps(end[:at], ensure_ascii=False) if at else ""
        text = _without(self.regex(text_of(form.get("pattern"), "pattern")), excludes_of(form))
        lexeme = self._terminal(f"{text} {first}".rstrip())
        return lexeme if at == len(end) else f"{lexeme} {self.literal(end[at:])}"

    def literal(self, text: str) -> str:
        """Return the expression of exactly this text; special tokens in it are written as
        tokens.
        """
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
        """Return the expression of any text without `excludes` up to the first `end`, and of
        `end`.
        """
        at, special = self._next_special(end)
        if special and at == 0:
            return f"{self._any(excludes)} {self.literal(end)}"
        text = _without(_ANY, excludes)
        return self._terminal(f"{text} {json.dumps(end, ensure_ascii=False)}", lazy=True)

    def _next_special(self, text: str) -> tuple[int, str]:
        """Return the place and the text of the first special token; without one, the length and
        "".
        """
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
        """Return the name of a lexeme's rule, which all places that need the lexeme share."""
        prefix = "l" if lazy else "T"
        for name, written in self.rules.items():
            if written == body and name.startswith(prefix):
                return name.removesuffix("[lazy]")
        name = f"{prefix}{len(self.rules)}"
        self.rules[name + ("[lazy]" if lazy else "")] = body
        return name

    @staticmethod
    def _group(parts: Sequence[str], joint: str) -> str:
        return parts[0] if len(parts) == 1 else f"({joint.join(parts)})"


def lark_text(grammar: str) -> str:
    """Return a grammar in Lark, given in Lark or GBNF (EBNF with `::=`). Raises InvalidRequest."""
    if "::=" not in grammar:
        return grammar
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(grammar)
    except Exception as error:  # the parser of GBNF may raise any exception
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequest(f"guided: the grammar cannot be read: {why}", field=FIELD) from error


def unanchored(pattern: str) -> str:
    """Return a pattern without `^` and `$` at its ends: it is matched from end to end anyway."""
    pattern = pattern.removeprefix("^")
    body = pattern[:-1]
    escaped = (len(body) - len(body.rstrip("\\"))) % 2 == 1
    return body if pattern.endswith("$") and not escaped else pattern


def _without(text: str, excludes: Sequence[str]) -> str:
    """Return an expression of those texts of `text` in which none of `excludes` occurs."""
    for without in excludes:
        escaped = re.escape(without).replace("/", "\\/").replace("\\\n", "\\n")
        text = f"({text} & ~/(.|\\n)*{escaped}(.|\\n)*/)"
    return text
