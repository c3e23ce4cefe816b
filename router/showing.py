"""Showing: which events of a request reach its caller, and in which order. Event loop only.

Nothing twice, no gap (output.py), and what tells of the prompt first: only a prefill node does, so
the events of a faster decode node wait for it. What is shown here is in the log already.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from baton.clock import Clock
from baton.events import TokenEvent, TokenLogprob
from baton.request import Request
from router.output import OutputSoFar
from router.trace import RequestTrace


class Showing:
    """`events`: the new parts, in order; None after the last. Writes its times to `trace`."""

    def __init__(self, request: Request, trace: RequestTrace, clock: Clock) -> None:
        self.output = OutputSoFar(request.output_ids, request.params.num_outputs)
        self.events: asyncio.Queue[TokenEvent | None] = asyncio.Queue()
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

    def restart(self) -> None:
        """Another epoch begins: what waited will be computed again."""
        self._early.clear()

    def close(self) -> None:
        """Nothing more will come."""
        self.events.put_nowait(None)

    def _emit(self, fresh: TokenEvent) -> None:
        if self._trace.first_token_at is None:
            self._trace.first_token_at = self._clock.monotonic()
        self._trace.output_tokens = self.output.num_tokens
        if self._of_prompt and not fresh.prompt_logprobs:
            fresh, self._of_prompt = replace(fresh, prompt_logprobs=self._of_prompt), ()
        # A decode node counts fetched KV as cached; the prefill's count is the true one.
        self.events.put_nowait(replace(fresh, num_cached_tokens=self._trace.cached_tokens))
