"""Engines of several ranks in one process: the others are threads that run the worker's code."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from baton.engine.config import EngineConfig
from baton.engine.core.active_model import ActiveModel
from baton.engine.core.assembly import EngineParts, assemble
from baton.engine.core.engine import Engine
from baton.engine.core.pooling import Pooler
from baton.engine.loading.leader import load_leader
from baton.engine.parallel.messages import Gone, Link, MessageKind
from baton.engine.parallel.ranks import RankProcess, RankStart
from baton.engine.running.runner import ModelRunner
from baton.engine.running.worker import join


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
def engine_of_ranks(model: str, size: int, **options: Any) -> Iterator[Engine]:
    """What build_engine makes, but for the processes."""
    config = EngineConfig(
        model, tensor_parallel_size=size, dtype="float32", device="cpu", threads=1,
        check_invariants=True, **options,
    )  # fmt: skip
    assert config.num_kv_blocks is not None
    assert config.block_size is not None
    loaded = load_leader(config, start_thread)
    assert loaded.ranks is not None
    try:
        arena = loaded.ranks.make_pool(loaded.info, config.num_kv_blocks, config.block_size)
        pooler = Pooler(loaded, arena, config.max_num_batched_tokens, config.max_num_seqs)
        active = ActiveModel(ModelRunner(loaded, arena), loaded, pooler)
        yield assemble(EngineParts(config, active, arena, loaded.info))
    finally:
        loaded.ranks.close()
