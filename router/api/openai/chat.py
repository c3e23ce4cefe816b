"""Messages and tools of a chat: checks what clients send, and makes what chat templates get.

A message keeps its fields, with three changes: its text parts are joined to one string, unless
images stand between them; the arguments of its calls, which clients send as JSON text, become
objects, as templates expect; its reasoning stands under both names, `reasoning` and
`reasoning_content`.
Bodies are in router/api/openai/bodies.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, cast

import msgspec
import orjson
from msgspec import Meta

from baton.protocol.errors import InvalidRequest, UnsupportedFeature
from baton.text.chat_template import RESERVED_NAMES
from router.api.openai.fields import MAX_NAME_CHARS, Name
from router.images.parts import ImagePart, of_chat

MAX_MESSAGES: Final = 4096
MAX_TOOLS: Final = 512
# OpenAI allows only 64 characters and no dots. Here longer names and dots are allowed, as in vLLM.
TOOL_NAME: Final = rf"[A-Za-z0-9_.\-]{{1,{MAX_NAME_CHARS}}}"
_TOOL_NAME: Final = re.compile(TOOL_NAME)
# Type of a content part that is text -> the field with its text.
TEXT_PARTS: Final = {
    "text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal",
    "thinking": "thinking",
}  # fmt: skip
IMAGE_PARTS: Final = ("image_url", "input_image")
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class CalledFunction(msgspec.Struct, kw_only=True):
    """The function of a call in an earlier message. `arguments`: an object, or its JSON text."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A call that the assistant made earlier in the conversation."""

    function: CalledFunction
    id: str | None = None
    type: str = msgspec.field(default_factory=lambda: "function")  # never omitted for the template


class ChatMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One message. `content` is text, or a list of parts: of text or images, as clients write them,
    or ImageParts, if another dialect has read them."""

    role: Name  # any: the chat template decides which roles it knows
    content: Any = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


Messages = Annotated[list[ChatMessage], Meta(min_length=1), Meta(max_length=MAX_MESSAGES)]
Tools = Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)]


class ToolFunction(msgspec.Struct, kw_only=True):
    """The struct that checks a tool's function. The template gets the client's own object."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ChatTool(msgspec.Struct, kw_only=True):
    type: str
    function: ToolFunction


def messages_of(
    messages: list[ChatMessage],
) -> tuple[list[dict[str, Any]], tuple[ImagePart, ...]]:
    """Return the messages for the template, as plain dicts, and their images in order.

    Raises InvalidRequest, naming the field, for a message without content, for parts that are no
    text and no image, and for arguments that are not a JSON object.
    """
    images: list[ImagePart] = []
    plain = cast("list[dict[str, Any]]", msgspec.to_builtins(messages))
    for index, (message, item) in enumerate(zip(messages, plain, strict=True)):
        if type(message.content) is not str:
            content, found = _content_of(message, f"messages[{index}].content")
            item["content"] = content
            images += found
        for number, call in enumerate(message.tool_calls or ()):
            field = f"messages[{index}].tool_calls[{number}].function.arguments"
            function = item["tool_calls"][number]["function"]
            function["arguments"] = _arguments(call.function.arguments, field)
        thought = message.reasoning or message.reasoning_content
        if thought:
            item["reasoning"] = item["reasoning_content"] = thought
    return plain, tuple(images)


def tools_of(given: list[dict[str, Any]] | None) -> tuple[dict[str, Any], ...]:
    """Check the tools; return them as the client wrote them.

    Raises InvalidRequest, naming the field."""
    names: set[str] = set()
    for index, tool in enumerate(given or ()):
        where = f"tools[{index}]"
        try:
            checked = msgspec.convert(tool, ChatTool, strict=True)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"{where}: {error}", field=where) from error
        if checked.type != "function":
            message = f"{where}: only tools of type function are supported"
            raise UnsupportedFeature(message, field=f"{where}.type")
        name, field = checked.function.name, f"{where}.function.name"
        if not _TOOL_NAME.fullmatch(name):
            message = f"{field}: 1 to {MAX_NAME_CHARS} letters, digits and _.-"
            raise InvalidRequest(message, field=field)
        if name in names:
            raise InvalidRequest(f"{field}: another tool is called {name!r}, too", field=field)
        names.add(name)
    return tuple(given or ())


