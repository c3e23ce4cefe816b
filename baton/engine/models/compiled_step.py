"""Steps of the lean decoder in one compiled call, or in one for each layer, and which models and
steps allow it.

A step is one call if each row is one new token, no row wants an adapter, no caller waits for single
layers (`Batch.on_layer`), and the compiled attention supports every layer that attends. Logits that
the batch wants of every row are made in the same call. Where only the rows or a caller forbid it,
as prompts do, a dense decoder whose layers attend over heads makes one call between two layers'
attention. All other steps run operation by operation (decoder.py). The kernels are the same, so are
the results, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from baton.engine.attention.compiled import CompiledAttention
from baton.engine.kernels.cpu.gates import NO_CHOICE
from baton.engine.kernels.cpu.latent import NO_LATENTS
from baton.engine.kernels.cpu.layer_part import NO_LAYER, LayerParts
from baton.engine.kernels.cpu.step import (
    NO_DELTA,
    StepHead,
    StepInputs,
    StepLayer,
    StepModel,
    StepPools,
    StepSizes,
    StepStates,
    StepTable,
)
from baton.engine.kernels.cpu.step_linears import StepLinear
from baton.engine.kernels.rope import Frequencies
from baton.engine.models.config import DecoderConfig
from baton.engine.models.elementwise import CompiledElementwise, Elementwise
from baton.engine.quantization.integer import IntegerPanels, W8A8Panels
from baton.engine.quantization.linear import (
    EmbeddingTable,
    Linear,
    PanelLinear,
    PlainLinear,
    SideBySide,
)
from baton.engine.state.batch import Batch, States
from baton.protocol.errors import InternalError

DIM_MULTIPLE = 32  # head dims must be a multiple: attention.h reads keys 32 numbers at a time


class CompiledStep:
    """All layers of a decoder in one call. `num_steps`: how many steps have run so, `num_parted`:
    how many in one call for each layer."""

    def __init__(
        self, model: StepModel, layers: Sequence[StepLayer], frequencies: Sequence[Frequencies]
    ) -> None:
        self._model = model
        self._frequencies = frequencies
        self.embeds = model.embedding is not None  # run() needs no residual
        self._num_layers = len(layers)
        self._linear = [index for index, layer in enumerate(layers) if layer.delta is not None]
        self._states: tuple[States, StepStates] | None = None  # the last step's
        self.num_steps = self.num_parted = 0
        sizes = model.sizes
        # Whether a step may be one call for each layer: only attention over heads, no mixtures.
        self.has_parts = not (
            sizes.gated or self._linear or sizes.latents.heads or sizes.choice.experts
        )

    def pools(self, batch: Batch) -> StepPools | None:
        """Return the KV pools for a step in one call, or in one for each layer; None if the step
        must run operation by operation. The caller has checked that no row wants an adapter."""
        attention = batch.attention
        return attention.step_pools if isinstance(attention, CompiledAttention) else None

    def is_whole(self, batch: Batch, num_rows: int) -> bool:
        """Whether a step of `num_rows` rows may be one call."""
        return len(batch.spans) == num_rows and batch.on_layer is None

    def run_parts(
        self, positions: Tensor, residual: Tensor, batch: Batch, pools: StepPools
    ) -> Tensor:
        """Run positions [T] and the embeddings `residual` [T, H], which are overwritten -> hidden
        [T, H], with zeros for rows that nobody reads. Writes KV."""
        self.num_parted += 1
        tables = [StepTable(t.slots, t.blocks, t.first) for t in batch.tables]
        rotations = [each.at(positions, torch.bfloat16) for each in self._frequencies]
        inputs = StepInputs(positions, positions, rotations, tables)
        args, alive = self._model.arguments(inputs, pools)
        parts = LayerParts(self._model, args, residual, alive)
        queries = parts.qkv[:, : self._model.sizes.heads]
        attended, last = None, self._num_layers - 1
        for layer in range(self._num_layers):
            parts.run(layer - 1, layer, attended)
            if batch.on_layer is not None:
                batch.on_layer(layer)
            if layer == last:
                batch = batch.in_last_layer()
            attending = batch if batch.only is None else batch.only.batch
            attended = batch.attention.attend(layer, batch.kept(queries), attending)
        if batch.only is None:
            parts.run(last, NO_LAYER, attended)
            return parts.hidden
        few = parts.of(batch.only.index)
        few.run(last, NO_LAYER, attended)
        return torch.zeros_like(parts.hidden).index_copy_(0, batch.only.index, few.hidden)

    def run(
        self,
        token_ids: Tensor,
        positions: Tensor,
        residual: Tensor | None,
        batch: Batch,
        pools: StepPools,
    ) -> tuple[Tensor, Tensor | None]:
        """Run token_ids [T], positions [T] -> hidden [T, H], and logits [T, vocab] float32 if the
        batch wants them and the head is of a known format; the next call overwrites these.
        `residual` [T, H]: the embeddings, which are overwritten; None if `embeds`. Writes KV, and
        advances the sequences' states."""
        tables = [StepTable(t.slots, t.blocks, t.first) for t in batch.tables]
        self.num_steps += 1
        last = max([span.start for span in batch.spans])
        kept = [each.table(last, torch.bfloat16) for each in self._frequencies]
        rotations = [each for each in kept if each is not None]
        by_position = len(rotations) == len(kept)
        if not by_position:
            rotations = [each.at(positions, torch.bfloat16) for each in self._frequencies]
        inputs = StepInputs(
            token_ids, positions, rotations, tables, by_position, residual,
            logits=batch.logits is not None,
        )  # fmt: skip
        states = None
        if self._linear:
            states = self._states_of(batch)
            slots = torch.tensor([span.state_slot for span in batch.spans])
            begins = torch.tensor([int(span.start == 0) for span in batch.spans])
            inputs = replace(inputs, slots=slots, begins=begins)
        return self._model.run(inputs, pools, states)

    def _states_of(self, batch: Batch) -> StepStates:
        arena = batch.states
        if arena is None:
            raise InternalError("a model with recurrent state got a step without states")
        if self._states is None or self._states[0] is not arena:
            layers: dict[int, tuple[Tensor, Tensor]] = {}
            for index in self._linear:
                conv, matrices = arena.views(index)
                assert conv is not None, "the layer has both states"
                assert matrices is not None, "as above"
                layers[index] = conv, matrices
            self._states = arena, StepStates(layers, self._num_layers)
        return self._states[1]


