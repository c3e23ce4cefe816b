"""What the types of the bodies cannot say of their fields, for /openapi.json: bounds and forms.

Bounds come from the tables that the code checks by. What is said here is refused by the code where
it does not hold: a form that is only advised is none. A null is as if the field were absent.
"""

from __future__ import annotations

from typing import Any, Final

from baton.guided.grammars import BACKENDS, MAX_CHOICES
from baton.protocol.sampling import BOUNDS, MAX_ALLOWED_TOKEN_IDS, MAX_LOGPROB_TOKEN_IDS
from router.api.anthropic.body import MAX_BUDGET
from router.api.openai.bodies import MAX_PROMPTS, MAX_STOP_CHARS, MAX_STOPS, PRIORITY_LIMIT
from router.api.openai.chat import (
    EFFORTS,
    MAX_MESSAGES,
    MAX_NAME_CHARS,
    MAX_TOOLS,
    TEXT_PARTS,
    TOOL_NAME,
)
from router.api.openai.prompt_options import MAX_BAD_WORD_CHARS, MAX_BAD_WORDS
from router.api.pooling.embeddings import MAX_INPUTS
from router.api.pooling.rerank import MAX_INSTRUCTION_CHARS
from router.api.responses.body import (
    INCLUDABLE,
    MAX_METADATA,
    MAX_METADATA_KEY,
    MAX_METADATA_VALUE,
    MAX_TOP_LOGPROBS,
)
from router.config import MAX_LOGPROBS
from router.prompts.reader import MAX_TEMPLATE_CHARS
from router.request.request_ids import ID_PATTERN
from router.request.terms import MAX_SESSION_CHARS

Schema = dict[str, Any]
MAX_INTEGER: Final = 2**64 - 1  # orjson reads a larger one as a float, which is refused
REF: Final = "#/components/schemas/{name}"
TOKEN: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_COUNT: Final[Schema] = {"type": "integer", "minimum": 1, "maximum": MAX_INTEGER}
_IDS: Final[Schema] = {"type": "array", "items": TOKEN, "minItems": 1}
_STRING: Final[Schema] = {"type": "string"}
_TEXT: Final[Schema] = {"type": "string", "minLength": 1}
_NAME: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": MAX_NAME_CHARS}
_TOOL_NAME: Final[Schema] = {"type": "string", "pattern": f"^{TOOL_NAME}$"}
_ID: Final[Schema] = {"type": "string", "pattern": f"^{ID_PATTERN}$"}
_SESSION: Final[Schema] = {"type": "string", "maxLength": MAX_SESSION_CHARS}
_STOP: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_STOPS: Final[Schema] = {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}
_INSTRUCTION: Final[Schema] = {"type": "string", "maxLength": MAX_INSTRUCTION_CHARS}
_PRIORITY: Final[Schema] = {
    "type": "integer", "minimum": -PRIORITY_LIMIT, "maximum": PRIORITY_LIMIT
}  # fmt: skip
_TRUNCATION: Final[Schema] = {
    "type": "integer", "minimum": -1, "maximum": MAX_INTEGER, "not": {"const": 0}
}  # fmt: skip
_SCHEMA: Final[Schema] = {"type": "object", "description": "A JSON schema"}
# A schema may also come as its JSON text.
_ANY_SCHEMA: Final[Schema] = {"anyOf": [_SCHEMA, {"type": "string", "minLength": 2}]}
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
        "properties": {"name": _TOOL_NAME, "description": nullable(_STRING), "parameters": _MAYBE},
    }


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


