"""GuidedDecoding -> the text of one grammar as llguidance reads it.

The router tries the text before a node hears of it (trials.py), and the nodes match tokens against
the same text (matcher.py). White space in JSON is limited: a model that cannot stop would fill its
answer with line breaks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final, cast

import llguidance

from baton.guided.spec import FIELD, OPTIONS, choices_of, read_json
from baton.guided.structural_tags import Dialect, lark_of, lark_text, unanchored
from baton.protocol.errors import InvalidRequest
from baton.protocol.sampling import GuidedDecoding

# Between the parts of a JSON text: nothing, a space, or a line break with its indentation.
JSON_SPACE: Final = r" |\r?\n[ \t]{0,32}"
_EXCERPT: Final = re.compile(r"\n<state>|\n *\d+ \| | \(at \"")
_NOTHING: Final = "no text matches the grammar"


def llguidance_grammar(guided: GuidedDecoding, specials: Mapping[str, int] | None = None) -> str:
    """Return the grammar for llguidance.

    `specials` maps the texts of the vocabulary's special tokens to their ids. None = there is no
    vocabulary, so special tokens are written as text. Raises InvalidRequest, and UnsupportedFeature
    for structural tags that cannot be written.
    """

    def with_options(schema: Any) -> Any:
        return json_schema(schema, guided.whitespace)

    match guided.kind:
        case "free":
            raise InvalidRequest("guided: there is no grammar", field=FIELD)
        case "json_object":
            return _of_schema(with_options({"type": "object"}))
        case "json_schema":
            return _of_schema(with_options(read_json(guided.grammar)))
        case "regex":
            # \d and \w mean ASCII, as in JSON schemas and as most writers expect.
            pattern = llguidance.regex_to_lark(unanchored(guided.grammar), "dw")
            return llguidance.LLMatcher.grammar_from_lark(f"start: /{pattern}/")
        case "choice":
            return llguidance.LLMatcher.grammar_from_lark(_choice(guided.grammar))
        case "ebnf":
            return llguidance.LLMatcher.grammar_from_lark(lark_text(guided.grammar))
        case "structural_tag":
            return lark_of(guided.grammar, Dialect(with_options, specials or {}))


def json_schema(schema: Any, whitespace: str | None) -> Any:
    """Return the schema with the options of JSON added; the schema's own options have
    precedence.
    """
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise InvalidRequest("guided: a JSON schema is an object or a boolean", field=FIELD)
    plain = cast("dict[str, Any]", schema)
    options: dict[str, Any] = {"whitespace_pattern": JSON_SPACE}
    if whitespace is not None:
        options = {"whitespace_pattern": whitespace} if whitespace else {
            "whitespace_flexible": False
        }  # fmt: skip
    own = plain.get(OPTIONS)
    return {**plain, OPTIONS: {**options, **(own if isinstance(own, dict) else {})}}


def limits() -> llguidance.LLParserLimits:
    """Return limits for building and following a grammar; errors will not contain the grammar.

    The lexer gets half of the usual fuel: a grammar that needs more, as `(a{1000}){1000}`, takes a
    second.
    """
    return llguidance.LLParserLimits(initial_lexer_fuel=500_000, verbose_errors=False)


def reason_of(message: str) -> str:
    """Return an error's own words on one line, without the excerpt of the grammar."""
    words = " ".join(_EXCERPT.split(message)[0].replace("<non-verbose/>", "").split())
    # The library's name for a start from which no text leads on, as with {"$ref": "#"}.
    return _NOTHING if words == "NoExtensionBias" else words[:500]


def _choice(text: str) -> str:
    return "start: " + " | ".join(json.dumps(c, ensure_ascii=False) for c in choices_of(text))


def _of_schema(schema: Any) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema, ensure_ascii=False))
