"""/openapi.json: OpenAPI 3.1 of the public HTTP API, made from the structs of bodies and answers.

The structs say which fields there are, and their bounds. router/api/openapi/shapes.py adds what a
type cannot say (a prompt is text, or texts, or ids), router/api/openapi/rules.py adds the rules for
several fields at once. The document only describes; requests are not checked by it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from baton import __version__
from router.api.anthropic.body import CountBody, MessagesBody
from router.api.dialect import SAME
from router.api.generate_ids import GenerateBody, GenerateReply
from router.api.openai.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from router.api.openai.replies import ChatReply, CompletionReply, Model, ModelList
from router.api.openapi.dialects import (
    AnthropicErrorReply,
    CountReply,
    InputTokensReply,
    MessageReply,
    ResponseDeleted,
    ResponseItemList,
    ResponsesReply,
)
from router.api.openapi.rules import RULES
from router.api.openapi.shapes import MAX_INTEGER, PROPERTIES, REF, REQUIRED, Schema
from router.api.pooling.classify import ClassifyBody, ClassifyReply, PoolBody, PoolReply
from router.api.pooling.cohere import EmbedBody, EmbedReply
from router.api.pooling.embeddings import EmbeddingBody, EmbeddingReply
from router.api.pooling.rerank import RerankBody, RerankReply, ScoreBody, ScoreReply
from router.api.responses.body import ResponsesBody
from router.api.responses.stored_api import MAX_PAGE
from router.api.timelines import LIST_PATH, MOST_LISTED, RequestList, Timeline
from router.api.timelines import PATH as TIMELINE_PATH
from router.resumable.terms import EVENT_ID, POSITION_HEADER, POSITION_QUERY


class ErrorObject(msgspec.Struct):
    """An error. `param` names the field of the request at fault, `code` the kind of error."""

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


class TokenizerInfo(msgspec.Struct):
    """The fields of the model's tokenizer_config.json."""

    tokenizer_class: str
    chat_template: str | None = None


class Status(msgspec.Struct):
    status: str


class Version(msgspec.Struct):
    version: str


class Document(msgspec.Struct):
    """An OpenAPI document, as the OpenAPI specification defines it."""

    openapi: str
    info: dict[str, Any]
    servers: list[dict[str, Any]]
    paths: dict[str, Any]
    components: dict[str, Any]


class ServerLoad(msgspec.Struct):
    server_load: int


@dataclass(frozen=True, slots=True)
class Operation:
    """One route. `reply`: the struct of its answer, or several alternatives; None: it answers text
    of the type `media`. `anthropic`: its errors are Anthropic's objects. `parameters`: those that
    are not in the path."""

    method: Literal["get", "post", "delete"]
    path: str
    summary: str
    reply: type[msgspec.Struct] | tuple[type[msgspec.Struct], ...] | None
    body: type[msgspec.Struct] | None = None
    streams: bool = False
    example: Mapping[str, Any] | None = None
    anthropic: bool = False
    parameters: Sequence[Mapping[str, Any]] = ()
    media: str = "text/plain"
    refusable: bool = False  # it may answer 400 though it has no body and no parameters

    @property
    def replies(self) -> tuple[type[msgspec.Struct], ...]:
        if self.reply is None:
            return ()
        return self.reply if isinstance(self.reply, tuple) else (self.reply,)


_EVENT_ID: Final = {
    "schema": {"type": "string", "pattern": f"^{EVENT_ID}$"},
    "description": "The id of the event that was seen last: go on after it",
}


def _query(name: str, schema: Schema) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": schema}