def step_linears(linears: Sequence[Linear]) -> list[StepLinear] | None:
    """Return a layer's products in the form of the compiled step; None if it does not support the
    format of one of them."""
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


def _step_head(head: Linear) -> StepHead | None:
    """Return the product over the vocabulary; None if the step does not support its format."""
    held = step_linears([head])
    if held is None or not isinstance(head, PanelLinear | IntegerPanels | W8A8Panels):
        return None
    of = head if isinstance(head, PanelLinear) else head.packed
    return StepHead(held[0], of.outputs)


def _side_by_side(linear: Linear) -> tuple[IntegerPanels, ...] | None:
    """Return the integer panels of a product, in the order of its outputs; None if any part of the
    product has another format."""
    layers = linear.layers if isinstance(linear, SideBySide) else (linear,)
    panels = tuple(layer for layer in layers if isinstance(layer, IntegerPanels))
    return panels if len(panels) == len(layers) else None


def compile_step(
    config: DecoderConfig,
    layers: Sequence[StepLayer | None],
    final_norm: Tensor,
    between: Elementwise,
    ends: tuple[EmbeddingTable, Linear],
    frequencies: Sequence[Frequencies],
) -> CompiledStep | None:
    """Return the decoder's layers as one call; None if a layer or a size does not allow it. `ends`:
    the embedding and the head, which join them if their formats allow it."""
    held = [layer for layer in layers if layer is not None]
    if not isinstance(between, CompiledElementwise) or len(held) < len(layers):
        return None
    if config.head_dim % DIM_MULTIPLE:
        return None
    latents = NO_LATENTS if config.latent is None else config.latent.sizes(config.num_heads)
    mixture = next((layer.experts for layer in held if layer.experts is not None), None)
    sizes = StepSizes(
        hidden=config.hidden_size,
        inner=max(layer.inner for layer in held),
        heads=config.num_heads,
        kv_heads=config.num_kv_heads if config.latent is None else 1,
        dim=config.head_dim if config.latent is None else latents.key,
        epsilon=config.rms_norm_eps,
        norm_offset=config.norm_offset,
        gelu=config.activation == "gelu_tanh",
        gated=config.gated,
        delta=NO_DELTA if config.delta is None else config.delta.sizes,
        latents=latents,
        query_rank=0 if config.latent is None else config.latent.query_rank,
        choice=NO_CHOICE if mixture is None else mixture.rule,
        expert_inner=0 if mixture is None else mixture.inner,
    )
    table, head = ends
    embedding = None
    if isinstance(table, PlainLinear) and config.embedding_scale == 1.0:
        embedding = table.weight
    model = StepModel(between.kernels, held, final_norm, sizes, _step_head(head), embedding)
    return CompiledStep(model, held, frequencies)
