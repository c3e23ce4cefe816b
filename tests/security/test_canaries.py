"""Canaries: bytes of one tenant in KV memory never reach another, by attention or on the wire.

Blocks are not wiped when they are freed: whoever gets them next overwrites or clears what it reads.
The canary is NaN where a model computes: one element of it, met by any product even under a weight
of zero, would be seen. On the wire it is a pattern that occurs nowhere else.
What a fetch writes beyond its tokens (nothing) is proven byte by byte for every lane by
tests/transfer/test_contract.py (`expect_bytes`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.config import EngineConfig
from baton.engine.core.assembly import build_engine
from baton.engine.core.engine import Engine
from baton.engine.memory.kv_cache import KVArena
from baton.protocol.errors import InternalError
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from baton.runtime.timing import Timing
from kv_transfer.connector import TransferOptions
from kv_transfer.lanes.memory import MemoryFabric, MemoryLane
from kv_transfer.lanes.shm_arena import ShmArena
from kv_transfer.lanes.stream import StreamLane, StreamLaneOptions
from kv_transfer.protocol.base import Blocks, Lane
from kv_transfer.protocol.messages import INT8
from tests.engine.driving import run, tokens_of
from tests.tiny_models import make_tiny_model
from tests.transfer.cluster import Cluster
from tests.transfer.faults import FaultyLane
from tests.transfer.pools import BOOT_D, request_of, snapshot

CANARY = b"\xca\x4a\x47\xff"
RUN = CANARY * 8  # so many bytes in a row are no accident


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of each kind."""
    folder = tmp_path_factory.mktemp("canary")
    for kind in ("llama", "mistral", "gpt2"):
        make_tiny_model(kind, folder / kind)
    return folder


def engine_of(model: Path, **options: Any) -> Engine:
    values = {"num_kv_blocks": 24, "block_size": 8, "threads": 1, "check_invariants": True}
    return build_engine(EngineConfig(model=str(model), dtype="float32", **(values | options)))


def ask(name: str, length: int, tenant: str, max_tokens: int = 9) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, seed=len(name), ignore_eos=True)
    prompt = tuple(10 + (7 * i + length) % 200 for i in range(length))
    return Request(name, prompt, sampling, tenant_salt=tenant)


# Lengths that end within a block, at its edge, and just beyond; forks; chunks; speculation.
LENGTHS = (1, 7, 8, 9, 23, 40)


def poison(arena: KVArena) -> None:
    """Every byte of every block becomes NaN (or the lowest code), as if freed by somebody else."""
    for layer in range(len(arena.layers)):
        for tensor in arena.layer(layer):
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
            else:
                tensor.fill_(-128)
        if arena.dtype == "int8":
            for scales in arena.scales(layer):
                scales.fill_(float("nan"))


def outputs(engine: Engine, tenant: str, poisoned: bool) -> dict[str, list[int]]:
    """Tokens of requests of every shape, each in blocks that were somebody else's before."""
    found: dict[str, list[int]] = {}
    for length in LENGTHS:
        if poisoned:
            assert engine.pool.num_free == engine.pool.num_blocks
            poison(engine.arena)  # what the prefix map still offers belongs to another tenant
        request = ask(f"r{length}", length, f"{tenant}{length}")
        engine.add(request)
        found[request.id] = tokens_of(run(engine)[request.id])
    return found


CHUNKED = {"max_num_batched_tokens": 16, "max_num_seqs": 4}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("llama", CHUNKED),
        ("llama", {"kv_cache_dtype": "int8"}),
        ("llama", {"speculative_method": "ngram"}),
        ("llama", {"deterministic": True}),
        ("mistral", CHUNKED),  # windows
        ("gpt2", {}),  # transformers' own code
    ],
)
def test_what_blocks_held_before_changes_no_token(
    models: Path, kind: str, options: dict[str, Any]
) -> None:
    model = models / kind
    clean = outputs(engine_of(model, **options), "a", poisoned=False)
    assert outputs(engine_of(model, **options), "b", poisoned=True) == clean


