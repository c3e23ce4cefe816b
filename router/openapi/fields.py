"""What the types of the bodies cannot say of their fields, for /openapi.json: bounds and forms.

Bounds come from the tables that the code checks by. What is said here is refused by the code where
it does not hold: a form that is only advised is none. A null is as if the field were absent.
"""

from __future__ import annotations

from typing import Any, Final

from baton.grammars import MAX_CHOICES
from baton.sampling import BOUNDS, MAX_ALLOWED_TOKEN_IDS
from router.openai import MAX_PROMPTS, MAX_STOP_CHARS, MAX_STOPS, PRIORITY_LIMIT
from router.openai_chat import MAX_MESSAGES, MAX_NAME_CHARS, MAX_TOOLS, ROLES
from router.pooling.embeddings import MAX_INPUTS
from router.prompt_options import MAX_BAD_WORDS
from router.request_ids import ID_PATTERN
from router.responses.body import (
    INCLUDABLE,
    MAX_METADATA,
    MAX_METADATA_KEY,
    MAX_METADATA_VALUE,
    MAX_TOP_LOGPROBS,
)
from router.terms import MAX_SESSION_CHARS

Schema = dict[str, Any]
REF: Final = "#/components/schemas/{name}"
TOKEN: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_IDS: Final[Schema] = {"type": "array", "items": TOKEN, "minItems": 1}
_STRING: Final[Schema] = {"type": "string"}
_TEXT: Final[Schema] = {"type": "string", "minLength": 1}
_NAME: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": MAX_NAME_CHARS}
_ID: Final[Schema] = {"type": "string", "pattern": f"^{ID_PATTERN}$"}
_SESSION: Final[Schema] = {"type": "string", "maxLength": MAX_SESSION_CHARS}
_STOP: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_STOPS: Final[Schema] = {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}
_PRIORITY: Final[Schema] = {
    "type": "integer", "minimum": -PRIORITY_LIMIT, "maximum": PRIORITY_LIMIT
}  # fmt: skip
_SCHEMA: Final[Schema] = {"type": "object", "description": "A JSON schema"}
# A schema may also come as its JSON text.
_ANY_SCHEMA: Final[Schema] = {"anyOf": [_SCHEMA, {"type": "string"}]}
_CHOICES: Final[Schema] = {
    "type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_CHOICES
}  # fmt: skip


def _tagged(kind: str, *required: str, **properties: Schema) -> Schema:
    """An object of that `type`; the others are `required` or not."""
    told = {"type": {"const": kind}, **properties}
    return {"type": "object", "required": ["type", *required], "properties": told}


def _texts(*kinds: str) -> Schema:
    """A string, or parts of those types, each with its text."""
    part = {"type": "object", "required": ["type", "text"],
            "properties": {"type": {"enum": list(kinds)}, "text": _STRING}}  # fmt: skip
    return {"anyOf": [_STRING, {"type": "array", "items": part}]}


def _function(*more: str) -> Schema:
    """What a tool's function is made of."""
    return {
        "type": "object",
        "required": ["name", *more],
        "properties": {"name": _NAME, "description": _nullable(_STRING), "parameters": _MAYBE},
    }


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


