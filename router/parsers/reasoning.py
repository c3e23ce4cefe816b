"""Reasoning between tags at the start of an answer; how it may begin without its opening tag.

Templates differ: the model writes `<think>` itself, or its prompt ends with it, or its prompt ends
with `</think>` (thinking switched off). What the prompt ends with decides, if it does; else what
the format says. Without a closing tag everything is reasoning: the answer was cut short. A call
may be made within reasoning; what is said after it is reasoning as before, up to the same tag.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from router.parsers.parts import Sink
from router.parsers.reader import Reader, Steps

OPEN: Final = "<think>"
CLOSE: Final = "</think>"


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """A format by name. `begins(chat_template_kwargs)`: an answer without `<think>` is reasoning.

    `call`: what begins a call within it, and what must follow (after white space) to be one: models
    at times call a tool in mid-thought.
    """

    name: str
    begins: Callable[[Mapping[str, Any]], bool]
    call: tuple[str, tuple[str, ...]] | None = None

    def opened(self, prompt: str, kwargs: Mapping[str, Any]) -> bool:
        """Whether an answer to `prompt` starts within reasoning, if it does not say so itself."""
        end = prompt.rstrip()
        if end.endswith((OPEN, CLOSE)):
            return end.endswith(OPEN)
        return self.begins(kwargs)

    def opened_by(self, message: str) -> bool:
        """The same for a message of the assistant's that is to be continued."""
        return message.rfind(OPEN) > message.rfind(CLOSE)


def read(reader: Reader, sink: Sink, form: ReasoningFormat, opened: bool) -> Steps[None]:
    """Read the reasoning with its tags, if the answer starts with some."""
    space = yield from reader.space()
    tagged = yield from reader.literal(OPEN)
    if not tagged and not opened:
        sink.content(space)
        return
    sink.thinking = True
    if space and not tagged:
        sink.reasoning(space)
    call, follows = form.call if form.call and sink.may_call else ("", ())
    markers = (CLOSE, call) if call else (CLOSE,)
    while (yield from reader.until(markers, sink.reasoning)) == call != "":
        reader.mark(len(call))
        yield from reader.space()
        if (yield from _one_of(reader, follows)):
            reader.rewind()
            sink.interrupted(CLOSE)
            return
        sink.reasoning(reader.marked())
    sink.thinking = False


def _one_of(reader: Reader, texts: tuple[str, ...]) -> Steps[bool]:
    for text in texts:
        if (yield from reader.literal(text)):
            return True
    return False


_CALL: Final = ("<tool_call>", ("<function=", '{"name"'))
QWEN3: Final = ReasoningFormat("qwen3", lambda k: k.get("enable_thinking") is not False, _CALL)
DEEPSEEK_R1: Final = ReasoningFormat("deepseek_r1", lambda _: True)
DEEPSEEK_V3: Final = ReasoningFormat(
    "deepseek_v3", lambda k: bool(k.get("thinking") or k.get("enable_thinking"))
)
