"""One request from the dispatcher's tokens to what a client reads: text, finish reason, usage.

Used by both front doors (HTTP and gRPC); for chats the text is taken apart too (baton/parsers).
A request may have several samples, or beams: all run at once, each ends once, with a Delta that has
a finish_reason, and each has its own text, stop strings and parser. An exception ends all of them.
Closing `deltas()` early closes the dispatcher's stream, which aborts the request on every hop. A
stop string ends a sample here, because only the router sees text; the others go on.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol

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
    from router.metrics.router import RouterMetrics


class Dispatch(Protocol):
    """What a front door needs of router/request/dispatch.py."""

    def run(self, request: Request, trace: RequestTrace) -> AsyncGenerator[TokenEvent, None]: ...
    def stop_sample(self, request_id: str, sample: int) -> None: ...


@dataclass(frozen=True, slots=True)
class CallRunner:
    """What runs completions: who computes their tokens, who counts them, and by which clock."""

    dispatch: Dispatch
    metrics: RouterMetrics
    clock: Clock


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


PLAIN_OUTPUT: Final = OutputRules()  # of whoever asks for nothing of this


@dataclass(frozen=True, slots=True)
class Delta:
    """What one event of one sample adds. `text` may be empty (half a character, a held-back tail).

    `position` is the absolute output index of token_ids[0]. `stop_reason` is the stop string or the
    stop token id that ended it, None for end-of-sequence. `logprobs[i]` belongs to token_ids[i].
    `parts` are what `text` holds, `num_calls` the tool calls so far, if the rules ask for these.
    `sample`: which of the request's choices it belongs to, from 0.
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
        self.rules = rules
        self.tokenizer = tokenizer
        self.trace = RequestTrace(terms)
        self.cached_tokens = 0
        self.guided_field = FIELD  # the client's own name of the constraint, for what nodes refuse
        self.prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
        self._samples = [
            SampleText(sample, request, rules, tokenizer)
            for sample in range(request.params.num_outputs)
        ]

    @property
    def num_choices(self) -> int:
        """Answers that the client gets: samples of the deltas are below that."""
        return self.request.params.n

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def completion_tokens(self) -> int:
        """Of all samples, also of those that best_of drops."""
        return sum([sample.num_tokens for sample in self._samples])

    @property
    def reasoning_tokens(self) -> int:
        return sum([sample.reasoning_tokens for sample in self._samples])

    def parts_of(self, delta: Delta) -> Sequence[Part]:
        """What a delta of this completion holds: all of its text is content, unless the rules ask
        for parts."""
        if self.rules.message is not None:
            return delta.parts
        return (Content(delta.text),) if delta.text else ()

    def twin(self) -> Completion:
        """The same, not run yet: its request may be told to several readers."""
        return Completion(self.request, self.model, self.rules, self.tokenizer, self.trace.terms)

    def deltas(self, runner: CallRunner) -> AsyncGenerator[Delta, None]:
        """Run the request, measured from its arrival. Raises BatonError."""
        live = self._run(runner)
        return live if len(self._samples) == self.request.params.n else self._best(live)

    async def _run(self, runner: CallRunner) -> AsyncGenerator[Delta, None]:
        """All samples as they come, each ended once. The last end is told when the dispatcher has
        recorded it. The meter is ended on every way out."""
        dispatch, clock, outcome = runner.dispatch, runner.clock, "cancelled"
        meter = runner.metrics.begin(self.model, self.request.arrival)
        meter.params = self.request.params
        num_running = len(self._samples)
        last: Delta | None = None
        try:
            try:
                async with aclosing(dispatch.run(self.request, self.trace)) as events:
                    async for event in events:
                        sample = self._samples[event.sample]
                        if sample.ended:
                            continue  # under way when its text ended it
                        self.cached_tokens = max(self.cached_tokens, event.num_cached_tokens)
                        self.prompt_logprobs = self.prompt_logprobs or event.prompt_logprobs
                        delta = sample.absorb(event)
                        meter.tokens(clock.monotonic(), len(event.token_ids), event.sample)
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
            meter.end(clock.monotonic(), self.trace, len(self.request.prompt_ids), outcome)

    def _cut_short(self, held: Delta | None) -> list[Delta]:
        """`held`, if any, and the ends of what an operator has aborted: at least one."""
        ends = [sample.aborted() for sample in self._samples if not sample.ended]
        return ends if held is None else [held, *ends]

    async def _best(self, live: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
        """The n best samples, best first, once all have ended."""
        held: list[list[Delta]] = [[] for _ in self._samples]
        async with aclosing(live):
            async for delta in live:
                held[delta.sample].append(delta)
        told = [[row[0].logprob for delta in each for row in delta.logprobs] for each in held]
        for choice, sample in enumerate(best_samples(told, self.num_choices)):
            for delta in held[sample]:
                yield replace(delta, sample=choice)


class SampleText:
    """One sample's tokens as text. `absorb` each of its events, in order, until it has `ended`.

    `stopped_by_text`: a stop string ended it, and a node may still go on with it.
    """

    def __init__(
        self, index: int, request: Request, rules: OutputRules, tokenizer: Tokenizer
    ) -> None:
        self.num_tokens = 0
        self.reasoning_tokens = 0  # up to the one that ended it
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
        # None: nothing is looked for in the text.
        self._stops: StopMatcher | None = None
        if rules.stop or self._parser is not None:
            self._stops = StopMatcher(rules.stop, rules.include_stop)

    def absorb(self, event: TokenEvent) -> Delta:
        """Text of one event. Mutates decoder, matcher, parser and counts."""
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
        """An event's text, token by token: a stop string may be complete with each of them."""
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
        """Stop strings count from the first token beyond `min_tokens` on, as vLLM's do."""
        return self.num_tokens > self._min_tokens

    def aborted(self) -> Delta:
        """The end of an output that somebody else than its client stopped: what there is of it."""
        shown: list[str] = []
        text = self._decoder.flush()
        if self._stops is None:
            shown.append(text)
        else:
            self._show(self._stops.push(text).text, shown)
            self._show(self._stops.flush(), shown)
        return self._delta(Delta(self.num_tokens, (), "".join(shown), FinishReason.ABORT))

    def _show(self, text: str, shown: list[str]) -> None:
        """Text that became final with the token counted last."""
        shown.append(text)
        if self._parser is not None:
            was_thinking = self._parser.thinking
            self._parts += self._parser.push(text)
            if was_thinking or self._parser.thinking:
                self.reasoning_tokens = self.num_tokens

    def _delta(self, delta: Delta) -> Delta:
        """The delta with its sample, and with its parts."""
        self.ended = delta.finish_reason is not None
        if self._parser is None:
            return replace(delta, sample=self._index) if self._index else delta
        if self.ended and not self._discard:
            self._parts += self._parser.finish()
        parts, self._parts = tuple(self._parts), []
        calls = self._parser.num_calls
        return replace(delta, parts=parts, num_calls=calls, sample=self._index)

    def _stop_token(self, event: TokenEvent) -> int | None:
        """The client's own stop token id that ended it, None for the model's end-of-sequence."""
        return event.stop_token_id if event.stop_token_id in self._stop_token_ids else None

    def _stop(
        self, event: TokenEvent, index: int, shown: list[str], matched: str, at_end: bool = False
    ) -> Delta:
        """The Delta that ends the output at a stop string completed by event.token_ids[index]."""
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
