"""PoolingDesk: computes vectors of prompts on a node, in turns with the engine's steps.

Life of a SubmitPool:
    serve()  -> a PoolingJob is made on the engine thread: lengths, ids and adapter are checked
    step     -> one forward per call on that thread, and one call at a time of all jobs: every
                running request steps in between
    no room  -> the job waits until blocks are given back, at most until its deadline
    end      -> one Pooled to the router; however the job ends, its blocks are free at once

A node of either role serves it: nothing is exported or decoded. `vectors` does all of this except
the message to the router, for callers that have an engine without a node.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

import torch
from torch import Tensor

from baton.engine.core.engine import Engine
from baton.engine.core.pooling import PoolingJob, normalized
from baton.engine.thread import EngineThread
from baton.node.requests import NodeRequest
from baton.protocol.errors import UnsupportedFeature
from baton.protocol.events import NodeStep, Pooled
from baton.protocol.messages import SubmitPool

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
        raise UnsupportedFeature("this engine has no hidden states to pool", field="model")
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
