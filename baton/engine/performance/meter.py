"""Meter: a runner around another that counts what each step needs (work.py).

It counts before the step's end; the share of the machine's limits follows from the step's time,
which the engine measures. A few microseconds a step. A share above 1 says
that the limits were measured beside other work: once the engine is idle they are measured again,
after the first such time of work, the second, the fourth, ... for what a CPU's caches hold may be
read faster than memory for good.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.engine.config import EngineConfig
from baton.engine.loading.loading import LoadedModel
from baton.engine.performance.roofline import limits_again, limits_of
from baton.engine.state.interface import ChunkResult, Runner, SequenceChunk
from baton.engine.state.place import rank_layers
from baton.engine.state.work import ModelWork, Utilization, layer_works


class Meter:
    """Implements interface.Runner for `loaded`: counts into `utilization`, which it also gives the
    machine's limits, measured now if nobody knows them."""

    def __init__(
        self, inner: Runner, loaded: LoadedModel, config: EngineConfig, utilization: Utilization
    ) -> None:
        self._inner = inner
        self._loaded = loaded
        self._work = work_of(loaded)
        self._config = config
        self._utilization = utilization
        self._num_exceeded = 0
        utilization.limits = limits_of(config, loaded.device, loaded.dtype)

    def look_again(self) -> None:
        """The engine is idle: measure limits that the last steps exceeded, in about 0.2 s."""
        config, now = self._config, self._utilization
        reads = now.mbu > 1 and config.memory_bandwidth is None
        products = now.mfu > 1 and config.peak_flops is None
        if now.limits is None or not (reads or products):
            return
        self._num_exceeded += 1
        if self._num_exceeded.bit_count() == 1:  # a power of two
            now.limits = limits_again(config, self._loaded.device, self._loaded.dtype, now.limits)

    def run(
        self, chunks: Sequence[SequenceChunk], on_layer: Callable[[int], None] | None = None
    ) -> list[ChunkResult]:
        """See interface.Runner.run."""
        results = self._inner.run(chunks, on_layer)
        self._utilization.ran(self._work.step(chunks))
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
