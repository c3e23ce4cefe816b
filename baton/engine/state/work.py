"""What a step must read and multiply, and how much of the machine's limits it reaches. Pure.

Bytes: each weight that the step uses, once, and the KV of each sequence, once. Of routed experts,
those count that the step's rows are expected to choose. FLOPs: two per weight and row, for the head
only of sampled rows, and those of attention; in the last layer what is behind its first product
only of rows that are read. These are the least that the work needs, not what the kernels really do.
So the shares below are comparable between kernels:

    MBU = bytes / seconds / read bandwidth        MFU = FLOPs / seconds / rate of a matrix product

Source: roofline model (Williams, Waterman, Patterson, CACM 2009); vLLM's estimated_flops metrics.
Not here: the measurement of the limits (roofline.py), counting while an engine runs (meter.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from baton.engine.state.interface import SequenceChunk
from baton.protocol.kv_spec import LayerSpec

SMOOTHING: Final = 0.1  # weight of the newest step in moving means and fading sums


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the device that runs a model, with the threads that the model has."""

    read_bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes to read and FLOPs of one step, or of several steps."""

    read_bytes: float = 0.0
    flops: float = 0.0

    def intensity(self) -> float:
        """Return FLOPs per byte: the place of the work on a roofline's x axis."""
        return self.flops / self.read_bytes if self.read_bytes else 0.0


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """A model's parameters, by which rows use them.

    `dense`: used by every row (shared experts and routers included). `experts`: all routed experts
    together; each row uses `experts_per_token` of `num_experts`. `head`: used by sampled rows only.
    `tied`: the head is also the embedding. `last` of `dense` and `last_experts` of `experts` lie
    behind the last layer's attention: only rows whose hidden states are read use them.
    """

    dense: int
    head: int
    tied: bool = True
    experts: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    last: int = 0
    last_experts: int = 0


@dataclass(frozen=True, slots=True)
class LayerWork:
    """All layers with one window (0 = unlimited): KV bytes of one token, and FLOPs per (query,
    key), of all of them and, if it is one of them, of the model's last layer.

    The sums run over these layers.
    """

    window: int
    kv_bytes: int
    pair_flops: int
    last_flops: int = 0


@dataclass(frozen=True, slots=True)
class ModelWork:
    """The model's numbers from which `step` computes. Bytes are those of the stored weights:
    quantized weights have fewer.
    """

    counts: ParameterCounts
    dense_bytes: float
    expert_bytes: float
    head_bytes: float
    layers: tuple[LayerWork, ...]

    @classmethod
    def of(
        cls,
        counts: ParameterCounts,
        weight_bytes: int,
        itemsize: int,
        layers: tuple[LayerWork, ...],
        rounded_head_bytes: int = 0,
    ) -> ModelWork:
        """Compute the numbers of a model from its counts and the bytes of all its weights.

        `weight_bytes` includes embedding and head. Both take `itemsize` bytes a number, unless a
        head that is not the embedding was quantized to `rounded_head_bytes`.
        """
        table = counts.head * itemsize
        head = rounded_head_bytes or table
        shared = counts.tied and not rounded_head_bytes
        inner = max(0, weight_bytes - table - (0 if shared else head))
        in_layers = counts.dense + counts.experts
        share = counts.experts / in_layers if in_layers else 0.0
        return cls(counts, inner * (1 - share), inner * share, head, layers)

    def step(self, chunks: Sequence[SequenceChunk]) -> Work:
        """Return what a step of these chunks needs."""
        if not chunks:
            return Work()
        rows = rows_read = sampled = 0
        read = self.dense_bytes
        flops = 0.0
        for chunk in chunks:
            count, start = len(chunk.token_ids), chunk.start
            rows += count
            rows_read += chunk.rows_read
            if chunk.sample is not None:
                sampled += len(chunk.fan_out) or 1 + chunk.num_drafts
            if chunk.prompt_logprobs is not None:
                sampled += count
            for layer in self.layers:
                tokens, pairs = seen(start, count, layer.window)
                read += tokens * layer.kv_bytes
                flops += pairs * layer.pair_flops
                flops -= seen(start, count - chunk.rows_read, layer.window)[1] * layer.last_flops
        counts = self.counts
        if sampled:
            read += self.head_bytes
        unread = rows - rows_read
        flops += 2.0 * (counts.dense * rows - counts.last * unread + counts.head * sampled)
        if counts.num_experts:
            chosen = counts.experts_per_token / counts.num_experts
            # The expected number of distinct experts, if rows choose independently and equally
            # often.
            read += self.expert_bytes * (1 - (1 - chosen) ** rows)
            flops += 2.0 * chosen * (counts.experts * rows - counts.last_experts * unread)
        return Work(read, flops)


