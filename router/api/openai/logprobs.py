"""Log-probabilities in the formats of OpenAI and vLLM. Pure.

A row (events.TokenEvent.logprobs) has the log-probabilities at one token's place: the token itself
first, then the most probable others. Chats return the `count` most probable tokens, best first,
each with its bytes. Completions return a map from text to log-probability that always contains the
token itself. JSON has no -inf, so values below FLOOR (vLLM's number) become FLOOR.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from baton.protocol.events import TokenLogprob
from baton.text.tokenizer import Tokenizer

FLOOR: Final = -9999.0
Row = Sequence[TokenLogprob]


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities of a completion: four lists with one entry per token. For the first token
    of a prompt the log-probabilities are null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]

    def extend(self, more: CompletionLogprobs) -> None:
        self.tokens += more.tokens
        self.token_logprobs += more.token_logprobs
        self.top_logprobs += more.top_logprobs
        self.text_offset += more.text_offset


def chat_logprobs(
    rows: Sequence[Row], count: int, tokenizer: Tokenizer, by_id: bool = False
) -> list[dict[str, Any]]:
    """Return `content` of a chat choice's `logprobs`: one entry per token. `by_id`: tokens are
    named `token_id:<number>`."""
    return [
        {
            **_spelled(row[0], tokenizer, by_id),
            "top_logprobs": [
                _spelled(each, tokenizer, by_id)
                for each in sorted(row, key=lambda told: told.rank)
                if each.rank <= count
            ],
        }
        for row in rows
    ]


def chat_choice_logprobs(content: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a chat choice's `logprobs`. `refusal` is always null: no model here marks the tokens
    of a refusal."""
    return {"content": content, "refusal": None}


class CompletionWriter:
    """Writes the log-probabilities of one completion choice, token by token in order.

    Text offsets count the characters of the tokens' joined text. If a token ends within a
    character, the character counts with the token that completes it, and the first token is named
    by its bytes, as OpenAI does. `by_id`: all tokens are named `token_id:<number>`; the offsets
    stay the same.
    """

    def __init__(self, tokenizer: Tokenizer, count: int, by_id: bool = False) -> None:
        self._tokenizer = tokenizer
        self._count = count
        self._by_id = by_id
        self._offset = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def prompt(self, first_id: int, rows: Sequence[Row]) -> CompletionLogprobs:
        """Return the log-probabilities of an echoed prompt. `rows`: one for each token after the
        first."""
        told = CompletionLogprobs([], [None], [None], [])
        self._append(told, first_id)
        told.extend(self.rows(rows))
        return told

    def rows(self, rows: Sequence[Row]) -> CompletionLogprobs:
        told = CompletionLogprobs([], [], [], [])
        for row in rows:
            best: dict[str, float] = {}
            for each in row:
                if each is row[0] or each.rank <= self._count:
                    text = self._name(each.token_id, self._tokenizer.token_bytes(each.token_id))
                    best[text] = max(best.get(text, FLOOR), each.logprob)
            self._append(told, row[0].token_id)
            told.token_logprobs.append(max(row[0].logprob, FLOOR))
            told.top_logprobs.append(best)
        return told

    def _append(self, told: CompletionLogprobs, token_id: int) -> None:
        spelled = self._tokenizer.token_bytes(token_id)
        told.tokens.append(self._name(token_id, spelled))
        told.text_offset.append(self._offset)
        self._offset += len(self._utf8.decode(spelled))

    def _name(self, token_id: int, spelled: bytes) -> str:
        return name_of(token_id) if self._by_id else _unique(spelled)


def name_of(token_id: int) -> str:
    """Return vLLM's name of a token by its id."""
    return f"token_id:{token_id}"


def prompt_logprobs(
    rows: Sequence[Row], count: int, tokenizer: Tokenizer
) -> list[dict[int, dict[str, Any]] | None]:
    """Return vLLM's `prompt_logprobs`: for each token of the prompt a map from token id to its
    log-probability, null for the first token."""

    def told(row: Row) -> dict[int, dict[str, Any]]:
        return {
            each.token_id: {
                "logprob": max(each.logprob, FLOOR),
                "rank": each.rank,
                "decoded_token": _text(each.token_id, tokenizer),
            }
            for each in row
            if each is row[0] or each.rank <= count
        }

    return [None, *map(told, rows)]


def _spelled(told: TokenLogprob, tokenizer: Tokenizer, by_id: bool) -> dict[str, Any]:
    spelled = tokenizer.token_bytes(told.token_id)
    return {
        "token": name_of(told.token_id) if by_id else spelled.decode("utf-8", "replace"),
        "logprob": max(told.logprob, FLOOR),
        "bytes": list(spelled),
    }


def _text(token_id: int, tokenizer: Tokenizer) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def _unique(spelled: bytes) -> str:
    """Return bytes as text, or as `bytes:\\xf0\\x9f` if they are not valid UTF-8: as text,
    different bytes would become the same replacement character."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
