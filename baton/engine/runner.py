"""ModelRunner: one engine step: flatten the chunks, run the model, sample where asked.

Synchronous; owned by the engine thread. It keeps no state between steps beyond the pool's KV.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from baton.engine.attention.base import KVViews
from baton.engine.attention.torch_cpu import TorchAttention
from baton.engine.batch import flatten
from baton.engine.interface import SequenceChunk
from baton.engine.loading import LoadedModel
from baton.engine.sampler import Draw, sample


class ModelRunner:
    """Implements interface.Runner over a loaded model and the pool's KV views."""

    def __init__(self, loaded: LoadedModel, pool: KVViews) -> None:
        self._loaded = loaded
        self._attention = TorchAttention(pool, loaded.attention_layers)
        self._block_size = pool.layer(0)[0].shape[1]

    @torch.inference_mode()
    def run(
        self, chunks: Sequence[SequenceChunk], on_layer: Callable[[int], None] | None = None
    ) -> list[int | None]:
        """See interface.Runner.run."""
        if not chunks:
            return []
        step = flatten(chunks, self._attention, self._block_size, self._loaded.device, on_layer)
        hidden = self._loaded.forward(step.token_ids, step.positions, step.batch)
        sampled = [index for index, chunk in enumerate(chunks) if chunk.sample is not None]
        tokens: list[int | None] = [None] * len(chunks)
        if not sampled:
            return tokens
        spans = step.batch.spans
        last_rows = [spans[index].first_row + spans[index].num_rows - 1 for index in sampled]
        # Only these rows meet the vocabulary: the head is the widest product of the model.
        logits = self._loaded.logits(hidden[torch.tensor(last_rows, device=hidden.device)])
        draws = [_draw(chunks[index]) for index in sampled]
        for index, token in zip(sampled, sample(logits, draws), strict=True):
            tokens[index] = token
        return tokens


def _draw(chunk: SequenceChunk) -> Draw:
    assert chunk.sample is not None
    return Draw(chunk.sample, chunk.sample_index, chunk.position)
