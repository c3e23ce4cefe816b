"""Schemas of the fields that the structs declare as any JSON, for /openapi.json: prompts, messages,
tools, grammars. The bounds of other fields are in the types of the structs.

The parsing code refuses whatever breaks these schemas, so they contain no mere advice. A null means
the same as an absent field.
"""

from __future__ import annotations

from typing import Any, Final

from baton.guided.spec import MAX_CHOICES
from router.api.openai.bodies import MAX_PROMPTS
from router.api.openai.chat import MAX_MESSAGES, TEXT_PARTS, TOOL_NAME
from router.api.openai.fields import MAX_TOKEN_ID
from router.api.pooling.embeddings import MAX_INPUTS

Schema = dict[str, Any]
MAX_INTEGER: Final = 2**64 - 1  # orjson reads a larger one as a float, which is refused
REF: Final = "#/components/schemas/{name}"
_TOKEN: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}
_IDS: Final[Schema] = {"type": "array", "items": _TOKEN, "minItems": 1}
_STRING: Final[Schema] = {"type": "string"}
_TEXT: Final[Schema] = {"type": "string", "minLength": 1}
_TOOL_NAME: Final[Schema] = {"type": "string", "pattern": f"^{TOOL_NAME}$"}
_SCHEMA: Final[Schema] = {"type": "object", "description": "A JSON schema"}
# A schema may also come as its JSON text.
_ANY_SCHEMA: Final[Schema] = {"anyOf": [_SCHEMA, {"type": "string", "minLength": 2}]}
_CHOICES: Final[Schema] = {
    "type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_CHOICES
}  # fmt: skip


def _tagged(kind: str, *required: str, **properties: Schema) -> Schema:
    """Return the schema of an object with this `type` and these properties. `required`: their
    names, as far as they must be there."""
    told = {"type": {"const": kind}, **properties}
    return {"type": "object", "required": ["type", *required], "properties": told}


def _texts(*kinds: str) -> Schema:
    """Return the schema of a string, or of a list of parts of these types, each with a `text`."""
    part = {"type": "object", "required": ["type", "text"],
            "properties": {"type": {"enum": list(kinds)}, "text": _STRING}}  # fmt: skip
    return {"anyOf": [_STRING, {"type": "array", "items": part}]}


def _function(*more: str) -> Schema:
    """Return the schema of a tool's function. `more`: required fields beside `name`."""
    return {
        "type": "object",
        "required": ["name", *more],
        "properties": {"name": _TOOL_NAME, "description": nullable(_STRING), "parameters": _MAYBE},
    }


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


