"""Grammars of guided decoding as llguidance reads them; and what of them can be checked anywhere.

GuidedDecoding (what a client asked for) -> one grammar text, the same on the router, which checks
it before a node hears of it, and on the nodes, which match tokens against it (baton/engine/guided).
White space in JSON is bounded: a model that cannot stop would fill its answer with line breaks.
Errors name the field `guided`; the front doors put the client's own name there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final, cast

import llguidance

from baton.guided.structural_tags import Dialect, lark_of, lark_text, unanchored
from baton.protocol.errors import InvalidRequest
from baton.protocol.sampling import GuidedDecoding

FIELD: Final = "guided"
MAX_GRAMMAR_BYTES: Final = 256 << 10
MAX_CHOICES: Final = 1024  # llguidance holds 2,000 alternatives at one place
MAX_OPTION_CHARS: Final = 256  # of `whitespace` and `starts_after`
BACKENDS: Final = ("", "auto", "llguidance", "xgrammar")
# Between the parts of a JSON text: nothing, a space, or a line break with its indentation.
JSON_SPACE: Final = r" |\r?\n[ \t]{0,32}"
_EXCERPT: Final = re.compile(r"\n<state>|\n *\d+ \| | \(at \"")
_PLACE: Final = re.compile(r"^\[[\d:]+\] \S+:\d+: ")  # in xgrammar's own source
_OPTIONS: Final = "x-guidance"
_STEPS: Final = 32  # of the text that a grammar is tried with
_BLANK: Final = 33  # the first byte that is no white space
_QUOTE: Final = ord('"')
_NOTHING: Final = "no text matches the grammar"


def check_size(guided: GuidedDecoding) -> None:
    """Raise InvalidRequest for a grammar that is too large, empty, or for an unknown backend."""
    if guided.backend not in BACKENDS:
        raise InvalidRequest(f"guided: no backend {guided.backend[:80]!r}", field=FIELD)
    if len(guided.grammar.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"guided: a grammar has at most {MAX_GRAMMAR_BYTES} bytes", field=FIELD
        )
    texts = (guided.whitespace or "", guided.starts_after, guided.thought_start)
    if max(map(len, texts)) > MAX_OPTION_CHARS:
        raise InvalidRequest(
            f"guided: its options have at most {MAX_OPTION_CHARS} characters", field=FIELD
        )
    if not guided.grammar and guided.kind not in ("json_object", "free"):
        raise InvalidRequest("guided: the grammar is empty", field=FIELD)
    if guided.most_thought is not None and not guided.starts_after:
        raise InvalidRequest("guided: a limit of thoughts needs their end", field=FIELD)


def check_grammar(guided: GuidedDecoding) -> None:
    """Raise InvalidRequest (UnsupportedFeature for what another backend may know) if llguidance
    could not follow it. Takes milliseconds, for some grammars minutes:
    baton/guided/grammar_trials.py does more, within a budget. Needs no vocabulary."""
    check_size(guided)
    text = llguidance_grammar(guided)
    failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(text, limits=limits())
    if failed:
        raise InvalidRequest(f"guided: {reason_of(messages[0])}", field=FIELD)


def check_start(matcher: llguidance.LLMatcher, end_id: int) -> None:
    """Follow one text for a little while, over tokens that are bytes and `end_id`.

    Raise InvalidRequest if nothing can begin, or nothing but the end, or if a limit is met: parts
    of a grammar are only built where a text comes to them. Advances `matcher`.
    """
    for step in range(_STEPS):
        allowed = int.from_bytes(b"" if matcher.is_error() else matcher.compute_bitmask(), "little")
        if matcher.is_error():
            raise InvalidRequest(f"guided: {reason_of(matcher.get_error())}", field=FIELD)
        if not allowed & ((1 << end_id) - 1):
            if step == 0:
                reason = "nothing but an empty answer matches the grammar"
                raise InvalidRequest(f"guided: {reason}", field=FIELD)
            return
        # A quote wherever it can be, so that a JSON text does not stay in its first string.
        byte = _QUOTE if allowed >> _QUOTE & 1 else _lowest(allowed, _BLANK)
        matcher.consume_token(byte if _BLANK <= byte < end_id else _lowest(allowed))


def _lowest(bits: int, start: int = 0) -> int:
    """The lowest bit that is set, from `start` on; `start` - 1 if none is."""
    rest = bits >> start
    return start + (rest & -rest).bit_length() - 1


def limits() -> llguidance.LLParserLimits:
    """What a grammar may cost to build and to follow; errors without the grammar's text.

    Half of the usual fuel for its lexer: what needs more, as `(a{1000}){1000}`, costs a second.
    """
    return llguidance.LLParserLimits(initial_lexer_fuel=500_000, verbose_errors=False)


def reason_of(message: str) -> str:
    """An error's own words on one line, without an excerpt of the grammar."""
    message = _PLACE.sub("", message)
    words = " ".join(_EXCERPT.split(message)[0].replace("<non-verbose/>", "").split())
    # The library's name for a start from which no text leads on, like {"$ref": "#"}.
    return _NOTHING if words == "NoExtensionBias" else words[:500]


