"""What the log of a resumable request keeps beside token ids: writes it as text, and reads it.

The answer to a resumable request depends only on its canonical request and this log. So every
replay gives the same ends, log-probabilities, counts and times. Pure. The text (`LogEntry.more`):

    "!"    first, if the entry ends its sample (router.store.base.END_MARK)
    then a JSON object: p position of the first token as the node reported it, w wall clock in whole
    seconds, c prompt tokens from a cache, f finish reason, s stop token id, l log-probabilities
    (rows of [token id, logprob, rank]; null for -inf, which JSON does not have)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import orjson

from baton.protocol.events import TokenEvent, TokenLogprob
from baton.protocol.request import FinishReason
from router.store.base import END_MARK, LogEntry

Rows = tuple[tuple[TokenLogprob, ...], ...]
_LOWEST: Final = -math.inf


@dataclass(frozen=True, slots=True)
class LoggedToken:
    """One token of one sample, or the end of a sample without a token.

    `event` holds at most one token id. `told_at`: when it was logged, in wall-clock seconds.
    """

    event: TokenEvent
    told_at: int


def entry_of(event: TokenEvent, epoch: int, told_at: int) -> LogEntry:
    """Return the log entry for an event of a resumable request."""
    details: dict[str, Any] = {"p": event.position, "w": told_at, "c": event.num_cached_tokens}
    if event.finish_reason is not None:
        details["f"] = event.finish_reason.value
    if event.stop_token_id is not None:
        details["s"] = event.stop_token_id
    if event.logprobs:
        details["l"] = [[_cells(each) for each in row] for row in event.logprobs]
    mark = "" if event.finish_reason is None else END_MARK
    more = mark + orjson.dumps(details).decode()
    return LogEntry(
        event.request_id, epoch, event.position, event.token_ids, event.sample, more=more
    )


def tokens_of(entry: LogEntry) -> Iterator[LoggedToken]:
    """Yield the tokens of an entry one by one; the last one carries the sample's end, if any."""
    ends = entry.more.startswith(END_MARK)
    details: dict[str, Any] = orjson.loads(entry.more.removeprefix(END_MARK) or "{}")
    rows = _rows(details.get("l", ()))[entry.position - details.get("p", entry.position) :]
    told_at, cached = details.get("w", 0), details.get("c", 0)
    reason = FinishReason(details["f"]) if ends else None
    ids = entry.token_ids
    for index in range(max(1, len(ids)) if ends else len(ids)):
        last = index >= len(ids) - 1
        event = TokenEvent(
            request_id=entry.request_id,
            epoch=entry.epoch,
            position=entry.position + index,
            token_ids=ids[index : index + 1],
            sample=entry.sample,
            finish_reason=reason if last else None,
            stop_token_id=details.get("s") if last else None,
            num_cached_tokens=cached,
            logprobs=rows[index : index + 1] if ids else (),
        )
        yield LoggedToken(event, told_at)


def output_ids_of(tokens: Iterable[LoggedToken], samples: int) -> tuple[tuple[int, ...], ...]:
    """Return the logged token ids of each sample, for the request's next epoch."""
    outputs: list[list[int]] = [[] for _ in range(samples)]
    for token in tokens:
        outputs[token.event.sample] += token.event.token_ids
    return tuple(map(tuple, outputs))


def _cells(logprob: TokenLogprob) -> tuple[int, float | None, int]:
    value = None if logprob.logprob == _LOWEST else logprob.logprob
    return logprob.token_id, value, logprob.rank


def _rows(rows: Iterable[Iterable[tuple[int, float | None, int]]]) -> Rows:
    return tuple(
        tuple(
            TokenLogprob(token, _LOWEST if logprob is None else logprob, rank)
            for token, logprob, rank in row
        )
        for row in rows
    )
