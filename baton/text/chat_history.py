"""Rewrites tool calls in a conversation's history as some models' chat templates need them.

Most templates take messages as OpenAI spells them, with arguments as objects. Some templates would
refuse such messages, leave calls out, or show the model something that it never writes. A
template's text tells which rewrites it needs. Pure functions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

Message = dict[str, Any]
Rewrite = Callable[[list[Message]], list[Message]]

_LOOPS: Final = re.compile(r"""in message(\.|\[['"])tool_calls""")
# Arguments that are followed by a filter are not joined.
_JOINED: Final = re.compile(r"""['"]arguments['"]\]\s*\+""")
_TOOL_ROLE: Final = re.compile(r"""role['"]?[\])]? ?[!=]= ?['"]tool['"]""")
_SEPARATE: Final = re.compile(
    r"""assistant['"] and message(\.content|\[['"]content['"]\]) is none"""
)


def rewrites_of(source: str) -> tuple[Rewrite, ...]:
    """Return the rewrites that a template's text needs, in the order in which to apply them."""
    found: list[Rewrite] = []
    if "tool_calls[0]" in source and not _LOOPS.search(source):
        found.append(one_call_each)
    if _SEPARATE.search(source):
        found.append(calls_apart)
    if "<|channel|>" in source and "message.thinking" in source:
        found.append(thoughts_in_analysis)
    if "<|tool_calls_section_begin|>" in source:
        found.append(numbered_ids)
    if "tool_responses" in source and not _TOOL_ROLE.search(source):
        found.append(results_beside_calls)
    if _JOINED.search(source):
        found.append(arguments_as_text)
    if "<|tool|>" in source and "tool_calls" not in source:
        found.append(calls_in_content)
    return tuple(found)


def wants_tools_in_system(source: str) -> bool:
    """Whether a template shows only the tools of a system message."""
    return "message['tools']" in source and "tool_calls" not in source


def one_call_each(messages: list[Message]) -> list[Message]:
    """Split a message with several calls into one message per call, each before its result.

    For templates that show the first call only, or refuse several calls (Llama 3, gpt-oss).
    """
    made: list[Message] = []
    waiting: dict[object, Message] = {}
    for message in messages:
        if message.get("role") == "tool" and waiting:
            asked = message.get("tool_call_id")
            made.append(waiting.pop(asked if asked in waiting else next(iter(waiting))))
        elif message.get("role") != "tool":
            made += waiting.values()
            waiting = {}
        calls = _calls(message)
        if len(calls) < 2:
            made.append(message)
            continue
        for at, call in enumerate(calls):
            first = {"role": "assistant", "content": ""} if at else message
            waiting[call.get("id", at)] = {**first, "tool_calls": [call]}
    return [*made, *waiting.values()]


def calls_apart(messages: list[Message]) -> list[Message]:
    """Move the content of a message with calls into a message before it.

    For templates that show only content or calls of a message (DeepSeek R1 and V3).
    """
    made: list[Message] = []
    for message in messages:
        if not _calls(message):
            made.append(message)
            continue
        if message.get("content"):
            made.append({key: value for key, value in message.items() if key != "tool_calls"})
        made.append({**message, "content": None})
    return made


def thoughts_in_analysis(messages: list[Message]) -> list[Message]:
    """Put the reasoning under `thinking`, the name that gpt-oss's template knows.

    That template has room for one text beside a call, so the content is appended to the reasoning.
    """
    made: list[Message] = []
    for message in messages:
        thought = message.get("reasoning")
        if thought and _calls(message) and message.get("content"):
            text = f"{thought}\n\n{message['content']}"
            made.append({**message, "content": "", "thinking": text})
        else:
            made.append({**message, "thinking": thought} if thought else message)
    return made


def numbered_ids(messages: list[Message]) -> list[Message]:
    """Give calls Kimi's ids, functions.NAME:NUMBER, numbered from 0 in the whole conversation."""
    ids: dict[object, str] = {}
    made: list[Message] = []
    number = 0
    for message in messages:
        calls: list[Message] = []
        for call in _calls(message):
            own = f"functions.{call['function']['name']}:{number}"
            ids[call.get("id")] = own
            calls.append({**call, "id": own})
            number += 1
        if calls:
            made.append({**message, "tool_calls": calls})
        elif message.get("tool_call_id") in ids:
            made.append({**message, "tool_call_id": ids[message["tool_call_id"]]})
        else:
            made.append(message)
    return made


def results_beside_calls(messages: list[Message]) -> list[Message]:
    """Put results as `tool_responses` into the message of their calls, and its content before it.

    For templates without messages of role tool (the first one of Gemma 4).
    """
    made: list[Message] = []
    names: dict[object, str] = {}
    for message in calls_apart(messages):
        if message.get("role") == "tool" and names:
            name = names.get(message.get("tool_call_id")) or next(iter(names.values()))
            response = {"name": name, "response": _as_object(message.get("content"))}
            made[-1] = {
                **made[-1],
                "tool_responses": [*made[-1].get("tool_responses", ()), response],
            }
            continue
        names = {call.get("id"): call["function"]["name"] for call in _calls(message)}
        made.append(message)
    return made


def calls_in_content(messages: list[Message]) -> list[Message]:
    """Put calls into the content as the text that the model writes.

    For a template that knows no calls (Phi-4-mini).
    """
    made: list[Message] = []
    for message in messages:
        calls = [call["function"] for call in _calls(message)]
        text = f"<|tool_call|>{json.dumps(calls, ensure_ascii=False)}<|/tool_call|>"
        content = f"{message.get('content') or ''}{text}" if calls else message.get("content")
        made.append({**message, "content": content})
    return made


def tools_in_system(messages: list[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Put the functions as JSON text into the system message (Phi-4-mini).

    A system message is added if there is none.
    """
    has_one = bool(messages) and messages[0].get("role") == "system"
    system = messages[0] if has_one else {"role": "system", "content": ""}
    text = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    return [{**system, "tools": text}, *messages[has_one:]]


def arguments_as_text(messages: list[Message]) -> list[Message]:
    """Turn arguments into JSON text, for templates that join them to other texts."""
    return [
        {**message, "tool_calls": [_with_text(call) for call in _calls(message)]}
        if _calls(message)
        else message
        for message in messages
    ]


def _with_text(call: Message) -> Message:
    function = call["function"]
    text = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _as_object(content: object) -> object:
    """Return a result as an object if it is the text of a JSON object, else return it unchanged."""
    try:
        found = json.loads(content) if isinstance(content, str) else None
    except (ValueError, RecursionError):
        return content
    return cast("object", found) if isinstance(found, dict) else content


def _calls(message: Mapping[str, Any]) -> Sequence[Message]:
    return message.get("tool_calls") or ()
