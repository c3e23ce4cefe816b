"""Told: the logged tokens of one resumable request, for any number of readers.

The router that runs the request fills it when appends are confirmed (run_log.py). A router that
only reads the log fills it by a Follower (follower.py). Each reader begins at the first token and
makes text of tokens by itself, so what it reads depends on the log alone. Event loop only.

Readers end in one of two ways. `close`: the request has ended, perhaps with a failure. `cut`: this
router cannot show how the request goes on; another router can, or this one later.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from dataclasses import replace

import msgspec

from baton.protocol.errors import BatonError, Cancelled, Unavailable
from baton.protocol.events import TokenEvent
from baton.protocol.request import Request
from router.request.trace import RequestTrace
from router.store.base import LogEntry
from router.store.log_details import LoggedToken, tokens_of


class StreamCut(Unavailable):
    """A reader is ended before the request's end: the client has to ask for the request again."""

    def __init__(self) -> None:
        super().__init__("the request goes on: ask for it again", retry_after_s=1)


class Told:
    """The tokens that readers may see. `samples`: how many outputs the request has. `failure`: once
    `closed`, the error with which the request ended, or None."""

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
        """The number of tokens of all samples."""
        return sum(self._lengths)

    @property
    def all_ended(self) -> bool:
        """Whether the log has the end of every sample."""
        return all(self._ended)

    @property
    def ended(self) -> tuple[int, ...]:
        return tuple(sample for sample, ended in enumerate(self._ended) if ended)

    def add(self, entries: Iterable[LogEntry]) -> None:
        """Add log entries, in order; tokens that are there already are dropped."""
        for entry in entries:
            for token in tokens_of(entry):
                self._take(token)
        self._tell()

    def close(self, failure: BatonError | None = None) -> None:
        """End the readers with the request's end. Only the first call counts."""
        if not self.closed:
            self.closed, self.failure = True, failure
            self._tell()

    def cut(self) -> None:
        """End all present readers with StreamCut."""
        self._cuts += 1
        self._tell()

    async def read(self) -> AsyncGenerator[LoggedToken, None]:
        """Yield every token from the first one on, and wait for more until the request's end.

        Raises StreamCut after `cut`, and at the end `failure` if there is one.
        """
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
        # All replays report the cached tokens of the first token: a retry may find more cached.
        first = self.tokens[0].event if self.tokens else event
        kept = event if fresh else msgspec.structs.replace(event, token_ids=(), logprobs=())
        kept = msgspec.structs.replace(kept, num_cached_tokens=first.num_cached_tokens)
        self._lengths[sample] += len(kept.token_ids)
        self._ended[sample] = ends
        self.tokens.append(replace(token, event=kept))

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class ToldDispatch:
    """A completion's Dispatch (router/request/completion.py) that yields the tokens of a Told
    instead of computing them."""

    def __init__(self, told: Told) -> None:
        self._told = told

    async def run(self, request: Request, trace: RequestTrace) -> AsyncGenerator[TokenEvent, None]:
        try:
            async for token in self._told.read():
                trace.told_at = token.told_at
                yield token.event
        except Cancelled:
            trace.aborted = True  # only an operator ends a request that is being read
            raise

    def stop_sample(self, request_id: str, sample: int) -> None:
        """Do nothing: the router that runs the request finds the same stop string."""
