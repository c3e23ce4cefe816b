"""Decode steps of the lean decoder in one compiled call; which models and which steps.

A step may be taken so if each row is one new token, no row wants an adapter, nothing waits for the
layers one by one, and the compiled attention knows every layer of the pool. All others go layer by
layer (decoder.py): the same numbers, bit for bit, by the same kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.engine.attention.compiled import CompiledAttention
from baton.engine.kernels.cpu.step import (
    StepInputs,
    StepLayer,
    StepLinear,
    StepModel,
    StepPools,
    StepSizes,
    StepTable,
)
from baton.engine.kernels.rope import Rotation
from baton.engine.models.config import DecoderConfig
from baton.engine.models.elementwise import CompiledElementwise, Elementwise
from baton.engine.quantization.integer import IntegerPanels, W8A8Panels
from baton.engine.quantization.linear import Linear, PanelLinear, SideBySide
from baton.engine.state.batch import Batch

DIM_MULTIPLE = 32  # of head dims: attention.h takes keys 32 numbers at a time


class CompiledStep:
    """All layers of a decoder in one call. `num_steps`: how many were taken."""

    def __init__(self, model: StepModel) -> None:
        self._model = model
        self.num_steps = 0

    def pools(self, batch: Batch, num_rows: int) -> StepPools | None:
        """The pool that a step of so many rows is taken over; None for a step that goes layer by
        layer. The caller has seen to it that no row wants an adapter."""
        attention = batch.attention
        if len(batch.spans) != num_rows or batch.on_layer is not None:
            return None
        return attention.step_pools if isinstance(attention, CompiledAttention) else None

    def run(
        self,
        residual: Tensor,
        positions: Tensor,
        rotations: Sequence[Rotation],
        batch: Batch,
        pools: StepPools,
    ) -> Tensor:
        """residual [T, H], which is overwritten, positions [T] -> hidden [T, H]; writes KV."""
        tables = [StepTable(t.slots, t.blocks, torch.tensor(t.first)) for t in batch.tables]
        self.num_steps += 1
        inputs = StepInputs(residual, rotations, positions, tables)
        return self._model.run(inputs, pools)


def step_linears(linears: Sequence[Linear]) -> list[StepLinear] | None:
    """The products of a layer as the step takes them; None if one has another format."""
    held: list[StepLinear] = []
    for linear in linears:
        if isinstance(linear, PanelLinear):
            held.append(StepLinear(linear.panels, linear.bias))
        elif isinstance(linear, W8A8Panels):
            held.append(StepLinear(linear.packed, linear.bias))
        elif (panels := _side_by_side(linear)) is not None:
            biases = [each.bias for each in panels if each.bias is not None]
            packed = tuple(each.packed for each in panels)
            held.append(StepLinear(packed, torch.cat(biases) if biases else None))
        else:
            return None
    return held


def _side_by_side(linear: Linear) -> tuple[IntegerPanels, ...] | None:
    """Panels of integers, some after the others."""
    layers = linear.layers if isinstance(linear, SideBySide) else (linear,)
    panels = tuple(layer for layer in layers if isinstance(layer, IntegerPanels))
    return panels if len(panels) == len(layers) else None


def compile_step(
    config: DecoderConfig,
    layers: Sequence[StepLayer | None],
    final_norm: Tensor,
    between: Elementwise,
) -> CompiledStep | None:
    """The decoder's layers as one call; None if a layer, or a size, is not for it."""
    held = [layer for layer in layers if layer is not None]
    if not isinstance(between, CompiledElementwise) or len(held) < len(layers):
        return None
    if config.head_dim % DIM_MULTIPLE:
        return None
    sizes = StepSizes(
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        dim=config.head_dim,
        epsilon=config.rms_norm_eps,
        norm_offset=config.norm_offset,
        gelu=config.activation == "gelu_tanh",
    )
    return CompiledStep(StepModel(between.kernels, held, final_norm, sizes))
