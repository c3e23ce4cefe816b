"""Turns the deltas of one choice of a chat into the frames of a stream, or into a whole choice.

The chunks of a stream mostly differ in one string only. So the bytes before and after that string
are encoded once per choice, and a frame is head + text + tail. A chunk with more than text is
encoded as a whole. Tests decode every frame with the OpenAI SDK.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import orjson

from baton.parsers.parts import Content, Part
from router.api.openai.logprobs import chat_choice_logprobs, chat_logprobs
from router.api.openai.message import DrawId, delta_of, draw_call_id, message_of
from router.api.openai.replies import ChatChoice, finish_reason_of
from router.api.openai.reply_ids import call_ids
from router.request.completion import Completion, Delta

if TYPE_CHECKING:
    from router.api.openai.exchange import OpenAIExchange

_TEXT: Final = b'"content":'


class ChatFrames:
    """Writes the chunks of one choice (exchange.Frames): first the role, then one chunk per part of
    the answer, last the finish reason."""

    def __init__(self, exchange: OpenAIExchange, completion: Completion, index: int) -> None:
        self._exchange = exchange
        self._completion = completion
        self._choice: dict[str, Any] = {
            "index": index, "delta": {"content": 0}, "logprobs": None, "finish_reason": None
        }  # fmt: skip
        # Nothing that a client chose comes after the text.
        self._head, _, self._tail = exchange.chunk(self._choice).rpartition(_TEXT + b"0")
        self._head += _TEXT
        self._tells_ids = bool(exchange.body.return_token_ids)
        parsed = completion.rules.message is not None
        self._plain = not parsed and not self._tells_ids and exchange.logprobs is None
        self._draw_id = _draw_id(exchange, completion, index) if parsed else draw_call_id
        self._rows: list[dict[str, Any]] = []  # log-probabilities that are not sent yet
        self._ids: list[int] = []  # token ids that are not sent yet

    def opening(self) -> bytes:
        exchange, more = self._exchange, dict[str, Any]()
        if self._tells_ids:
            more["prompt_token_ids"] = self._completion.request.prompt_ids
        first = {**self._choice, "delta": {"role": exchange.role, "content": ""}}
        opening = exchange.chunk(first, **more)
        return opening + self._text(exchange.lead) if exchange.lead else opening

    def delta(self, delta: Delta) -> bytes:
        if self._plain:
            data = b""
            if delta.text:
                data = self._head + orjson.dumps(delta.text) + self._tail
        else:
            if self._tells_ids:
                self._ids += delta.token_ids
            self._rows += _rows(self._exchange, self._completion, delta)
            data = b"".join([self._part(part) for part in self._completion.parts_of(delta)])
        if delta.finish_reason is None:
            return data
        end = {"finish_reason": finish_reason_of(delta), "stop_reason": delta.stop_reason}
        last = {**self._choice, **self._told(), "delta": {}, **end}
        return data + self._exchange.chunk(last)

    def _part(self, part: Part) -> bytes:
        if isinstance(part, Content) and not self._rows and not self._tells_ids:
            return self._text(part.text)
        told = {"delta": delta_of(part, self._draw_id), **self._told()}
        return self._exchange.chunk({**self._choice, **told})

    def _text(self, text: str) -> bytes:
        return self._head + orjson.dumps(text) + self._tail

    def _told(self) -> dict[str, Any]:
        """Return a chunk's fields with the log-probabilities and token ids not sent yet."""
        rows, self._rows = self._rows, []
        told: dict[str, Any] = {"logprobs": chat_choice_logprobs(rows) if rows else None}
        if self._tells_ids:
            told["token_ids"], self._ids = self._ids, []
        return told


class WholeChat:
    """Collects one choice of a non-streaming answer: call `take` for each delta, then `choice`."""

    def __init__(self, exchange: OpenAIExchange, completion: Completion, index: int) -> None:
        self._exchange = exchange
        self._completion = completion
        self._index = index
        self._parts: list[Part] = []
        self._ids: list[int] = []
        self._rows: list[dict[str, Any]] = []
        self._last: Delta | None = None

    def take(self, delta: Delta) -> None:
        self._parts += self._completion.parts_of(delta)
        self._rows += _rows(self._exchange, self._completion, delta)
        self._ids += delta.token_ids
        self._last = delta

    def choice(self) -> ChatChoice:
        assert self._last is not None, "a sample ends with a delta or an exception"
        exchange = self._exchange
        draw_id = _draw_id(exchange, self._completion, self._index)
        return ChatChoice(
            self._index,
            message_of(self._parts, draw_id, exchange.role, exchange.lead),
            finish_reason_of(self._last),
            logprobs=None if exchange.logprobs is None else chat_choice_logprobs(self._rows),
            stop_reason=self._last.stop_reason,
            token_ids=self._ids if exchange.body.return_token_ids else None,
        )


def _draw_id(exchange: OpenAIExchange, completion: Completion, index: int) -> DrawId:
    """Return the function that makes the ids of the choice's tool calls."""
    return call_ids(exchange.pinned, completion.rules.message, choice=index)


def _rows(exchange: OpenAIExchange, completion: Completion, delta: Delta) -> list[dict[str, Any]]:
    """Return the log-probabilities of a delta's tokens; [] if the client did not ask."""
    if exchange.logprobs is None:
        return []
    rows, tokenizer = delta.logprobs, completion.tokenizer
    return chat_logprobs(rows, exchange.logprobs, tokenizer, exchange.named_by_id)