_USER: Final = [{"role": "user", "content": "What is prefill?"}]
OPERATIONS: Final = (
    Operation("post", "/v1/chat/completions", "Answer a conversation", ChatReply, ChatBody, True,
              {"messages": _USER, "max_tokens": 16}),
    Operation("post", "/v1/completions", "Continue prompts", CompletionReply, CompletionBody, True,
              {"prompt": "What is prefill?", "max_tokens": 16}),
    Operation("post", "/v1/responses", "Answer items with items", ResponsesReply, ResponsesBody,
              True, {"input": "What is prefill?", "max_output_tokens": 16}),
    Operation("post", "/v1/responses/input_tokens", "Tokens of such a prompt", InputTokensReply,
              ResponsesBody, example={"input": "What is prefill?"}),
    Operation("get", "/v1/responses/{id}", "A stored response, or the rest of its stream",
              ResponsesReply, streams=True, parameters=(
                  _query("stream", {"type": "boolean"}),
                  _query("starting_after", {"type": "integer", "minimum": 0,
                                            "maximum": 999_999_999}))),
    Operation("delete", "/v1/responses/{id}", "Forget it", ResponseDeleted),
    Operation("post", "/v1/responses/{id}/cancel", "End one in the background", ResponsesReply,
              refusable=True),
    Operation("get", "/v1/responses/{id}/input_items", "What it answered", ResponseItemList,
              parameters=(
                  _query("order", {"enum": ["asc", "desc"]}),
                  _query("limit", {"type": "integer", "minimum": 1, "maximum": MAX_PAGE}),
                  _query("after", {"type": "string"}))),
    Operation("post", "/v1/messages", "Answer a conversation, as Anthropic's API does",
              MessageReply, MessagesBody, True, {"messages": _USER, "max_tokens": 16}, True),
    Operation("post", "/v1/messages/count_tokens", "Tokens of such a conversation", CountReply,
              CountBody, example={"messages": _USER}, anthropic=True),
    Operation("post", "/v1/embeddings", "Vectors of inputs", EmbeddingReply, EmbeddingBody,
              example={"input": "What is prefill?"}),
    Operation("post", "/v2/embed", "Vectors of inputs, as Cohere's API tells them", EmbedReply,
              EmbedBody, example={"texts": ["What is prefill?"]}),
    Operation("post", "/classify", "Classes of inputs", ClassifyReply, ClassifyBody,
              example={"input": "What is prefill?"}),
    Operation("post", "/pooling", "What the model makes of inputs", PoolReply, PoolBody,
              example={"input": "What is prefill?"}),
    Operation("post", "/invocations", "Any of these bodies, for SageMaker",
              (ChatReply, CompletionReply, EmbeddingReply, ClassifyReply, RerankReply, ScoreReply),
              ChatBody, True, {"messages": _USER, "max_tokens": 16}),
    Operation("get", "/tokenizer_info", "The tokenizer's configuration", TokenizerInfo),
    Operation("post", "/v1/rerank", "Order documents by a query", RerankReply, RerankBody,
              example={"query": "prefill", "documents": ["computes the prompt", "a fish"]}),
    Operation("post", "/v2/rerank", "As /v1/rerank", RerankReply, RerankBody),
    Operation("post", "/rerank", "As /v1/rerank", RerankReply, RerankBody),
    Operation("post", "/v1/score", "Score pairs of texts", ScoreReply, ScoreBody,
              example={"text_1": "prefill", "text_2": ["computes the prompt", "a fish"]}),
    Operation("post", "/score", "As /v1/score", ScoreReply, ScoreBody),
    Operation("post", "/inference/v1/generate", "Token ids in, token ids out", GenerateReply,
              GenerateBody, True, {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 8}}),
    Operation("get", "/v1/requests/{name}/stream", "Read a resumable request's answer again, as it"
              " was asked for: streamed or whole",
              (ChatReply, CompletionReply, ResponsesReply, MessageReply), streams=True, parameters=(
                  {"name": POSITION_QUERY, "in": "query", **_EVENT_ID},
                  {"name": POSITION_HEADER, "in": "header", **_EVENT_ID})),
    Operation("get", LIST_PATH, "The requests that ended last, or the slowest of them", RequestList,
              parameters=(
                  {"name": "slowest", "in": "query", "schema": {"type": "boolean"}},
                  {"name": "limit", "in": "query", "schema": {
                      "type": "integer", "minimum": 1, "maximum": MOST_LISTED}})),
    Operation("get", TIMELINE_PATH, "Where one request's time went", Timeline,
              parameters=(
                  {"name": "format", "in": "query", "schema": {"enum": ["json", "perfetto"]}},
                  {"name": "text", "in": "query", "schema": {"type": "boolean"}})),
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
    Operation("post", "/ping", "As /health, for SageMaker", Status),
    Operation("get", "/ready", "Requests would be served", Status),
    Operation("get", "/readyz", "As /ready", Status),
    Operation("get", "/metrics", "Prometheus metrics", None),
    Operation("get", "/openapi.json", "This document", Document),
    Operation("get", "/docs", "This document as a page", None, media="text/html"),
)  # fmt: skip

_ANTHROPIC: Final = "anthropic-"
_ERRORS: Final = {
    "400": "Invalid: `param` names the field",
    "401": "No known API key",
    "404": "No such model, request or response",
    "405": "Another method is wanted",
    "413": "The body is too large",
    "414": "The request target is too long",
    "415": "The body is not application/json",
    "422": "The request id or idempotency key belongs to another body",
    "429": "Too much is under way; retry-after says when to come again",
    "431": "The headers are too many, or too large",
    "500": "A fault of the server",
    "503": "No node can serve this now",
    "504": "The deadline has passed",
}
_HEAD: Final = ("401", "414", "431")  # errors of every route, found in the head of the request


