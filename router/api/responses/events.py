"""ResponseEvents: turns the parts of an answer into the numbered events of a response. Sans I/O.

The life: begin() -> part()* -> end() -> last(); or fail() instead of end(). One output item is open
at a time: a part of another kind, or the start of a call, closes it and opens the next item.
`sequence_number` counts all events from 0 without gaps. `response` is the response object.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any, Final

from baton.parsers.parts import CallArguments, CallStart, Content, Part, Reasoning
from router.api.openai.message import DrawId
from router.api.responses.output import (
    CustomCall,
    Event,
    FunctionCall,
    Message,
    OutputItem,
    Status,
    Thought,
)
from router.api.responses.tools import ClientTool

Logprobs = list[dict[str, Any]]


class ResponsePhase(enum.Enum):
    NEW = "new"
    OPEN = "open"
    ENDED = "ended"


_NEXT: Final = {
    ResponsePhase.NEW: (ResponsePhase.OPEN, ResponsePhase.ENDED),
    ResponsePhase.OPEN: (ResponsePhase.ENDED,),
    ResponsePhase.ENDED: (),
}


class ResponseEvents:
    """The events of one response. `head`: the fields of the response object that never change.
    `tools`: the model's name of a tool -> the client's tool."""

    def __init__(
        self,
        head: Mapping[str, Any],
        draw_id: DrawId,
        summarized: bool,
        tools: Mapping[str, ClientTool] | None = None,
    ) -> None:
        self._head = dict(head)
        self._id = str(head["id"])
        self._draw_id = draw_id
        self._summarized = summarized
        self._tools = tools or {}
        self._phase = ResponsePhase.NEW
        self._number = 0
        self._done: list[dict[str, Any]] = []
        self._open: OutputItem | None = None
        self.response: dict[str, Any] = self._object("in_progress")

    def begin(self) -> list[Event]:
        self._go(ResponsePhase.OPEN)
        kinds = ("response.created", "response.in_progress")
        return self._numbered([{"type": kind, "response": self.response} for kind in kinds])

    def part(self, part: Part, told: Logprobs | None = None) -> list[Event]:
        """Return the events for the next part that the model wrote. `told`: log-probabilities of
        the part's text."""
        assert self._phase is ResponsePhase.OPEN, (
            f"a part of a response that is {self._phase.value}"
        )
        events: list[Event] = []
        match part:
            case Content(text):
                if not isinstance(self._open, Message):
                    events += self._opening(Message(len(self._done) + self._num_open, self._id))
                assert isinstance(self._open, Message), "just opened"
                self._open.told += told or []
            case Reasoning(text):
                if not isinstance(self._open, Thought):
                    index = len(self._done) + self._num_open
                    events += self._opening(Thought(index, self._id, self._summarized))
            case CallStart(_, name):
                index = len(self._done) + self._num_open
                tool = self._tools.get(name, ClientTool(name))
                made = CustomCall if tool.custom else FunctionCall
                call = made(index, self._id, tool, self._draw_id())
                return self._numbered(self._opening(call))
            case CallArguments(_, text):
                called = isinstance(self._open, FunctionCall | CustomCall)
                assert called, "arguments follow their call's start"
        assert self._open is not None, "a part belongs to an item"
        return self._numbered([*events, *self._open.more(text)])

    def end(self, cut_short: bool, usage: Mapping[str, Any], completed_at: int) -> list[Event]:
        """Close the open item and complete `response`; return the events of that. `last` returns
        the response's own last event. `cut_short`: the answer reached its maximum of tokens."""
        status: Status = "incomplete" if cut_short else "completed"
        self._go(ResponsePhase.ENDED)
        events: list[Event] = []
        if not self._done and self._open is None:
            events += self._opening(Message(0, self._id))  # an empty answer still has a message
        events += self._closing(status)
        self.response = self._object(status)
        self.response["usage"] = dict(usage)
        if cut_short:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["completed_at"] = completed_at
        return self._numbered(events)

    def last(self) -> list[Event]:
        assert self._phase is ResponsePhase.ENDED, (
            f"the last event of a response that is {self._phase}"
        )
        kind = f"response.{self.response['status']}"
        return self._numbered([{"type": kind, "response": self.response}])

    def fail(self, code: str, message: str) -> list[Event]:
        """End the response after a failure. The open item gets no closing event; in the response
        its status is `incomplete`."""
        self._go(ResponsePhase.ENDED)
        if self._open is not None:
            self._done.append(self._open.item("incomplete"))
            self._open = None
        self.response = self._object("failed")
        self.response["error"] = {"code": code, "message": message}
        return self._numbered([{"type": "response.failed", "response": self.response}])

    def _go(self, phase: ResponsePhase) -> None:
        assert phase in _NEXT[self._phase], f"{self._phase.value} -> {phase.value}"
        self._phase = phase

    @property
    def _num_open(self) -> int:
        return 0 if self._open is None else 1

    def _opening(self, item: OutputItem) -> list[Event]:
        """Close the open item as completed, and open `item`; return the events of both."""
        events = self._closing("completed")
        self._open = item
        return [*events, *item.opened()]

    def _closing(self, status: Status) -> list[Event]:
        if self._open is None:
            return []
        item, self._open = self._open, None
        self._done.append(item.item(status))
        return item.closed(status)

    def _numbered(self, events: Iterable[Event]) -> list[Event]:
        numbered = [
            {**event, "sequence_number": self._number + i} for i, event in enumerate(events)
        ]
        self._number += len(numbered)
        return numbered

    def _object(self, status: str) -> dict[str, Any]:
        return {
            **self._head,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "output": list(self._done),
        }
