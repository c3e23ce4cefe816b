"""LLM: one plain engine in this process, for scripts and as the great test's reference. No network.

from baton.llm import LLM
from baton.protocol.sampling import SamplingParams

outputs = LLM(model="path/to/model").generate(["What is prefill?"], SamplingParams(max_tokens=40))
print(outputs[0].text)

Names are vLLM's where they mean the same (docs/offline.md); AsyncLLM (async_llm.py) is the same for
asyncio. Every call adds its requests, steps the engine until they have ended, and leaves nothing
behind, whatever is raised.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cached_property
from typing import Any, cast

from torch import Tensor

from baton.engine.config import EngineConfig
from baton.engine.core.assembly import build_engine
from baton.engine.core.engine import Engine
from baton.engine.core.pooling import Pooler, PoolingJob, PoolingKind, normalized
from baton.engine.state.interface import Task
from baton.llm_encoder import Bar, OfflineEncoder, progress_bar
from baton.llm_inputs import (
    Adapter,
    BeamSearchParams,
    ChatOptions,
    Inputs,
    LoRARequest,
    Message,
    Prompt,
)
from baton.llm_outputs import CollectedAnswer, GenerationOutput, SampleOutput
from baton.protocol.errors import ConfigError, InternalError, InvalidRequest, UnsupportedFeature
from baton.protocol.sampling import SamplingParams
from baton.runtime.config import load
from baton.runtime.vllm_flags import IDLE, note
from baton.text.reranking import answer_tokens, rerank_prompts
from baton.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
__all__ = [
    "LLM", "BeamSearchParams", "GenerationOutput", "LoRARequest", "SampleOutput", "SamplingParams",
]  # fmt: skip

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A loaded model. Not thread-safe."""

    def __init__(
        self,
        model: str,
        dtype: str = "auto",
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
        loaded = engine or build_engine(_configured({"model": model, "dtype": dtype, **options}))
        self.engine = loaded
        self.inputs = Inputs(loaded.config.model, loaded.info, draw_seed)
        self._defaults = self.inputs.defaults if engine is None else SamplingParams()
        self._live: dict[str, CollectedAnswer] = {}

    @property
    def tokenizer(self) -> Tokenizer:
        """Loaded on first use: prompts given as token ids need none. Raises ModelRefused."""
        return self.inputs.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What holds where a call gives none: the model's generation_config.json recommends it."""
        return self._defaults

    # ---- tokens ----

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: Bar = True,
        lora_request: Adapter | Sequence[Adapter] = None,
    ) -> list[GenerationOutput]:
        """Answers in the order of `prompts` (texts, or lists of token ids), all run together.

        `sampling_params`: one for all, or one per prompt; None = what the model's
        generation_config.json recommends. A seed that is None is drawn; max_tokens is cut to what
        the context leaves. `lora_request`: an adapter, or its name, for all or one per prompt.
        Raises InvalidRequest before anything runs; on any raise nothing stays behind.
        """
        asked = _each(prompts)
        params = _one_each(sampling_params or self._defaults, len(asked), "params")
        adapters = _one_each(lora_request, len(asked), "lora_request")
        answers = [
            self.inputs.answer(prompt, one, adapter)
            for prompt, one, adapter in zip(asked, params, adapters, strict=True)
        ]
        with self._running(answers), progress_bar(len(answers), use_tqdm) as bar:
            while waiting := [answer for answer in answers if not answer.finished]:
                self._step()
                bar.update(sum(answer.finished for answer in waiting))
        return [answer.output() for answer in answers]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        lora_request: Adapter = None,
        *,
        delta: bool = False,
    ) -> Generator[GenerationOutput, None, None]:
        """One prompt's answer while it is written: all of it so far, or (`delta`) what is new.

        Closing the generator ends the request. With best_of or beams the end alone is
        reported. Raises the same exceptions as `generate`.
        """
        answer = self.inputs.answer(prompt, sampling_params or self._defaults, lora_request)
        with self._running([answer]):
            while not answer.finished:
                before = answer.num_tokens
                self._step()
                if answer.finished or (answer.reports_early and answer.num_tokens > before):
                    yield answer.output(delta)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: Bar = True,
        lora_request: Adapter | Sequence[Adapter] = None,
        **options: Any,
    ) -> list[GenerationOutput]:
        """Answers to a conversation, or to several, by the model's chat template.

        `options`: ChatOptions. Raises as `generate` does, also for a model without a template.
        """
        several = [] if not messages or isinstance(messages[0], dict) else messages
        talks = cast("Sequence[Sequence[Message]]", several or [messages])
        how = ChatOptions(**options)
        prompts = [self.inputs.rendered(talk, how) for talk in talks]
        return self.generate(prompts, sampling_params, use_tqdm, lora_request)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        use_tqdm: Bar = True,
        lora_request: Adapter | Sequence[Adapter] = None,
    ) -> list[GenerationOutput]:
        """The `beam_width` most probable continuations of each prompt, best first, with their
        `cumulative_logprob`. Raises the same exceptions as `generate`."""
        return self.generate(prompts, params.sampling(), use_tqdm, lora_request)

    # ---- vectors ----

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: PoolingKind | None = None,
        normalize: bool | None = None,
        use_tqdm: Bar = True,
        lora_request: Adapter = None,
    ) -> list[list[float]]:
        """A vector per prompt: the last token's hidden state, or the mean over all tokens.

        `normalize`: to length 1, which is the default. An encoder's checkpoint says both, and the
        prompt that is written before each text. Raises InvalidRequest before anything runs.
        """
        if self._encoder is not None:
            return self._encoder.embed(_each(prompts), pooling, normalize, use_tqdm)
        ids = [self.inputs.read(prompt)[0] for prompt in _each(prompts)]
        if not ids:
            return []
        vectors = self._pooled(ids, use_tqdm, lora_request, pooling or "last")
        return (vectors if normalize is False else normalized(vectors)).tolist()

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: Bar = True,
        lora_request: Adapter = None,
    ) -> list[list[float]]:
        """The probabilities of each prompt's classes: of a reranker no and yes, in this order, of
        a cross-encoder those of its config.json.

        Raises UnsupportedFeature for a model that was not made to name classes.
        """
        if self._encoder is not None:
            return self._encoder.classify(_each(prompts), use_tqdm)
        if not self.inputs.is_reranker:
            raise UnsupportedFeature("this model has no classes: it is no reranker", field="model")
        ids = [self.inputs.read(prompt)[0] for prompt in _each(prompts)]
        return [[1.0 - yes, yes] for yes in self._yes(ids, use_tqdm, lora_request)] if ids else []

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        use_tqdm: Bar = True,
        lora_request: Adapter = None,
    ) -> list[float]:
        """How well the texts of each pair belong together: one `text_1` goes with every `text_2`.

        By a reranker the probability that the second answers the first, by a cross-encoder its
        score, by any other model the cosine of their vectors. Raises InvalidRequest.
        """
        first = [text_1] if isinstance(text_1, str) else list(text_1)
        second = [text_2] if isinstance(text_2, str) else list(text_2)
        first = first * len(second) if len(first) == 1 else first
        if len(first) != len(second):
            message = f"text_1: one, or as many as there are in text_2 ({len(second)})"
            raise InvalidRequest(message, field="text_1")
        if not second:
            return []
        if self._encoder is not None:
            return self._encoder.score(first, second, use_tqdm)
        if self.inputs.is_reranker:
            pairs = zip(first, second, strict=True)
            asked = [rerank_prompts(self.tokenizer, a, [b], None)[0] for a, b in pairs]
            return self._yes(asked, use_tqdm, lora_request)
        ids = [self.tokenizer.encode(text) for text in (*first, *second)]
        vectors = normalized(self._pooled(ids, use_tqdm, lora_request))
        return (vectors[: len(first)] * vectors[len(first) :]).sum(-1).tolist()

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        instruction: str | None = None,
        use_tqdm: Bar = True,
        lora_request: Adapter = None,
    ) -> list[float]:
        """How probably each document answers the query, 0 to 1, in the order given.

        The model is asked for a yes or a no (Qwen3-Reranker's prompt). Raises UnsupportedFeature
        for a model in whose vocabulary these are not single tokens.
        """
        if self._encoder is not None:
            if instruction is not None:
                raise UnsupportedFeature("an encoder takes no instruction", field="instruction")
            return self.score(query, documents, use_tqdm)
        if not documents:
            answer_tokens(self.tokenizer)
            return []
        ids = rerank_prompts(self.tokenizer, query, documents, instruction)
        return self._yes(ids, use_tqdm, lora_request)

    def _yes(self, ids: Sequence[Sequence[int]], use_tqdm: Bar, adapter: Adapter) -> list[float]:
        yes, no = answer_tokens(self.tokenizer)
        hidden = self._pooled(ids, use_tqdm, adapter)
        return self._pooler.yes_probability(hidden, yes, no).tolist()

    def _pooled(
        self,
        ids: Sequence[Sequence[int]],
        use_tqdm: Bar,
        adapter: Adapter,
        kind: PoolingKind = "last",
    ) -> Tensor:
        name = self.inputs.adapter(adapter)
        job = PoolingJob(self.engine, self._pooler, ids, kind, name)
        with progress_bar(len(ids), use_tqdm) as bar:
            return job.run(bar.update)

    @cached_property
    def _encoder(self) -> OfflineEncoder | None:
        encoder = self.engine.active.encoder
        return None if encoder is None else OfflineEncoder(encoder, self.engine.config, self.inputs)

    @property
    def _pooler(self) -> Pooler:
        if self.engine.pooler is None:
            raise UnsupportedFeature("an engine without a model has no hidden states")
        return self.engine.pooler

    # ---- the engine ----

    @contextmanager
    def _running(self, answers: Sequence[CollectedAnswer]) -> Generator[None, None, None]:
        """Their requests are in the engine, all or none; at the end none is."""
        for answer in answers:
            self.engine.validate(answer.request, Task.LOCAL)
        try:
            for answer in answers:
                self.engine.add(answer.request, Task.LOCAL)
                self._live[answer.request.id] = answer
            yield
        finally:
            for answer in answers:
                self._live.pop(answer.request.id, None)
                self.engine.abort(answer.request.id)

    def _step(self) -> None:
        """One step, of whatever runs: also of streams that somebody else reads."""
        for event in self.engine.step():
            answer = self._live.get(event.request_id)
            if answer is not None and answer.take(event):
                if answer.finished:
                    self.engine.abort(event.request_id)
                else:
                    self.engine.stop_sample(event.request_id, event.epoch, event.sample)
        self.engine.take_block_events()  # nobody listens: forget them
        if self.engine.stalled:
            raise InternalError("the engine cannot advance: its blocks are held elsewhere")


def _configured(options: Mapping[str, Any]) -> EngineConfig:
    """Raises ConfigError for an option that there is none of."""
    known = {spec.name for spec in fields(EngineConfig)}
    for name in options.keys() - known:
        if name not in IDLE:
            raise ConfigError(f"LLM has no option {name!r}", field=name)
        log.info(note(name))
    return load(EngineConfig, {name: options[name] for name in options.keys() & known})


def _each(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt, of whatever form, is a list of one."""
    given: Any = prompts
    single = isinstance(given, str | dict) or (len(given) > 0 and isinstance(given[0], int))
    return [given] if single else list(given)


def _one_each(given: Any, number: int, name: str) -> list[Any]:
    """One for all, or as many as there are. Raises InvalidRequest."""
    if not isinstance(given, list | tuple):
        return [given] * number
    several = cast("Sequence[Any]", given)
    if len(several) != number:
        raise InvalidRequest(f"{len(several)} {name} for {number} prompts", field=name)
    return list(several)
