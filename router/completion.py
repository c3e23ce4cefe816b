"""One request from the dispatcher's tokens to what a client reads: text, finish reason, usage.

Used by both front doors (HTTP and gRPC); for chats the text is taken apart too (router/parsers).
Ends exactly once: with a Delta that has a finish_reason,
or with an exception. Closing `deltas()` early closes the dispatcher's stream, which aborts the
request on every hop. A stop string ends the request here, because only the router sees text.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

from baton.clock import Clock
from baton.errors import Cancelled, InternalError
from baton.events import TokenEvent, TokenLogprob
from baton.request import FinishReason, Request
from baton.tokenizer import Tokenizer
from router.metrics import RequestMeter
from router.parsers.message import MessageParser, MessageRules
from router.parsers.parts import Part
from router.stops import StopMatcher
from router.terms import STANDARD, Terms
from router.trace import RequestTrace
from router.web_errors import as_baton_error


class Dispatch(Protocol):
    """What a front door needs of router/dispatch.py."""

    def run(self, request: Request, trace: RequestTrace) -> AsyncGenerator[TokenEvent, None]: ...


@dataclass(frozen=True, slots=True)
class OutputRules:
    """How tokens become text. `message`: and that text, parts. `echo`: the prompt's text, for
    replies that repeat it; `discard`: nothing else is wanted, the tokens are not shown."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    message: MessageRules | None = None
    echo: str = ""
    discard: bool = False


@dataclass(frozen=True, slots=True)
class Delta:
    """What one event of one sample adds. `text` may be empty (half a character, a held-back tail).

    `position` is the absolute output index of token_ids[0]. `stop_reason` is the stop string or the
    stop token id that ended it, None for end-of-sequence. `logprobs[i]` belongs to token_ids[i].
    `parts` are what `text` holds, `num_calls` the tool calls so far, if the rules ask for these.
    """

    position: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    parts: tuple[Part, ...] = ()
    num_calls: int = 0


class Completion:
    """The run of one request. `deltas()` once; the counts are final when it has ended.

    `prompt_logprobs` are there with the first delta, if they were asked for.
    """

    def __init__(
        self,
        request: Request,
        model: str,
        rules: OutputRules,
        tokenizer: Tokenizer,
        terms: Terms = STANDARD,
    ) -> None:
        self.request = request
        self.model = model
        self.prompt_text = rules.echo
        self.trace = RequestTrace(terms)
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.reasoning_tokens = 0  # up to the one that ended it
        self.prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
        self._discard = rules.discard
        shown: tuple[str, ...] = ()
        self._parser: MessageParser | None = None
        if rules.message is not None:
            shown, self._parser = rules.message.markers, MessageParser(rules.message)
        self._parts: list[Part] = []
        self._decoder = tokenizer.stream(rules.skip_special_tokens, shown)
        self._stops = StopMatcher(rules.stop, rules.include_stop)
        self._stopped_by_text = False

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    async def deltas(
        self, dispatch: Dispatch, meter: RequestMeter, clock: Clock
    ) -> AsyncGenerator[Delta, None]:
        """Run the request. Raises BatonError; feeds `meter` and ends it on every way out."""
        outcome = "cancelled"
        meter.params = self.request.params
        try:
            last: Delta | None = None
            try:
                async with aclosing(dispatch.run(self.request, self.trace)) as events:
                    async for event in events:
                        if last is not None:
                            continue  # the dispatcher ends by itself after the finish, recorded
                        delta = self._absorb(event)
                        meter.tokens(clock.monotonic(), len(event.token_ids))
                        if delta.finish_reason is None:
                            yield delta
                            continue
                        last = delta
                        if self._stopped_by_text:
                            self.trace.stopped_by_text()
                            break
            except Cancelled:
                if not self.trace.aborted:
                    raise
                last = last or self._aborted()
            if last is None or last.finish_reason is None:
                raise InternalError("the token stream ended without a finish reason")
            outcome = last.finish_reason.value
            yield last
        except (GeneratorExit, asyncio.CancelledError):
            raise
        except BaseException as error:
            outcome = as_baton_error(error).code
            raise
        finally:
            meter.end(clock.monotonic(), self.trace, self.prompt_tokens, outcome)

    def _absorb(self, event: TokenEvent) -> Delta:
        """Text of one event. Mutates decoder, matcher, parser and counts."""
        self.cached_tokens = max(self.cached_tokens, event.num_cached_tokens)
        self.prompt_logprobs = self.prompt_logprobs or event.prompt_logprobs
        if self._discard:
            return Delta(event.position, (), "", event.finish_reason and FinishReason.LENGTH)
        ended_by_token = event.stop_token_id is not None and event.finish_reason is not None
        shown: list[str] = []
        for index, token_id in enumerate(event.token_ids):
            self.completion_tokens += 1
            if ended_by_token and index == len(event.token_ids) - 1:
                break  # the end-of-sequence or stop token is counted, never shown
            result = self._stops.push(self._decoder.push(token_id))
            self._show(result.text, shown)
            if result.matched is not None:
                return self._stop(event, index, shown, result.matched)
        if event.finish_reason is None:
            return self._delta(
                Delta(event.position, event.token_ids, "".join(shown), logprobs=event.logprobs)
            )
        # A last half character may complete a stop string too (it became a replacement character).
        result = self._stops.push(self._decoder.flush())
        self._show(result.text, shown)
        if result.matched is not None:
            return self._stop(event, len(event.token_ids) - 1, shown, result.matched, at_end=True)
        self._show(self._stops.flush(), shown)
        return self._delta(
            Delta(
                position=event.position,
                token_ids=event.token_ids,
                text="".join(shown),
                finish_reason=event.finish_reason,
                stop_reason=self._stop_token(event),
                logprobs=event.logprobs,
            )
        )

    def _aborted(self) -> Delta:
        """The end of an output that somebody else than its client stopped: what there is of it."""
        shown: list[str] = []
        self._show(self._stops.push(self._decoder.flush()).text, shown)
        self._show(self._stops.flush(), shown)
        text, reason = "".join(shown), FinishReason.ABORT
        return self._delta(Delta(self.completion_tokens, (), text, reason))

    def _show(self, text: str, shown: list[str]) -> None:
        """Text that became final with the token counted last."""
        shown.append(text)
        if self._parser is not None:
            was_thinking = self._parser.thinking
            self._parts += self._parser.push(text)
            if was_thinking or self._parser.thinking:
                self.reasoning_tokens = self.completion_tokens

    def _delta(self, delta: Delta) -> Delta:
        """The delta with its parts."""
        if self._parser is None:
            return delta
        if delta.finish_reason is not None:
            self._parts += self._parser.finish()
        parts, self._parts = tuple(self._parts), []
        return replace(delta, parts=parts, num_calls=self._parser.num_calls)

    def _stop_token(self, event: TokenEvent) -> int | None:
        """The client's own stop token id that ended it, None for the model's end-of-sequence."""
        asked_for = event.stop_token_id in self.request.params.stop_token_ids
        return event.stop_token_id if asked_for else None

    def _stop(
        self, event: TokenEvent, index: int, shown: list[str], matched: str, at_end: bool = False
    ) -> Delta:
        """The Delta that ends the output at a stop string completed by event.token_ids[index]."""
        # The request may have ended with the same event: then there is nothing left to stop.
        self._stopped_by_text = event.finish_reason is None and not at_end
        return self._delta(
            Delta(
                position=event.position,
                token_ids=event.token_ids[: index + 1],
                text="".join(shown),
                finish_reason=FinishReason.STOP,
                stop_reason=matched,
                logprobs=event.logprobs[: index + 1],
            )
        )
