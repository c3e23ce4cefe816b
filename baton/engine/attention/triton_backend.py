"""Paged attention with the Triton kernels, which read the pool directly, without gathers; GPU.

One kernel computes all decode rows, another all spans of several rows. Layers that the kernels do
not support (MLA, wide heads, chunks) go to torch_cpu.py. A recorded decode step (cuda_graphs.py)
brings its own plan. Under Triton's interpreter the backend runs on a CPU, for tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from baton.engine.attention.torch_cpu import TorchAttention
from baton.engine.kernels.gpu.decode_attention import GpuDecodeRows, decode_attention
from baton.engine.kernels.gpu.kv_write import store
from baton.engine.kernels.gpu.pages import LayerPages, layer_pages
from baton.engine.kernels.gpu.prefill_attention import (
    PrefillTiles,
    TileSizes,
    lay_tiles,
    prefill_attention,
    tile_sizes,
)
from baton.engine.state.attention import AttentionLayer, KVViews
from baton.engine.state.batch import Batch

MAX_DIM: Final = 256


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """The rows of a step, for the layers of one group; None where there are no rows of a kind."""

    decode: GpuDecodeRows | None
    prefill: PrefillTiles | None


class TritonAttention:
    """Attention with Triton kernels. See state/attention.py."""

    def __init__(
        self,
        pool: KVViews,
        layers: Sequence[AttentionLayer],
        tiles: TileSizes | None = None,
        splits: int | None = None,
    ) -> None:
        """Prepare all layers.

        `tiles` are the tile sizes of prefill; None chooses them by dtype and head width. `splits`
        is the number of parts of a decode row's keys; None chooses it by the number of rows.
        """
        self.group_of = pool.group_of
        self._torch = TorchAttention(pool, layers)
        self._tiles = tiles
        self._splits = splits
        self._layers = [_known(pool, index, spec) for index, spec in enumerate(layers)]

    @property
    def knows_all(self) -> bool:
        """Whether the kernels serve all layers, so that decode steps can be recorded as CUDA
        graphs.
        """
        return all(layer is not None for layer in self._layers)

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """See Attention.write. Rows with a negative slot are padding."""
        pages = self._layers[layer]
        if pages is None:
            self._torch.write(layer, k, v, slots)
        else:
            store(k, v, pages, slots)

    def attend(self, layer: int, q: Tensor, batch: Batch) -> Tensor:
        """See Attention.attend."""
        pages = self._layers[layer]
        if pages is None or batch.mutual:
            return self._torch.attend(layer, q, batch)
        plan = self._plan_of(batch, self.group_of[layer], q)
        if q.stride(2) != 1:
            q = q.contiguous()
        out = torch.empty(q.shape[0], q.shape[1], pages.v_dim, dtype=q.dtype, device=q.device)
        if plan.decode is not None:
            decode_attention(q, out, pages, plan.decode, self._splits)
        if plan.prefill is not None:
            prefill_attention(q, out, pages, plan.prefill)
        return out

    def _plan_of(self, batch: Batch, layer_group: int, q: Tensor) -> TritonPlan:
        """Return the plan of a layer group; made once per step, at the group's first layer."""
        key = plan_key(layer_group)
        plan = batch.plans.get(key)
        if plan is None:
            table = batch.tables[layer_group]
            sizes = self._tiles or tile_sizes(q.dtype, q.shape[2])
            plan = TritonPlan(
                _decode_rows(batch, layer_group), lay_tiles(batch.spans, table, sizes)
            )
            batch.plans[key] = plan
        return plan


def plan_key(layer_group: int) -> tuple[str, int]:
    """Return the key under which a batch's `plans` hold the TritonPlan of a layer group."""
    return ("triton", layer_group)


def _decode_rows(batch: Batch, layer_group: int) -> GpuDecodeRows | None:
    table = batch.tables[layer_group]
    numbers = [
        (span.first_row, index, span.num_tokens, table.first[index])
        for index, span in enumerate(batch.spans)
        if span.num_rows == 1
    ]
    if not numbers:
        return None
    columns = torch.tensor(numbers, dtype=torch.int64).T.contiguous()
    return GpuDecodeRows(columns.to(table.blocks.device), table.blocks)


def _known(pool: KVViews, layer: int, spec: AttentionLayer) -> LayerPages | None:
    """Return what the kernels read of a layer; None if they do not support the layer."""
    keys, values = pool.layer(layer)
    widest = max(keys.shape[3], values.shape[3])
    if spec.latent or spec.chunked or not values.shape[3] or widest > MAX_DIM:
        return None
    return layer_pages(pool, layer, spec)
