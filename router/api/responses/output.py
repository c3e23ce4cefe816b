"""The output items of /v1/responses, and the events that each sends while it grows. Sans I/O.

The life of an item: opened() -> more()* -> closed(status). A message and a thought have one content
part, with its own events of opening and closing; a call has no part. The events have no
`sequence_number` yet: router/api/responses/events.py adds it.
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal, Protocol

from router.api.responses.custom_input import CustomInput
from router.api.responses.tools import ClientTool

Event = dict[str, Any]
RESPONSE_PREFIX: Final = "resp_"
_ITEM_ID: Final = re.compile("[a-z]+_i?[0-9]+_(.+)")
Status = Literal["in_progress", "completed", "incomplete"]


class OutputItem(Protocol):
    """One item of the output. `opened`, `more` and `closed` return events; `item` returns the item
    as an object."""

    def opened(self) -> list[Event]: ...
    def more(self, text: str) -> list[Event]: ...
    def closed(self, status: Status) -> list[Event]: ...
    def item(self, status: Status) -> dict[str, Any]: ...


def item_id(prefix: str, response_id: str, place: int | str) -> str:
    """Return the id of the item at `place` in a response. It contains the response's id, and is the
    same if the request is replayed."""
    return f"{prefix}{place}_{response_id.removeprefix(RESPONSE_PREFIX)}"


def response_of(id_: str) -> str | None:
    """Return the id of the response that an item's id contains; None for any other id."""
    found = _ITEM_ID.fullmatch(id_)
    return None if found is None else RESPONSE_PREFIX + found.group(1)


class _Place:
    """Makes events about one item, or about its only part, whose number `index_name` is 0."""

    def __init__(self, index: int, id_: str, index_name: str | None) -> None:
        self.id = id_
        self._index = index
        self._part = {} if index_name is None else {index_name: 0}

    def of_item(self, kind: str, item: dict[str, Any]) -> Event:
        return {"type": kind, "output_index": self._index, "item": item}

    def of_part(self, kind: str, **fields: Any) -> Event:
        return {
            "type": kind, "item_id": self.id, "output_index": self._index, **self._part, **fields
        }  # fmt: skip


class Message:
    """The message that the model answers. `told`: log-probabilities of the text that `more` gets
    next."""

    def __init__(self, index: int, response_id: str) -> None:
        self.told: list[dict[str, Any]] = []
        self._at = _Place(index, item_id("msg_", response_id, index), "content_index")
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def opened(self) -> list[Event]:
        return [
            self._at.of_item("response.output_item.added", self._item("in_progress", [])),
            self._at.of_part("response.content_part.added", part=self._part),
        ]

    def more(self, text: str) -> list[Event]:
        self._texts.append(text)
        told, self.told = self.told, []
        self._logprobs += told
        return [self._at.of_part("response.output_text.delta", delta=text, logprobs=told)]

    def closed(self, status: Status) -> list[Event]:
        part = self._part
        text, told = part["text"], part["logprobs"]
        return [
            self._at.of_part("response.output_text.done", text=text, logprobs=told),
            self._at.of_part("response.content_part.done", part=part),
            self._at.of_item("response.output_item.done", self.item(status)),
        ]

    def item(self, status: Status) -> dict[str, Any]:
        return self._item(status, [self._part])

    @property
    def _part(self) -> dict[str, Any]:
        text = "".join(self._texts)
        logprobs = list(self._logprobs)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _item(self, status: Status, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._at.id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }


class Thought:
    """The model's reasoning. If the client asked for a summary, it has the form of a summary, but
    the same text, because nothing here can summarize."""

    def __init__(self, index: int, response_id: str, summarized: bool) -> None:
        name = "summary_index" if summarized else "content_index"
        self._at = _Place(index, item_id("rs_", response_id, index), name)
        self._summarized = summarized
        self._texts: list[str] = []
        self._text_events = "response.reasoning_text"
        self._part_events = "response.content_part"
        if summarized:
            self._text_events = "response.reasoning_summary_text"
            self._part_events = "response.reasoning_summary_part"

    def opened(self) -> list[Event]:
        return [
            self._at.of_item("response.output_item.added", self._item("in_progress", [])),
            self._at.of_part(f"{self._part_events}.added", part=self._part),
        ]

    def more(self, text: str) -> list[Event]:
        self._texts.append(text)
        return [self._at.of_part(f"{self._text_events}.delta", delta=text)]

    def closed(self, status: Status) -> list[Event]:
        part = self._part
        return [
            self._at.of_part(f"{self._text_events}.done", text=part["text"]),
            self._at.of_part(f"{self._part_events}.done", part=part),
            self._at.of_item("response.output_item.done", self.item(status)),
        ]

    def item(self, status: Status) -> dict[str, Any]:
        return self._item(status, [self._part])

    @property
    def _part(self) -> dict[str, Any]:
        kind = "summary_text" if self._summarized else "reasoning_text"
        return {"type": kind, "text": "".join(self._texts)}

    def _item(self, status: Status, parts: list[dict[str, Any]]) -> dict[str, Any]:
        told = {"summary": parts} if self._summarized else {"summary": [], "content": parts}
        return {"id": self._at.id, "type": "reasoning", "status": status, **told}


class FunctionCall:
    """A call of one of the client's functions; its arguments are sent as the model writes them."""

    def __init__(self, index: int, response_id: str, tool: ClientTool, call_id: str) -> None:
        self._at = _Place(index, item_id("fc_", response_id, index), None)
        self._tool = tool
        self._call_id = call_id
        self._texts: list[str] = []

    def opened(self) -> list[Event]:
        return [self._at.of_item("response.output_item.added", self.item("in_progress"))]

    def more(self, text: str) -> list[Event]:
        self._texts.append(text)
        return [self._at.of_part("response.function_call_arguments.delta", delta=text)]

    def closed(self, status: Status) -> list[Event]:
        item = self.item(status)
        done = {"arguments": item["arguments"], "name": self._tool.name}
        return [
            self._at.of_part("response.function_call_arguments.done", **done),
            self._at.of_item("response.output_item.done", item),
        ]

    def item(self, status: Status) -> dict[str, Any]:
        return {
            "id": self._at.id,
            "type": "function_call",
            "status": status,
            **_called(self._tool, self._call_id),
            "arguments": "".join(self._texts),
        }


class CustomCall:
    """A call of one of the client's custom tools; its input is sent as the model writes it."""

    def __init__(self, index: int, response_id: str, tool: ClientTool, call_id: str) -> None:
        self._at = _Place(index, item_id("ctc_", response_id, index), None)
        self._tool = tool
        self._call_id = call_id
        self._input = CustomInput()
        self._texts: list[str] = []

    def opened(self) -> list[Event]:
        return [self._at.of_item("response.output_item.added", self.item("in_progress"))]

    def more(self, text: str) -> list[Event]:
        return self._told(self._input.push(text))

    def closed(self, status: Status) -> list[Event]:
        events = self._told(self._input.finish())
        item = self.item(status)
        return [
            *events,
            self._at.of_part("response.custom_tool_call_input.done", input=item["input"]),
            self._at.of_item("response.output_item.done", item),
        ]

    def item(self, status: Status) -> dict[str, Any]:
        return {
            "id": self._at.id,
            "type": "custom_tool_call",
            "status": status,
            **_called(self._tool, self._call_id),
            "input": "".join(self._texts),
        }

    def _told(self, text: str) -> list[Event]:
        if not text:
            return []
        self._texts.append(text)
        return [self._at.of_part("response.custom_tool_call_input.delta", delta=text)]


def _called(tool: ClientTool, call_id: str) -> dict[str, Any]:
    namespace = {} if tool.namespace is None else {"namespace": tool.namespace}
    return {**namespace, "name": tool.name, "call_id": call_id}
