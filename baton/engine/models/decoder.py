"""The lean decoder: Llama, Mistral, Mixtral, Qwen2, Qwen3 and their mixtures of experts, those with
latent attention (DeepSeek, GLM-4 MoE Lite, Kimi K2) or sinks (GPT-OSS), Gemma, Phi-3 and GLM-4; all
that differs is
read from the config.

Against transformers' modelling code: Q, K and V in one product, gate and up in one product,
rotation of query and key heads at once, experts grouped, no cache objects. In float32 it gives the
universal route's tokens. The batch (where KV lives) arrives as an argument; the decoder owns
weights only, the base's and those of its LoRA adapters.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.kernels.rope import Frequencies
from baton.engine.models.compiled_step import compile_step
from baton.engine.models.config import DecoderConfig
from baton.engine.models.elementwise import choose_elementwise
from baton.engine.models.experts import ExpertDispatch, Experts
from baton.engine.models.families.gemma import own_name
from baton.engine.models.layers.layer import LayerBuilder, ReadTensor
from baton.engine.models.lora import Adapter, rows_by_adapter
from baton.engine.quantization.linear import Linears, in_float32
from baton.engine.state.attention import AttentionLayer
from baton.engine.state.batch import Batch
from baton.engine.state.work import ParameterCounts
from baton.protocol.errors import ModelRefused
from baton.protocol.kv_spec import LayerSpec


class Shards(Protocol):
    """What a decoder asks for where its weights may be one rank's share of the model: the lookup of
    embeddings, the sum behind each row-parallel product, the vocabulary's logits. `Whole` is the
    model in one piece; parallel/sharding.py is a rank of several. T = tokens, N = rows, H = hidden
    size.

    `dispatch`: how rows reach experts of other ranks; None = every rank has all rows, and their
    answers meet in `reduce`.

    Source: Megatron-LM (arXiv 1909.08053, section 3).
    """

    @property
    def dispatch(self) -> ExpertDispatch | None: ...

    def embed(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        """token_ids [T], weight [vocabulary here, H] -> [T, H]."""
        ...

    def reduce(self, partial: Tensor) -> Tensor:
        """What this rank's share of a product's inputs gave, [T, H] -> the sum over all ranks; may
        mutate `partial`."""
        ...

    def gather(self, logits: Tensor) -> Tensor:
        """logits [N, vocabulary here] -> [N, vocabulary] on the rank that samples."""
        ...


class Whole:
    """Shards of a model in one piece."""

    dispatch: ExpertDispatch | None = None

    def embed(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        """See Shards."""
        return functional.embedding(token_ids, weight)

    def reduce(self, partial: Tensor) -> Tensor:
        """See Shards."""
        return partial

    def gather(self, logits: Tensor) -> Tensor:
        """See Shards."""
        return logits


class Decoder:
    """A decoder-only transformer over flattened tokens and a paged KV pool."""

    def __init__(
        self,
        config: DecoderConfig,
        read: ReadTensor,
        linears: Linears,
        fixed_shapes: bool = False,
        shards: Shards | None = None,
    ) -> None:
        """Read and merge all weights; `linears` decides the format of the products'.

        `fixed_shapes`: no product's shape depends on which experts or adapters rows want. `shards`:
        of a tensor-parallel rank, whose share `config` describes; None = the model in one piece.
        """
        self._config = config
        self._shards = shards or Whole()
        self._fixed_shapes = fixed_shapes
        self._embedding = read("model.embed_tokens.weight")
        place = self._embedding
        self._between = choose_elementwise(config, place.dtype, place.device)
        dispatch = self._shards.dispatch
        builder = LayerBuilder(config, read, linears, fixed_shapes, self._between, dispatch)
        self._layers = [builder.layer(i) for i in range(config.num_layers)]
        self._final_norm = self._between.norm_weight(read("model.norm.weight"))
        # Decode steps in one call; None: layer by layer, as the sums of several ranks need it.
        parts = [None if shards else layer.step_layer() for layer in self._layers]
        self.step = compile_step(config, parts, self._final_norm, self._between)
        self._head = linears.head(self._embedding if config.tied_embeddings else None)
        self._frequencies = [
            Frequencies.of(rule, config.turned, config.pairs, place.device) for rule in config.ropes
        ]
        # As transformers has it: a number of the model's dtype.
        self._scale = torch.tensor(config.embedding_scale).to(place.dtype).item()

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
        """What each layer stores per token."""
        return self._config.layers

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
        """Serve `adapter` to the rows that name it. Raises ModelRefused for layers it cannot
        reach."""
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
        """Forget an adapter, also one that was refused halfway."""
        for layer in self._layers:
            for projection in layer.projections:
                projection.deltas.pop(id_, None)

    def forward(self, token_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """token_ids [T], positions [T] -> hidden [T, H]; writes the batch's KV into the pool."""
        eps, groups = self._config.rms_norm_eps, rows_by_adapter(batch, self._fixed_shapes)
        residual = self._shards.embed(token_ids, self._embedding)
        if self._scale != 1.0:
            residual = residual * self._scale
        rotations = [each.at(positions, residual.dtype) for each in self._frequencies]
        if self.step is not None and not groups:
            pools = self.step.pools(batch, token_ids.shape[0])
            if pools is not None:
                return self.step.run(residual, positions, rotations, batch, pools)
        between, reduce, delta = self._between, self._shards.reduce, None
        for layer in self._layers:
            residual, hidden = between.add_norm(residual, delta, layer.input_norm, eps)
            rotation = rotations[layer.rotation]
            delta = layer.attention(hidden, rotation, batch, groups, reduce)
            delta = self._normalized(delta, layer.attention_output_norm)
            residual, hidden = between.add_norm(residual, delta, layer.mlp_norm, eps)
            delta = layer.mlp.summed(hidden, groups, reduce)
            delta = self._normalized(delta, layer.mlp_output_norm)
        return between.add_norm(residual, delta, self._final_norm, eps)[1]

    def empty_forward(self) -> None:
        """A forward without rows: this rank's experts answer the rows of other ranks."""
        experts = self._config.experts
        for layer in self._layers:
            if experts is not None and isinstance(layer.mlp, Experts):
                layer.mlp.answer_others(self._embedding[:0], experts.per_token)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> [N, vocab] float32."""
        logits = self._shards.gather(in_float32(self._head, hidden))
        cap = self._config.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _normalized(self, delta: Tensor, weight: Tensor | None) -> Tensor:
        """By a norm behind attention or an MLP, if there is one."""
        if weight is None:
            return delta
        return self._between.add_norm(delta, None, weight, self._config.rms_norm_eps)[1]
