"""One request from the dispatcher's tokens to what a client reads: text, finish reason, usage.

Used by both front doors (HTTP and gRPC). The text of a chat is also divided into parts: content,
reasoning, tool calls (baton/parsers).
A request may have several samples, or beams. All run at once. Each has its own text, stop strings
and parser, and ends with exactly one Delta that has a finish_reason. An exception ends all of them.
Closing `deltas()` early closes the dispatcher's stream, which aborts the request on every node. A
stop string ends a sample here, because only the router sees text; the other samples go on.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from baton.guided.spec import FIELD
from baton.parsers.message import MessageParser, MessageRules
from baton.parsers.parts import Content, Part
from baton.protocol.best_of import best_samples
from baton.protocol.clock import Clock
from baton.protocol.errors import Cancelled, InternalError
from baton.protocol.events import TokenEvent, TokenLogprob
from baton.protocol.request import FinishReason, Request
from baton.text.stops import StopMatcher
from baton.text.tokenizer import Tokenizer
from router.prompts.grammar_checks import BLAMED, blamed_on
from router.request.failures import as_baton_error
from router.request.terms import STANDARD, Terms
from router.request.trace import RequestTrace

if TYPE_CHECKING:
    from router.metrics.router import RequestMeter, RouterMetrics


class Dispatch(Protocol):
    """What a front door needs of the dispatcher (router/request/dispatcher.py)."""

    def run(self, request: Request, trace: RequestTrace) -> AsyncGenerator[TokenEvent, None]: ...
    def stop_sample(self, request_id: str, sample: int) -> None: ...


@dataclass(frozen=True, slots=True)
class CallRunner:
    """What a completion needs to run: the dispatcher of its tokens, the metrics, and the clock.

    `direct`: the dispatcher shows each event as it is, so its reader may take it at once."""

    dispatch: Dispatch
    metrics: RouterMetrics
    clock: Clock
    direct: bool = False


@dataclass(frozen=True, slots=True)
class OutputRules:
    """How tokens become text.

    `message`: the rules that divide the text into parts; None: the text is not divided. `echo`: the
    prompt's text, for replies that repeat it. `discard`: the client wants the echo alone, so the
    tokens are not shown.
    """

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    message: MessageRules | None = None
    echo: str = ""
    discard: bool = False


MAX_GATHERED: Final = 1024  # tokens that are decoded in one turn of the loop
PLAIN_OUTPUT: Final = OutputRules()  # for requests that set none of these rules


class Delta(msgspec.Struct, frozen=True):
    """What one token event adds to one sample.

    `text` may be empty: half a character, or text held back because it may begin a stop string.
    `position` is the output index of token_ids[0] within the sample. `stop_reason` is the stop
    string or the stop token id that ended the sample, None for end-of-sequence. `logprobs[i]`
    belongs to token_ids[i]. `parts` divide `text`, and `num_calls` counts the sample's tool calls
    so far; both stay empty unless the rules have `message`. `sample`: the request's choice that the
    delta belongs to, from 0.
    """

    position: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    parts: tuple[Part, ...] = ()
    num_calls: int = 0
    sample: int = 0


class Completion:
    """The run of one request. Call `deltas()` once; the counts are final when it has ended.

    `model`: its name in answers, `key`: its key among the router's models (router/models.py).
    `prompt_logprobs` are set when the first delta comes; empty if the request asked for none.
    """

    def __init__(
        self,
        request: Request,
        model: str,
        rules: OutputRules,
        tokenizer: Tokenizer,
        terms: Terms = STANDARD,
        key: str = "",
    ) -> None:
        self.request = request
        self.model = model
        self.rules = rules
        self.tokenizer = tokenizer
        self.trace = RequestTrace(terms, key)
        self.cached_tokens = 0
        # The field in which the client gave the constraint, for errors about that constraint.
        self.guided_field = FIELD
        self.prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
        # Shows a delta to the client, made by the call of its argument, without a switch to the
        # task that reads `deltas`; False: it must wait for that task. Set by that task.
        self.at_once: Callable[[Callable[[], Delta]], bool] | None = None
        self._gathered: list[int] = []  # tokens of the only sample, for its next delta
        self._failure: Exception | None = None  # of `at_once`, for that task
        self._samples = [
            SampleText(sample, request, rules, tokenizer)
            for sample in range(request.params.num_outputs)
        ]

    @property
    def num_choices(self) -> int:
        """How many choices the client gets; each delta's `sample` is below that number."""
        return self.request.params.n

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def image_tokens(self) -> int:
        """Those of the prompt's tokens that stand for images."""
        return sum([image.num_tokens for image in self.request.images])

    @property
    def completion_tokens(self) -> int:
        """Output tokens of all samples, also of those that best_of drops."""
        return sum([sample.num_tokens for sample in self._samples])

    @property
    def reasoning_tokens(self) -> int:
        return sum([sample.reasoning_tokens for sample in self._samples])

    def parts_of(self, delta: Delta) -> Sequence[Part]:
        """Return the parts of a delta. Without message rules its whole text is one Content."""
        if self.rules.message is not None:
            return delta.parts
        return (Content(delta.text),) if delta.text else ()

    def twin(self) -> Completion:
        """Return a new completion of the same request, not run yet, for another reader of it."""
        terms, key = self.trace.terms, self.trace.model
        return Completion(self.request, self.model, self.rules, self.tokenizer, terms, key)

    def deltas(self, runner: CallRunner) -> AsyncGenerator[Delta, None]:
        """Run the request and yield its deltas. The metrics measure from the request's arrival, or
        from when this router took it over.

        Raises BatonError.
        """
        live = self._run(runner)
        return live if len(self._samples) == self.request.params.n else self._best(live)

    async def _run(self, runner: CallRunner) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of all samples as they come, each sample ended exactly once.

        The very last delta is yielded when the dispatcher has recorded the request's end. The
        request's meter is ended on every way out.
        """
        dispatch, clock, outcome = runner.dispatch, runner.clock, "cancelled"
        began = self.trace.adopted_at or self.request.arrival
        meter = runner.metrics.begin(self.model, began)
        meter.params = self.request.params
        num_running = len(self._samples)
        last: Delta | None = None
        self.trace.shows = self._shower(runner, meter)
        try:
            try:
                async with aclosing(dispatch.run(self.request, self.trace)) as events:
                    async for event in events:
                        sample = self._sample_of(event)
                        if sample.ended:
                            continue  # was under way when a stop string ended the sample
                        self.cached_tokens = max(self.cached_tokens, event.num_cached_tokens)
                        self.prompt_logprobs = self.prompt_logprobs or event.prompt_logprobs
                        meter.tokens(clock.monotonic(), len(event.token_ids), event.sample)
                        delta = sample.absorb(self._with_gathered(event))
                        num_running -= sample.ended
                        if num_running:
                            if sample.stopped_by_text:
                                dispatch.stop_sample(self.request.id, event.sample)
                            yield delta
                            continue
                        last = delta
                        if sample.stopped_by_text:
                            self.trace.stopped_by_text()
                            break
            except Cancelled:
                if not self.trace.aborted:
                    raise
                *cut, last = self._cut_short(last)
                for delta in cut:
                    yield delta
            if last is None or last.finish_reason is None:
                raise InternalError("the token stream ended without a finish reason")
            outcome = last.finish_reason.value
            yield last
        except BLAMED as error:
            outcome = error.code
            raise blamed_on(error, self.guided_field) from error
        except Exception as error:
            outcome = as_baton_error(error).code
            raise
        finally:
            self.trace.shows = None
            meter.end(clock.monotonic(), self.trace, len(self.request.prompt_ids), outcome)

    def _sample_of(self, event: TokenEvent) -> SampleText:
        """Return the sample of an event. Raises what showing an event at once has met."""
        if self._failure is not None:
            raise self._failure
        return self._samples[event.sample]

    def _shower(
        self, runner: CallRunner, meter: RequestMeter
    ) -> Callable[[TokenEvent], bool] | None:
        """Return what takes the events that need no task; None if all of them need it."""
        if runner.direct and len(self._samples) == 1 and self._samples[0].is_plain:
            return partial(self._shows, meter, runner.clock)
        return None

    def _shows(self, meter: RequestMeter, clock: Clock, event: TokenEvent) -> bool:
        """Show or gather an event of the only sample, if it needs no task. Raises nothing."""
        if event.prompt_logprobs:
            return False
        if self.trace.gathers and not event.logprobs and len(self._gathered) < MAX_GATHERED:
            self.cached_tokens = self.trace.cached_tokens
            self._gathered += event.token_ids
        elif self.at_once is None:
            return False
        else:
            try:
                if not self.at_once(partial(self._samples[0].absorb, event)):
                    return False
            except Exception as error:  # noqa: BLE001  the reader's task raises it
                self._failure = error
                return False
        meter.tokens(clock.monotonic(), len(event.token_ids))
        return True

    def _with_gathered(self, event: TokenEvent) -> TokenEvent:
        """Return the event behind the tokens that were gathered before it, as one event."""
        ids, self._gathered = self._gathered, []
        if not ids:
            return event
        first = event.position - len(ids)
        return msgspec.structs.replace(event, position=first, token_ids=(*ids, *event.token_ids))

    def _cut_short(self, held: Delta | None) -> list[Delta]:
        """Return the last deltas of a request that an operator has aborted, at least one.

        `held` comes first unless None, else what was gathered; then one delta ends each sample that
        has not ended.
        """
        if self._gathered:
            sample = self._samples[0]
            end = sample.num_tokens + len(self._gathered)
            held = sample.absorb(self._with_gathered(TokenEvent(self.request.id, 0, end, ())))
        ends = [sample.aborted() for sample in self._samples if not sample.ended]
        return ends if held is None else [held, *ends]

    async def _best(self, live: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of the n best samples, best sample first, once all have ended."""
        held: list[list[Delta]] = [[] for _ in self._samples]
        async with aclosing(live):
            async for delta in live:
                held[delta.sample].append(delta)
        told = [[row[0].logprob for delta in each for row in delta.logprobs] for each in held]
        for choice, sample in enumerate(best_samples(told, self.num_choices)):
            for delta in held[sample]:
                yield msgspec.structs.replace(delta, sample=choice)


