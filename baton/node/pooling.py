"""PoolingDesk: computes vectors of prompts on a node, in turns with the engine's steps.

Life of a SubmitPool:
    serve()  -> a PoolingJob is made on the engine thread: lengths, ids and adapter are checked
    step     -> one forward per call on that thread, and one call at a time of all jobs: every
                running request steps in between
    no room  -> the job waits until blocks are given back, at most until its deadline
    end      -> one Pooled to the router; however the job ends, its blocks are free at once

A node of either role serves it: nothing is exported or decoded. `vectors` does all of this except
the message to the router, for callers that have an engine without a node.

Texts of an encoder (baton/engine/encoders/) go to EncoderDesk instead:
    vectors()  -> ids and lengths are checked; the texts join one queue with those of all calls
    batch      -> the next texts of the queue, at most max_num_batched_tokens and max_num_seqs of
                  them, are one forward on the engine thread, without padding
    end        -> each call gets its numbers, also if its texts were in several batches
The router sends groups of bounded size in fair turns (router/request/pool.py), so first come, first
served is fair here.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

import torch
from torch import Tensor

from baton.engine.core.engine import Engine
from baton.engine.core.pooling import PoolingJob, normalized
from baton.engine.state.encoder_texts import EncoderText, VectorAsk, batch_sizes
from baton.engine.thread import EngineThread
from baton.node.requests import NodeRequest
from baton.protocol.errors import InternalError, UnsupportedFeature
from baton.protocol.events import NodeStep, Pooled
from baton.protocol.messages import SubmitPool

if TYPE_CHECKING:  # lazy at run time: it takes transformers
    from baton.engine.encoders.encoder import Encoder

# One forward takes at most a step's tokens divided by this number.
STEP_SHARE: Final = 8


class ThreadOwner(Protocol):
    """The owner of the engine's thread."""

    @property
    def thread(self) -> EngineThread: ...


class PoolingDesk:
    """Runs the pooling jobs of one engine: any number at once, their forwards one after another."""

    def __init__(self, owner: ThreadOwner) -> None:
        self._thread = owner.thread
        self._encoding = EncoderDesk(owner.thread)
        self._freed = asyncio.Event()
        # Only one forward of all jobs runs between two steps, so that requests wait for no more
        # than one.
        self._turn = asyncio.Lock()

    async def serve(self, entry: NodeRequest, asked: SubmitPool) -> None:
        """Serve a submission until its Pooled is sent. Raises InvalidRequest,
        UnsupportedFeature.
        """
        request, vectors = asked.request, await self.vectors(asked)
        entry.send(NodeStep(pooled=(Pooled(request.id, request.epoch, vectors),)))
        entry.end()

    async def vectors(self, asked: SubmitPool) -> tuple[bytes, ...]:
        """Return one vector per prompt: float32, little-endian. Raises the errors of `serve`."""
        encoder = self._thread.engine.active.encoder
        if encoder is not None:
            return await self._encoding.vectors(encoder, asked)
        job = await self._thread.call(lambda engine: _begin(engine, asked))
        try:
            while not job.done:
                # Read before the step, so that blocks freed during the step are not missed.
                freed = self._freed
                async with self._turn:
                    stepped = await self._thread.call(lambda _: job.step())
                if not stepped:
                    await freed.wait()
            return await self._thread.call(lambda engine: _end(engine, asked, job))
        finally:
            self._thread.post(lambda _: job.close())
            self.blocks_freed()

    def blocks_freed(self) -> None:
        """Let waiting jobs try again: blocks may have become free. Event loop."""
        self._freed.set()
        self._freed = asyncio.Event()


