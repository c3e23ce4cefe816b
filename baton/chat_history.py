"""Calls of tools in a conversation's history, as some models' chat templates want them.

Most templates take messages as OpenAI spells them, arguments as objects. Some do not, and would
refuse them, leave calls out or show the model what it never writes; which they are is told by
their text. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

Message = dict[str, Any]
Rewrite = Callable[[list[Message]], list[Message]]

_LOOPS: Final = re.compile(r"""in message(\.|\[['"])tool_calls""")
_JOINED: Final = re.compile(r"""['"]arguments['"]\]\s*\+""")  # what follows a filter is not joined
_SEPARATE: Final = re.compile(
    r"""assistant['"] and message(\.content|\[['"]content['"]\]) is none"""
)


def rewrites_of(source: str) -> tuple[Rewrite, ...]:
    """What a template's text asks for, in the order in which it is to be done."""
    found: list[Rewrite] = []
    if "tool_calls[0]" in source and not _LOOPS.search(source):
        found.append(one_call_each)
    if _SEPARATE.search(source):
        found.append(calls_apart)
    if "<|channel|>" in source and "message.thinking" in source:
        found.append(thoughts_in_analysis)
    if "<|tool_calls_section_begin|>" in source:
        found.append(numbered_ids)
    if _JOINED.search(source):
        found.append(arguments_as_text)
    return tuple(found)


def one_call_each(messages: list[Message]) -> list[Message]:
    """Several calls of one message become messages of their own, each before its result: for
    templates that show the first one only, or refuse others (Llama 3, gpt-oss)."""
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
    """What is said beside calls becomes a message before them, which have no content then: for
    templates that show one or the other (DeepSeek R1 and V3)."""
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
    """The reasoning under the name that gpt-oss's template knows; beside a call it has room for
    one text only."""
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
    """Kimi's ids, functions.NAME:NUMBER, numbered from 0 in the whole conversation."""
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


def arguments_as_text(messages: list[Message]) -> list[Message]:
    """Arguments as JSON text, for templates that join them to other texts."""
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


def _calls(message: Mapping[str, Any]) -> Sequence[Message]:
    return message.get("tool_calls") or ()
