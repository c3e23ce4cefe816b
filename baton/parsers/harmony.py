"""Harmony, the format of gpt-oss: an answer is a list of messages, each with a channel.

    <|channel|>analysis<|message|>what it thinks<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>the answer<|return|>

A message to a function (the recipient after `to=`) is a call, in any channel. A message to another
recipient (a tool that the model knows by itself) is reasoning. Among the other messages, `analysis`
is reasoning; `commentary` and `final` are content. The recipient may stand before the channel. One
state machine reads the whole answer, so this is a format of reasoning and of calls at once. Source:
github.com/openai/harmony, docs/format.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from baton.parsers.grammar import (
    Form,
    Schemas,
    Tool,
    ToolFormat,
    json_form,
    sequence,
    tag,
    text_form,
)
from baton.parsers.parts import Sink
from baton.parsers.reader import Emit, Steps, TextReader

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
MESSAGE: Final = "<|message|>"
END: Final = "<|end|>"
CALL: Final = "<|call|>"
RETURN: Final = "<|return|>"
MARKERS: Final = (START, CHANNEL, MESSAGE, END, CALL, RETURN, "<|constrain|>")
ANALYSIS: Final = f"{CHANNEL}analysis{MESSAGE}"
FUNCTIONS: Final = "functions."
_ENDS: Final = (END, CALL, RETURN, START, CHANNEL)
_RECIPIENT: Final = re.compile(r"\bto=([^\s<]+)")


def read(reader: TextReader, sink: Sink, schemas: Schemas) -> Steps[None]:
    """Read an answer to its end: see grammar.Grammar."""
    space = yield from reader.space()
    in_header = (yield from reader.comes("to=")) or (yield from reader.comes(CHANNEL))
    if not in_header:
        sink.content(space)
    said: set[Emit] = set()
    while True:
        if in_header:
            header: list[str] = []
            if not (yield from reader.until((MESSAGE,), header.append)):
                return
            mark = yield from _message(reader, sink, schemas, "".join(header), said)
        else:  # the rest of a message, or text without a header
            mark = yield from reader.until(_ENDS, sink.content)
        if not mark:
            return
        if mark == CHANNEL:
            reader.unread(mark)
        in_header = mark in (START, CHANNEL)


def _message(
    reader: TextReader, sink: Sink, schemas: Schemas, header: str, said: set[Emit]
) -> Steps[str]:
    """Read a message's text; return the mark that ends it, "" at the end of the answer.

    `said`: the kinds (reasoning, content) of the messages before. A message of the same kind as an
    earlier one begins with a line break.
    """
    found = _RECIPIENT.search(header)
    recipient = found[1] if found else ""
    name = recipient.removeprefix(FUNCTIONS)
    is_call = bool(name) and (name != recipient or name in schemas)
    if is_call and sink.may_call:
        sink.call(name)
        return (yield from reader.until(_ENDS, sink.arguments, tail=False))
    sink.thinking = bool(recipient) or f"{CHANNEL}analysis" in header
    emit = sink.reasoning if sink.thinking else sink.content
    if emit in said:
        emit("\n")
    said.add(emit)
    mark = yield from reader.until(_ENDS, emit)
    sink.thinking = False
    return mark


# ---- answers that must have a form ----

# The model may think first, and may then say what it is about to do.
_THOUGHT: Final = tag(ANALYSIS, {"type": "any_text"}, f"{END}{START}assistant")
_PREAMBLE: Final = tag(
    f"{CHANNEL}commentary{MESSAGE}", {"type": "any_text"}, f"{END}{START}assistant"
)


def final(form: Form) -> Form:
    """Return the form of an answer with an optional thought and a final message of `form`."""
    return sequence(_optional(_THOUGHT), text_form(f"{CHANNEL}final{MESSAGE}"), form)


class HarmonyWriter:
    """Implements grammar.Writer. There is one call at most, because it ends the turn."""

    def forced(self, tools: Sequence[Tool], several: bool) -> Form:
        """See Writer.forced."""
        calls: list[Any] = [
            tag(
                f"{CHANNEL}commentary to={FUNCTIONS}{tool.name} <|constrain|>json{MESSAGE}",
                json_form(tool.schema),
                "",
            )
            for tool in tools
        ]
        return sequence(_optional(_THOUGHT), _one_of(calls))

    def offered(self, tools: Sequence[Tool], several: bool) -> Form:
        """See Writer.offered."""
        *_, calls = self.forced(tools, several)["elements"]
        text = sequence(text_form(f"{CHANNEL}final{MESSAGE}"), {"type": "any_text"})
        call = sequence(_optional(_PREAMBLE), calls)
        return sequence(_optional(_THOUGHT), _one_of([text, call]))


def _optional(form: Form) -> Form:
    return {"type": "optional", "content": form}


def _one_of(forms: list[Any]) -> Form:
    return {"type": "or", "elements": forms}


FORMAT: Final = ToolFormat("openai", read, HarmonyWriter(), MARKERS, (CHANNEL,))
