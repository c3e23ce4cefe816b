"""What a tensor-parallel rank holds of a model's weights and KV: an even part, and what does not
divide.

    routers, first products of latents   every rank holds them whole
    universal route: whatever is not cut  as above; what is: models/module_shares.py
    k, v with fewer KV heads than ranks  a head lies on several ranks
    o, down with groups of inputs        a group that ranks share has a scale on each of them
    o, down with act-order               each group's inputs lie on all ranks, unequally, and every
                                         group of a rank becomes as long as its longest

How weights are cut: parallel/sharding.py and quantization/parts.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from baton.engine.loading.model_shape import ModelShape, RowProduct
from baton.engine.loading.stored_weights import StoredWeights
from baton.protocol.kv_spec import LayerSpec

_STEP = 4  # act-order: columns of a group are a multiple (kernels/cpu/quantized.py, QUAD)
_INDEX_BYTES = 8  # of a column's input


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """`plain_bytes`: of a number that is not quantized. `stored`: how matrices are, if they are
    quantized."""

    shape: ModelShape
    plain_bytes: float
    stored: StoredWeights | None
    size: int
    whole_experts: bool = False

    def num_bytes(self, whole: int) -> int:
        """Return the bytes that one rank has of `whole` bytes of the model's weights."""
        shape, size = self.shape, self.size
        everywhere = shape.replicated * self._matrix_bytes + shape.routers * self.plain_bytes
        return int(everywhere + (whole - everywhere) / size + self._keys() + self._rows())

    @property
    def _matrix_bytes(self) -> float:
        """Of a weight of attention."""
        if self.stored is None or self.stored.only_experts:
            return self.plain_bytes
        return self.stored.bytes_per_weight

    def _keys(self) -> float:
        """Return the bytes of k and v beyond an even part."""
        if self.shape.by_module:
            return 0.0  # their outputs are gathered
        shared = [s for s in self.shape.layers if s.kind != "mla" and s.kv_heads < self.size]
        numbers = sum((s.k_dim + s.v_dim) * (1 - s.kv_heads / self.size) for s in shared)
        return numbers * self.shape.hidden_size * self._matrix_bytes

    def _rows(self) -> float:
        """Return the bytes of o and down beyond an even part."""
        stored = self.stored
        if stored is None or not stored.group_size or stored.only_experts:
            return 0.0
        return sum(self._row_excess(row, stored) for row in self.shape.row_products)

    def _row_excess(self, row: RowProduct, stored: StoredWeights) -> float:
        """Return the bytes of products of one kind beyond an even part. Act-order's indices of
        inputs are counted here, also those of q, k and v or of gate and up beside them."""
        hidden = self.shape.hidden_size
        products = row.parameters / row.inputs / hidden
        size = 1 if row.routed and self.whole_experts else self.size
        share = row.inputs // size
        if stored.act_order:
            groups = max(1, row.inputs // stored.group_size)
            columns = groups * longest_group(row.inputs, stored.group_size, size)
        else:
            columns, groups = share, share / math.gcd(stored.group_size, share)
        held = columns * stored.bits / 8 + groups * stored.bytes_per_group
        excess = products * hidden * (held - share * stored.bytes_per_weight)
        if stored.act_order:
            excess += products * (columns + 2 * hidden) * _INDEX_BYTES / (self.size / size)
        return excess


def longest_group(inputs: int, group_size: int, size: int) -> float:
    """Return how many columns the longest group of one of `size` ranks is expected to have if an
    order has spread the groups over all inputs."""
    mine, groups = inputs // size, inputs // group_size
    ways, below, before, mean = math.comb(inputs, group_size), 0, 0.0, 0.0
    for count in range(group_size + 1):
        below += math.comb(mine, count) * math.comb(inputs - mine, group_size - count)
        until = (below / ways) ** groups  # how probable it is that no group is longer
        mean += (until - before) * min(group_size, -(-count // _STEP) * _STEP)
        before = until
    return mean


def kv_token_bytes(spec: LayerSpec, dtype: str) -> int:
    """Return the bytes of one token in one layer, scales of int8 included."""
    return spec.token_bytes(dtype) + spec.scale_bytes(dtype)


def per_device(spec: LayerSpec, tp: int) -> LayerSpec:
    """Return what one rank stores of a layer.

    The ranks share the heads; a latent, and heads fewer than ranks, are held by every rank. So is a
    state without segments.
    """
    state = spec.state
    if state is not None and state.segments:  # its channels and its heads come first in the shapes
        conv, recurrent = (
            tuple(-(-size // tp) if index == 0 else size for index, size in enumerate(shape))
            for shape in (state.conv, state.recurrent)
        )
        state = replace(state, conv=conv, recurrent=recurrent)
    return replace(spec, kv_heads=-(-spec.kv_heads // tp), state=state)
