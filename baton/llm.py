"""LLM: one plain engine in this process, for scripts and as the great test's reference. No network.

from baton.llm import LLM
from baton.sampling import SamplingParams

outputs = LLM(model="path/to/model").generate(["What is prefill?"], SamplingParams(max_tokens=40))
print(outputs[0].text)
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from baton.best_of import best_samples
from baton.engine.checkpoint import open_checkpoint
from baton.engine.config import DtypeName, EngineConfig
from baton.engine.engine import Engine
from baton.engine.interface import Task
from baton.engine.pooling import Pooler, PoolingJob, PoolingKind, normalized
from baton.errors import InternalError, InvalidRequest, UnsupportedFeature
from baton.events import TokenEvent, TokenLogprob
from baton.generation_config import sampling_defaults
from baton.request import FinishReason, Request
from baton.reranking import answer_tokens, rerank_prompts
from baton.sampling import SamplingParams
from baton.tokenizer import Tokenizer

Logprobs = tuple[tuple[TokenLogprob, ...], ...]


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """One sample, or one beam. `token_ids` include the token that ended it; `text` (None for a
    prompt given as token ids) leaves that token out. `logprobs[i]` belongs to token_ids[i] (itself
    first), if params asked for them or best_of needed them; only then `cumulative_logprob` is
    known."""

    index: int
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    logprobs: Logprobs = ()
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """One prompt's answer: n samples in their order; with best_of (by log probability per token) or
    beams, the best first.

    `prompt_logprobs[i]` is about prompt token i + 1, if params asked for them.
    """

    prompt_ids: tuple[int, ...]
    outputs: tuple[SampleOutput, ...]
    prompt_logprobs: Logprobs = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of the first sample."""
        return self.outputs[0].token_ids

    @property
    def text(self) -> str | None:
        """Of the first sample."""
        return self.outputs[0].text

    @property
    def finish_reason(self) -> FinishReason:
        """Of the first sample."""
        return self.outputs[0].finish_reason


class _Answer:
    """What has been generated for one prompt so far."""

    def __init__(self) -> None:
        self.prompt_logprobs: Logprobs = ()
        self.samples: dict[int, _Sample] = {}

    def take(self, event: TokenEvent) -> None:
        self.prompt_logprobs = event.prompt_logprobs or self.prompt_logprobs
        sample = self.samples.setdefault(event.sample, _Sample())
        sample.token_ids.extend(event.token_ids)
        sample.logprobs.extend(event.logprobs)
        sample.last = event


@dataclass(slots=True)
class _Sample:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[TokenLogprob, ...]] = field(default_factory=list)
    last: TokenEvent | None = None


