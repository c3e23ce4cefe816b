"""OutputStream: the tokens that a request has emitted, and those that its reader has yet to take.

No token comes twice and none is left out. Nodes may repeat tokens (the decode node's first event
repeats token 1), but they may never skip any. The log-probabilities of the prompt come first: only
a prefill node reports them, so the events of a faster decode node wait for the prefill node. All
events of a resumable request that are shown here are in the log already. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections import deque

import msgspec

from baton.protocol.clock import Clock
from baton.protocol.errors import InternalError
from baton.protocol.events import TokenEvent, TokenLogprob
from baton.protocol.request import Request
from router.request.trace import RequestTrace


class OutputStream:
    """Tokens per sample, from position 0, over all epochs; one reader gets them by `next`.

    `num_tokens`: tokens of all samples. `prompt_reported`: the log-probabilities of the prompt have
    been shown; True from the start if the request asked for none. Writes the time of token 1 and
    the number of tokens to `trace`.
    """

    def __init__(self, request: Request, trace: RequestTrace, clock: Clock) -> None:
        self._trace = trace
        self._clock = clock
        self._samples = [list(ids) for ids in request.output_ids]
        self._samples += [[] for _ in range(request.params.num_outputs - len(self._samples))]
        self.num_tokens = sum(map(len, self._samples))
        self._finished = [False] * len(self._samples)
        self._stopped: set[int] = set()  # samples whose further tokens are dropped
        for sample in request.ended:  # samples that ended under another router
            self.stop(sample)
        self.prompt_reported = request.params.prompt_logprobs is None
        self._early: list[TokenEvent] = []  # decode events that wait for the prompt's logprobs
        # Log-probabilities of the prompt that came without a token, as a beam search reports them.
        self._of_prompt: tuple[tuple[TokenLogprob, ...], ...] = ()
        self._unread: deque[TokenEvent | None] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None  # kept: a look-up is a system call
        self._reader: asyncio.Future[None] | None = None

    @property
    def finished(self) -> bool:
        """Every sample has ended."""
        return all(self._finished)

    @property
    def ended(self) -> tuple[int, ...]:
        """The samples that have ended, which no node needs to compute."""
        return tuple(sample for sample, ended in enumerate(self._finished) if ended)

    @property
    def output_ids(self) -> tuple[tuple[int, ...], ...]:
        """All tokens emitted so far, per sample."""
        return tuple(tuple(ids) for ids in self._samples)

    def stop(self, sample: int) -> None:
        """End a sample; tokens of it that still come are dropped."""
        self._finished[sample] = True
        self._stopped.add(sample)

    # ---- for its reader ----
    async def next(self) -> TokenEvent | None:
        """Wait for new tokens and return them as one event; return None after the last.

        Waiting events of one sample are joined. So a slow reader catches up with a single event,
        and a client that does not read costs only memory for its token ids.
        """
        while not self._unread:
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
            self._reader = self._loop.create_future()
            await self._reader
        return self._unread.popleft()

    # ---- for the journey ----
    def decoded(self, event: TokenEvent, prefilled_elsewhere: bool) -> None:
        """Show a decode node's event, but not before the prefill node's report on the prompt."""
        if self.prompt_reported or not prefilled_elsewhere:
            self.show(event)
        else:
            self._early.append(event)

    def show(self, event: TokenEvent) -> None:
        """Give the reader the new part of `event`, and of the decode events that waited for it.

        Raises InternalError as `take` does.
        """
        self.prompt_reported = True
        events = (event, *self._early)
        self._early.clear()
        for each in events:
            fresh = self.take(each)
            if fresh is None:
                self._of_prompt = self._of_prompt or each.prompt_logprobs
                continue
            if self._trace.first_token_at is None:
                self._trace.first_token_at = self._clock.monotonic()
            self._trace.output_tokens = self.num_tokens
            if self._of_prompt and not fresh.prompt_logprobs:
                fresh, self._of_prompt = (
                    msgspec.structs.replace(fresh, prompt_logprobs=self._of_prompt),
                    (),
                )
            self._put(fresh)

    def show_next(self, event: TokenEvent) -> bool:
        """Show an event that only continues its sample, without a switch to the journey's task, and
        without one to the reader's if `trace.shows` takes it.

        Returns False and changes nothing for an event that ends a sample or contradicts the output.
        """
        if event.finish_reason is not None or not self.prompt_reported or self._early:
            return False
        shows, reader = self._trace.shows, self._reader
        if shows is not None and reader is not None and not (reader.done() or self._unread):
            ids = self._samples[0]  # the only one
            follows = event.position == len(ids) and event.token_ids and not self._finished[0]
            if follows and event.sample == 0 and shows(event):
                ids += event.token_ids
                self.num_tokens = self._trace.output_tokens = len(ids)
                return True
        try:
            self.show(event)
        except InternalError:
            return False  # the journey will meet the same error, and end with it
        return True

    def restart(self) -> None:
        """Begin another epoch: drop the decode events that wait; they will be computed again."""
        self._early.clear()

    def close(self) -> None:
        """End the stream: `next` returns None after the tokens that are left."""
        self._put(None)

    def take(self, event: TokenEvent) -> TokenEvent | None:
        """Return the part of `event` that is new, and count it as emitted; None if nothing is new.

        Raises InternalError for a gap, for an unknown sample, and for tokens that contradict those
        emitted before.
        """
        if event.sample >= len(self._samples):
            raise InternalError(f"sample {event.sample} of {len(self._samples)}")
        if event.sample in self._stopped:
            return None
        ids = self._samples[event.sample]
        known = len(ids) - event.position
        if known < 0:
            raise InternalError(f"a gap: position {event.position} after {len(ids)} tokens")
        repeated = event.token_ids[:known]
        if tuple(ids[event.position : event.position + len(repeated)]) != repeated:
            raise InternalError(f"position {event.position} was emitted with other tokens")
        fresh = event.token_ids[known:]
        ends = event.finish_reason is not None and not self._finished[event.sample]
        if not fresh and not ends:
            return None
        if self._finished[event.sample]:
            raise InternalError(f"tokens after the end of sample {event.sample}")
        if len(event.token_ids) + event.position < len(ids):
            raise InternalError(f"the end at {event.position} lies before {len(ids)} tokens")
        self._finished[event.sample] = ends
        ids.extend(fresh)
        self.num_tokens += len(fresh)
        # A decode node counts fetched KV as cached; the prefill's count is the true one.
        cached = self._trace.cached_tokens
        if known == 0 and event.num_cached_tokens == cached:
            return event
        return TokenEvent(  # not `replace`, which is three times as slow
            request_id=event.request_id,
            epoch=event.epoch,
            position=len(ids) - len(fresh),
            token_ids=fresh,
            sample=event.sample,
            finish_reason=event.finish_reason,
            stop_token_id=event.stop_token_id,
            num_cached_tokens=cached,
            logprobs=event.logprobs[known:],
            prompt_logprobs=event.prompt_logprobs,
        )

    def _put(self, event: TokenEvent | None) -> None:
        """Queue an event for the reader and wake it, unless it is gathered. `event` None ends the
        stream."""
        gathers = self._trace.shows if self._trace.gathers and not self._unread else None
        if gathers and event and not event.finish_reason and gathers(event):
            return
        last = self._unread[-1] if self._unread else None
        if event is not None and last is not None and _continues(last, event):
            self._unread[-1] = _joined(last, event)
        else:
            self._unread.append(event)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _continues(event: TokenEvent, more: TokenEvent) -> bool:
    """Whether `more` directly follows `event` in the same sample, both with or both without
    log-probabilities, so that the two can be joined."""
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
