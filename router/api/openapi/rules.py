"""Rules that relate several fields of a body, for /openapi.json; the parsing code enforces them.

Each rule is an anyOf or a oneOf of partial schemas, since generators of clients and of tests
understand these better than if/then.
"""

from __future__ import annotations

from typing import Any, Final

from router.api.openapi.shapes import TOOLS, Schema, nullable
from router.api.pooling.embeddings import MAX_INPUTS
from router.api.pooling.rerank import SIDES
from router.api.responses.body import LOGPROBS

_STRING: Final[Schema] = {"type": "string"}
_NULL: Final[Schema] = {"type": "null"}
_TRUE: Final[Schema] = {"const": True}
_LIST: Final[Schema] = {"type": "array", "minItems": 1}


def _has(**fields: Schema) -> Schema:
    """Return the schema of an object that has all these fields, with these schemas."""
    return {"required": list(fields), "properties": fields}


def _only_if(name: str, harmless: list[Any], needed: Schema) -> Schema:
    """Return the rule that `needed` holds unless the field is absent or has a `harmless` value."""
    return {"anyOf": [{"properties": {name: {"enum": harmless}}}, needed]}


_STREAM_OPTIONS: Final = _only_if("stream_options", [None], _has(stream=_TRUE))
_NO_STREAM: Final[Schema] = {"properties": {"stream": {"enum": [None, False]}}}
_PROMPT_LOGPROBS: Final = _only_if("prompt_logprobs", [None], _NO_STREAM)
_BEAMS: Final = _only_if("use_beam_search", [None, False], _NO_STREAM)
_EARLY_STOPPING: Final = _only_if("early_stopping", [None], _has(use_beam_search=_TRUE))
_SAMPLING: Final = [_STREAM_OPTIONS, _PROMPT_LOGPROBS, _BEAMS, _EARLY_STOPPING]
_NAMED_LOGPROBS: Final = _only_if("logprob_token_ids", [None, []], {
    **_has(logprobs={"not": {"enum": [None, False]}}),
    "not": _has(use_beam_search=_TRUE),
})  # fmt: skip
# /v1/responses returns log-probabilities if `top_logprobs` is set or `include` names them.
_RESPONSES_LOGPROBS: Final = _only_if("logprob_token_ids", [None, []], {"anyOf": [
    _has(top_logprobs={"type": "integer"}),
    _has(include={"type": "array", "contains": {"const": LOGPROBS}}),
]})  # fmt: skip
_TOP_LOGPROBS: Final = _only_if("top_logprobs", [None, 0], _has(logprobs=_TRUE))
_TOOL_CHOICE: Final = _only_if("tool_choice", [None, "none", "auto"], _has(tools=_LIST))
_BACKGROUND: Final = _only_if(
    "background", [None, False], {"properties": {"store": {"enum": [None, True]}}}
)
_ANTHROPIC_CHOICE: Final[Schema] = {"anyOf": [
    {"properties": {"tool_choice": {"type": "null"}}},
    {"properties": {"tool_choice": {"properties": {"type": {"enum": ["none", "auto"]}}}}},
    _has(tools=_LIST),
]}  # fmt: skip
_TEXTS: Final[Schema] = {"type": ["string", "array"], "minItems": 1, "maxItems": MAX_INPUTS}
# Name of a struct -> its rules; a body must meet all of them.
RULES: Final[dict[str, list[Schema]]] = {
    "ChatBody": [*_SAMPLING, _NAMED_LOGPROBS, _TOOL_CHOICE, _TOP_LOGPROBS],
    "CompletionBody": [*_SAMPLING, _NAMED_LOGPROBS],
    "GenerateBody": [_STREAM_OPTIONS],
    "ResponsesBody": [_TOOL_CHOICE, _BACKGROUND, _RESPONSES_LOGPROBS],
    "MessagesBody": [_ANTHROPIC_CHOICE],
    "ChatMessage": [{"anyOf": [
        _has(content={"type": ["string", "array"]}),
        _has(role={"const": "assistant"}),
    ]}],
    "ToolChoice": [{"anyOf": [
        {"properties": {"type": {"enum": ["auto", "any", "none"]}}},
        _has(name=_STRING),
    ]}],
    "TokenizeBody": [{"oneOf": [
        {"required": ["prompt"],
         "properties": {"prompt": _STRING, "messages": _NULL, "chat_template": _NULL}},
        {"required": ["messages"],
         "properties": {"messages": _LIST, "prompt": _NULL, "tools": nullable(TOOLS)}},
    ]}],
    "EmbedBody": [{"oneOf": [_has(texts=_LIST), _has(inputs=_LIST)]}],
    "ScoreBody": [{"anyOf": [_has(**dict.fromkeys(pair, _TEXTS)) for pair in SIDES]}],
}  # fmt: skip