class LLM:
    """A loaded model. Not thread-safe; `generate` returns when every prompt has ended."""

    def __init__(
        self,
        model: str,
        dtype: DtypeName = "auto",
        *,
        engine: Engine | None = None,
        draw_seed: Callable[[], int] | None = None,
        **options: Any,
    ) -> None:
        """Load `model`; `options` are the other fields of EngineConfig.

        `engine`: use this one, made of the same checkpoint, instead of loading; nothing of the
        checkpoint is then read before it is needed. `draw_seed`: where seeds come from that the
        params leave open. Raises ConfigError for a model that cannot be served.
        """
        self._defaults = SamplingParams()
        if engine is None:
            engine = Engine.load(EngineConfig(model=model, dtype=dtype, **options))
            self._defaults = replace(
                self._defaults, **sampling_defaults(open_checkpoint(model).path)
            )
        self.engine = engine
        self._draw_seed = draw_seed or (lambda: secrets.randbits(64))
        self._tokenizer: Tokenizer | None = None
        self._ids = count()

    @property
    def tokenizer(self) -> Tokenizer:
        """Loaded on first use: prompts given as token ids need none. Raises ModelRefused."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.load(open_checkpoint(self.engine.config.model).path)
        return self._tokenizer

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[GenerationOutput]:
        """Answers in the order of `prompts` (texts, or lists of token ids), all run together.

        `params`: one for all, or one per prompt; None = what the model's generation_config.json
        recommends. A seed that is None is drawn; max_tokens is cut to what the context leaves.
        Raises InvalidRequest before anything runs; on any raise nothing stays behind.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or self._defaults] * len(texts)
        if len(params) != len(texts):
            raise InvalidRequest(f"{len(params)} params for {len(texts)} prompts", field="params")
        requests = [self._request(text, p) for text, p in zip(texts, params, strict=True)]
        for request in requests:
            self.engine.validate(request, Task.LOCAL)
        answers = self._run(requests)
        return [
            self._output(request, answers[request.id], isinstance(text, str))
            for request, text in zip(requests, texts, strict=True)
        ]

    def embed(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        pooling: PoolingKind = "last",
        normalize: bool = True,
    ) -> list[list[float]]:
        """A vector per prompt: the last token's hidden state, or the mean over all tokens.

        `normalize`: to length 1. Raises InvalidRequest before anything runs.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        ids = [self.tokenizer.encode(t) if isinstance(t, str) else list(t) for t in texts]
        if not ids:
            return []
        vectors = PoolingJob(self.engine, self._pooler, ids, pooling).run()
        return (normalized(vectors) if normalize else vectors).tolist()

    def rerank(
        self, query: str, documents: Sequence[str], instruction: str | None = None
    ) -> list[float]:
        """How probably each document answers the query, 0 to 1, in the order given.

        The model is asked for a yes or a no (Qwen3-Reranker's prompt). Raises UnsupportedFeature
        for a model in whose vocabulary these are not single tokens.
        """
        yes, no = answer_tokens(self.tokenizer)
        if not documents:
            return []
        ids = rerank_prompts(self.tokenizer, query, documents, instruction)
        hidden = PoolingJob(self.engine, self._pooler, ids).run()
        return self._pooler.yes_probability(hidden, yes, no).tolist()

    @property
    def _pooler(self) -> Pooler:
        if self.engine.pooler is None:
            raise UnsupportedFeature("an engine without a model has no hidden states")
        return self.engine.pooler

    def _request(self, prompt: str | Sequence[int], params: SamplingParams) -> Request:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        room = self.engine.info.max_model_len - len(ids)
        max_tokens = max(1, min(params.max_tokens, room))
        seed = self._draw_seed() if params.seed is None else params.seed
        return Request(
            id=f"llm-{next(self._ids)}",
            prompt_ids=tuple(ids),
            params=replace(params, seed=seed, max_tokens=max_tokens),
        )

    def _run(self, requests: Sequence[Request]) -> dict[str, _Answer]:
        answers = {request.id: _Answer() for request in requests}
        try:
            for request in requests:
                self.engine.add(request, Task.LOCAL)
            while self.engine.has_work:
                for event in self.engine.step():
                    answers[event.request_id].take(event)
                self.engine.take_block_events()  # nobody listens: forget them
                if self.engine.stalled:
                    raise InternalError("the engine cannot advance: its blocks are held elsewhere")
        finally:
            for request in requests:
                self.engine.abort(request.id)
        return answers

    def _output(self, request: Request, answer: _Answer, as_text: bool) -> GenerationOutput:
        """The n samples asked for: of best_of, the best ones."""
        params = request.params
        samples = [
            self._sample(request, index, answer.samples[index], as_text)
            for index in sorted(answer.samples)
        ]
        if (params.best_of or 1) > params.n and not params.beam_width:
            told = [[each[0].logprob for each in sample.logprobs] for sample in samples]
            samples = [samples[index] for index in best_samples(told, params.n)]
        return GenerationOutput(
            request.prompt_ids, tuple(samples[: params.n]), answer.prompt_logprobs
        )

    def _sample(self, request: Request, index: int, sample: _Sample, as_text: bool) -> SampleOutput:
        if sample.last is None or sample.last.finish_reason is None:
            raise InternalError(f"{request.id} did not end")
        token_ids = tuple(sample.token_ids)
        shown = token_ids if sample.last.stop_token_id is None else token_ids[:-1]
        told = bool(sample.logprobs)
        return SampleOutput(
            index,
            token_ids,
            self._text(shown) if as_text else None,
            sample.last.finish_reason,
            tuple(sample.logprobs),
            sum(each[0].logprob for each in sample.logprobs) if told else None,
        )

    def _text(self, token_ids: Sequence[int]) -> str:
        """As a stream shows it: the router's text and this one are the same by construction."""
        stream = self.tokenizer.stream()
        return "".join([*(stream.push(token) for token in token_ids), stream.flush()])
