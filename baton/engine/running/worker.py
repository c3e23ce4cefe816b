"""A rank other than the leader: a process that computes its share of what the leader sends.

`python -m baton.engine.running.worker SOCKET MEMORY` (two inherited descriptors): started by
ranks.py, never by hand. Its life: SETUP -> weights -> LOADED -> POOL -> connects to the other ranks
-> READY -> FORWARD, LOGITS and DRAFT in turn, until the socket closes. It ignores SIGINT and
SIGTERM: the leader drains, and the ranks end with the leader. It keeps nothing except KV, recurrent
states and the hidden states of the last forward pass.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from baton.engine.config import EngineConfig
from baton.engine.loading.loading import LoadedModel, load_model
from baton.engine.models.draft_heads import DraftHead
from baton.engine.parallel.group import RankGroup
from baton.engine.parallel.image_rows import share_rows
from baton.engine.parallel.messages import ALL_ROWS, Gone, Link, MessageKind, decode_step
from baton.engine.parallel.pool import SharedMemory
from baton.engine.parallel.ranks import store
from baton.engine.running.attention_choice import choose_attention
from baton.engine.state.attention import Attention
from baton.engine.state.batch import States, Step
from baton.engine.state.place import RankPlace
from baton.protocol.errors import ConfigError, InternalError
from baton.runtime import log as logs
from baton.runtime.cores import pin_process

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rank:
    """A loaded share of the model, ready to follow the leader."""

    link: Link
    group: RankGroup
    loaded: LoadedModel
    attention: Attention
    states: States | None  # of its heads; None for a model without recurrent state

    @torch.inference_mode()
    def follow(self) -> None:
        """Compute what the leader sends, until it is Gone."""
        last: torch.Tensor | None = None
        adapters = self.loaded.info.adapters
        while True:
            kind, body = self.link.receive()
            if kind is MessageKind.FORWARD:
                step = decode_step(body, self.attention, self.loaded.device, adapters, self.states)
                last = self._forward(step)
            elif kind is MessageKind.DRAFT and self.loaded.head is not None:
                step = decode_step(body, self.attention, self.loaded.device)
                self._draft(self.loaded.head, step)
            elif kind is MessageKind.LOGITS and last is not None:
                hidden = last
                if body != ALL_ROWS:
                    count = int.from_bytes(body, "little")
                    hidden = self.group.broadcast(last.new_empty(count, last.shape[1]))
                self.loaded.logits(hidden)
            else:
                raise InternalError(f"{kind.name} is not for a rank that follows")

    def _forward(self, step: Step) -> torch.Tensor:
        """Run this rank's share of the model; the rows of images are the leader's."""
        batch = step.batch
        if batch.images is not None:
            images = share_rows(batch.images, self.group, self.loaded.dtype)
            batch = replace(batch, images=images)
        return self.loaded.forward(step.token_ids, step.positions, batch)

    def _draft(self, head: DraftHead, step: Step) -> None:
        """Run this rank's share of the draft head's layer."""
        rows, width = step.token_ids.shape[0], head.config.hidden_size
        empty = torch.empty(rows, width, dtype=self.loaded.dtype, device=self.loaded.device)
        head.forward(self.group.broadcast(empty), step.token_ids, step.positions, step.batch)


def main(arguments: Sequence[str]) -> int:
    """Run one rank. Return the exit status: 0 when the leader has gone, 1 after an error."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    link = Link(socket.socket(fileno=int(arguments[0])))
    rank = 0
    try:
        _, setup = link.expect(MessageKind.SETUP)
        rank = int(setup["rank"])
        logs.setup(f"rank {rank}", setup["log_level"], setup["log_format"])
        if setup["cores"]:
            pin_process(tuple(setup["cores"]))
        torch.set_num_threads(setup["threads"])
        join(link, int(arguments[1]), setup).follow()
    except Gone:
        log.info("the leader has gone: rank %d ends", rank)
        return 0
    except Exception:
        log.exception("rank %d failed", rank)
        return 1
    return 0


def join(link: Link, memory: int, setup: dict[str, Any]) -> Rank:
    """Load this rank's share and connect to the other ranks.

    `setup` is the content of SETUP. The descriptor `memory` is closed. Raises ConfigError as
    load_model does, Gone, InternalError.
    """
    values: dict[str, Any] = setup["config"]
    values["lora_modules"] = tuple(values["lora_modules"])
    config = EngineConfig(**values)
    place = RankPlace(setup["rank"], config.tensor_parallel_size)
    group = RankGroup(place, "gloo", setup["deadline_s"])
    try:
        loaded = load_model(config, group)
    except ConfigError as error:
        link.send_json(MessageKind.FAILED, {"message": error.message, "field": error.field})
        raise
    link.send(MessageKind.LOADED)
    _, pool = link.expect(MessageKind.POOL)
    info = loaded.info
    blocks = (pool["num_blocks"], pool["block_size"])
    states = (pool["states"][0], pool["states"][1])
    shared = SharedMemory(memory, place, blocks, info.layers, info.kv_dtype, states)
    os.close(memory)
    arena = shared.arena(place.rank)
    attention = choose_attention(loaded, arena)
    group.connect(store(setup["directory"], place.size))
    link.send(MessageKind.READY)
    return Rank(link, group, loaded, attention, arena.states)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
