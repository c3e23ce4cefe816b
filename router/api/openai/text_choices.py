"""Turns the deltas of one choice of /v1/completions into frames of a stream, or a whole choice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
import orjson

from router.api.openai.logprobs import CompletionLogprobs, CompletionWriter
from router.api.openai.replies import CompletionChoice, finish_reason_of
from router.request.completion import Completion, Delta

if TYPE_CHECKING:
    from router.api.openai.exchange import OpenAIExchange

_TEXT: Final = b'"text":'


class _ChoiceText:
    """Returns the text and log-probabilities of each delta; the first also has an echoed prompt."""

    def __init__(self, exchange: OpenAIExchange, completion: Completion) -> None:
        self._completion = completion
        self._echo = bool(exchange.body.echo)
        self._writer: CompletionWriter | None = None
        if exchange.logprobs is not None:
            tokenizer = completion.tokenizer
            self._writer = CompletionWriter(tokenizer, exchange.logprobs, exchange.named_by_id)

    def take(self, delta: Delta) -> tuple[str, CompletionLogprobs | None]:
        """Return the text and the log-probabilities that `delta` adds; None for the latter if the
        client did not ask."""
        text, told = "", None
        if self._echo:
            self._echo = False
            text, told = self._prompt()
        if self._writer is not None:
            rows = self._writer.rows(delta.logprobs)
            if told is None:
                told = rows
            else:
                told.extend(rows)
        return text + delta.text, told

    def _prompt(self) -> tuple[str, CompletionLogprobs | None]:
        it = self._completion
        if self._writer is None:
            return it.rules.echo, None
        first = it.request.prompt_ids[0]
        return it.rules.echo, self._writer.prompt(first, it.prompt_logprobs)


class CompletionFrames:
    """Writes the chunks of one choice (exchange.Frames): one chunk per delta; the last one has the
    finish reason."""

    def __init__(self, exchange: OpenAIExchange, completion: Completion, index: int) -> None:
        self._exchange = exchange
        self._text = _ChoiceText(exchange, completion)
        self._choice: dict[str, Any] = {
            "index": index, "text": 0, "logprobs": None, "finish_reason": None, "stop_reason": None
        }  # fmt: skip
        # Nothing that a client chose comes after the text.
        self._head, _, self._tail = exchange.chunk(self._choice).rpartition(_TEXT + b"0")
        self._head += _TEXT
        self._tells_ids = bool(exchange.body.return_token_ids)
        self._ids: list[int] = []  # token ids that are not sent yet
        self._prompt_ids: tuple[int, ...] | None = completion.request.prompt_ids  # None: sent

    def opening(self) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        text, told = self._text.take(delta)
        if self._tells_ids:
            self._ids += delta.token_ids
        reason = finish_reason_of(delta)
        if reason is None and not (told and told.tokens) and not self._ids:
            return self._head + orjson.dumps(text) + self._tail if text else b""
        rows = None if told is None else msgspec.to_builtins(told)
        more: dict[str, Any] = {"text": text, "logprobs": rows}
        if self._tells_ids:
            more["prompt_token_ids"], self._prompt_ids = self._prompt_ids, None
            more["token_ids"], self._ids = self._ids, []
        end = {"finish_reason": reason, "stop_reason": delta.stop_reason}
        return self._exchange.chunk({**self._choice, **more, **end})


class WholeText:
    """Collects one choice of a non-streaming answer: call `take` for each delta, then `choice`."""

    def __init__(self, exchange: OpenAIExchange, completion: Completion, index: int) -> None:
        self._exchange = exchange
        self._completion = completion
        self._index = index
        self._text = _ChoiceText(exchange, completion)
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._rows: CompletionLogprobs | None = None
        self._last: Delta | None = None

    def take(self, delta: Delta) -> None:
        more, rows = self._text.take(delta)
        self._texts.append(more)
        self._ids += delta.token_ids
        if self._rows is None:
            self._rows = rows
        elif rows is not None:
            self._rows.extend(rows)
        self._last = delta

    def choice(self) -> CompletionChoice:
        assert self._last is not None, "a sample ends with a delta or an exception"
        tells_ids = bool(self._exchange.body.return_token_ids)
        return CompletionChoice(
            self._index,
            "".join(self._texts),
            finish_reason_of(self._last),
            logprobs=self._rows,
            stop_reason=self._last.stop_reason,
            prompt_logprobs=self._exchange.told_of_prompt(self._completion),
            token_ids=self._ids if tells_ids else None,
            prompt_token_ids=list(self._completion.request.prompt_ids) if tells_ids else None,
        )
