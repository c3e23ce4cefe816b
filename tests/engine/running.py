"""Logits of a loaded model over a prompt, fed in chunks of any sizes, beside any batch mates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from baton.engine.config import EngineConfig
from baton.engine.loading.loading import LoadedModel, load_model
from baton.engine.memory.kv_cache import KVArena
from baton.engine.memory.layer_groups import one_group
from baton.engine.memory.state_arena import StateArena
from baton.engine.running.attention_choice import choose_attention
from baton.engine.state.batch import flatten
from baton.engine.state.interface import SequenceChunk
from tests.block_lists import held

NUM_SLOTS = 4  # of recurrent states


def load(path: Path, **options: Any) -> LoadedModel:
    """Load on the CPU, in float32 unless told otherwise."""
    chosen: dict[str, Any] = {"dtype": "float32", "device": "cpu", **options}
    return load_model(EngineConfig(model=str(path), **chosen))


class Driver:
    """A loaded model with a pool and slots: computes chunks, gives the logits of their rows."""

    def __init__(self, loaded: LoadedModel, num_blocks: int = 64, block_size: int = 8) -> None:
        self.loaded = loaded
        info = loaded.info
        self.arena = KVArena(one_group(info.layers), num_blocks, block_size, info.kv_dtype)
        self.attention = choose_attention(loaded, self.arena)
        self.states = StateArena(info.layers, NUM_SLOTS)

    @torch.inference_mode()
    def step(self, chunks: Sequence[SequenceChunk]) -> list[Tensor]:
        """Logits [rows, vocab] of each chunk."""
        size = self.arena.block_size
        step = flatten(chunks, self.attention, size, self.loaded.device, states=self.states)
        hidden = self.loaded.forward(step.token_ids, step.positions, step.batch)
        counts = [len(chunk.token_ids) for chunk in chunks]
        return list(self.loaded.logits(hidden).split(counts))

    def logits(self, ids: Sequence[int], blocks: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Logits [len(ids), vocab] of one sequence alone, in chunks of `sizes`."""
        rows: list[Tensor] = []
        at = 0
        for size in sizes:
            chunk = SequenceChunk("alone", ids[at : at + size], at, held(blocks), state_slot=1)
            rows += self.step([chunk])
            at += size
        assert at == len(ids)
        return torch.cat(rows)


def logits_of(loaded: LoadedModel, ids: Sequence[int]) -> Tensor:
    """Logits [len(ids), vocab] of a prompt in one chunk."""
    driver = Driver(loaded)
    return driver.logits(ids, range(-(-len(ids) // driver.arena.block_size)), [len(ids)])


@torch.inference_mode()
def native_logits(path: Path, ids: Sequence[int]) -> Tensor:
    """Logits [len(ids), vocab] of transformers' own forward."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def relative_error(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|, over all entries."""
    return float((a.float() - b.float()).norm() / b.float().norm())
