"""Vectors of prompts on a node: both roles, in turns with tokens, within the pool's room."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.engine.state.encoder_texts import EncoderText, VectorAsk
from baton.engine.state.interface import SequenceChunk
from baton.node import pooling
from baton.node.main import NodeProgram
from baton.node.pooling import PoolingDesk
from baton.protocol.clock import SystemClock
from baton.protocol.errors import InvalidRequest
from baton.protocol.events import Pooled
from baton.protocol.messages import AbortRequest, ReleaseExport, SubmitPool, SubmitPrefill
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from kv_transfer.lanes.memory import MemoryFabric
from tests.node.fakes import (
    DECODE,
    PATIENCE_S,
    PREFILL,
    Gate,
    RawRouter,
    Setup,
    TestNode,
    connected,
    running_node,
)

PARAMS = SamplingParams(max_tokens=1, seed=0)


class FakePooler:
    """Hidden states [n, 3]: the token, its position, 4.0."""

    max_num_batched_tokens = 8
    max_num_seqs = 4
    windows = (0,)
    vocab_size = 1000
    max_model_len = 512

    def __init__(self) -> None:
        self.gate = Gate()
        self.adapters: set[str] = set()

    def forward(self, chunks: Sequence[SequenceChunk]) -> list[torch.Tensor]:
        self.gate.pass_through()
        self.adapters.update(chunk.adapter for chunk in chunks)
        return [
            torch.tensor([[t, chunk.start + i, 4.0] for i, t in enumerate(chunk.token_ids)])
            for chunk in chunks
        ]

    def yes_probability(self, hidden: torch.Tensor, yes: int, no: int) -> torch.Tensor:
        return hidden[:, 0] * yes + no


def give_pooler(node: TestNode) -> FakePooler:
    pooler = FakePooler()
    engine: Any = node.engine
    engine.active = replace(engine.active, pooler=pooler)
    return pooler


def submission(*prompts: tuple[int, ...], id_: str = "e", **more: Any) -> SubmitPool:
    ids = tuple(token for prompt in prompts for token in prompt)
    adapter = more.pop("adapter", "")
    request = Request(id_, ids, PARAMS, adapter=adapter, deadline=more.pop("deadline", None))
    return SubmitPool(request, tuple(map(len, prompts)), **more)


async def pooled(router: RawRouter, id_: str = "e") -> list[tuple[float, ...]]:
    found: list[Pooled] = []

    def there() -> bool:
        found.extend(p for step in router.steps for p in step.pooled if p.request_id == id_)
        return bool(found)

    await router.until(there)
    return [struct.unpack(f"<{len(vector) // 4}f", vector) for vector in found[0].vectors]


@pytest.mark.parametrize("program", [PREFILL, DECODE], ids=["prefill", "decode"])
async def test_vectors_of_each_kind(program: NodeProgram) -> None:
    setup = Setup(model_options={"adapters": ("poet",)})
    async with running_node(program, MemoryFabric(), setup) as node, connected(node) as router:
        pooler = give_pooler(node)
        prompts = ((5, 6, 7), (9,), tuple(range(20)))
        await router.send(submission(*prompts, normalize=False, adapter="poet"))
        assert await pooled(router) == [(7, 2, 4), (9, 0, 4), (19, 19, 4)]
        assert pooler.adapters == {"poet"}
        await router.send(submission(*prompts, id_="m", kind="mean", normalize=False, dimensions=2))
        assert await pooled(router, "m") == [(6, 1), (9, 0), (9.5, 9.5)]
        await router.send(submission((3, 3), id_="n"))
        (unit,) = await pooled(router, "n")
        assert unit == pytest.approx([3 / 26**0.5, 1 / 26**0.5, 4 / 26**0.5])
        await router.send(submission((2,), (3,), id_="y", kind="yes_no", answers=(10, 1)))
        assert await pooled(router, "y") == [(21,), (31,)]
        await node.until_idle()
        stats = node.engine.stats
        assert (stats.num_pooled_prompts, stats.num_pooled_tokens) == (9, 2 * 24 + 2 + 2)


async def test_what_cannot_be_pooled_is_told_by_field() -> None:
    async with running_node(PREFILL, MemoryFabric()) as node, connected(node) as router:
        await router.send(submission((1,), id_="none"))
        assert (await router.failure_of("none")).code == "unsupported_feature"
        give_pooler(node)
        for id_, message, field in (
            ("vocabulary", submission((1000,), id_="vocabulary"), "prompt"),
            ("long", submission((1,) * 300, id_="long"), "prompt"),
            ("adapter", submission((1,), id_="adapter", adapter="x"), "model"),
            ("wide", submission((1,), id_="wide", dimensions=4), "dimensions"),
            ("yes", submission((1,), id_="yes", kind="yes_no", answers=(9999, 1)), "model"),
        ):
            await router.send(message)
            failed = await router.failure_of(id_)
            assert (failed.field, failed.retryable) == (field, False), id_
        await node.until_idle()


async def test_it_waits_for_room_and_takes_it_when_an_export_is_released() -> None:
    setup = Setup(num_blocks=4, block_size=4)
    async with running_node(PREFILL, MemoryFabric(), setup) as node, connected(node) as router:
        give_pooler(node)
        await router.send(SubmitPrefill(Request("r", tuple(range(1, 13)), PARAMS)))
        handle = await router.handle_of("r")  # 3 of 4 blocks, leased
        await router.send(submission((1,) * 8, normalize=False))
        await router.send(submission((2,), id_="small", normalize=False))
        assert await pooled(router, "small") == [(2, 0, 4)]  # there was room for this one
        assert not any(p.request_id == "e" for step in router.steps for p in step.pooled)
        await router.send(ReleaseExport(handle, "test"))
        assert await pooled(router) == [(1, 7, 4)]
        await node.until_idle()


async def test_an_abort_a_lost_router_and_a_deadline_free_everything() -> None:
    async with running_node(PREFILL, MemoryFabric()) as node:
        pooler = give_pooler(node)
        async with connected(node) as router:
            pooler.gate.close()
            await router.send(submission((1,) * 20, (2,) * 20, id_="a"))
            await pooler.gate.reached()
            await router.send(AbortRequest("a", 1))
            await router.send(submission((1,) * 20, id_="b"))
            deadline = SystemClock().monotonic() + 0.05
            await router.send(submission((1,) * 20, id_="late", deadline=deadline))
            assert (await router.failure_of("late")).code == "deadline_exceeded"
        pooler.gate.open()  # its router has gone
        await node.until_idle()
        assert node.engine.stats.num_pooled_prompts == 0
        async with asyncio.timeout(PATIENCE_S), connected(node) as router:
            await router.send(submission((1,)))
            assert len(await pooled(router)) == 1


class _CountingThread:
    """An engine thread on which calls of jobs wait: how many of them at once."""

    engine = SimpleNamespace(active=SimpleNamespace(encoder=None))

    def __init__(self) -> None:
        self.waiting = self.most = 0

    async def call(self, function: Any) -> Any:
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        await asyncio.sleep(0)
        try:
            return function(None)
        finally:
            self.waiting -= 1

    def post(self, function: Any) -> None:
        function(None)


class _Job:
    """Five forwards."""

    left = 5

    @property
    def done(self) -> bool:
        return self.left == 0

    def step(self) -> bool:
        self.left -= 1
        return True

    def close(self) -> None:
        pass


async def test_one_forward_of_all_jobs_stands_between_two_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight groups of a call each had one there: a prompt beside them waited for eight."""
    thread = _CountingThread()
    jobs = [_Job() for _ in range(8)]
    made = iter(jobs)
    monkeypatch.setattr(pooling, "_end", lambda *_: ())

    def begin(*_: Any) -> _Job:
        thread.most = 0  # beginnings are cheap: of forwards there is one
        return next(made)

    monkeypatch.setattr(pooling, "_begin", begin)
    desk = PoolingDesk(SimpleNamespace(thread=thread))  # type: ignore[arg-type]
    asked = SubmitPool(Request("r", (1,), PARAMS), (1,))
    begun = [asyncio.create_task(desk.vectors(asked)) for _ in jobs]
    await asyncio.gather(*begun)
    assert all(job.done for job in jobs)
    assert thread.most <= 2  # one forward, and one job that ends


