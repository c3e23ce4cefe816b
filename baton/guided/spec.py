"""Checks and parts of the grammar that a client asked for, as text. Pure; no I/O.

GuidedDecoding (baton/protocol/sampling.py) is a kind and a text. Errors name the field `guided`;
the front doors replace it by the client's own field name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, cast

from baton.protocol.errors import InvalidRequest, UnsupportedFeature
from baton.protocol.sampling import GuidedDecoding

FIELD: Final = "guided"
MAX_GRAMMAR_BYTES: Final = 256 << 10
MAX_CHOICES: Final = 1024  # llguidance holds 2,000 alternatives at one place
MAX_OPTION_CHARS: Final = 256  # of `whitespace` and `starts_after`
# Backends that requests may name. llguidance serves all of them (docs/adr/0008-*).
BACKENDS: Final = ("", "auto", "llguidance", "xgrammar")
OPTIONS: Final = "x-guidance"  # the keyword of a schema that holds llguidance's options

Format = dict[str, Any]  # a part of a structural tag (structural_tags.py)


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


def lenient(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema with options by which llguidance ignores what no grammar can follow.

    Without them such a schema is refused.
    """
    return {**schema, OPTIONS: {"lenient": True, "coerce_one_of": True}}


def closed(schema: Any) -> Any:
    """Return a schema in which objects with named properties allow no others, unless they say
    so.
    """
    if isinstance(schema, list):
        return [closed(item) for item in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    plain = {key: closed(value) for key, value in cast("dict[str, Any]", schema).items()}
    if isinstance(plain.get("properties"), dict):
        plain.setdefault("additionalProperties", False)
    return plain


def choices_of(text: str) -> list[str]:
    """Return the texts of a choice, given as a JSON list. Raises InvalidRequest."""
    given = read_json(text)
    if not isinstance(given, list) or not 0 < len(cast("list[Any]", given)) <= MAX_CHOICES:
        raise InvalidRequest(f"guided: a choice has 1 to {MAX_CHOICES} texts", field=FIELD)
    choices = cast("list[object]", given)
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise InvalidRequest("guided: choices are texts, none empty", field=FIELD)
    return cast("list[str]", choices)


def format_of(guided: GuidedDecoding, field: str) -> Format:
    """Return a grammar as a part of a structural tag.

    `field` is named by the error if that is not possible. Raises InvalidRequest,
    UnsupportedFeature.
    """
    match guided.kind:
        case "free":
            return {"type": "any_text"}
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "json_schema":
            return {"type": "json_schema", "json_schema": read_json(guided.grammar)}
        case "regex":
            return {"type": "regex", "pattern": guided.grammar}
        case "ebnf":
            return {"type": "grammar", "grammar": guided.grammar}
        case "choice":
            texts = [{"type": "const_string", "value": text} for text in choices_of(guided.grammar)]
            return {"type": "or", "elements": texts}
        case "structural_tag":
            message = f"{field} cannot be combined with a structural_tag"
            raise UnsupportedFeature(message, field=field)


def read_json(text: str) -> Any:
    """Return the value of a JSON text. Raises InvalidRequest."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"guided: it is not JSON: {error}", field=FIELD) from error