def test_several_at_once_and_preempted_ones_meet_no_canary(models: Path) -> None:
    """Padding between rows of a batch, forks, swapped pages: all at once, in a pool too small."""

    def everything(poisoned: bool) -> tuple[dict[str, list[int]], int]:
        engine = engine_of(
            models / "llama", num_kv_blocks=8, preemption_mode="swap", max_num_seqs=4
        )
        if poisoned:
            poison(engine.arena)
        asked = [ask(f"r{n}", n, f"t{n}", max_tokens=30) for n in (9, 10, 13)]
        for request in asked:
            engine.add(request)
        events = run(engine)
        found = {request.id: tokens_of(events[request.id]) for request in asked}
        return found, engine.stats.num_preemptions

    clean, preemptions = everything(False)
    assert everything(True) == (clean, preemptions)
    assert preemptions > 0


def test_a_canary_that_is_read_is_seen(models: Path) -> None:
    """The test's own proof: the same bytes, where a request does read, end it."""
    engine = engine_of(models / "llama")
    request = ask("r23", 23, "a")
    engine.add(request)
    events = engine.step()  # the prompt is computed, token 1 sampled
    poison(engine.arena)
    assert len(tokens_of(events)) == 1
    with pytest.raises(InternalError, match="not numbers"):
        run(engine)


def test_fresh_shared_memory_is_zero_and_nobody_elses(tmp_path: Path) -> None:
    first = ShmArena("0a" * 16, 1 << 16, 4096, tmp_path, 1 << 20)
    first.memory().fill_(0xCA)
    first.close()
    second = ShmArena("0b" * 16, 1 << 16, 4096, tmp_path, 1 << 20)
    try:
        assert not second.memory().any()
        files = [file for file in tmp_path.rglob("*") if file.is_file()]
        assert all(file.stat().st_mode & 0o077 == 0 for file in files), "for this user alone"
    finally:
        second.close()


# ---- on the wire ----


@pytest.fixture(params=["memory", "stream"])
async def tapped(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Cluster, list[bytes]]]:
    """Nodes whose receiving lane notes every frame that it gets."""
    fabric, seen = MemoryFabric(), list[bytes]()

    def plain() -> Lane:
        if request.param == "memory":
            return MemoryLane(fabric)
        return StreamLane(Timing(), StreamLaneOptions(unix=False))

    def note(_: int, frame: bytes) -> list[bytes]:
        seen.append(frame)
        return [frame]

    async with AsyncExitStack() as stack:
        yield Cluster(lambda: FaultyLane(plain(), receiving=note), stack), seen


@pytest.mark.parametrize("codec", ["raw", INT8])
@pytest.mark.parametrize(("p_block", "d_block", "start"), [(8, 8, 0), (32, 8, 3), (8, 32, 17)])
async def test_frames_carry_the_requests_tokens_and_nothing_beside(
    tapped: tuple[Cluster, list[bytes]], codec: str, p_block: int, d_block: int, start: int
) -> None:
    """Exports of partly filled blocks: the rest of a block is somebody else's."""
    cluster, seen = tapped
    num_tokens = 21
    options = TransferOptions(wire_codec=codec, burst_bytes=0)
    p = await cluster.node(block_size=p_block, num_blocks=24)
    d = await cluster.node(block_size=d_block, num_blocks=24, boot_id=BOOT_D, options=options)
    source, target = p.pick(num_tokens, 1), d.pick(num_tokens, 2)
    fill_canary(p.arena)
    for layer in range(len(p.layers)):
        write_zeros(p.arena, layer, source, num_tokens)
    assert RUN in snapshot(p.arena), "it is there to be leaked"
    handle = p.connector.export(request_of(), 0, source, num_tokens)
    p.finish(handle)
    ready = await d.connector.fetch(handle, 1, target, start)
    assert ready.num_tokens == num_tokens
    await p.freed()
    assert seen
    assert all(CANARY * 2 not in frame for frame in seen)
    assert CANARY * 2 not in snapshot(d.arena)


def fill_canary(arena: KVArena) -> None:
    buffer = torch.frombuffer(arena.buffer(), dtype=torch.uint8)
    pattern = torch.frombuffer(bytearray(CANARY), dtype=torch.uint8)
    buffer.copy_(pattern.repeat(len(buffer) // len(CANARY)))


def write_zeros(arena: KVArena, layer: int, blocks: Blocks, num_tokens: int) -> None:
    """The request's own rows, [0, num_tokens)."""
    held = blocks[arena.group_of[layer]]
    for tensor in arena.layer(layer):
        for position in range(num_tokens):
            block, offset = divmod(position, arena.block_size)
            tensor[held.ids[block], offset] = 0
