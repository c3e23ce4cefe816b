"""OutputStream: which events of a request reach its caller, and in which order. Event loop only.

No token comes twice and none is left out (OutputSoFar). Nodes may repeat tokens, as the decode
node's first event repeats token 1, but they may never skip any. Log-probabilities of the prompt
come first: only a prefill node reports them, so the events of a faster decode node wait for it. All
events that are shown here are in the log already.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace

from baton.protocol.clock import Clock
from baton.protocol.errors import InternalError
from baton.protocol.events import TokenEvent, TokenLogprob
from baton.protocol.request import Request
from router.request.trace import RequestTrace


class OutputSoFar:
    """What a request has emitted: tokens per sample, from position 0, over all epochs. Pure."""

    def __init__(self, output_ids: tuple[tuple[int, ...], ...], num_samples: int) -> None:
        self._samples = [list(ids) for ids in output_ids]
        self._samples += [[] for _ in range(num_samples - len(output_ids))]
        self._finished = [False] * len(self._samples)
        self._stopped: set[int] = set()  # ended by their reader

    @property
    def finished(self) -> bool:
        """Every sample has ended."""
        return all(self._finished)

    @property
    def ended(self) -> tuple[int, ...]:
        """Samples that no node needs to go on with."""
        return tuple(sample for sample, ended in enumerate(self._finished) if ended)

    def stop(self, sample: int) -> None:
        """Nobody wants more of this sample; tokens that still come are dropped."""
        self._finished[sample] = True
        self._stopped.add(sample)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self._samples))

    @property
    def output_ids(self) -> tuple[tuple[int, ...], ...]:
        """For the request's next owner."""
        return tuple(tuple(ids) for ids in self._samples)

    def take(self, event: TokenEvent) -> TokenEvent | None:
        """The part of `event` that is new, None if nothing is.

        Raises InternalError for a gap, an unknown sample, or a contradiction of an emitted token.
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
        if known == 0:
            return event
        return TokenEvent(  # not `replace`, which is three times as slow
            request_id=event.request_id,
            epoch=event.epoch,
            position=len(ids) - len(fresh),
            token_ids=fresh,
            sample=event.sample,
            finish_reason=event.finish_reason,
            stop_token_id=event.stop_token_id,
            num_cached_tokens=event.num_cached_tokens,
            logprobs=event.logprobs[known:],
            prompt_logprobs=event.prompt_logprobs,
            candidates=event.candidates,
        )


class Events:
    """The events that are shown, in order, for one reader.

    For a slow reader the waiting events of a sample are joined to one. So it catches up with a
    single frame, and a client that does not read costs its token ids, not an event for each.
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


class OutputStream:
    """`events`: the new parts; None after the last. Writes its times to `trace`."""

    def __init__(self, request: Request, trace: RequestTrace, clock: Clock) -> None:
        self.output = OutputSoFar(request.output_ids, request.params.num_outputs)
        for sample in request.ended:  # under another router
            self.output.stop(sample)
        self.events = Events()
        self._trace = trace
        self._clock = clock
        self._early: list[TokenEvent] = []  # the decode node's, before the prompt's logprobs
        self._prompt_reported = request.params.prompt_logprobs is None
        # Log-probabilities of the prompt that came without a token: a search reports them so.
        self._of_prompt: tuple[tuple[TokenLogprob, ...], ...] = ()

    @property
    def prompt_reported(self) -> bool:
        """The log-probabilities of the prompt have been shown, if the request asked for any."""
        return self._prompt_reported

    def decoded(self, event: TokenEvent, prefilled_elsewhere: bool) -> None:
        """Show a decode node's event, but not before the prefill node's report on the prompt."""
        if self._prompt_reported or not prefilled_elsewhere:
            self.show(event)
        else:
            self._early.append(event)

    def show(self, event: TokenEvent) -> None:
        """Show the new part of `event`, and of the events that waited for it."""
        self._prompt_reported = True
        early, self._early = self._early, []
        for each in (event, *early):
            fresh = self.output.take(each)
            if fresh is not None:
                self._emit(fresh)
            else:
                self._of_prompt = self._of_prompt or each.prompt_logprobs

    def show_next(self, event: TokenEvent) -> bool:
        """Show an event that only continues its sample, without a switch to the journey's task.

        Returns False and changes nothing for an event that ends a sample or contradicts the output.
        """
        if event.finish_reason is not None or not self._prompt_reported or self._early:
            return False
        try:
            self.show(event)
        except InternalError:
            return False  # the journey will meet the same error, and end with it
        return True

    def restart(self) -> None:
        """Another epoch begins: the events that waited will be computed again."""
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
    """`more` is the same sample's next, reported in the same detail."""
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