def schemas_of(tools: tuple[dict[str, Any], ...]) -> dict[str, dict[str, Any]]:
    """Return the JSON schema of each tool's parameters, by the tool's name."""
    return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}


def template_kwargs(
    given: Mapping[str, Any] | None, reasoning_effort: Effort | None = None
) -> dict[str, Any]:
    """Check the variables that a client sets in its chat template: scalars, under plain names.

    `reasoning_effort` also switches thinking on, or off for `none`, under the names that templates
    read. A template ignores names that it does not read (ChatTemplate.parameters).
    """
    kwargs = dict(given or {})
    for name, value in kwargs.items():
        field = f"chat_template_kwargs.{name}"
        plain = name.isidentifier() and not name.startswith("_") and len(name) <= MAX_NAME_CHARS
        if not plain or name in RESERVED_NAMES:
            raise InvalidRequest(f"{field[: 2 * MAX_NAME_CHARS]} cannot be set", field=field)
        if value is not None and not isinstance(value, bool | int | float | str):
            raise InvalidRequest(f"{field} must be a plain value", field=field)
    if reasoning_effort is None:
        return kwargs
    thinks = reasoning_effort != "none"
    asked = {"reasoning_effort": reasoning_effort, "enable_thinking": thinks, "thinking": thinks}
    return {**asked, **kwargs}


def _arguments(given: str | dict[str, Any] | None, field: str) -> dict[str, Any]:
    """Return a call's arguments as an object; absent arguments as an empty one."""
    if isinstance(given, dict) or not given:
        return given or {}
    try:
        found: object = orjson.loads(given)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"{field} is not valid JSON: {error}", field=field) from error
    if not isinstance(found, dict):
        raise InvalidRequest(f"{field} must be a JSON object", field=field)
    return cast("dict[str, Any]", found)


def text_of(message: ChatMessage, field: str) -> str:
    """Return the text of a message's content, its parts joined. Raises InvalidRequest, naming
    `field`."""
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        # An earlier answer may have had no content, only reasoning, calls or a refusal.
        if message.role != "assistant":
            raise InvalidRequest(f"{field} is missing", field=field)
        return ""
    if not isinstance(content, list):
        raise InvalidRequest(f"{field} must be a string or a list of parts", field=field)
    parts = enumerate(cast("list[object]", content))
    return "\n".join(_text_part(part, f"{field}[{index}]") for index, part in parts)


def _content_of(
    message: ChatMessage, field: str
) -> tuple[str | list[dict[str, str]], list[ImagePart]]:
    """Return a message's content for the template, and its images. Without images the content is
    text; with them, the parts as templates expect them. Raises InvalidRequest."""
    content = message.content
    images: list[ImagePart] = []
    parts: list[dict[str, str]] = []
    for index, part in enumerate(
        cast("list[object]", content) if isinstance(content, list) else ()
    ):
        where = f"{field}[{index}]"
        item = cast("dict[str, Any]", part) if isinstance(part, dict) else {}
        if isinstance(part, ImagePart):
            images.append(part)
        elif item.get("type") in IMAGE_PARTS:
            images.append(of_chat(item, where))
        else:
            parts.append({"type": "text", "text": _text_part(part, where)})
            continue
        parts.append({"type": "image"})
    return (parts if images else text_of(message, field)), images


def _text_part(part: object, where: str) -> str:
    """Return the text of a part. Raises InvalidRequest, UnsupportedFeature."""
    if isinstance(part, str):
        return part
    item = cast("dict[str, object]", part) if isinstance(part, dict) else {}
    kind = item.get("type")
    holder = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if holder is None:
        told = f", not {kind[:MAX_NAME_CHARS]}" if isinstance(kind, str) else ""
        message = f"{where}: only parts of text and images are supported{told}"
        raise UnsupportedFeature(message, field=where)
    text = item.get(holder)
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.{holder} must be a string", field=f"{where}.{holder}")
    return text
