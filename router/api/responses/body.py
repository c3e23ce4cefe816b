"""The body of /v1/responses: a strict struct, and its translation to a chat. Pure.

Between the two, router/api/responses/conversation.py looks up the earlier responses and items that
the body refers to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from baton.protocol.errors import InvalidRequest
from router.api.dialect import chat_body, in_own_names
from router.api.openai.bodies import ChatBody, object_of, struct_of
from router.api.openai.chat import Effort, Tools
from router.api.openai.fields import MaxNewTokens, Session, Stops, StopText
from router.api.responses.items import Item, messages_of
from router.api.responses.tools import Toolbox, choice_of, toolbox_of
from router.api.unserved import Unserved, refuse

LOGPROBS: Final = "message.output_text.logprobs"
# A chat's field -> what this API calls it.
NAMES: Final = {
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "messages": "input",
    "tool_choice.allowed_tools": "tool_choice",
}
_ONE: Final = ": each call has one response"
UNSERVED: Final[Unserved] = {
    "context_management": (([],), ""),
    "conversation": ((), ": say previous_response_id"),
    "enable_response_messages": ((False,), ""),
    "best_of": ((1,), _ONE),
    "moderation": ((), ""),
    "n": ((1,), _ONE),
    "previous_input_messages": (([],), ": say previous_response_id"),
    "prompt": ((), ""),
    "truncation": (("disabled",), ""),
}
Includable = Literal[
    "message.output_text.logprobs",
    # Reasoning is never encrypted here; clients send back the plain text.
    "reasoning.encrypted_content",
    # These belong to tools and inputs that this server does not have: nothing is included.
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
Metadata = Annotated[
    dict[
        Annotated[str, Meta(max_length=64)],
        Annotated[str, Meta(max_length=512)],
    ],
    Meta(max_length=16),
]
Length = Literal["auto", "concise", "detailed"]


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: Effort | None = None
    summary: Length | None = None
    generate_summary: Length | None = None  # the older name


class TextOptions(msgspec.Struct, kw_only=True):
    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesBody(msgspec.Struct, kw_only=True):
    """The fields of /v1/responses that differ from a chat's. Its sampling fields are a chat's."""

    input: Any = None
    previous_response_id: str | None = None
    instructions: str | None = None
    max_output_tokens: MaxNewTokens | None = None
    max_tool_calls: int | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    background: bool | None = None
    include: list[Includable] | None = None
    stop: StopText | Stops | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_cache_key: Session | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: Session | None = None


@dataclass(frozen=True, slots=True)
class Given:
    """A checked body, and all fields of the JSON object that it was read from."""

    body: ResponsesBody
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ResponsesCall:
    """A body's translation: the chat to run, and what its answer needs. `items`: the whole
    conversation. `names`: the chat's field -> the client's field, for errors."""

    body: ResponsesBody
    chat: ChatBody
    items: list[Item]
    tools: Toolbox
    names: Mapping[str, str]

    @property
    def summarized(self) -> bool:
        """Whether the reasoning is returned as `summary`. Its text is the same: nothing here can
        summarize."""
        asked = self.body.reasoning
        return asked is not None and (asked.summary or asked.generate_summary) is not None


def read(raw: bytes) -> Given:
    """Parse and check a body. Raises InvalidRequest, naming the field."""
    fields = object_of(raw)
    refuse(fields, UNSERVED)
    body = struct_of(fields, ResponsesBody)
    _check(body)
    return Given(body, fields)


def asks_background(raw: bytes) -> bool:
    """Whether a body asks for a response in the background. May raise InvalidRequest for a body
    that is no JSON object."""
    return b'"background"' in raw and object_of(raw).get("background") is True


def call_of(
    given: Given, earlier: Sequence[Item], items: Sequence[Item], drops_tools: bool
) -> ResponsesCall:
    """Translate a body into a chat. `earlier`: items of earlier responses; `items`: those of the
    body. `drops_tools`: leave OpenAI's own tools out, with a note, instead of refusing them.

    Raises InvalidRequest, naming the field.
    """
    body, whole = given.body, [*earlier, *items]
    box = toolbox_of(body.tools or (), drops_tools)
    names = {**NAMES, **box.places}
    logprobs = body.top_logprobs is not None or LOGPROBS in (body.include or ())
    translated: dict[str, Any] = {
        "messages": messages_of(whole, len(earlier), body.instructions),
        "max_completion_tokens": body.max_output_tokens,
        "tools": None if body.tools is None else box.functions,
        "tool_choice": choice_of(body.tool_choice, box),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(body.text.format if body.text else None),
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "chat_template_kwargs": body.chat_template_kwargs,
        "stop": body.stop,
        "logprobs": logprobs or None,
        "top_logprobs": body.top_logprobs if logprobs else None,
    }
    with in_own_names(names):
        chat = chat_body(given.fields, translated)
    return ResponsesCall(body, chat, whole, box, names)


def _check(body: ResponsesBody) -> None:
    if body.background and body.store is False:
        message = "background: such a response is stored, so store must not be false"
        raise InvalidRequest(message, field="background")


def _response_format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the chat's response_format, where the schema and its name are one level deeper."""
    if given is None or given.get("type") != "json_schema":
        return given
    schema = {name: value for name, value in given.items() if name != "type" and value is not None}
    return {"type": "json_schema", "json_schema": schema}
