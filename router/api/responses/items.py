"""Input items of /v1/responses -> the messages of a chat. Pure.

message              becomes a message; the role `developer` becomes `system`
reasoning            becomes the reasoning of the assistant's message that follows
function_call        becomes a call in the assistant's message directly before it, or in a new one
custom_tool_call     becomes such a call of the function that stands for the custom tool
..._output           of either call becomes a message of role `tool`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

from baton.protocol.errors import InvalidRequest, UnsupportedFeature
from router.api.openai.chat import MAX_MESSAGES
from router.api.responses.custom_input import FIELD
from router.api.responses.output import item_id
from router.api.responses.tools import flat_name
from router.images.parts import ImagePart, of_chat

_ROLES: Final = ("user", "assistant", "system", "developer")
_IMAGE: Final = "input_image"
_TEXTS: Final = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_PREFIXES: Final = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
}
Item = dict[str, Any]


def items_of(given: object) -> list[Item]:
    """Return the field `input` as items; a string becomes a user message.

    Raises InvalidRequest, naming the part of `input`."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if not isinstance(given, list):
        raise InvalidRequest("input must be a string or a list of items", field="input")
    items = cast("list[object]", given)
    if not items:
        raise InvalidRequest("input must not be empty", field="input")
    if len(items) > MAX_MESSAGES:
        raise InvalidRequest(f"input: at most {MAX_MESSAGES} items", field="input")
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise InvalidRequest(f"{where} must be an object", field=where)
        if not isinstance(cast("Item", item).get("id"), str | None):
            raise InvalidRequest(f"{where}.id must be a string", field=f"{where}.id")
    return cast("list[Item]", items)


def messages_of(items: Sequence[Item], num_earlier: int, instructions: str | None) -> list[Item]:
    """Return the messages of the chat. The first `num_earlier` items come from earlier responses.

    Raises InvalidRequest or UnsupportedFeature, naming `input`'s part.
    """
    begun: list[Item] = []
    if instructions:
        begun.append({"role": "system", "content": instructions})
    conversation = _Conversation(begun)
    for index, item in enumerate(items):
        conversation.add(item, f"input[{index - num_earlier}]")
    return conversation.messages


def kept(items: Sequence[Item], response_id: str) -> list[Item]:
    """Return input items as they are stored: each with an id and all fields of its type."""
    return [_whole(item, response_id, index) for index, item in enumerate(items)]


def _whole(item: Item, response_id: str, index: int) -> Item:
    kind = item.get("type") or "message"
    id_ = item.get("id") or item_id(_PREFIXES[kind], response_id, f"i{index}")
    if kind == "reasoning":
        return {"summary": [], **item, "id": id_}
    item = {"status": "completed", **item, "type": kind, "id": id_}
    if isinstance(item.get("content"), str):
        said = item["role"] == "assistant"
        part = {"type": "output_text" if said else "input_text", "text": item["content"]}
        item["content"] = [{**part, "annotations": []} if said else part]
    return item


class _Conversation:
    """The messages so far. `_turn`: the assistant's last message while the next item may belong to
    it, else None."""

    def __init__(self, begun: list[Item]) -> None:
        self.messages = begun
        self._turn: Item | None = None

    def add(self, item: Item, where: str) -> None:
        kind = item.get("type")
        if kind is None and "role" in item:
            kind = "message"
        match kind:
            case "message":
                self._message(item, where)
            case "reasoning":
                self._reasoning(item, where)
            case "function_call":
                self._call(item, where, _string(item, "arguments", where))
            case "custom_tool_call":
                self._call(item, where, {FIELD: _string(item, "input", where)})
            case "function_call_output" | "custom_tool_call_output":
                self._turn = None
                call_id = _string(item, "call_id", where)
                output = _content(item.get("output"), f"{where}.output")
                self.messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
            case _:
                shown = str(kind)[:64]
                message = f"{where}: items of type {shown!r} are not supported by this server"
                raise UnsupportedFeature(message, field=f"{where}.type")

    def _message(self, item: Item, where: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            message = f"{where}.role must be one of {', '.join(_ROLES)}"
            raise InvalidRequest(message, field=f"{where}.role")
        given, field = item.get("content"), f"{where}.content"
        if role != "assistant":
            self._turn = None
            # Chat templates have no role `developer`; in OpenAI's API it means `system`.
            said = "system" if role == "developer" else role
            self.messages.append({"role": said, "content": _content(given, field)})
            return
        content = _text(given, field)
        if self._turn is not None and not self._turn["content"] and "tool_calls" not in self._turn:
            self._turn["content"] = content
        else:
            self._begin(content)

    def _reasoning(self, item: Item, where: str) -> None:
        thought = ""
        for name in ("content", "summary"):
            if not thought and item.get(name):
                thought = _text(item[name], f"{where}.{name}")
        self._begin("")["reasoning"] = thought or None

    def _call(self, item: Item, where: str, arguments: str | Item) -> None:
        turn = self._turn if self._turn is not None else self._begin("")
        namespace = None if item.get("namespace") is None else _string(item, "namespace", where)
        name = flat_name(namespace, _string(item, "name", where))
        call = {
            "id": _string(item, "call_id", where),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        turn.setdefault("tool_calls", []).append(call)

    def _begin(self, content: str) -> Item:
        turn: Item = {"role": "assistant", "content": content}
        self.messages.append(turn)
        self._turn = turn
        return turn


def _string(item: Item, name: str, where: str) -> str:
    found = item.get(name)
    if not isinstance(found, str):
        field = f"{where}.{name}"
        raise InvalidRequest(f"{field} must be a string", field=field)
    return found


def _content(content: object, field: str) -> str | list[Item | ImagePart]:
    """Return the content of a message that may hold images: text, or parts if it holds some."""
    if not isinstance(content, list) or not any(map(_is_image, cast("list[object]", content))):
        return _text(content, field)
    parts: list[Item | ImagePart] = []
    for index, part in enumerate(cast("list[object]", content)):
        where = f"{field}[{index}]"
        if _is_image(part):
            parts.append(of_chat(cast("Item", part), where))
        else:
            parts.append({"type": "text", "text": _part(part, where)})
    return parts


def _is_image(part: object) -> bool:
    return isinstance(part, dict) and cast("Item", part).get("type") == _IMAGE


def _text(content: object, field: str) -> str:
    """Return the text of `content`: a string, or a list of text parts, which are joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{field} must be a string or a list of parts", field=field)
    parts = enumerate(cast("list[object]", content))
    return "\n".join(_part(part, f"{field}[{index}]") for index, part in parts)


def _part(part: object, where: str) -> str:
    """Return the text of a part. Raises InvalidRequest, UnsupportedFeature."""
    if not isinstance(part, dict):
        raise InvalidRequest(f"{where} must be an object", field=where)
    item = cast("Item", part)
    kind = item.get("type")
    if kind == "refusal":
        return _string(item, "refusal", where)
    if kind in _TEXTS:
        return _string(item, "text", where)
    message = f"{where}: only text parts are supported, not {str(kind)[:64]!r}"
    raise UnsupportedFeature(message, field=where)
