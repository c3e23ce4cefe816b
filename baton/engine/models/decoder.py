"""The lean decoder: one class for all families of the lean route; the config says how they differ.

The families: Llama, Mistral, Mixtral, Qwen2, Qwen3 and their mixtures of experts, mixtures with
latent attention (DeepSeek, GLM-4 MoE Lite, Kimi K2), GPT-OSS (sinks), Gemma, Phi-3, GLM-4, and
Qwen3-Next and Qwen3.5 (linear attention with recurrent state).

It differs from transformers' modelling code in this: one product makes Q, K and V, one makes gate
and up, query and key heads rotate at once, rows are grouped by expert, and there are no cache
objects. In float32 it gives the universal route's tokens. The decoder owns weights only: the base
model's and those of its LoRA adapters. Where KV lives comes with the batch, an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from baton.engine.kernels.rope import Frequencies
from baton.engine.models.compiled_step import compile_step
from baton.engine.models.config import DecoderConfig
from baton.engine.models.elementwise import choose_elementwise
from baton.engine.models.experts import ExpertDispatch, Experts
from baton.engine.models.families.gemma import own_name
from baton.engine.models.layers.building import BuildLayers, in_turn
from baton.engine.models.layers.layer import LayerBuilder, ReadTensor
from baton.engine.models.lora import Adapter, AdapterRows, of_kept, rows_by_adapter
from baton.engine.quantization.linear import (
    EmbeddingTable,
    Linear,
    Linears,
    PanelLinear,
    PlainLinear,
    in_float32,
)
from baton.engine.state.attention import AttentionLayer
from baton.engine.state.batch import Batch
from baton.engine.state.work import ParameterCounts
from baton.protocol.errors import ModelRefused
from baton.protocol.kv_spec import LayerSpec


class Shards(Protocol):
    """The operations of a decoder that depend on whether its weights are one rank's share of the
    model: looking up embeddings, the sum after each row-parallel product, gathering logits. `Whole`
    implements them for a model in one piece, parallel/sharding.py for one rank of several.
    T = tokens, N = rows, H = hidden size.

    `dispatch`: sends rows to experts on other ranks. None = every rank has all rows, and `reduce`
    sums the answers of the ranks' experts.

    Source: Megatron-LM (arXiv 1909.08053, section 3).
    """

    @property
    def dispatch(self) -> ExpertDispatch | None: ...

    def embed(self, token_ids: Tensor, table: EmbeddingTable) -> Tensor:
        """Look up token_ids [T] in a table [vocabulary of this rank, H] -> [T, H]."""
        ...

    def reduce(self, partial: Tensor) -> Tensor:
        """Sum `partial` [T, H], a product over this rank's share of the inputs, over all ranks; may
        mutate `partial`."""
        ...

    def gather(self, logits: Tensor) -> Tensor:
        """Gather logits [N, vocabulary of this rank] -> [N, vocabulary] on the rank that samples;
        on the others the result is not used."""
        ...


class Whole:
    """Shards of a model in one piece."""

    dispatch: ExpertDispatch | None = None

    def embed(self, token_ids: Tensor, table: EmbeddingTable) -> Tensor:
        """See Shards."""
        return table.rows(token_ids)

    def reduce(self, partial: Tensor) -> Tensor:
        """See Shards."""
        return partial

    def gather(self, logits: Tensor) -> Tensor:
        """See Shards."""
        return logits


def _table(config: DecoderConfig, head: Linear, read: ReadTensor) -> EmbeddingTable:
    """Return the embedding: the weights of the head, if both are one and rows can be read there."""
    if config.tied_embeddings and isinstance(head, PlainLinear | PanelLinear):
        return head
    return PlainLinear(read("model.embed_tokens.weight"), None)


class Decoder:
    """A decoder-only transformer over flattened tokens and a paged KV pool."""

    def __init__(
        self,
        config: DecoderConfig,
        read: ReadTensor,
        linears: Linears,
        fixed_shapes: bool = False,
        shards: Shards | None = None,
        build: BuildLayers = in_turn,
    ) -> None:
        """Read and merge all weights; `linears` decides the format of the products' weights.

        `fixed_shapes`: no product's shape depends on which experts or adapters rows want. `shards`:
        the operations of a rank, whose share of the model `config` describes; None = the model in
        one piece. `build`: builds the layers.
        """
        self._config = config
        self._shards = shards or Whole()
        self._fixed_shapes = fixed_shapes
        self._head = linears.head(config.tied_embeddings)
        self._table = _table(config, self._head, read)
        dtype, device = self.place
        self._between = choose_elementwise(config, dtype, device)
        dispatch = self._shards.dispatch
        builder = LayerBuilder(config, read, linears, fixed_shapes, self._between, dispatch)
        self._layers = build(builder.layer, config.num_layers)
        self._final_norm = self._between.norm_weight(read("model.norm.weight"))
        # Runs a step in one call, or in one for each layer; None = all steps run operation by
        # operation. With `shards` they do: the ranks sum or exchange within each layer.
        parts = [None if shards else layer.step_layer() for layer in self._layers]
        self._frequencies = [
            Frequencies.of(rule, config.turned, config.pairs, device) for rule in config.ropes
        ]
        ends = self._table, self._head
        self.step = compile_step(
            config, parts, self._final_norm, self._between, ends, self._frequencies
        )
        # Rounded to the model's dtype, as transformers does it.
        self._scale = torch.tensor(config.embedding_scale).to(dtype).item()

    @property
    def place(self) -> tuple[torch.dtype, torch.device]:
        """The dtype and the device of its activations."""
        return self._table.place

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._config.vocab_size

    @property
    def max_positions(self) -> int | None:
        """Positions the model was made for."""
        return self._config.max_positions

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """What each layer stores per token. Inputs of convolutions have the model's dtype."""
        return self._config.layers_in(self.place[0])

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """How each layer attends."""
        layers = zip(self._config.attention_layers, self._layers, strict=True)
        return tuple(replace(attends, sinks=layer.sinks) for attends, layer in layers)

    @property
    def parameter_counts(self) -> ParameterCounts:
        """See CausalModel."""
        return self._config.parameter_counts

    def add_adapter(self, adapter: Adapter) -> None:
        """Apply `adapter` to the rows that name it. Raises ModelRefused if it changes layers that
        the decoder cannot adapt."""
        if self._config.prefix:
            named = {own_name(module): delta for module, delta in adapter.deltas.items()}
            adapter = replace(adapter, deltas=named)
        reached: set[str] = set()
        for layer in self._layers:
            for projection in layer.projections:
                reached |= projection.adapt(adapter)
        missed = sorted(set(adapter.deltas) - reached)
        if missed:
            reason = f"the lean route does not adapt {missed[0]}"
            if self._config.latent is not None and missed[0].endswith(".kv_b_proj"):
                reason = f"{missed[0]} is absorbed into attention"
            raise ModelRefused(f"adapter {adapter.name}: {reason}", field="lora_modules")

    def remove_adapter(self, id_: str) -> None:
        """Forget an adapter, also one that `add_adapter` refused after some layers had taken it."""
        for layer in self._layers:
            for projection in layer.projections:
                projection.deltas.pop(id_, None)

    def forward(self, token_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """Run token_ids [T], positions [T] -> hidden [T, H]; write the batch's KV to the pool, and
        make `batch.logits` where one call makes both. Rows that nobody reads (`batch.read`) may be
        zeros."""
        eps = self._config.rms_norm_eps
        groups: Sequence[AdapterRows] = rows_by_adapter(batch, self._fixed_shapes)
        if self.step is not None and not groups and not batch.taps:
            pools = self.step.pools(batch)
            if pools is not None and self.step.is_whole(batch, len(token_ids)):
                residual = None if self.step.embeds else self.embed(token_ids)
                hidden, logits = self.step.run(token_ids, positions, residual, batch, pools)
                if batch.logits is not None and logits is not None:
                    batch.logits.made = self._capped(logits)
                return hidden
            if pools is not None and self.step.has_parts and not batch.mutual:
                return self.step.run_parts(positions, self.embed(token_ids), batch, pools)
        residual = self.embed(token_ids)
        rotations = [each.at(positions, residual.dtype) for each in self._frequencies]
        between, reduce, delta = self._between, self._shards.reduce, None
        shorter = self._shards.dispatch is None  # ranks that exchange rows agreed on their number
        for index, layer in enumerate(self._layers):
            if shorter and index == len(self._layers) - 1:
                batch = batch.in_last_layer()
            if index in batch.taps:  # a copy: add_norm may overwrite `residual`
                batch.tapped[index] = residual.clone() if delta is None else residual + delta
            residual, hidden = between.add_norm(residual, delta, layer.input_norm, eps)
            rotation = rotations[layer.rotation]
            delta = layer.attention(hidden, rotation, batch, groups, reduce)
            delta = self._normalized(delta, layer.attention_output_norm)
            residual, groups = batch.kept(residual), of_kept(groups, batch)
            residual, hidden = between.add_norm(residual, delta, layer.mlp_norm, eps)
            delta = layer.mlp.summed(hidden, groups, reduce)
            delta = self._normalized(delta, layer.mlp_output_norm)
        hidden = between.add_norm(residual, delta, self._final_norm, eps)[1]
        if batch.only is None:
            return hidden
        whole = hidden.new_zeros(len(token_ids), hidden.shape[1])
        return whole.index_copy_(0, batch.only.index, hidden)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Look up token_ids [T] -> [T, H], a new tensor."""
        embedded = self._shards.embed(token_ids, self._table)
        return embedded if self._scale == 1.0 else embedded * self._scale

    def reduce(self, partial: Tensor) -> Tensor:
        """Sum partial results [T, H] over the ranks; see Shards."""
        return self._shards.reduce(partial)

    def empty_forward(self) -> None:
        """Run a forward without rows: this rank's experts compute the rows of other ranks."""
        experts, (dtype, device) = self._config.experts, self.place
        none = torch.empty(0, self._config.hidden_size, dtype=dtype, device=device)
        for layer in self._layers:
            if experts is not None and isinstance(layer.mlp, Experts):
                layer.mlp.answer_others(none, experts.per_token)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> [N, vocab] float32."""
        return self._capped(self._shards.gather(in_float32(self._head, hidden)))

    def _capped(self, logits: Tensor) -> Tensor:
        cap = self._config.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _normalized(self, delta: Tensor, weight: Tensor | None) -> Tensor:
        """Normalize the output of attention or of an MLP; return it as it is without a `weight`."""
        if weight is None:
            return delta
        return self._between.add_norm(delta, None, weight, self._config.rms_norm_eps)[1]