def document(root_path: str = "", tokenizer_info: bool = False) -> dict[str, Any]:
    """Return the whole document as JSON values. `tokenizer_info`: include /tokenizer_info."""
    schemas = _schemas()
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        if operation.path == "/tokenizer_info" and not tokenizer_info:
            continue
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": __version__,
            "description": (
                "OpenAI's API, with vLLM's conventions where OpenAI is silent, and Anthropic's"
                " messages."
            ),
        },
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": _failures(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _failures() -> dict[str, Any]:
    """Return the error answers by status, as OpenAI's objects; with the prefix _ANTHROPIC before
    the status, as Anthropic's objects."""
    kinds = (("", ErrorReply), (_ANTHROPIC, AnthropicErrorReply))
    return {
        prefix + code: {"description": text, "content": _json(_ref(kind))}
        for prefix, kind in kinds
        for code, text in _ERRORS.items()
    }


def _operation(operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": _operation_id(operation),
        "summary": operation.summary,
        "responses": {"200": _reply(operation), **_error_refs(operation)},
    }
    parameters = list(operation.parameters)
    for name in re.findall(r"\{(\w+)\}", operation.path):
        place = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        parameters.insert(0, place)
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        content = _json(_ref(operation.body))
        if operation.example is not None:
            content["application/json"]["example"] = dict(operation.example)
        described["requestBody"] = {"required": True, "content": content}
    return described


def _reply(operation: Operation) -> dict[str, Any]:
    if operation.reply is None:
        return {"description": "OK", "content": {operation.media: {"schema": {"type": "string"}}}}
    kinds = [_ref(kind) for kind in operation.replies]
    content = _json(kinds[0] if len(kinds) == 1 else {"anyOf": kinds})
    if operation.streams:
        content["text/event-stream"] = {"schema": {}}  # `data:` lines: chunks, then [DONE]
    return {"description": "OK", "content": content}


def _error_refs(operation: Operation) -> dict[str, Any]:
    codes = list(_ERRORS) if operation.body is not None else [*_HEAD, "404", "500", "503"]
    codes += ["400"] if operation.parameters or operation.refusable else []
    prefix = _ANTHROPIC if operation.anthropic else ""
    found: dict[str, Any] = {
        code: {"$ref": f"#/components/responses/{prefix}{code}"}
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
    """Return the schemas of all structs by name."""
    bodies = {operation.body for operation in OPERATIONS if operation.body is not None}
    replies = {kind for operation in OPERATIONS for kind in operation.replies}
    errors = {ErrorReply, AnthropicErrorReply}
    types = sorted(bodies | replies | errors, key=lambda kind: kind.__name__)
    _, found = msgspec.json.schema_components(types, ref_template=REF)
    for name in msgspec.json.schema_components(sorted(bodies, key=str))[1]:
        _limit(found[name])
    for name, properties in PROPERTIES.items():
        _refine(found[name], properties)
    for kind in (ResponsesBody, MessagesBody):
        _add_same(found[kind.__name__], found["ChatBody"])
    # /v1/messages has `thinking` for the one, and refuses the other.
    for name in ("include_reasoning", "logprob_token_ids"):
        del found["MessagesBody"]["properties"][name]
    found["CountBody"]["properties"]["model"] = found["ChatBody"]["properties"]["model"]
    for name, required in REQUIRED.items():
        schema = found[name]
        schema["required"] = sorted({*schema.get("required", ()), *required})
        for field in required:
            _never_null(schema["properties"][field])
    for name, rules in RULES.items():
        found[name] |= rules[0] if len(rules) == 1 else {"allOf": rules}
    return found


def _add_same(schema: Schema, chat: Schema) -> None:
    """Add the chat's fields that a dialect takes under the same name (router/api/dialect.py)."""
    for name in SAME:
        if name in chat["properties"]:
            schema["properties"].setdefault(name, deepcopy(chat["properties"][name]))


def _refine(schema: Schema, properties: Mapping[str, Schema]) -> None:
    """Add the shapes `properties` to a struct's schema. All of these properties may be null."""
    for name, given in properties.items():
        told = schema["properties"][name]
        branches: list[Schema] = told.get("anyOf", [told])
        same = [branch for branch in branches if branch.get("type") == given.get("type", "")]
        if same:
            same[0] |= given
        else:
            told["anyOf"] = [given, {"type": "null"}]


def _never_null(told: Schema) -> None:
    """Make the schema of a required property: without a default and without null."""
    del told["default"]
    told |= told.pop("anyOf")[0]


def _limit(schema: Schema) -> None:
    """Add the bounds of 64 bits to a body's integers that have no bounds."""
    for told in schema.get("properties", {}).values():
        for branch in told.get("anyOf", (told,)):
            if branch.get("type") == "integer":
                branch.setdefault("minimum", -(2**63))
                branch.setdefault("maximum", MAX_INTEGER)


def _ref(kind: type[msgspec.Struct]) -> Schema:
    return {"$ref": REF.format(name=kind.__name__)}


def _json(schema: Schema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
