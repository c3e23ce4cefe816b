"""Told: what is in the log of one resumable request, token by token, for any number of readers.

Filled by the router that runs the request, as appends are confirmed (run_log.py), or by one
that follows the log (follower.py). Each reader begins at the start and makes text of tokens
by itself, so what it reads depends on the log alone, not on when it came. Event loop only.

It ends in one of two ways: `close`, when nothing can follow (with the failure, if it is one), or
`cut`: this router may no longer tell how it goes on, somebody else may.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from dataclasses import replace

from baton.protocol.errors import BatonError, Cancelled, Unavailable
from baton.protocol.events import TokenEvent
from baton.protocol.request import Request
from router.request.trace import RequestTrace
from router.store.base import LogEntry
from router.store.log_details import LoggedToken, tokens_of


class StreamCut(Unavailable):
    """Readers leave without an end: another router may tell it, or this one later."""

    def __init__(self) -> None:
        super().__init__("the request goes on: ask for it again", retry_after_s=1)


class Told:
    """`samples`: outputs that the request has. `failure`: how it ended, once `closed`."""

    def __init__(self, samples: int) -> None:
        self.tokens: list[LoggedToken] = []
        self.failure: BatonError | None = None
        self.closed = False
        self._lengths = [0] * samples
        self._ended = [False] * samples
        self._cuts = 0
        self._news = asyncio.Event()

    @property
    def num_samples(self) -> int:
        return len(self._lengths)

    @property
    def num_tokens(self) -> int:
        """Over all samples."""
        return sum(self._lengths)

    @property
    def all_ended(self) -> bool:
        """Every sample's end is in the log."""
        return all(self._ended)

    @property
    def ended(self) -> tuple[int, ...]:
        return tuple(sample for sample, ended in enumerate(self._ended) if ended)

    def add(self, entries: Iterable[LogEntry]) -> None:
        """Entries of the log, in order; what they repeat is dropped."""
        for entry in entries:
            for token in tokens_of(entry):
                self._take(token)
        self._tell()

    def close(self, failure: BatonError | None = None) -> None:
        """Nothing follows. Twice is safe; the first one holds."""
        if not self.closed:
            self.closed, self.failure = True, failure
            self._tell()

    def cut(self) -> None:
        """End all readers of now, without an end of the request."""
        self._cuts += 1
        self._tell()

    async def read(self) -> AsyncGenerator[LoggedToken, None]:
        """Every token from the start, waiting for more. Raises StreamCut, and `failure` at the
        end."""
        cuts, index = self._cuts, 0
        while True:
            while index < len(self.tokens):
                yield self.tokens[index]
                index += 1
            if self._cuts != cuts:
                raise StreamCut
            if self.closed:
                break
            await self._news.wait()
        if self.failure is not None:
            raise self.failure

    def _take(self, token: LoggedToken) -> None:
        event = token.event
        sample, ends = event.sample, event.finish_reason is not None
        fresh = event.token_ids and event.position == self._lengths[sample]
        if self._ended[sample] or not (fresh or ends):
            return
        # Every replay tells what the first token told: a retry may find more of the prompt cached.
        first = self.tokens[0].event if self.tokens else event
        kept = event if fresh else replace(event, token_ids=(), logprobs=())
        kept = replace(kept, num_cached_tokens=first.num_cached_tokens)
        self._lengths[sample] += len(kept.token_ids)
        self._ended[sample] = ends
        self.tokens.append(replace(token, event=kept))

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class ToldDispatch:
    """A completion's Dispatch (router/request/completion.py) that computes nothing: it reads."""

    def __init__(self, told: Told) -> None:
        self._told = told

    async def run(self, request: Request, trace: RequestTrace) -> AsyncGenerator[TokenEvent, None]:
        try:
            async for token in self._told.read():
                trace.told_at = token.told_at
                yield token.event
        except Cancelled:
            trace.aborted = True  # nobody but an operator ends a request that is being read
            raise

    def stop_sample(self, request_id: str, sample: int) -> None:
        """Whoever runs the request finds the same end."""