_MAYBE: Final[Schema] = nullable(_SCHEMA)
TOOLS: Final[Schema] = {
    "type": "array", "maxItems": MAX_TOOLS,
    "items": _tagged("function", "function", function=_function()),
}  # fmt: skip
_FORMATS: Final[Schema] = {"anyOf": [
    _tagged("text"),
    _tagged("json_object"),
    _tagged("json_schema", "json_schema",
            json_schema={"type": "object", "required": ["schema"],
                         "properties": {"name": nullable(_STRING), "schema": _SCHEMA}}),
    _tagged("structural_tag", "format", format={"type": "object"}),
    _tagged("structural_tag", "structures", "triggers",
            structures={"type": "array"}, triggers={"type": "array", "items": _STRING}),
]}  # fmt: skip
_FLAT_FORMATS: Final[Schema] = {"anyOf": [
    _tagged("text"),
    _tagged("json_object"),
    _tagged("json_schema", "schema", schema=_SCHEMA),
]}  # fmt: skip
_STRUCTURES: Final[dict[str, Schema]] = {
    "json": _ANY_SCHEMA,
    "regex": _TEXT,
    "choice": _CHOICES,
    "grammar": _TEXT,
    "json_object": {"const": True},
    "structural_tag": {"anyOf": [_TEXT, {"type": "object"}]},
}
_STRUCTURED: Final[Schema] = {
    "type": "object",
    "description": "Exactly one of json, regex, choice, grammar, json_object, structural_tag",
    "properties": {
        **{name: nullable(schema) for name, schema in _STRUCTURES.items()},
        "json_object": {"type": ["boolean", "null"]},
        "whitespace_pattern": nullable(_STRING),
        "disable_any_whitespace": {"type": ["boolean", "null"]},
        "disable_additional_properties": {"type": ["boolean", "null"]},
    },
    "oneOf": [
        {"required": [name], "properties": {name: schema}} for name, schema in _STRUCTURES.items()
    ],
}
_FUNCTION_NAME: Final[Schema] = {
    "type": "object", "required": ["name"], "properties": {"name": _STRING}
}  # fmt: skip
_MODE: Final[Schema] = {"enum": ["auto", "required"]}
_SOME: Final[Schema] = {"type": "array", "items": {"type": "object"}, "minItems": 1}
_ALLOWED: Final[Schema] = {
    "type": "object", "required": ["mode", "tools"], "properties": {"mode": _MODE, "tools": _SOME}
}  # fmt: skip
_EFFORT: Final[Schema] = {"enum": list(EFFORTS)}
_CHOICE: Final[Schema] = {"enum": ["none", "auto", "required"]}
# Of every body that samples, chats and completions.
SAMPLING: Final[dict[str, Schema]] = {
    "stop": {"anyOf": [_STOP, _STOPS]},
    "stop_token_ids": {"type": "array", "items": TOKEN, "maxItems": 256},
    "priority": _PRIORITY,
    "seed": {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1},
    "cache_salt": _NAME,
    "logit_bias": {"type": "object", "propertyNames": {"pattern": "^[0-9]{1,9}$"},
                   "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}},
    "truncate_prompt_tokens": _TRUNCATION,
    "allowed_token_ids": {**_IDS, "maxItems": MAX_ALLOWED_TOKEN_IDS},
    "logprob_token_ids": {"type": "array", "items": TOKEN, "maxItems": MAX_LOGPROB_TOKEN_IDS},
    "thinking_token_budget": {"type": "integer", "minimum": -1, "maximum": 2**31 - 1},
    "bad_words": {"type": "array", "maxItems": MAX_BAD_WORDS,
                  "items": {"type": "string",
                            "pattern": rf"^\s*\S[\s\S]{{0,{MAX_BAD_WORD_CHARS - 1}}}$"}},
    "early_stopping": {"enum": [True, False, "never"]},
    "request_id": _ID,
    "session_id": _SESSION,
    "prompt_cache_key": _SESSION,
    "user": _SESSION,
    "response_format": _FORMATS,
    "structured_outputs": _STRUCTURED,
    "guided_json": _ANY_SCHEMA,
    "guided_decoding_backend": {"enum": list(BACKENDS)},
    "guided_regex": _TEXT,
    "guided_choice": _CHOICES,
    "guided_grammar": _TEXT,
}  # fmt: skip
_ROLE: Final[Schema] = {"enum": ["user", "assistant", "system", "developer"]}
_PART: Final[Schema] = {"anyOf": [
    {"type": "object", "required": ["type", "text"],
     "properties": {"type": {"enum": ["input_text", "output_text", "text", "summary_text",
                                      "reasoning_text"]}, "text": _STRING}},
    _tagged("refusal", "refusal", refusal=_STRING),
]}  # fmt: skip
_PARTS: Final[Schema] = {"anyOf": [_STRING, {"type": "array", "items": _PART}]}
_ITEM: Final[Schema] = {"anyOf": [
    {"type": "object", "required": ["role", "content"],
     "properties": {"type": {"enum": ["message", None]}, "role": _ROLE, "content": _PARTS}},
    _tagged("reasoning"),
    _tagged("function_call", "call_id", "name", "arguments",
            call_id=_STRING, name=_STRING, arguments=_STRING),
    _tagged("function_call_output", "call_id", "output", call_id=_STRING, output=_PARTS),
    _tagged("custom_tool_call", "call_id", "name", "input",
            call_id=_STRING, name=_STRING, input=_STRING),
    _tagged("custom_tool_call_output", "call_id", "output", call_id=_STRING, output=_PARTS),
]}  # fmt: skip
_GRAMMAR: Final = _tagged("grammar", "definition", definition=_STRING)
# What a client's tool may be in /v1/responses, beside a namespace of them.
_CALLED: Final = (
    _tagged("function", "name", **_function()["properties"]),
    _tagged("custom", "name", name=_TOOL_NAME, description=nullable(_STRING),
            format=nullable({"anyOf": [_tagged("text"), _GRAMMAR]})),
)  # fmt: skip
_SHORT_NAME: Final[Schema] = {"type": "string", "pattern": r"^[A-Za-z0-9_.\-]{1,64}$"}
# One of OpenAI's own tools, whatever it is called: left out of a body, with a note.
_OPENAIS: Final[Schema] = {"type": "object", "required": ["type"], "properties": {
    "type": {"type": "string", "not": {"enum": ["function", "custom", "namespace"]}},
}}  # fmt: skip
_BLOCK: Final = _tagged("text", "text", text=_STRING)
_BLOCKS: Final[Schema] = _texts("text")
_RESULT: Final = _tagged(
    "tool_result", "tool_use_id", tool_use_id=_STRING, content=nullable(_BLOCKS)
)
_SAID: Final = (
    _BLOCK,
    _tagged("thinking", "thinking", thinking=_STRING),
    _tagged("redacted_thinking"),
    _tagged("tool_use", "id", "name", id=_STRING, name=_STRING, input={"type": "object"}),
)


def _message(role: str, content: Schema) -> Schema:
    """A message of that role."""
    told = {"role": {"const": role}, "content": content}
    return {"type": "object", "required": ["role", "content"], "properties": told}


def _any_of(*blocks: Schema) -> Schema:
    """A string, or such blocks."""
    return {"anyOf": [_STRING, {"type": "array", "items": {"anyOf": list(blocks)}}]}


_MESSAGES: Final[dict[str, Schema]] = {
    "messages": {"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": {"anyOf": [
        _message("user", _any_of(_BLOCK, _RESULT)),
        _message("assistant", _any_of(*_SAID)),
        _message("system", _BLOCKS),
    ]}},
    "system": _BLOCKS,
    "tools": {"type": "array", "maxItems": MAX_TOOLS, "items": {
        "type": "object", "required": ["name"],
        "properties": {"type": {"enum": ["custom", None]}, "name": _TOOL_NAME,
                       "description": nullable(_STRING), "input_schema": _MAYBE},
    }},
    "output_format": _FLAT_FORMATS,
}  # fmt: skip
_INPUT: Final[dict[str, Schema]] = {
    "input": {"anyOf": [_TEXT, _IDS, {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS,
                                      "items": {"anyOf": [_TEXT, _IDS]}}]},
    "truncate_prompt_tokens": _TRUNCATION,
    "request_id": _ID,
    "priority": _PRIORITY,
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
        "tools": TOOLS,
        "reasoning_effort": _EFFORT,
        "chat_template": {"type": ["string", "null"], "maxLength": MAX_TEMPLATE_CHARS,
                          "description": "Only with --trust-request-chat-template"},
        "tool_choice": {"anyOf": [
            _CHOICE,
            _tagged("function", "function", function=_FUNCTION_NAME),
            _tagged("allowed_tools", "allowed_tools", allowed_tools=_ALLOWED),
        ]},
    },
    "ChatMessage": {
        "role": _NAME,
        "content": {"anyOf": [_STRING, {"type": "array", "items": {"anyOf": [_STRING, *(
            _tagged(kind, holder, **{holder: _STRING}) for kind, holder in TEXT_PARTS.items()
        )]}}]},
    },
    "ResponsesBody": {
        "input": {"anyOf": [_STRING, {"type": "array", "items": _ITEM, "minItems": 1,
                                      "maxItems": MAX_MESSAGES}]},
        "tools": {"type": "array", "maxItems": MAX_TOOLS, "items": {"anyOf": [
            *_CALLED,
            _tagged("namespace", "name", "tools", name=_SHORT_NAME, description=nullable(_STRING),
                    tools={"type": "array", "maxItems": 8, "items": {"anyOf": [
                        {**each, "properties": {**each["properties"], "name": _SHORT_NAME}}
                        for each in _CALLED
                    ]}}),
            _OPENAIS,
        ]}},
        "tool_choice": {"anyOf": [
            _CHOICE,
            _tagged("function", "name", name=_STRING),
            _tagged("custom", "name", name=_STRING),
            _tagged("allowed_tools", "mode", "tools", mode=_MODE, tools=_SOME),
        ]},
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
        "max_tokens": _COUNT,  # cut to what the model holds
    },
    "ThinkingBody": {"budget_tokens": {"type": "integer", "minimum": -1, "maximum": MAX_BUDGET}},
    "OutputConfig": {"format": _FLAT_FORMATS, "effort": _EFFORT},
    "ReasoningOptions": {"effort": _EFFORT},
    "EmbeddingBody": {**_INPUT, "dimensions": _COUNT},
    "ClassifyBody": _INPUT,
    "PoolBody": {**_INPUT, "dimensions": _COUNT,
                 "task": {"enum": ["embed", "classify"]}},
    "EmbedBody": {
        "texts": {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS, "items": _TEXT},
        "inputs": {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS,
                   "items": {"$ref": REF.format(name="EmbedInput")}},
        "output_dimension": _COUNT,
        "max_tokens": _COUNT,
        "request_id": _ID,
        "priority": _PRIORITY,
    },
    "EmbedInput": {"content": {"type": "array", "minItems": 1,
                               "items": _tagged("text", "text", text=_TEXT)}},
    "GenerateBody": {
        "token_ids": _IDS,
        "features": {"type": "null"},
        "kv_transfer_params": {"type": "null"},
        "cache_salt": _NAME,
        "priority": _PRIORITY,
        "request_id": _ID,
    },
    "TokenizeBody": {
        "prompt": _TEXT,
        "messages": {"type": "array", "items": {"$ref": REF.format(name="ChatMessage")},
                     "minItems": 1, "maxItems": MAX_MESSAGES},
    },
    "RerankBody": {
        "documents": {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS, "items": {"anyOf": [
            _STRING,
            {"type": "object", "required": ["text"], "properties": {"text": _STRING}},
        ]}},
        "top_n": {"type": "integer", "minimum": 0, "maximum": MAX_INTEGER},
        "instruction": _INSTRUCTION,
        "request_id": _ID,
        "priority": _PRIORITY,
    },
    "ScoreBody": {"instruction": _INSTRUCTION, "request_id": _ID, "priority": _PRIORITY},
    "DetokenizeBody": {"tokens": {"type": "array", "items": TOKEN}},
}  # fmt: skip
REQUIRED: Final = {
    "CompletionBody": ["prompt"],
    "EmbeddingBody": ["input"],
    "ClassifyBody": ["input"],
    "PoolBody": ["input"],
    "ResponsesBody": ["input"],
    "CountBody": ["messages"],
    "MessagesBody": ["messages"],
}
_LOGPROBS: Final = (0, MAX_LOGPROBS)  # unless --max-logprobs says otherwise
_BOUNDS: Final = {**BOUNDS, "logprobs": _LOGPROBS, "prompt_logprobs": _LOGPROBS}
# Struct -> numbers of it that have bounds.
BOUNDED: Final[dict[str, dict[str, tuple[float, float]]]] = {
    "CompletionBody": _BOUNDS,
    "ChatBody": {
        **_BOUNDS,
        "max_completion_tokens": BOUNDS["max_tokens"],
        "top_logprobs": _LOGPROBS,
    },
    "ResponsesBody": {
        **_BOUNDS,
        "max_output_tokens": BOUNDS["max_tokens"],
        "top_logprobs": (0, MAX_TOP_LOGPROBS),
    },
}