_MAYBE: Final[Schema] = _nullable(_SCHEMA)
_TOOLS: Final[Schema] = {
    "type": "array", "maxItems": MAX_TOOLS,
    "items": _tagged("function", "function", function=_function()),
}  # fmt: skip
_FORMATS: Final[Schema] = {"anyOf": [
    _tagged("text"),
    _tagged("json_object"),
    _tagged("json_schema", "json_schema",
            json_schema={"type": "object", "required": ["schema"],
                         "properties": {"name": _nullable(_STRING), "schema": _SCHEMA}}),
    _tagged("structural_tag"),
]}  # fmt: skip
_FLAT_FORMATS: Final[Schema] = {"anyOf": [
    _tagged("text"),
    _tagged("json_object"),
    _tagged("json_schema", "schema", schema=_SCHEMA),
]}  # fmt: skip
_STRUCTURED: Final[Schema] = {
    "type": "object",
    "description": "Exactly one of json, regex, choice, grammar, json_object, structural_tag",
    "properties": {
        "json": _ANY_SCHEMA,
        "regex": _STRING,
        "choice": _CHOICES,
        "grammar": _STRING,
        "json_object": {"type": "boolean"},
        "structural_tag": {"anyOf": [_STRING, {"type": "object"}]},
        "whitespace_pattern": _STRING,
        "disable_any_whitespace": {"type": "boolean"},
        "disable_additional_properties": {"type": "boolean"},
    },
}
# Of every body that samples, chats and completions.
SAMPLING: Final[dict[str, Schema]] = {
    "stop": {"anyOf": [_STOP, _STOPS]},
    "stop_token_ids": {"type": "array", "items": TOKEN, "maxItems": 256},
    "priority": _PRIORITY,
    "seed": {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1},
    "cache_salt": _NAME,
    "logit_bias": {"type": "object", "propertyNames": {"pattern": "^[0-9]{1,9}$"},
                   "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}},
    "truncate_prompt_tokens": {"type": "integer", "minimum": -1},
    "allowed_token_ids": {**_IDS, "maxItems": MAX_ALLOWED_TOKEN_IDS},
    "bad_words": {"type": "array", "maxItems": MAX_BAD_WORDS,
                  "items": {"type": "string", "minLength": 1}},
    "early_stopping": {"enum": [True, False, "never"]},
    "request_id": _ID,
    "session_id": _SESSION,
    "prompt_cache_key": _SESSION,
    "user": _SESSION,
    "response_format": _FORMATS,
    "structured_outputs": _STRUCTURED,
    "guided_json": _ANY_SCHEMA,
    "guided_choice": _CHOICES,
}  # fmt: skip
_ROLE: Final[Schema] = {"enum": ["user", "assistant", "system", "developer"]}
_ITEM: Final[Schema] = {"anyOf": [
    {"type": "object", "required": ["role", "content"],
     "properties": {"type": {"enum": ["message", None]}, "role": _ROLE,
                    "content": _texts("input_text", "output_text", "text", "summary_text",
                                      "reasoning_text")}},
    _tagged("message", "role", "content", role=_ROLE),
    _tagged("reasoning"),
    _tagged("function_call", "call_id", "name", "arguments",
            call_id=_STRING, name=_STRING, arguments=_STRING),
    _tagged("function_call_output", "call_id", "output", call_id=_STRING),
]}  # fmt: skip
_BLOCK: Final[Schema] = {"anyOf": [
    _tagged("text", "text", text=_STRING),
    _tagged("thinking", "thinking", thinking=_STRING),
    _tagged("redacted_thinking"),
    _tagged("tool_use", "id", "name", id=_STRING, name=_STRING, input={"type": "object"}),
    _tagged("tool_result", "tool_use_id", tool_use_id=_STRING),
]}  # fmt: skip
_MESSAGES: Final[dict[str, Schema]] = {
    "messages": {"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": {
        "type": "object", "required": ["role", "content"],
        "properties": {
            "role": {"enum": ["user", "assistant", "system"]},
            "content": {"anyOf": [_STRING, {"type": "array", "items": _BLOCK}]},
        },
    }},
    "tools": {"type": "array", "maxItems": MAX_TOOLS, "items": {
        "type": "object", "required": ["name"],
        "properties": {"type": {"enum": ["custom", None]}, "name": _NAME,
                       "description": _nullable(_STRING), "input_schema": _MAYBE},
    }},
    "output_format": _FLAT_FORMATS,
}  # fmt: skip
# Struct -> its properties.
PROPERTIES: Final[dict[str, dict[str, Schema]]] = {
    "CompletionBody": {
        "prompt": {"anyOf": [_TEXT, _IDS, {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS,
                                           "items": {"anyOf": [_TEXT, _IDS]}}]},
    },
    "ChatBody": {
        "messages": {"type": "array", "items": {"$ref": REF.format(name="ChatMessage")},
                     "minItems": 1, "maxItems": MAX_MESSAGES},
        "tools": _TOOLS,
    },
    "ChatMessage": {
        "role": {"type": "string", "enum": list(ROLES)},
        "content": _texts("text", "input_text"),
    },
    "ResponsesBody": {
        "input": {"anyOf": [_STRING, {"type": "array", "items": _ITEM, "minItems": 1,
                                      "maxItems": MAX_MESSAGES}]},
        "tools": {"type": "array", "maxItems": MAX_TOOLS,
                  "items": _tagged("function", "name", **_function()["properties"])},
        "metadata": {"type": "object", "maxProperties": MAX_METADATA,
                     "propertyNames": {"maxLength": MAX_METADATA_KEY},
                     "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_VALUE}},
        "include": {"type": "array", "items": {"enum": sorted(INCLUDABLE)}},
        "stop": {"anyOf": [_STOP, _STOPS]},
        "user": _SESSION,
        "prompt_cache_key": _SESSION,
    },
    "TextOptions": {"format": _FLAT_FORMATS},
    "CountBody": _MESSAGES,
    "MessagesBody": {
        **_MESSAGES,
        "stop_sequences": _STOPS,
        "max_tokens": {"type": "integer", "minimum": 1},  # cut to what the model holds
    },
    "OutputConfig": {"format": _FLAT_FORMATS},
    "EmbeddingBody": {
        "input": {"anyOf": [_TEXT, _IDS, {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS,
                                          "items": {"anyOf": [_TEXT, _IDS]}}]},
        "dimensions": {"type": "integer", "minimum": 1},
        "truncate_prompt_tokens": {"type": "integer", "minimum": -1},
        "request_id": _ID,
        "priority": _PRIORITY,
    },
    "GenerateBody": {
        "token_ids": _IDS,
        "features": {"type": "null"},
        "kv_transfer_params": {"type": "null"},
        "priority": _PRIORITY,
        "request_id": _ID,
    },
    "TokenizeBody": {"prompt": _TEXT},
    "RerankBody": {
        "top_n": {"type": "integer", "minimum": 0}, "request_id": _ID, "priority": _PRIORITY
    },
    "ScoreBody": {"request_id": _ID, "priority": _PRIORITY},
    "DetokenizeBody": {"tokens": {"type": "array", "items": TOKEN}},
}  # fmt: skip
REQUIRED: Final = {
    "CompletionBody": ["prompt"],
    "EmbeddingBody": ["input"],
    "ResponsesBody": ["input"],
    "CountBody": ["messages"],
    "MessagesBody": ["messages"],
}
# Struct -> numbers of it that have bounds.
BOUNDED: Final[dict[str, dict[str, tuple[float, float]]]] = {
    "CompletionBody": BOUNDS,
    "ChatBody": {
        **BOUNDS,
        "max_completion_tokens": BOUNDS["max_tokens"],
        "top_logprobs": BOUNDS["logprobs"],
    },
    "ResponsesBody": {
        **BOUNDS,
        "max_output_tokens": BOUNDS["max_tokens"],
        "top_logprobs": (0, MAX_TOP_LOGPROBS),
    },
}
