"""Meter: a runner around another runner, which counts what each step needs (work.py).

It counts at the end of the model's run; the engine then measures the step's time, from which the
share of the machine's limits follows. The cost is a few microseconds a step. A share above 1 says
that the limits were measured while other work ran. Then they are measured again when the engine is
idle: after the first such busy period, the second, the fourth, and so on. The distance grows
because what lies in a CPU's caches may always be read faster than memory.
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
    """Implements interface.Runner for `loaded` and counts into `utilization`.

    At the start it also puts the machine's limits there, and measures them if they are not known.
    """

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
        """Measure the limits again if the last steps exceeded them. Called while the engine is
        idle.

        It takes about 0.2 s.
        """
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
    """Return what steps of this model need; with tensor parallelism, of the leader's device."""
    info, attention = loaded.info, loaded.attention_layers
    layers = info.layers if loaded.ranks is None else rank_layers(info.layers, loaded.ranks.size)
    values = [layer.latent or spec.v_dim for layer, spec in zip(attention, layers, strict=True)]
    heads = [layer.query_heads for layer in attention]
    return ModelWork.of(
        loaded.model.parameter_counts,
        loaded.weight_bytes,
        loaded.dtype.itemsize,
        layer_works(layers, values, heads, info.kv_dtype, len(loaded.model.attention_layers) - 1),
        loaded.rounded_head_bytes,
    )
