"""Showing: which events of a request reach its caller, and in which order. Event loop only.

Nothing twice, no gap (output.py), and what tells of the prompt first: only a prefill node does, so
the events of a faster decode node wait for it. What is shown here is in the log already.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace

from baton.protocol.clock import Clock
from baton.protocol.errors import InternalError
from baton.protocol.events import TokenEvent, TokenLogprob
from baton.protocol.request import Request
from router.request.output import OutputSoFar
from router.request.trace import RequestTrace


class Events:
    """What is shown, for one reader, in order.

    A reader that is behind finds the events of a sample joined to one: it catches up with a single
    frame, and what waits for a client that does not read is its token ids, not an event for each.
    """

    def __init__(self) -> None:
        self._waiting: deque[TokenEvent | None] = deque()
        self._reader: asyncio.Future[None] | None = None

    def put(self, event: TokenEvent | None) -> None:
        """None: nothing more will come."""
        last = self._waiting[-1] if self._waiting else None
        if event is not None and last is not None and _continues(last, event):
            self._waiting[-1] = _joined(last, event)
        else:
            self._waiting.append(event)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> TokenEvent | None:
        while not self._waiting:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._waiting.popleft()


class Showing:
    """`events`: the new parts; None after the last. Writes its times to `trace`."""

    def __init__(self, request: Request, trace: RequestTrace, clock: Clock) -> None:
        self.output = OutputSoFar(request.output_ids, request.params.num_outputs)
        for sample in request.ended:  # under another router
            self.output.stop(sample)
        self.events = Events()
        self._trace = trace
        self._clock = clock
        self._early: list[TokenEvent] = []  # the decode node's, before the prompt's logprobs
        self._told = request.params.prompt_logprobs is None
        self._of_prompt: tuple[tuple[TokenLogprob, ...], ...] = ()  # told without a token: a search

    @property
    def told(self) -> bool:
        """Whatever was asked of the prompt has been shown."""
        return self._told

    def decoded(self, event: TokenEvent, prefilled_elsewhere: bool) -> None:
        """Show a decode node's event: after the prefill node's, if that tells of the prompt."""
        if self._told or not prefilled_elsewhere:
            self.show(event)
        else:
            self._early.append(event)

    def show(self, event: TokenEvent) -> None:
        """The new part of `event`, and of those that waited for it."""
        self._told = True
        early, self._early = self._early, []
        for each in (event, *early):
            fresh = self.output.take(each)
            if fresh is not None:
                self._emit(fresh)
            else:
                self._of_prompt = self._of_prompt or each.prompt_logprobs

    def show_next(self, event: TokenEvent) -> bool:
        """Show an event that simply goes on, without a turn of the journey's task.

        False, and nothing is changed, for any other: it ends a sample, or contradicts the output.
        """
        if event.finish_reason is not None or not self._told or self._early:
            return False
        try:
            self.show(event)
        except InternalError:
            return False  # the journey will meet the same error, and fail of it
        return True

    def restart(self) -> None:
        """Another epoch begins: what waited will be computed again."""
        self._early.clear()

    def close(self) -> None:
        """Nothing more will come."""
        self.events.put(None)

    def _emit(self, fresh: TokenEvent) -> None:
        if self._trace.first_token_at is None:
            self._trace.first_token_at = self._clock.monotonic()
        self._trace.output_tokens = self.output.num_tokens
        if self._of_prompt and not fresh.prompt_logprobs:
            fresh, self._of_prompt = replace(fresh, prompt_logprobs=self._of_prompt), ()
        self.events.put(_with_cached(fresh, self._trace.cached_tokens))


def _with_cached(event: TokenEvent, num_cached_tokens: int) -> TokenEvent:
    """A decode node counts fetched KV as cached; the prefill's count is the true one."""
    if event.num_cached_tokens == num_cached_tokens:
        return event
    return TokenEvent(  # not `replace`, which is three times as slow
        request_id=event.request_id,
        epoch=event.epoch,
        position=event.position,
        token_ids=event.token_ids,
        sample=event.sample,
        finish_reason=event.finish_reason,
        stop_token_id=event.stop_token_id,
        num_cached_tokens=num_cached_tokens,
        logprobs=event.logprobs,
        prompt_logprobs=event.prompt_logprobs,
    )


def _continues(event: TokenEvent, more: TokenEvent) -> bool:
    """`more` is the same sample's next, told in the same detail."""
    return (
        more.sample == event.sample
        and event.finish_reason is None
        and more.position == event.position + len(event.token_ids)
        and bool(more.logprobs) == bool(event.logprobs)
        and not event.prompt_logprobs
        and not more.prompt_logprobs
    )


def _joined(event: TokenEvent, more: TokenEvent) -> TokenEvent:
    return TokenEvent(
        request_id=event.request_id,
        epoch=more.epoch,
        position=event.position,
        token_ids=event.token_ids + more.token_ids,
        sample=event.sample,
        finish_reason=more.finish_reason,
        stop_token_id=more.stop_token_id,
        num_cached_tokens=more.num_cached_tokens,
        logprobs=event.logprobs + more.logprobs,
        prompt_logprobs=event.prompt_logprobs,
    )