class SampleText:
    """The text of one sample. Call `absorb` with each of its events, in order, until it has
    `ended`.

    `stopped_by_text`: a stop string ended the sample, and a node may still compute it.
    """

    def __init__(
        self, index: int, request: Request, rules: OutputRules, tokenizer: Tokenizer
    ) -> None:
        self.num_tokens = 0
        self.reasoning_tokens = 0  # including the token that ended the reasoning
        self.ended = False
        self.stopped_by_text = False
        self._index = index
        self._stop_token_ids = request.params.stop_token_ids
        self._min_tokens = request.params.min_tokens
        self._shows_end = rules.include_stop
        self._discard = rules.discard
        shown: tuple[str, ...] = ()
        self._parser: MessageParser | None = None
        if rules.message is not None:
            shown, self._parser = rules.message.markers, MessageParser(rules.message)
        self._parts: list[Part] = []
        self._decoder = tokenizer.stream(rules.skip_special_tokens, shown)
        # None: no stop string and no parser looks at the text token by token.
        self._stops: StopMatcher | None = None
        if rules.stop or self._parser is not None:
            self._stops = StopMatcher(rules.stop, rules.include_stop)
        self.is_plain = self._stops is None and not self._discard  # only an event's reason ends it

    def absorb(self, event: TokenEvent) -> Delta:
        """Return what one event adds. Mutates decoder, matcher, parser and counts."""
        if self._discard:
            reason = event.finish_reason and FinishReason.LENGTH
            return self._delta(Delta(event.position, (), "", reason))
        ids, ended = event.token_ids, event.finish_reason is not None
        hides_last = ended and event.stop_token_id is not None and not self._shows_end
        if self._stops is not None:
            return self._delta(self._looked_through(event, hides_last, self._stops))
        self.num_tokens += len(ids)
        self.ended = ended
        text = self._decoder.push_all(ids[:-1] if hides_last else ids)
        return Delta(
            position=event.position,
            token_ids=ids,
            text=text + self._decoder.flush() if ended else text,
            finish_reason=event.finish_reason,
            stop_reason=self._stop_token(event) if ended else None,
            logprobs=event.logprobs,
            sample=self._index,
        )

    def _looked_through(self, event: TokenEvent, hides_last: bool, stops: StopMatcher) -> Delta:
        """Decode an event token by token, because a stop string may be complete after any token."""
        shown: list[str] = []
        for index, token_id in enumerate(event.token_ids):
            self.num_tokens += 1
            if hides_last and index == len(event.token_ids) - 1:
                break  # the end-of-sequence or stop token is counted, not shown
            result = stops.push(self._decoder.push(token_id), self._may_stop)
            self._show(result.text, shown)
            if result.matched is not None:
                return self._stop(event, index, shown, result.matched)
        if event.finish_reason is None:
            return Delta(event.position, event.token_ids, "".join(shown), logprobs=event.logprobs)
        # A last half character may complete a stop string too (it became a replacement character).
        result = stops.push(self._decoder.flush(), self._may_stop)
        self._show(result.text, shown)
        if result.matched is not None:
            return self._stop(event, len(event.token_ids) - 1, shown, result.matched, at_end=True)
        self._show(stops.flush(), shown)
        return Delta(
            position=event.position,
            token_ids=event.token_ids,
            text="".join(shown),
            finish_reason=event.finish_reason,
            stop_reason=self._stop_token(event),
            logprobs=event.logprobs,
        )

    @property
    def _may_stop(self) -> bool:
        """Whether a stop string may end the sample now: only after `min_tokens`, as in vLLM."""
        return self.num_tokens > self._min_tokens

    def aborted(self) -> Delta:
        """Return the delta that ends a sample which an operator aborted, with all text held back.

        Its finish reason is ABORT.
        """
        shown: list[str] = []
        text = self._decoder.flush()
        if self._stops is None:
            shown.append(text)
        else:
            self._show(self._stops.push(text).text, shown)
            self._show(self._stops.flush(), shown)
        return self._delta(Delta(self.num_tokens, (), "".join(shown), FinishReason.ABORT))

    def _show(self, text: str, shown: list[str]) -> None:
        """Add final text to `shown`, and parse it if there is a parser.

        The text became final with the token counted last; that token counts as reasoning if the
        parser is or was within the reasoning.
        """
        shown.append(text)
        if self._parser is not None:
            was_thinking = self._parser.thinking
            self._parts += self._parser.push(text)
            if was_thinking or self._parser.thinking:
                self.reasoning_tokens = self.num_tokens

    def _delta(self, delta: Delta) -> Delta:
        """Return the delta completed with its sample number and, with a parser, its parts."""
        self.ended = delta.finish_reason is not None
        if self._parser is None:
            return msgspec.structs.replace(delta, sample=self._index) if self._index else delta
        if self.ended and not self._discard:
            self._parts += self._parser.finish()
        parts, self._parts = tuple(self._parts), []
        calls = self._parser.num_calls
        return msgspec.structs.replace(delta, parts=parts, num_calls=calls, sample=self._index)

    def _stop_token(self, event: TokenEvent) -> int | None:
        """Return the client's stop token id that ended the sample; None for end-of-sequence."""
        return event.stop_token_id if event.stop_token_id in self._stop_token_ids else None

    def _stop(
        self, event: TokenEvent, index: int, shown: list[str], matched: str, at_end: bool = False
    ) -> Delta:
        """Return the delta that ends the sample at a stop string which event.token_ids[index]
        completed."""
        # The sample may have ended with the same event: then there is nothing left to stop.
        self.stopped_by_text = event.finish_reason is None and not at_end
        return Delta(
            position=event.position,
            token_ids=event.token_ids[: index + 1],
            text="".join(shown),
            finish_reason=FinishReason.STOP,
            stop_reason=matched,
            logprobs=event.logprobs[: index + 1],
        )