def llguidance_grammar(guided: GuidedDecoding, specials: Mapping[str, int] | None = None) -> str:
    """The grammar for llguidance. `specials`: the vocabulary's special tokens by their text.

    Raises InvalidRequest, UnsupportedFeature for what only another backend may know.
    """

    def with_options(schema: Any) -> Any:
        return json_schema(schema, guided.whitespace)

    match guided.kind:
        case "free":
            raise InvalidRequest("guided: there is no grammar", field=FIELD)
        case "json_object":
            return _of_schema(with_options({"type": "object"}))
        case "json_schema":
            return _of_schema(with_options(_read(guided.grammar)))
        case "regex":
            # \d and \w of ASCII, as in JSON schemas and as most writers mean them.
            pattern = llguidance.regex_to_lark(unanchored(guided.grammar), "dw")
            return llguidance.LLMatcher.grammar_from_lark(f"start: /{pattern}/")
        case "choice":
            return llguidance.LLMatcher.grammar_from_lark(_choice(guided.grammar))
        case "ebnf":
            return llguidance.LLMatcher.grammar_from_lark(lark_text(guided.grammar))
        case "structural_tag":
            return lark_of(guided.grammar, Dialect(with_options, specials or {}))


def json_schema(schema: Any, whitespace: str | None) -> Any:
    """A schema with the options of JSON added; its own have precedence."""
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
    own = plain.get(_OPTIONS)
    return {**plain, _OPTIONS: {**options, **(own if isinstance(own, dict) else {})}}


def lenient(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of which what no grammar can follow is ignored, not refused."""
    return {**schema, _OPTIONS: {"lenient": True, "coerce_one_of": True}}


def is_lenient(schema: object) -> bool:
    """Whether a schema says that what cannot be followed is ignored."""
    if not isinstance(schema, Mapping):
        return False
    own = cast("Mapping[str, Any]", schema).get(_OPTIONS)
    return isinstance(own, Mapping) and cast("Mapping[str, Any]", own).get("lenient") is True


def choices_of(text: str) -> list[str]:
    """The texts of a choice, given as a JSON list. Raises InvalidRequest."""
    given = _read(text)
    if not isinstance(given, list) or not 0 < len(cast("list[Any]", given)) <= MAX_CHOICES:
        raise InvalidRequest(f"guided: a choice has 1 to {MAX_CHOICES} texts", field=FIELD)
    choices = cast("list[object]", given)
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise InvalidRequest("guided: choices are texts, none empty", field=FIELD)
    return cast("list[str]", choices)


def _choice(text: str) -> str:
    return "start: " + " | ".join(json.dumps(c, ensure_ascii=False) for c in choices_of(text))


def _of_schema(schema: Any) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema, ensure_ascii=False))


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"guided: it is not JSON: {error}", field=FIELD) from error
