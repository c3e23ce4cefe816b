"""LLM: one plain engine in this process, for scripts and as the great test's reference. No network.

from baton.llm import LLM
from baton.sampling import SamplingParams

outputs = LLM(model="path/to/model").generate(["What is prefill?"], SamplingParams(max_tokens=40))
print(outputs[0].text)
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from baton.engine.checkpoint import open_checkpoint
from baton.engine.config import DtypeName, EngineConfig
from baton.engine.engine import Engine
from baton.engine.interface import Task
from baton.errors import InternalError, InvalidRequest
from baton.events import TokenEvent
from baton.request import FinishReason, Request
from baton.sampling import SamplingParams
from baton.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """One prompt's answer. `token_ids` include the token that ended it; `text` (None for a prompt
    given as token ids) leaves that token out."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason


@dataclass(slots=True)
class _Answer:
    """What has been generated for one prompt so far."""

    token_ids: list[int]
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

        `engine`: use this one, made of the same checkpoint, instead of loading. `draw_seed`: where
        seeds come from that the params leave open. Raises ConfigError for a model that cannot be
        served.
        """
        self.engine = engine or Engine.load(EngineConfig(model=model, dtype=dtype, **options))
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

        `params`: one for all, or one per prompt. A seed that is None is drawn; max_tokens is cut to
        what the context leaves. Raises InvalidRequest before anything runs; on any raise nothing
        stays behind.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(texts)
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
        answers = {request.id: _Answer([]) for request in requests}
        try:
            for request in requests:
                self.engine.add(request, Task.LOCAL)
            while self.engine.has_work:
                for event in self.engine.step():
                    answer = answers[event.request_id]
                    answer.token_ids.extend(event.token_ids)
                    answer.last = event
                self.engine.take_block_events()  # nobody listens: forget them
                if self.engine.stalled:
                    raise InternalError("the engine cannot advance: its blocks are held elsewhere")
        finally:
            for request in requests:
                self.engine.abort(request.id)
        return answers

    def _output(self, request: Request, answer: _Answer, as_text: bool) -> GenerationOutput:
        if answer.last is None or answer.last.finish_reason is None:
            raise InternalError(f"{request.id} did not end")
        token_ids = tuple(answer.token_ids)
        shown = token_ids if answer.last.stop_token_id is None else token_ids[:-1]
        text = self._text(shown) if as_text else None
        return GenerationOutput(request.prompt_ids, token_ids, text, answer.last.finish_reason)

    def _text(self, token_ids: Sequence[int]) -> str:
        """As a stream shows it: the router's text and this one are the same by construction."""
        stream = self.tokenizer.stream()
        return "".join([*(stream.push(token) for token in token_ids), stream.flush()])