_MAYBE: Final[Schema] = nullable(_SCHEMA)
_URL: Final[Schema] = {
    "type": "string",
    "description": "data:image/png;base64,... (PNG, JPEG, WebP, GIF), or a URL of an allowed host",
}
_DETAIL: Final = nullable({"enum": ["auto", "low", "high", "original"]})
_IMAGE_URL: Final[Schema] = {"anyOf": [
    _URL, {"type": "object", "required": ["url"], "properties": {"url": _URL, "detail": _DETAIL}},
]}  # fmt: skip
_INPUT_IMAGE: Final = _tagged("input_image", "image_url", image_url=_IMAGE_URL, detail=_DETAIL)
_IMAGE_BLOCK: Final = _tagged("image", "source", source={"anyOf": [
    _tagged("base64", "media_type", "data", media_type={"type": "string", "pattern": "^image/"},
            data=_STRING),
    _tagged("url", "url", url=_URL),
]})  # fmt: skip
TOOLS: Final[Schema] = {
    "type": "array", "items": _tagged("function", "function", function=_function())
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
_CHOICE: Final[Schema] = {"enum": ["none", "auto", "required"]}
# Fields of the bodies of chats and of completions.
SAMPLING: Final[dict[str, Schema]] = {
    "response_format": _FORMATS,
    "structured_outputs": _STRUCTURED,
    "guided_json": _ANY_SCHEMA,
}
_ROLE: Final[Schema] = {"enum": ["user", "assistant", "system", "developer"]}
_PART: Final[Schema] = {"anyOf": [
    {"type": "object", "required": ["type", "text"],
     "properties": {"type": {"enum": ["input_text", "output_text", "text", "summary_text",
                                      "reasoning_text"]}, "text": _STRING}},
    _tagged("refusal", "refusal", refusal=_STRING),
]}  # fmt: skip
_PARTS: Final[Schema] = {"anyOf": [_STRING, {"type": "array", "items": {
    "anyOf": [*_PART["anyOf"], _INPUT_IMAGE]}}]}  # fmt: skip
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
# A client's tool in /v1/responses, alone or in a namespace.
_CALLED: Final = (
    _tagged("function", "name", **_function()["properties"]),
    _tagged("custom", "name", name=_TOOL_NAME, description=nullable(_STRING),
            format=nullable({"anyOf": [_tagged("text"), _GRAMMAR]})),
)  # fmt: skip
_SHORT_NAME: Final[Schema] = {"type": "string", "pattern": r"^[A-Za-z0-9_.\-]{1,64}$"}
# One of OpenAI's own tools, of any other type: the server leaves it out, with a note in the reply.
_OPENAIS: Final[Schema] = {"type": "object", "required": ["type"], "properties": {
    "type": {"type": "string", "not": {"enum": ["function", "custom", "namespace"]}},
}}  # fmt: skip
_BLOCK: Final = _tagged("text", "text", text=_STRING)
_BLOCKS: Final[Schema] = _texts("text")
_SEEN: Final[Schema] = {
    "anyOf": [_STRING, {"type": "array", "items": {"anyOf": [_BLOCK, _IMAGE_BLOCK]}}]
}
_RESULT: Final = _tagged("tool_result", "tool_use_id", tool_use_id=_STRING, content=nullable(_SEEN))
_SAID: Final = (
    _BLOCK,
    _tagged("thinking", "thinking", thinking=_STRING),
    _tagged("redacted_thinking"),
    _tagged("tool_use", "id", "name", id=_STRING, name=_STRING, input={"type": "object"}),
)


def _message(role: str, content: Schema) -> Schema:
    """Return the schema of a message of that role."""
    told = {"role": {"const": role}, "content": content}
    return {"type": "object", "required": ["role", "content"], "properties": told}


def _any_of(*blocks: Schema) -> Schema:
    """Return the schema of a string or of a list of such blocks."""
    return {"anyOf": [_STRING, {"type": "array", "items": {"anyOf": list(blocks)}}]}


_MESSAGES: Final[dict[str, Schema]] = {
    "messages": {"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": {"anyOf": [
        _message("user", _any_of(_BLOCK, _IMAGE_BLOCK, _RESULT)),
        _message("assistant", _any_of(*_SAID)),
        _message("system", _BLOCKS),
    ]}},
    "system": _BLOCKS,
    "tools": {"type": "array", "items": {
        "type": "object", "required": ["name"],
        "properties": {"type": {"enum": ["custom", None]}, "name": _TOOL_NAME,
                       "description": nullable(_STRING), "input_schema": _MAYBE},
    }},
    "output_format": _FLAT_FORMATS,
}  # fmt: skip
_INPUT: Final[dict[str, Schema]] = {
    "input": {"anyOf": [_TEXT, _IDS, {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS,
                                      "items": {"anyOf": [_TEXT, _IDS]}}]},
}  # fmt: skip
# Name of a struct -> its properties. A shape with a `type` is merged into that branch of the
# property's schema that has the same type; any other shape replaces the schema, with null allowed.
PROPERTIES: Final[dict[str, dict[str, Schema]]] = {
    "CompletionBody": {
        **SAMPLING,
        "prompt": {"anyOf": [_TEXT, _IDS, {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS,
                                           "items": {"anyOf": [_TEXT, _IDS]}}]},
    },
    "ChatBody": {
        **SAMPLING,
        "tools": TOOLS,
        "tool_choice": {"anyOf": [
            _CHOICE,
            _tagged("function", "function", function=_FUNCTION_NAME),
            _tagged("allowed_tools", "allowed_tools", allowed_tools=_ALLOWED),
        ]},
    },
    "ChatMessage": {
        "content": {"anyOf": [_STRING, {"type": "array", "items": {"anyOf": [_STRING, *(
            _tagged(kind, holder, **{holder: _STRING}) for kind, holder in TEXT_PARTS.items()
        ), _tagged("image_url", "image_url", image_url=_IMAGE_URL), _INPUT_IMAGE]}}]},
    },
    "ResponsesBody": {
        "input": {"anyOf": [_STRING, {"type": "array", "items": _ITEM, "minItems": 1,
                                      "maxItems": MAX_MESSAGES}]},
        "tools": {"type": "array", "items": {"anyOf": [
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
    },
    "TextOptions": {"format": _FLAT_FORMATS},
    "CountBody": _MESSAGES,
    "MessagesBody": _MESSAGES,
    "OutputConfig": {"format": _FLAT_FORMATS},
    "EmbeddingBody": _INPUT,
    "ClassifyBody": _INPUT,
    "PoolBody": {**_INPUT, "task": {"enum": ["embed", "classify"]}},
    "EmbedInput": {"content": {"type": "array", "items": _tagged("text", "text", text=_TEXT)}},
    "RerankBody": {
        "documents": {"type": "array", "items": {"anyOf": [
            _STRING,
            {"type": "object", "required": ["text"], "properties": {"text": _STRING}},
        ]}},
    },
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