class FakeEncoder:
    """The sum of a text's tokens, and how many texts each forward had."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.gate = Gate()

    def check(self, texts: Sequence[EncoderText], ask: VectorAsk) -> None:
        if any(text.second_from == 0 for text in texts):
            raise InvalidRequest("a pair has no first text", field="prompt")

    def run(self, texts: Sequence[EncoderText], asks: Sequence[VectorAsk]) -> list[torch.Tensor]:
        self.batches.append(len(texts))
        self.gate.pass_through()
        if any(999 in text.ids for text in texts):
            raise RuntimeError("a text that no encoder takes")
        return [
            torch.tensor([float(sum(text.ids)), float(text.second_from or 0), float(ask.normalize)])
            for text, ask in zip(texts, asks, strict=True)
        ]


async def test_texts_of_all_calls_that_wait_share_a_forward() -> None:
    """The first call is under way; what comes meanwhile is one batch, within the limits."""
    setup = Setup(engine_options={"max_num_batched_tokens": 64, "max_num_seqs": 4})
    async with running_node(PREFILL, MemoryFabric(), setup) as node, connected(node) as router:
        encoder, engine = FakeEncoder(), node.engine
        engine_any: Any = engine
        engine_any.active = replace(engine.active, encoder=encoder)
        encoder.gate.close()
        await router.send(submission((1,), id_="first", normalize=False))
        await encoder.gate.reached()
        for number in range(3):
            pair = submission((number, 2), (3,), id_=f"c{number}", second_from=(1, 1))
            await router.send(pair)
        await router.send(submission((5,), id_="gone"))
        await router.send(AbortRequest("gone", 1))
        await router.send(submission((5,), id_="bad", second_from=(0,)))
        assert (await router.failure_of("bad")).field == "prompt"
        encoder.gate.open()
        assert await pooled(router, "first") == [(1, 0, 0)]
        for number in range(3):
            assert await pooled(router, f"c{number}") == [(number + 2, 1, 1), (3, 1, 1)]
        assert encoder.batches == [1, 4, 2]
        await router.send(submission((999,), id_="broken"))
        assert (await router.failure_of("broken")).code == "internal"
        await router.send(submission((4,), id_="after"))
        assert await pooled(router, "after") == [(4, 0, 1)]
        stats = engine.stats
        assert (stats.num_pooled_prompts, stats.num_pooled_tokens) == (8, 11)
        await router.send(submission((4,), id_="adapted", adapter="x"))
        assert (await router.failure_of("adapted")).code == "unsupported_feature"
