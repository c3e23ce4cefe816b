"""Anthropic's messages -> the messages of a chat. Pure.

A user message may hold results of tools: each result becomes a message of role `tool`, and the text
around them becomes user messages, in the same order. An assistant message, with its text, reasoning
and tool calls, becomes one message. Images stand where their client put them, also in results of
tools. Documents and the blocks of Anthropic's own tools are refused, naming the block.
"""

from __future__ import annotations

from typing import Any, Final, cast

from baton.protocol.errors import InvalidRequest, UnsupportedFeature
from router.api.openai.chat import MAX_MESSAGES
from router.images.parts import ImagePart, of_block

_ROLES: Final = ("user", "assistant", "system")
Block = dict[str, Any]


def messages_of(system: object, given: object) -> list[dict[str, Any]]:
    """Return the messages of the chat.

    Raises InvalidRequest or UnsupportedFeature, naming the part."""
    messages: list[dict[str, Any]] = []
    if system not in (None, "", []):
        messages.append({"role": "system", "content": _plain(system, "system")})
    if not isinstance(given, list) or not given:
        raise InvalidRequest("messages must be a list with a message", field="messages")
    items = cast("list[object]", given)
    if len(items) > MAX_MESSAGES:
        raise InvalidRequest(f"messages: at most {MAX_MESSAGES} messages", field="messages")
    for index, item in enumerate(items):
        where = f"messages[{index}]"
        if not isinstance(item, dict):
            raise InvalidRequest(f"{where} must be an object", field=where)
        message = cast("dict[str, Any]", item)
        role, content, field = message.get("role"), message.get("content"), f"{where}.content"
        match role:
            case "user":
                messages += _users(content, field)
            case "assistant":
                messages.append(_assistants(content, field))
            case "system":
                messages.append({"role": "system", "content": _plain(content, field)})
            case _:
                wanted = f"{where}.role must be one of {', '.join(_ROLES)}"
                raise InvalidRequest(wanted, field=f"{where}.role")
    if not messages:  # contents without a block say nothing
        raise InvalidRequest("messages must have content", field="messages")
    return messages


def _users(content: object, field: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    messages: list[dict[str, Any]] = []
    parts: list[str | ImagePart] = []

    def say() -> None:
        if parts:
            messages.append({"role": "user", "content": _said(parts)})
            parts.clear()

    for block, where in _blocks(content, field):
        if block.get("type") == "tool_result":
            say()
            result = block.get("content")
            told = "" if result is None else _content(result, f"{where}.content")
            call_id = _string(block, "tool_use_id", where)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": told})
        else:
            parts.append(_part(block, where))
    say()
    return messages


def _content(content: object, field: str) -> str | list[str | ImagePart]:
    """Return a string, or a list of blocks of text and images, for a chat."""
    if isinstance(content, str):
        return content
    return _said([_part(block, where) for block, where in _blocks(content, field)])


def _said(parts: list[str | ImagePart]) -> str | list[str | ImagePart]:
    """Return a chat's content: texts joined, unless images stand between them."""
    texts = [part for part in parts if isinstance(part, str)]
    return "\n".join(texts) if len(texts) == len(parts) else list(parts)


def _part(block: Block, where: str) -> str | ImagePart:
    return of_block(block, where) if block.get("type") == "image" else _text(block, where)


def _assistants(content: object, field: str) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block, where in _blocks(content, field):
        match block.get("type"):
            case "thinking":
                thoughts.append(_string(block, "thinking", where))
            case "redacted_thinking":
                pass  # encrypted: only Anthropic can read it
            case "tool_use":
                calls.append(_call(block, where))
            case _:
                texts.append(_text(block, where))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Block, where: str) -> dict[str, Any]:
    arguments = block.get("input", {})
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{where}.input must be an object", field=f"{where}.input")
    function = {"name": _string(block, "name", where), "arguments": arguments}
    return {"id": _string(block, "id", where), "type": "function", "function": function}


def _plain(content: object, field: str) -> str:
    """Return the text of `content`: a string, or a list of text blocks, which are joined."""
    if isinstance(content, str):
        return content
    return "\n".join(_text(block, where) for block, where in _blocks(content, field))


def _blocks(content: object, field: str) -> list[tuple[Block, str]]:
    if not isinstance(content, list):
        raise InvalidRequest(f"{field} must be a string or a list of blocks", field=field)
    blocks: list[tuple[Block, str]] = []
    for index, block in enumerate(cast("list[object]", content)):
        where = f"{field}[{index}]"
        if not isinstance(block, dict):
            raise InvalidRequest(f"{where} must be an object", field=where)
        blocks.append((cast("Block", block), where))
    return blocks


def _text(block: Block, where: str) -> str:
    kind = block.get("type")
    if kind != "text":
        message = f"{where}: blocks of type {str(kind)[:64]!r} are not supported by this server"
        raise UnsupportedFeature(message, field=f"{where}.type")
    return _string(block, "text", where)


def _string(block: Block, name: str, where: str) -> str:
    found = block.get(name)
    if not isinstance(found, str):
        field = f"{where}.{name}"
        raise InvalidRequest(f"{field} must be a string", field=field)
    return found
