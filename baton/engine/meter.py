"""Meter: a runner around another that counts what each step needs (work.py).

It tells an engine's statistics before the step's end; their share of the machine's limits follows
from the step's time, which is the engine's to take. A few microseconds a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.engine.config import EngineConfig
from baton.engine.interface import ChunkResult, Runner, SequenceChunk
from baton.engine.loading import LoadedModel
from baton.engine.roofline import limits_of
from baton.engine.stats import EngineStats
from baton.engine.tensor_parallel.place import rank_layers
from baton.engine.work import ModelWork, layer_works


class Meter:
    """Implements interface.Runner for `loaded`."""

    def __init__(self, inner: Runner, loaded: LoadedModel) -> None:
        self._inner = inner
        self._loaded = loaded
        self._work = work_of(loaded)
        self._stats: EngineStats | None = None

    def tell(self, stats: EngineStats, config: EngineConfig) -> None:
        """Whose steps these are; with the machine's limits, measured now if nobody knows them."""
        self._stats = stats
        stats.utilization.limits = limits_of(config, self._loaded.device, self._loaded.dtype)

    def run(
        self, chunks: Sequence[SequenceChunk], on_layer: Callable[[int], None] | None = None
    ) -> list[ChunkResult]:
        """See interface.Runner.run."""
        results = self._inner.run(chunks, on_layer)
        if self._stats is not None:
            self._stats.utilization.ran(self._work.step(chunks))
        return results


def work_of(loaded: LoadedModel) -> ModelWork:
    """What steps of this model need; of a tensor-parallel one, what they need of its leader."""
    info, attention = loaded.info, loaded.attention_layers
    layers = info.layers if loaded.ranks is None else rank_layers(info.layers, loaded.ranks.size)
    values = [layer.latent or spec.v_dim for layer, spec in zip(attention, layers, strict=True)]
    heads = [layer.query_heads for layer in attention]
    return ModelWork.of(
        loaded.model.parameter_counts,
        loaded.weight_bytes,
        loaded.dtype.itemsize,
        layer_works(layers, values, heads, info.kv_dtype),
        loaded.rounded_head_bytes,
    )
