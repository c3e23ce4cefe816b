"""/openapi.json: OpenAPI 3.1 of the public HTTP API, made of the structs that parse and answer it.

The structs say which fields there are; bounds come from the tables that the code checks by; what a
type cannot say (a prompt is text, or texts, or ids) is written down here. Nothing of a request is
checked by this document.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from baton import __version__
from baton.sampling import BOUNDS
from router.embeddings import MAX_INPUTS, EmbeddingBody, EmbeddingReply
from router.generate_ids import GenerateBody, GenerateReply
from router.openai import (
    MAX_PROMPTS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    PRIORITY_LIMIT,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from router.openai_chat import MAX_MESSAGES, ROLES
from router.openai_replies import ChatReply, CompletionReply, Model, ModelList
from router.rerank import RerankBody, RerankReply, ScoreBody, ScoreReply

Schema = dict[str, Any]
REF: Final = "#/components/schemas/{name}"
TOKEN: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_IDS: Final[Schema] = {"type": "array", "items": TOKEN, "minItems": 1}
_TEXT: Final[Schema] = {"type": "string", "minLength": 1}


class ErrorObject(msgspec.Struct):
    """`param` names the request's field at fault, `code` the kind of error."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(msgspec.Struct):
    error: ErrorObject


class TokenizeReply(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeReply(msgspec.Struct):
    prompt: str


class Status(msgspec.Struct):
    status: str


class Version(msgspec.Struct):
    version: str


class ServerLoad(msgspec.Struct):
    server_load: int


@dataclass(frozen=True, slots=True)
class Operation:
    """One route. `reply` None: plain text. `statuses`: of its own errors, beside those of all."""

    method: Literal["get", "post"]
    path: str
    summary: str
    reply: type[msgspec.Struct] | None
    body: type[msgspec.Struct] | None = None
    streams: bool = False
    example: Mapping[str, Any] | None = None


_USER: Final = [{"role": "user", "content": "What is prefill?"}]
OPERATIONS: Final = (
    Operation("post", "/v1/chat/completions", "Answer a conversation", ChatReply, ChatBody, True,
              {"messages": _USER, "max_tokens": 16}),
    Operation("post", "/v1/completions", "Continue prompts", CompletionReply, CompletionBody, True,
              {"prompt": "What is prefill?", "max_tokens": 16}),
    Operation("post", "/v1/embeddings", "Vectors of inputs", EmbeddingReply, EmbeddingBody,
              example={"input": "What is prefill?"}),
    Operation("post", "/v1/rerank", "Order documents by a query", RerankReply, RerankBody,
              example={"query": "prefill", "documents": ["computes the prompt", "a fish"]}),
    Operation("post", "/v2/rerank", "As /v1/rerank", RerankReply, RerankBody),
    Operation("post", "/rerank", "As /v1/rerank", RerankReply, RerankBody),
    Operation("post", "/v1/score", "Score pairs of texts", ScoreReply, ScoreBody,
              example={"text_1": "prefill", "text_2": ["computes the prompt", "a fish"]}),
    Operation("post", "/score", "As /v1/score", ScoreReply, ScoreBody),
    Operation("post", "/inference/v1/generate", "Token ids in, token ids out", GenerateReply,
              GenerateBody, True, {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 8}}),
    Operation("post", "/tokenize", "Text or messages to ids", TokenizeReply, TokenizeBody,
              example={"prompt": "What is prefill?"}),
    Operation("post", "/detokenize", "Ids to text", DetokenizeReply, DetokenizeBody,
              example={"tokens": [5, 6, 7]}),
    Operation("get", "/v1/models", "The served model and its adapters", ModelList),
    Operation("get", "/v1/models/{name}", "One of them", Model),
    Operation("get", "/load", "Requests under way here", ServerLoad),
    Operation("get", "/version", "Version of the server", Version),
    Operation("get", "/health", "The process answers", Status),
    Operation("get", "/ping", "As /health", Status),
    Operation("get", "/ready", "Requests would be served", Status),
    Operation("get", "/readyz", "As /ready", Status),
    Operation("get", "/metrics", "Prometheus metrics", None),
)  # fmt: skip

