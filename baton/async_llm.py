"""AsyncLLM: one engine in this process for asyncio; several requests at once, each a stream.

The life: made (the model is loaded, the engine's thread started) -> generate()* -> close(), or
`async with`. TokenStreams is what is below it, and below `baton batch --model`: requests in, token
events out, over the engine's thread. No network.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from baton.engine.core.engine import Engine
from baton.engine.core.images import read_ahead
from baton.engine.thread import EngineThread, StepReport
from baton.llm import LLM
from baton.llm_inputs import Adapter, ChatOptions, Message, Prompt
from baton.llm_outputs import CollectedAnswer, GenerationOutput
from baton.protocol.errors import (
    BatonError,
    Cancelled,
    InvalidRequest,
    Unavailable,
    error_from_code,
)
from baton.protocol.events import RequestFailed, TokenEvent
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from baton.text.tokenizer import Tokenizer


@dataclass(slots=True)
class _Stream:
    """A request under way; samples in `ended` have no further event. `failure` ends it at once,
    whatever still waits to be read."""

    request: Request
    events: asyncio.Queue[TokenEvent | RequestFailed | None] = field(default_factory=asyncio.Queue)
    ended: set[int] = field(default_factory=set[int])
    failure: BatonError | None = None

    @property
    def done(self) -> bool:
        return len(self.ended) == self.request.params.num_outputs

    def fail(self, error: BatonError) -> None:
        self.failure = error
        self.events.put_nowait(None)

    async def next(self) -> TokenEvent:
        """Raises what ended the request."""
        event = await self.events.get()
        if isinstance(event, RequestFailed):
            raise error_from_code(event.code, event.message, event.field)
        if self.failure is not None or event is None:
            raise self.failure or Cancelled("the request was cancelled")
        return event


class TokenStreams:
    """Requests over one engine. Used within one event loop, but for what the engine thread calls.

    `thread` runs the engine: its owner starts it, and calls `stop`. `stepped` is called on the
    event loop after each step, and when a request has left.
    """

    def __init__(self, engine: Engine, stepped: Callable[[], object] = lambda: None) -> None:
        self.thread = EngineThread(engine, self._on_step)
        self._stepped = stepped
        self._streams: dict[str, _Stream] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """The request's tokens to the end of every sample; closing it early aborts it.

        Raises BatonError: what the engine refuses, and Cancelled after `cancel`.
        """
        self._loop = asyncio.get_running_loop()
        if request.id in self._streams:
            raise InvalidRequest(f"request {request.id} already runs here", field="request_id")
        stream = self._streams[request.id] = _Stream(request)
        try:
            async with read_ahead(self.thread.engine.model, request):
                await self.thread.call(lambda engine: engine.add(request))
            while not stream.done:
                event = await stream.next()
                if event.finish_reason is not None:
                    stream.ended.add(event.sample)
                yield event
        finally:
            del self._streams[request.id]
            # Also when all samples have ended: by their text, the engine knows nothing of it.
            self.thread.post(lambda engine: self._leave(engine, request.id))

    def stop_sample(self, request_id: str, sample: int) -> None:
        """A sample's text has ended: it has no further event, the others go on."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.ended.add(sample)
            epoch = stream.request.epoch
            self.thread.post(lambda engine: engine.stop_sample(request_id, epoch, sample))

    def cancel(self, request_id: str) -> bool:
        """End a request from outside; False if it is not here."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.fail(Cancelled("the request was aborted"))
        return stream is not None

    async def stop(self) -> None:
        """End the thread; who still waits for tokens gets Unavailable. Twice is safe."""
        await asyncio.to_thread(self.thread.stop)
        for stream in self._streams.values():
            stream.fail(Unavailable("the engine is stopped"))

    def _leave(self, engine: Engine, request_id: str) -> None:
        engine.abort(request_id)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stepped)

    def _on_step(self, report: StepReport) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._deliver, report)

    def _deliver(self, report: StepReport) -> None:
        for event in (*report.events, *report.failed):
            stream = self._streams.get(event.request_id)
            if stream is not None:
                stream.events.put_nowait(event)
        self._stepped()


class AsyncLLM:
    """A loaded model whose requests run side by side. Used within one event loop."""

    def __init__(self, model: str, dtype: str = "auto", **options: Any) -> None:
        """As LLM's: loads the model before it returns. Raises ConfigError."""
        self._llm = LLM(model, dtype, **options)
        self._streams = TokenStreams(self._llm.engine)
        self._streams.thread.start()

    @property
    def tokenizer(self) -> Tokenizer:
        """See LLM.tokenizer."""
        return self._llm.tokenizer

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: Adapter = None,
        delta: bool = False,
    ) -> AsyncGenerator[GenerationOutput, None]:
        """The answer while it is written: all of it so far, or (`delta`) what is new.

        Closing the generator ends the request; with best_of or beams the end alone is
        reported. Raises BatonError.
        """
        params = sampling_params or self._llm.get_default_sampling_params()
        # Off the loop: a long text takes a while to encode.
        answer = await asyncio.to_thread(
            self._llm.inputs.answer, prompt, params, lora_request, request_id
        )
        async with aclosing(self._outputs(answer, delta)) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: Adapter = None,
        delta: bool = False,
        **options: Any,
    ) -> AsyncGenerator[GenerationOutput, None]:
        """`generate` of a conversation, by the model's chat template; `options`: ChatOptions."""
        how = ChatOptions(**options)
        prompt = await asyncio.to_thread(self._llm.inputs.rendered, messages, how)
        answering = self.generate(
            prompt, sampling_params, request_id, lora_request=lora_request, delta=delta
        )
        async with aclosing(answering) as outputs:
            async for output in outputs:
                yield output

    async def abort(self, request_id: str) -> bool:
        """End a request: its stream ends with what there is. False if it is not here."""
        return self._streams.cancel(request_id)

    async def close(self) -> None:
        """Requests under way raise Unavailable. Twice is safe."""
        await self._streams.stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _outputs(
        self, answer: CollectedAnswer, delta: bool
    ) -> AsyncGenerator[GenerationOutput, None]:
        request_id, num_returned = answer.request.id, 0
        try:
            async with aclosing(self._streams.run(answer.request)) as events:
                async for event in events:
                    if answer.take(event):
                        self._streams.stop_sample(request_id, event.sample)
                    early = answer.reports_early and answer.num_tokens > num_returned
                    if answer.finished or early:
                        num_returned = answer.num_tokens
                        yield answer.output(delta)
                    if answer.finished:
                        return
        except Cancelled:
            answer.abort()
            yield answer.output(delta)
