"""MessageEvents: turns the parts of an answer into the events of an Anthropic message. Sans I/O.

The life: begin() -> part()* -> end() or fail(). One content block is open at a time. A part of
another kind, or the start of a tool call, closes it and opens the next block. After end() `message`
is the complete message.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import orjson

from baton.parsers.parts import CallArguments, CallStart, Content, Part, Reasoning

Event = dict[str, Any]
Kind = Literal["text", "thinking", "tool_use"]
# Kind of a block -> (type of its deltas, the field with their text).
_DELTAS: Final[dict[Kind, tuple[str, str]]] = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


class MessagePhase(enum.Enum):
    NEW = "new"
    OPEN = "open"
    ENDED = "ended"


_NEXT: Final = {
    MessagePhase.NEW: (MessagePhase.OPEN, MessagePhase.ENDED),
    MessagePhase.OPEN: (MessagePhase.ENDED,),
    MessagePhase.ENDED: (),
}


class _Block:
    """The open content block: the object that its start event sent, and the texts since."""

    def __init__(self, kind: Kind, opened: dict[str, Any]) -> None:
        self.kind: Kind = kind
        self.opened = opened
        self.texts: list[str] = []

    def whole(self) -> dict[str, Any]:
        text = "".join(self.texts)
        if self.kind == "tool_use":
            return {**self.opened, "input": input_of(text)}
        return {**self.opened, _DELTAS[self.kind][1]: text}


class MessageEvents:
    """The events of one message. `head`: the fields of the message that never change. `draw_id`:
    returns the id of the next tool call."""

    def __init__(self, head: Mapping[str, Any], draw_id: Callable[[], str]) -> None:
        self._head = dict(head)
        self._draw_id = draw_id
        self._phase = MessagePhase.NEW
        self._blocks: list[dict[str, Any]] = []
        self._open: _Block | None = None
        self.message: dict[str, Any] = {}

    def begin(self, usage: Mapping[str, Any]) -> list[Event]:
        self._go(MessagePhase.OPEN)
        message = self._object(None, None, usage)
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def part(self, part: Part) -> list[Event]:
        """Return the events for the next part that the model wrote."""
        assert self._phase is MessagePhase.OPEN, f"a part of a message that is {self._phase.value}"
        match part:
            case Content(text):
                return self._more("text", text)
            case Reasoning(text):
                return self._more("thinking", text)
            case CallStart(_, name):
                used = {"type": "tool_use", "id": self._draw_id(), "name": name, "input": {}}
                return self._opening(_Block("tool_use", used))
            case CallArguments(_, text):
                assert self._open is not None, "arguments follow their call's start"
                assert self._open.kind == "tool_use", "arguments follow their call's start"
                return self._delta(self._open, text)

    def end(
        self, stop_reason: str, stop_sequence: str | None, usage: Mapping[str, Any]
    ) -> list[Event]:
        """End the message: close the open block, set `message`, return the last events. `usage`:
        the final one."""
        self._go(MessagePhase.ENDED)
        events = self._closing()
        self.message = self._object(stop_reason, stop_sequence, usage)
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        events.append({"type": "message_delta", "delta": delta, "usage": dict(usage)})
        return [*events, {"type": "message_stop"}]

    def fail(self, error: Mapping[str, Any]) -> list[Event]:
        """End the message after a failure: return Anthropic's error body `error` as an event."""
        self._go(MessagePhase.ENDED)
        return [dict(error)]

    def _go(self, phase: MessagePhase) -> None:
        assert phase in _NEXT[self._phase], f"{self._phase.value} -> {phase.value}"
        self._phase = phase

    def _more(self, kind: Literal["text", "thinking"], text: str) -> list[Event]:
        events: list[Event] = []
        if self._open is None or self._open.kind != kind:
            blank: dict[str, Any] = {"type": "text", "text": ""}
            if kind == "thinking":
                blank = {"type": "thinking", "thinking": "", "signature": ""}
            events = self._opening(_Block(kind, blank))
        assert self._open is not None, "just opened"
        return events + self._delta(self._open, text)

    def _delta(self, block: _Block, text: str) -> list[Event]:
        block.texts.append(text)
        kind, field = _DELTAS[block.kind]
        delta = {"type": kind, field: text}
        return [{"type": "content_block_delta", "index": len(self._blocks), "delta": delta}]

    def _opening(self, block: _Block) -> list[Event]:
        events = self._closing()
        self._open = block
        start = {"index": len(self._blocks), "content_block": block.opened}
        return [*events, {"type": "content_block_start", **start}]

    def _closing(self) -> list[Event]:
        if self._open is None:
            return []
        index = len(self._blocks)
        self._blocks.append(self._open.whole())
        self._open = None
        return [{"type": "content_block_stop", "index": index}]

    def _object(
        self, stop_reason: str | None, stop_sequence: str | None, usage: Mapping[str, Any]
    ) -> dict[str, Any]:
        return {
            **self._head,
            "content": list(self._blocks),
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": dict(usage),
        }


def input_of(arguments: str) -> dict[str, Any]:
    """Return a tool call's arguments as an object, {} for blank text.

    If `arguments` is no JSON object, for example because the text was cut short, return
    `{"raw_arguments": arguments}`.
    """
    if not arguments.strip():
        return {}
    try:
        found: object = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        found = None
    return found if isinstance(found, dict) else {"raw_arguments": arguments}