# What is not in the types. Properties of a struct -> schema; a field that is null is as if absent.
_PROPERTIES: Final[dict[str, dict[str, Schema]]] = {
    "CompletionBody": {
        "prompt": {"anyOf": [_TEXT, _IDS, {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS,
                                           "items": {"anyOf": [_TEXT, _IDS]}}]},
    },
    "ChatBody": {
        "messages": {"type": "array", "items": {"$ref": REF.format(name="ChatMessage")},
                     "minItems": 1, "maxItems": MAX_MESSAGES},
    },
    "ChatMessage": {
        "role": {"type": "string", "enum": list(ROLES)},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {
            "type": "object", "required": ["type", "text"],
            "properties": {"type": {"enum": ["text", "input_text"]}, "text": {"type": "string"}},
        }}]},
    },
    "EmbeddingBody": {
        "input": {"anyOf": [_TEXT, _IDS, {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS,
                                          "items": {"anyOf": [_TEXT, _IDS]}}]},
        "dimensions": {"type": "integer", "minimum": 1},
        "truncate_prompt_tokens": {"type": "integer", "minimum": -1},
    },
    "GenerateBody": {
        "token_ids": _IDS,
        "features": {"type": "null"},
        "kv_transfer_params": {"type": "null"},
        "priority": {"type": "integer", "minimum": -PRIORITY_LIMIT, "maximum": PRIORITY_LIMIT},
        "request_id": {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,128}$"},
    },
    "TokenizeBody": {"prompt": {"type": "string", "minLength": 1}},
    "RerankBody": {"top_n": {"type": "integer", "minimum": 0}},
    "DetokenizeBody": {"tokens": {"type": "array", "items": TOKEN}},
}  # fmt: skip
_REQUIRED: Final = {
    "CompletionBody": ["prompt"],
    "EmbeddingBody": ["input"],
}
_SAMPLING: Final[dict[str, Schema]] = {
    "stop": {"anyOf": [
        {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
        {"type": "array", "maxItems": MAX_STOPS,
         "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}},
    ]},
    "stop_token_ids": {"type": "array", "items": TOKEN, "maxItems": 256},
    "priority": {"type": "integer", "minimum": -PRIORITY_LIMIT, "maximum": PRIORITY_LIMIT},
    "seed": {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1},
    "cache_salt": {"type": "string", "minLength": 1, "maxLength": 256},
    "logit_bias": {"type": "object", "propertyNames": {"pattern": "^[0-9]{1,9}$"},
                   "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}},
    "truncate_prompt_tokens": {"type": "integer", "minimum": -1},
}  # fmt: skip
_ERRORS: Final = {
    "400": "Invalid: `param` names the field",
    "401": "No known API key",
    "404": "No such model",
    "405": "Another method is wanted",
    "413": "The body is too large",
    "415": "The body is not application/json",
    "429": "Too much is under way; retry-after says when to come again",
    "500": "A fault of the server",
    "503": "No node can serve this now",
    "504": "The deadline has passed",
}


def document() -> dict[str, Any]:
    """The whole document, as JSON values."""
    schemas = _schemas()
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": __version__,
            "description": "OpenAI's API, with vLLM's conventions where OpenAI is silent.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": {
                code: {"description": text, "content": _json(_ref(ErrorReply))}
                for code, text in _ERRORS.items()
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": _operation_id(operation),
        "summary": operation.summary,
        "responses": {"200": _reply(operation), **_error_refs(operation)},
    }
    if "{name}" in operation.path:
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        described["parameters"] = [name]
    if operation.body is not None:
        content = _json(_ref(operation.body))
        if operation.example is not None:
            content["application/json"]["example"] = dict(operation.example)
        described["requestBody"] = {"required": True, "content": content}
    return described


def _reply(operation: Operation) -> dict[str, Any]:
    if operation.reply is None:
        return {"description": "OK", "content": {"text/plain": {"schema": {"type": "string"}}}}
    content = _json(_ref(operation.reply))
    if operation.streams:
        content["text/event-stream"] = {"schema": {}}  # `data:` lines: chunks, then [DONE]
    return {"description": "OK", "content": content}


def _error_refs(operation: Operation) -> dict[str, Any]:
    codes = list(_ERRORS) if operation.body is not None else ["401", "404", "500", "503"]
    found: dict[str, Any] = {
        code: {"$ref": f"#/components/responses/{code}"}
        for code in codes
        if not (code == "503" and operation.reply is Status)
    }
    if operation.reply is Status:
        found["503"] = {"description": "Not ready", "content": _json(_ref(Status))}
    return found


def _operation_id(operation: Operation) -> str:
    words = operation.path.strip("/").replace("{", "").replace("}", "").replace("/", "_")
    return f"{operation.method}_{words}".replace(".", "_")


def _schemas() -> dict[str, Schema]:
    """Component name -> schema."""
    bodies = {operation.body for operation in OPERATIONS if operation.body is not None}
    replies = {operation.reply for operation in OPERATIONS if operation.reply is not None}
    types = sorted(bodies | replies | {ErrorReply}, key=lambda kind: kind.__name__)
    _, found = msgspec.json.schema_components(types, ref_template=REF)
    for name, properties in _PROPERTIES.items():
        _refine(found[name], properties)
    for name in ("CompletionBody", "ChatBody"):
        _bound(found[name])
        _refine(found[name], _SAMPLING)
    found["TokenizeBody"]["oneOf"] = [{"required": ["prompt"]}, {"required": ["messages"]}]
    for name, required in _REQUIRED.items():
        found[name]["required"] = sorted({*found[name].get("required", ()), *required})
    return found


def _refine(schema: Schema, properties: Mapping[str, Schema]) -> None:
    """Replace what the struct's types say of some properties; optional ones may be null."""
    for name, given in properties.items():
        old = schema["properties"][name]
        optional = name not in schema.get("required", ()) and given != {"type": "null"}
        schema["properties"][name] = {
            **({"anyOf": [given, {"type": "null"}]} if optional else given),
            **({"default": old["default"]} if "default" in old else {}),
        }


def _bound(schema: Schema) -> None:
    """Add the bounds of sampling fields to the branch of their type that is a number."""
    for name, (low, high) in BOUNDS.items():
        for branch in schema["properties"].get(name, {}).get("anyOf", ()):
            if branch.get("type") in ("integer", "number"):
                branch |= {"minimum": low, "maximum": high}


def _ref(kind: type[msgspec.Struct]) -> Schema:
    return {"$ref": REF.format(name=kind.__name__)}


def _json(schema: Schema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