def seen(start: int, count: int, window: int) -> tuple[int, int]:
    """Return how many tokens' KV rows [start, start + count) read, and how many (query, key) pairs.

    `window` 0 = unlimited.
    """
    end = start + count
    pairs = count * start + count * (count + 1) // 2
    if not window or end <= window:
        return end, pairs
    # A query at position p >= window sees `window` keys, not p + 1.
    first = max(start, window)
    hidden = (first + end - 1) * (end - first) // 2 + (1 - window) * (end - first)
    return min(end, count + window - 1), pairs - hidden


def layer_works(
    layers: Sequence[LayerSpec],
    value_dims: Sequence[int],
    query_heads: Sequence[int],
    dtype: str,
    last: int,
) -> tuple[LayerWork, ...]:
    """Sum up the layers by window.

    `value_dims` are the dims of the vectors that each layer's attention sums up (MLA: its latent).
    `last`: the index of the model's last layer; a draft head's layer follows.
    """
    found: defaultdict[int, tuple[int, int, int]] = defaultdict(lambda: (0, 0, 0))
    specs = zip(layers, value_dims, query_heads, strict=True)
    for index, (layer, value_dim, heads) in enumerate(specs):
        kv_bytes, flops, of_last = found[layer.window]
        kv_bytes += layer.token_bytes(dtype) + layer.scale_bytes(dtype)
        own = 2 * heads * (layer.k_dim + value_dim)
        found[layer.window] = kv_bytes, flops + own, own if index == last else of_last
    return tuple(LayerWork(window, *sums) for window, sums in found.items())


@dataclass(slots=True)
class Utilization:
    """What an engine's steps have needed so far, and how long they took. The engine thread writes
    it.
    """

    limits: Limits | None = None  # None: not measured, and no share is reported
    busy_seconds: float = 0.0  # sum over all steps
    read_bytes: float = 0.0
    flops: float = 0.0
    recent_seconds: float = 0.0  # fading sums over the last steps
    recent_bytes: float = 0.0
    recent_flops: float = 0.0
    under_way: Work = field(default_factory=Work)

    def ran(self, work: Work) -> None:
        """Add the work of the current step, whose model run has ended but which is not over."""
        self.under_way = work
        self.read_bytes += work.read_bytes
        self.flops += work.flops

    def step_done(self, seconds: float, share: float = 1.0) -> None:
        """End the current step, which took `seconds` with all work around the model. `share`: the
        cores that it ran on, over those whose limits these are.
        """
        work, self.under_way = self.under_way, Work()
        self.busy_seconds += seconds
        kept = 1 - SMOOTHING
        self.recent_seconds = kept * self.recent_seconds + seconds * share
        self.recent_bytes = kept * self.recent_bytes + work.read_bytes
        self.recent_flops = kept * self.recent_flops + work.flops

    @property
    def mbu(self) -> float:
        """Share of the read bandwidth that the last steps reached; 0 if limits or steps are
        missing.
        """
        if self.limits is None or not self.recent_seconds:
            return 0.0
        return self.recent_bytes / self.recent_seconds / self.limits.read_bytes_per_s

    @property
    def mfu(self) -> float:
        """Share of a matrix product's rate that the last steps reached; 0 if limits or steps are
        missing.
        """
        if self.limits is None or not self.recent_seconds:
            return 0.0
        return self.recent_flops / self.recent_seconds / self.limits.flops_per_s