def _begin(engine: Engine, asked: SubmitPool) -> PoolingJob:
    adapter = asked.request.adapter
    if engine.pooler is None:
        raise UnsupportedFeature("this engine pools no hidden states", field="model")
    if asked.kind == "own" or asked.second_from:
        raise UnsupportedFeature("this model is no encoder", field="kind")
    if adapter and adapter not in engine.info.adapters:
        raise UnsupportedFeature(f"no adapter {adapter!r} here", field="model")
    if asked.kind == "classify" and not engine.pooler.num_classes:
        raise UnsupportedFeature("this model is no classifier", field="model")
    if asked.kind == "yes_no" and max(asked.answers) >= engine.info.vocab_size:
        raise UnsupportedFeature("yes and no are no tokens of this model", field="model")
    kind = "mean" if asked.kind == "mean" else "last"
    job = PoolingJob(engine, engine.pooler, asked.prompts, kind, adapter)
    job.most_tokens = max(1, job.most_tokens // STEP_SHARE)
    return job


def _end(engine: Engine, asked: SubmitPool, job: PoolingJob) -> tuple[bytes, ...]:
    """Return the job's vectors in the form that was asked for, and count them."""
    pooler, vectors = engine.pooler, job.vectors()
    assert pooler is not None, "the job was made with it"
    engine.stats.num_pooled_prompts += len(asked.lengths)
    engine.stats.num_pooled_tokens += sum(asked.lengths)
    if asked.kind == "yes_no":
        yes, no = asked.answers
        return _as_bytes(pooler.yes_probability(vectors, yes, no)[:, None])
    if asked.kind == "classify":
        return _as_bytes(pooler.class_logits(vectors))
    if asked.dimensions > vectors.shape[1]:
        raise UnsupportedFeature(
            f"dimensions: this model's vectors have {vectors.shape[1]}", field="dimensions"
        )
    if asked.dimensions:
        vectors = vectors[:, : asked.dimensions]
    return _as_bytes(normalized(vectors) if asked.normalize else vectors)


def _as_bytes(vectors: Tensor) -> tuple[bytes, ...]:
    """Convert [N, H] to N vectors of H numbers, float32, little-endian."""
    rows = vectors.to("cpu", torch.float32).contiguous().numpy().astype("<f4")
    return tuple(row.tobytes() for row in rows)


@dataclass(eq=False, slots=True)
class _Waiting:
    text: EncoderText
    ask: VectorAsk
    numbers: asyncio.Future[bytes] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class EncoderDesk:
    """Runs one engine's encoder. A forward at a time, any number of calls at once."""

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread
        self._queue: deque[_Waiting] = deque()
        self._work: asyncio.Task[None] | None = None

    async def vectors(self, encoder: Encoder, asked: SubmitPool) -> tuple[bytes, ...]:
        """Return one vector (or the logits) per prompt: float32, little-endian.

        Raises InvalidRequest, ContextLengthExceeded, UnsupportedFeature."""
        if asked.request.adapter:
            raise UnsupportedFeature("an encoder has no adapters", field="model")
        seconds = asked.second_from or (None,) * len(asked.lengths)
        texts = [EncoderText(*each) for each in zip(asked.prompts, seconds, strict=True)]
        ask = VectorAsk(asked.kind, asked.normalize, asked.dimensions)
        encoder.check(texts, ask)
        waiting = [_Waiting(text, ask) for text in texts]
        self._queue.extend(waiting)
        if self._work is None:
            self._work = asyncio.create_task(self._run())
        try:
            return tuple(await asyncio.gather(*(each.numbers for each in waiting)))
        finally:
            for each in waiting:
                each.numbers.cancel()

    async def _run(self) -> None:
        try:
            while batch := self._next():
                await self._compute(batch)
        finally:
            self._work = None

    def _next(self) -> list[_Waiting]:
        """Take the next batch from the queue. Texts that nobody wants any more are dropped."""
        config = self._thread.engine.config
        self._queue = deque(each for each in self._queue if not each.numbers.done())
        lengths = [len(each.text.ids) for each in self._queue]
        sizes = batch_sizes(lengths, config.max_num_batched_tokens, config.max_num_seqs)
        return [self._queue.popleft() for _ in range(next(sizes, 0))]

    async def _compute(self, batch: Sequence[_Waiting]) -> None:
        texts, asks = [each.text for each in batch], [each.ask for each in batch]
        try:
            found = await self._thread.call(lambda engine: _forward(engine, texts, asks))
        except Exception as error:  # noqa: BLE001 - raised by each call
            for each in batch:
                if not each.numbers.done():
                    each.numbers.set_exception(error)
            return
        for each, numbers in zip(batch, found, strict=True):
            if not each.numbers.done():
                each.numbers.set_result(numbers)


def _forward(
    engine: Engine, texts: Sequence[EncoderText], asks: Sequence[VectorAsk]
) -> list[bytes]:
    """Run one batch and count it as a step. Engine thread."""
    encoder, began = engine.active.encoder, time.perf_counter()
    if encoder is None:
        raise InternalError("the encoder is gone")
    vectors = encoder.run(texts, asks)
    found = [vector.to("cpu", torch.float32).numpy().astype("<f4").tobytes() for vector in vectors]
    num_tokens = sum(len(text.ids) for text in texts)
    engine.stats.num_pooled_prompts += len(texts)
    engine.stats.num_pooled_tokens += num_tokens
    engine.stats.step_done(time.perf_counter() - began, num_tokens)
    return found
