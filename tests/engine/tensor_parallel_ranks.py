"""Engines of several ranks in one process: the others are threads that run the worker's code."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from baton.engine.config import EngineConfig
from baton.engine.core.assembly import assemble, load_parts
from baton.engine.core.engine import Engine
from baton.engine.loading import leader
from baton.engine.loading.loading import LoadedModel
from baton.engine.memory.kv_cache import KVArena
from baton.engine.memory.layer_groups import one_group
from baton.engine.parallel.group import RankGroup
from baton.engine.parallel.messages import Gone, Link, MessageKind
from baton.engine.parallel.ranks import RankProcess, RankStart
from baton.engine.running.attention_choice import choose_attention
from baton.engine.running.worker import join
from baton.engine.sampling.proposer import Proposer
from baton.engine.state.batch import flatten
from baton.engine.state.interface import SequenceChunk
from baton.engine.state.place import RankPlace, rank_layers
from baton.protocol.kv_spec import HeldBlocks

BLOCK = 8

CHUNKS = (
    SequenceChunk("a", range(7, 28), 0, (HeldBlocks((1, 4, 2)),), state_slot=1),
    SequenceChunk("b", range(90, 99), 0, (HeldBlocks((5, 6)),), state_slot=0),
)
NEXT = (
    SequenceChunk("b", (200,), 9, (HeldBlocks((5, 6)),), state_slot=0),
    SequenceChunk("a", (11, 12, 13), 21, (HeldBlocks((1, 4, 2)),), state_slot=1),
)


def config_of(path: Path, **options: Any) -> EngineConfig:
    return EngineConfig(str(path), dtype="float32", device="cpu", **options)


def logits_of(loaded: LoadedModel, size: int) -> torch.Tensor:
    """Logits of all rows of CHUNKS, then NEXT, over a pool and states of this rank's heads."""
    info = loaded.info
    arena = KVArena(one_group(rank_layers(info.layers, size)), 8, BLOCK, info.kv_dtype)
    arena.keep_states(2 if any(spec.state for spec in arena.layers) else 0)
    attention = choose_attention(loaded, arena)
    told: list[torch.Tensor] = []
    for chunks in (CHUNKS, NEXT):
        step = flatten(chunks, attention, BLOCK, loaded.device, states=arena.states)
        told.append(loaded.logits(loaded.forward(step.token_ids, step.positions, step.batch)))
    return torch.cat(told)


def by_threads(size: int, work: Callable[[RankGroup], Any]) -> list[Any]:
    """What `work` returns for each rank; all of them meet first."""
    store = HashStore()

    def run(rank: int) -> Any:
        with torch.inference_mode():
            group = RankGroup(RankPlace(rank, size), "gloo", deadline_s=60)
            group.connect(store)
            return work(group)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


class RankThread:
    """Implements ranks.Process."""

    def __init__(self, link: Link, start: RankStart) -> None:
        self._link = link
        self._memory = os.dup(start.memory)
        self._status: int | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with torch.inference_mode():
            try:
                _, setup = self._link.expect(MessageKind.SETUP)
                join(self._link, self._memory, setup).follow()
            except Gone:
                self._status = 0
            except Exception:  # noqa: BLE001 - as a process would end
                self._status = 1
        self._link.close()

    def poll(self) -> int | None:
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        return self._status or 0

    def kill(self) -> None:
        self._link.close()


def start_thread(start: RankStart) -> RankProcess:
    ours, theirs = socket.socketpair()
    link = Link(ours)
    thread = RankThread(Link(theirs), start)
    link.send_json(MessageKind.SETUP, start.setup())
    return RankProcess(start.place.rank, thread, link)


@contextmanager
def engine_of_ranks(
    model: str, size: int, proposer: Proposer | None = None, **options: Any
) -> Iterator[Engine]:
    """What build_engine makes, its ranks as threads. `proposer`: drafts in place of its own."""
    config = EngineConfig(
        model, tensor_parallel_size=size, dtype="float32", device="cpu", threads=1,
        check_invariants=True, **options,
    )  # fmt: skip
    with ranks_as_threads():
        parts = load_parts(config)
    if proposer is not None:
        parts = replace(parts, active=replace(parts.active, proposer=proposer))
    engine = assemble(parts)
    assert engine.ranks is not None
    try:
        yield engine
    finally:
        engine.ranks.close()


@contextmanager
def ranks_as_threads() -> Iterator[None]:
    """Whoever loads a model of several ranks in here gets threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leader.load_leader, "__defaults__", (start_thread,))
        yield
