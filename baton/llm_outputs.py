"""What offline generation hands out, and how it comes of an engine's tokens. No engine here.

The life of a CollectedAnswer: made with its request -> `take` each event, in order -> `output` at
the end, or after any event on the way -> `finished`. Text comes as a server's stream shows it: by
the same decoder, cut at the same stop texts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.protocol.best_of import best_samples
from baton.protocol.errors import InternalError
from baton.protocol.events import TokenEvent, TokenLogprob
from baton.protocol.request import FinishReason, Request
from baton.text.stops import StopMatcher
from baton.text.tokenizer import Tokenizer

Logprobs = tuple[tuple[TokenLogprob, ...], ...]


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """One sample, or one beam. `token_ids` include the token that ended it; `text` (None for a
    prompt given as token ids) leaves that token out. `logprobs[i]` belongs to token_ids[i] (itself
    first), if params asked for them or best_of needed them; only then `cumulative_logprob` is
    known. `finish_reason` None: it goes on. `stop_reason`: the stop text or the stop token's id
    that ended it."""

    index: int
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason | None
    logprobs: Logprobs = ()
    cumulative_logprob: float | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """One prompt's answer: n samples in their order; with best_of (by log probability per token) or
    beams, the best first.

    `prompt_logprobs[i]` is about prompt token i + 1, if params asked for them. `prompt` None: it
    was given as token ids.
    """

    prompt_ids: tuple[int, ...]
    outputs: tuple[SampleOutput, ...]
    prompt_logprobs: Logprobs = ()
    prompt: str | None = field(default=None, compare=False)
    request_id: str = field(default="", compare=False)

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """vLLM's name of prompt_ids."""
        return self.prompt_ids

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of the first sample."""
        return self.outputs[0].token_ids

    @property
    def text(self) -> str | None:
        """Of the first sample."""
        return self.outputs[0].text

    @property
    def finish_reason(self) -> FinishReason | None:
        """Of the first sample."""
        return self.outputs[0].finish_reason

    @property
    def finished(self) -> bool:
        """Whether all samples have ended."""
        return all(output.finish_reason is not None for output in self.outputs)


class CollectedAnswer:
    """What has been generated for one request so far. `tokenizer` None: no text is wanted."""

    def __init__(
        self, request: Request, tokenizer: Tokenizer | None = None, prompt: str | None = None
    ) -> None:
        self.request = request
        self._prompt = prompt
        self._prompt_logprobs: Logprobs = ()
        self._samples = [
            _Sample(index, request, tokenizer) for index in range(request.params.num_outputs)
        ]

    @property
    def finished(self) -> bool:
        return all(sample.finish_reason is not None for sample in self._samples)

    @property
    def reports_early(self) -> bool:
        """Whether its samples are known before their end: which ones are best is not."""
        return len(self._samples) == self.request.params.n and not self.request.params.beam_width

    @property
    def num_tokens(self) -> int:
        """Of all samples."""
        return sum(len(sample.token_ids) for sample in self._samples)

    def take(self, event: TokenEvent) -> bool:
        """Add an event's tokens. True: their text has just ended the sample, of which the engine
        knows nothing."""
        self._prompt_logprobs = event.prompt_logprobs or self._prompt_logprobs
        return self._samples[event.sample].take(event)

    def abort(self) -> None:
        """End what has not ended."""
        for sample in self._samples:
            sample.end(sample.finish_reason or FinishReason.ABORT)

    def output(self, delta: bool = False) -> GenerationOutput:
        """The n samples asked for, so far: of best_of, the best ones. `delta`: only what is new
        since it was asked for last."""
        params = self.request.params
        chosen = self._samples
        if len(chosen) > params.n and not params.beam_width:
            known = [[each[0].logprob for each in sample.logprobs] for sample in chosen]
            chosen = [chosen[index] for index in best_samples(known, params.n)]
        samples = tuple(sample.output(delta) for sample in chosen[: params.n])
        request, of_prompt = self.request, self._prompt_logprobs
        if delta:
            self._prompt_logprobs = ()
        return GenerationOutput(request.prompt_ids, samples, of_prompt, self._prompt, request.id)


class _Sample:
    """One sample so far. `token_ids`, `logprobs` and `finish_reason` are read by its
    CollectedAnswer."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer | None) -> None:
        params = request.params
        self.token_ids: list[int] = []
        self.logprobs: list[tuple[TokenLogprob, ...]] = []
        self.finish_reason: FinishReason | None = None
        self._index = index
        self._params = params
        self._stop_reason: str | int | None = None
        self._pieces: list[str] = []
        self._decoder = None if tokenizer is None else tokenizer.stream(params.skip_special_tokens)
        self._stops = StopMatcher(params.stop, params.include_stop_str_in_output)
        self._returned_tokens = 0
        self._returned_pieces = 0

    def take(self, event: TokenEvent) -> bool:
        """See CollectedAnswer.take."""
        if self.finish_reason is not None:
            return False  # computed before the engine heard of its end
        if event.position != len(self.token_ids):
            raise InternalError(f"{event.request_id}: tokens are missing before {event.position}")
        ended = event.finish_reason is not None
        for index, token_id in enumerate(event.token_ids):
            self.token_ids.append(token_id)
            self.logprobs += event.logprobs[index : index + 1]
            last = index == len(event.token_ids) - 1
            hidden = last and ended and event.stop_token_id is not None
            if hidden and not self._params.include_stop_str_in_output:
                continue
            if self._decoder is not None and self._matched(self._decoder.push(token_id)):
                return not ended
        if event.finish_reason is not None:
            self._stop_reason = event.stop_token_id
            if event.stop_token_id not in self._params.stop_token_ids:
                self._stop_reason = None  # the model's own end
            self.end(event.finish_reason)
        return False

    def end(self, reason: FinishReason) -> None:
        """Show what was held back. Twice is safe."""
        if self.finish_reason is None:
            self.finish_reason = reason
            if self._decoder is not None and not self._matched(self._decoder.flush()):
                self._pieces.append(self._stops.flush())

    def _matched(self, piece: str) -> bool:
        """Show a piece of text; whether it completes a stop text, which ends the sample. As
        vLLM's, they count from the first token beyond min_tokens on."""
        found = self._stops.push(piece, len(self.token_ids) > self._params.min_tokens)
        self._pieces.append(found.text)
        if found.matched is not None:
            self.finish_reason, self._stop_reason = FinishReason.STOP, found.matched
        return found.matched is not None

    def output(self, delta: bool) -> SampleOutput:
        tokens, pieces = (self._returned_tokens, self._returned_pieces) if delta else (0, 0)
        self._returned_tokens, self._returned_pieces = len(self.token_ids), len(self._pieces)
        return SampleOutput(
            self._index,
            tuple(self.token_ids[tokens:]),
            None if self._decoder is None else "".join(self._pieces[pieces:]),
            self.finish_reason,
            tuple(self.logprobs[tokens:]),
            sum(each[0].logprob for each in self.logprobs) if self.logprobs else None,
            self._stop_reason,
        )
