"""KV of a real model through tensor-parallel groups of pools: the greedy tokens of one engine.

    engine A --> ranks 0 .. n-1, each with its heads and its own block size --> engine B

A request leaves A in mid-answer, its KV is fetched by every rank of a group, offered again by all
of them, and fetched by B, which goes on: both directions, 1 -> n and n -> 1, within one text.
Two KV heads: two ranks hold a slice each, four hold replicas.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from baton.engine.config import EngineConfig
from baton.engine.core.assembly import build_engine
from baton.engine.core.engine import Engine
from baton.engine.state.interface import Task
from baton.llm import LLM
from baton.protocol.events import FirstToken
from baton.protocol.handles import KVHandle
from baton.protocol.kv_spec import layout_fingerprint
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from baton.runtime.rotation.deployment_secret import fixed
from baton.runtime.timing import Timing
from kv_transfer.connector import Connector, TransferOptions
from kv_transfer.lanes.grpc_stream import GrpcLane
from kv_transfer.lanes.memory import MemoryFabric, MemoryLane
from kv_transfer.lanes.shm_arena import ShmArena
from kv_transfer.lanes.stream import StreamLane
from kv_transfer.pool.layout import ArenaMemory
from kv_transfer.protocol.base import Lane
from tests.fakes import FakeClock
from tests.system.references import prompts
from tests.tiny_models import make_tiny_model
from tests.transfer.direct_lanes import pool_of, shm_lane
from tests.transfer.pools import EVERY_FRAME, SECRET, Node

[PROMPT] = prompts((75,), seed=9)
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
BEFORE = 6  # tokens on A


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["shm", "stream", "grpc"])
async def new_lane(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[Callable[[], Lane]]:
    fabric, arenas = MemoryFabric(), list[ShmArena]()
    makers: dict[str, Callable[[], Lane]] = {
        "shm": lambda: shm_lane(lambda: MemoryLane(fabric), tmp_path, arenas),
        "stream": lambda: StreamLane(Timing()),
        "grpc": lambda: GrpcLane(Timing()),
    }
    yield makers[request.param]
    for arena in arenas:
        arena.close()


@pytest.fixture(scope="module")
def alone(model: Path) -> Callable[..., tuple[int, ...]]:
    """What one engine with these options says; asked once."""

    @cache
    def of(**options: Any) -> tuple[int, ...]:
        llm = LLM(model=str(model), num_kv_blocks=64, threads=1, **options)
        [output] = llm.generate([list(PROMPT)], PARAMS)
        return tuple(output.token_ids)

    return of


class Alone:
    """One engine and its connector."""

    def __init__(self, lane: Lane, boot_id: str, model: Path, **options: Any) -> None:
        config = EngineConfig(
            model=str(model), num_kv_blocks=32, threads=1, check_invariants=True, **options
        )
        engines: list[Engine] = []

        def load(memory: Any) -> Any:
            engines.append(build_engine(config, memory=memory))
            return engines[0].arena

        arena = pool_of(lane, boot_id, load)
        (self.engine,) = engines
        self.connector = Connector(
            memory=ArenaMemory(arena),
            boot_id=boot_id,
            fingerprint=layout_fingerprint("model", "rope", self.engine.info.layers),
            secrets=fixed(SECRET),
            lanes=(lane,),
            timing=Timing(),
            clock=FakeClock(),
            on_released=lambda handle, blocks, why: self.engine.unpin(blocks),
            options=TransferOptions(burst_bytes=0),
        )

    def run(self, count: int | None = None) -> list[int]:
        """Its next tokens, `count` of them or all."""
        told: list[int] = []
        while self.engine.has_work and (count is None or len(told) < count):
            told += [token for event in self.engine.step() for token in event.token_ids]
        return told

    def check(self) -> None:
        self.engine.check()
        assert self.engine.pool.num_free == self.engine.pool.num_blocks


def offer(
    ranks: Sequence[Connector], handle: KVHandle, engine: Engine, first: Sequence[FirstToken]
) -> None:
    """All of it has been computed, on every rank; the leader knows the tokens."""
    for rank in ranks:
        for layer in range(len(engine.info.layers)):
            assert rank.publish(handle, layer, handle.num_tokens)
        rank.complete(handle, first if rank is ranks[0] else ())


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("dtype", "blocks"),
    [("float32", (16, 8, 32)), ("bfloat16", (32, 64, 16)), ("int8", (8, 16, 64))],
)
async def test_through_a_group_and_back(
    new_lane: Callable[[], Lane],
    model: Path,
    alone: Callable[..., tuple[int, ...]],
    size: int,
    dtype: str,
    blocks: tuple[int, int, int],
) -> None:
    kind = "kv_cache_dtype" if dtype == "int8" else "dtype"
    options: dict[str, Any] = {kind: dtype, "deterministic": dtype == "bfloat16"}
    async with AsyncExitStack() as stack:
        a = Alone(new_lane(), "0a" * 16, model, block_size=blocks[0], **options)
        b = Alone(new_lane(), "0b" * 16, model, block_size=blocks[2], **options)
        ranks = [
            Node(
                new_lane(), f"{rank:x}c" * 16, blocks[1], 32, dtype, a.engine.info.layers,
                options=EVERY_FRAME, tp=(size, rank),
            )
            for rank in range(size)
        ]  # fmt: skip
        for connector in (a.connector, b.connector, *(rank.connector for rank in ranks)):
            await connector.start()
            stack.push_async_callback(connector.stop)
        if size > 1:
            ranks[0].connector.join_group([rank.connector.endpoint() for rank in ranks])
        request = Request("r", PROMPT, PARAMS)
        a.engine.add(request)
        told = a.run(BEFORE)
        departure = a.engine.hand_on("r")
        assert departure is not None
        count, first = departure.num_tokens, departure.first_tokens
        handle = a.connector.export(request, 0, departure.blocks, count)
        offer([a.connector], handle, a.engine, first)
        held = ranks[0].pick(count, size)
        fetches = (rank.connector.fetch(handle, 1, held) for rank in ranks)
        bytes_moved = sum(ready.num_bytes for ready in await asyncio.gather(*fetches))
        assert bytes_moved >= a.connector.bytes_of(count), "with four ranks twice: replicas"
        again = request.retried((tuple(told),))
        handle = ranks[0].connector.export(again, 0, held, count)
        for rank in ranks[1:]:
            rank.connector.export_share(handle, held)
        offer([rank.connector for rank in ranks], handle, a.engine, first)
        reservation = b.engine.reserve(again, count)
        assert reservation is not None
        ready = await b.connector.fetch(handle, 2, reservation.blocks, reservation.start_token)
        assert ready.num_bytes == b.connector.bytes_of(count), "every head once"
        b.engine.add(again, Task.LOCAL, reservation, ready.first_tokens)
        rest = b.run()
        assert b.engine.stats.num_prompt_tokens == 0
        for rank in ranks:
            await rank.freed()
    assert (*told, *rest) == alone(**options)
    a.check()
    b.check()
