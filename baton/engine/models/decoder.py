"""The lean decoder: Llama, Mistral, Mixtral, Qwen2, Qwen3 and their mixtures of experts; all that
differs is read from the config.

Against transformers' modelling code: Q, K and V in one product, gate and up in one product,
rotation of query and key heads at once, experts grouped, no cache objects. In float32 it gives the
universal route's tokens. The batch (where KV lives) arrives as an argument; the decoder owns
weights only, the base's and those of its LoRA adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.kernels.cpu.library import HeadNorms
from baton.engine.kernels.cpu.step import StepLayer
from baton.engine.kernels.gpu.support import triton_serves
from baton.engine.kernels.rope import Rotation, attention_factor, inverse_frequencies
from baton.engine.models.compiled_step import compile_step, step_linears
from baton.engine.models.config import DecoderConfig, ExpertsConfig
from baton.engine.models.elementwise import (
    CompiledElementwise,
    Elementwise,
    choose_elementwise,
)
from baton.engine.models.experts import Expert, Experts, SharedExpert, compiled_experts
from baton.engine.models.lora import (
    Adapter,
    AdapterRows,
    LowRank,
    apply_deltas,
    merge_parts,
    rows_by_adapter,
)
from baton.engine.quantization.linear import Linear, Linears, W8A8Share, in_float32
from baton.engine.state.attention import AttentionLayer
from baton.engine.state.batch import Batch
from baton.engine.state.work import ParameterCounts
from baton.protocol.errors import ModelRefused
from baton.protocol.kv_spec import LayerSpec

# A checkpoint's tensor by name, in the model's dtype and place; several names: stacked.
ReadTensor = Callable[..., Tensor]
Reduce = Callable[[Tensor], Tensor]


class Shards(Protocol):
    """What a decoder asks for where its weights may be one rank's share of the model: the lookup of
    embeddings, the sum behind each row-parallel product, the vocabulary's logits. `Whole` is the
    model in one piece; parallel/sharding.py is a rank of several. T = tokens, N = rows, H = hidden
    size.

    Source: Megatron-LM (arXiv 1909.08053, section 3).
    """

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

    def embed(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        """See Shards."""
        return functional.embedding(token_ids, weight)

    def reduce(self, partial: Tensor) -> Tensor:
        """See Shards."""
        return partial

    def gather(self, logits: Tensor) -> Tensor:
        """See Shards."""
        return logits


@dataclass(frozen=True, slots=True)
class Projection:
    """One product: one or several projections of the checkpoint, stacked along their outputs.

    `parts`: which outputs belong to which module path. `deltas`: LoRA, by adapter id.
    """

    linear: Linear
    parts: dict[str, slice]
    num_inputs: int
    deltas: dict[str, LowRank] = field(default_factory=dict)

    def __call__(self, x: Tensor, groups: Sequence[AdapterRows]) -> Tensor:
        """x [T, in] -> [T, out]."""
        return apply_deltas(x, self.linear(x), self.deltas, groups)

    def summed(self, x: Tensor, groups: Sequence[AdapterRows], reduce: Reduce) -> Tensor:
        """x [T, in of this rank] -> [T, out], summed over the ranks; `reduce`: see Shards."""
        if not isinstance(self.linear, W8A8Share):
            return reduce(self(x, groups))
        y = self.linear(x)
        if any(group.id in self.deltas for group in groups):
            y += reduce(apply_deltas(x, torch.zeros_like(y), self.deltas, groups))
        return y

    def adapt(self, adapter: Adapter) -> set[str]:
        """Take the adapter's deltas for these parts; their module paths. Raises ModelRefused."""
        held = {module: adapter.deltas[module] for module in self.parts if module in adapter.deltas}
        for module, delta in held.items():
            outputs = self.parts[module].stop - self.parts[module].start
            if (delta.up.shape[0], delta.down.shape[1]) != (outputs, self.num_inputs):
                raise ModelRefused(
                    f"adapter {adapter.name} was made for another model: {module} has other sizes",
                    field="lora_modules",
                )
        if held:
            total = max(part.stop for part in self.parts.values())
            parts = ((self.parts[module], delta) for module, delta in held.items())
            self.deltas[adapter.id] = merge_parts(parts, total)
        return set(held)


@dataclass(frozen=True, slots=True)
class Mlp:
    """A dense layer. H = hidden, I = intermediate size."""

    gate_up: Projection  # [H] -> [2 * I]
    down: Projection  # [I] -> [H]
    between: Elementwise

    def summed(self, hidden: Tensor, groups: Sequence[AdapterRows], reduce: Reduce) -> Tensor:
        """hidden [T, H] -> [T, H], summed over the ranks; `reduce`: see Shards."""
        inner = self.between.swiglu(self.gate_up(hidden, groups))
        return self.down.summed(inner, groups, reduce)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer. H = hidden, D = head_dim."""

    input_norm: Tensor  # [H]
    qkv: Projection  # [H] -> [(heads + 2 * kv_heads) * D]
    head_norms: HeadNorms | None
    output: Projection  # [heads * D] -> [H]
    mlp_norm: Tensor  # [H]
    mlp: Mlp | Experts

    @property
    def projections(self) -> list[Projection]:
        """What an adapter can reach."""
        dense = [self.mlp.gate_up, self.mlp.down] if isinstance(self.mlp, Mlp) else []
        return [self.qkv, self.output, *dense]

    def step_layer(self) -> StepLayer | None:
        """The layer as a whole compiled step takes it; None for experts and other formats."""
        mlp = self.mlp
        if not isinstance(mlp, Mlp):
            return None
        projections = (self.qkv, self.output, mlp.gate_up, mlp.down)
        linears = step_linears([projection.linear for projection in projections])
        if linears is None:
            return None
        qkv, output, gate_up, down = linears
        return StepLayer(
            self.input_norm, qkv, self.head_norms, output, self.mlp_norm, gate_up, down
        )


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
        builder = _Builder(config, read, linears, fixed_shapes, self._between)
        self._layers = [builder.layer(i) for i in range(config.num_layers)]
        self._final_norm = read("model.norm.weight")
        # Decode steps in one call; None: layer by layer, as the sums of several ranks need it.
        parts = [None if shards else layer.step_layer() for layer in self._layers]
        self.step = compile_step(config, parts, self._final_norm, self._between)
        self._head = linears.head(self._embedding if config.tied_embeddings else None)
        frequencies = inverse_frequencies(config.rope, config.head_dim)
        self._frequencies = frequencies.to(self._embedding.device)
        self._attention_factor = attention_factor(config.rope)

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
        return self._config.attention_layers

    @property
    def parameter_counts(self) -> ParameterCounts:
        """See CausalModel."""
        return self._config.parameter_counts

    def add_adapter(self, adapter: Adapter) -> None:
        """Serve `adapter` to the rows that name it. Raises ModelRefused for layers it cannot
        reach."""
        reached: set[str] = set()
        for layer in self._layers:
            for projection in layer.projections:
                reached |= projection.adapt(adapter)
        missed = sorted(set(adapter.deltas) - reached)
        if missed:
            raise ModelRefused(
                f"adapter {adapter.name}: the lean route does not adapt {missed[0]}",
                field="lora_modules",
            )

    def remove_adapter(self, id_: str) -> None:
        """Forget an adapter, also one that was refused halfway."""
        for layer in self._layers:
            for projection in layer.projections:
                projection.deltas.pop(id_, None)

    def forward(self, token_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """token_ids [T], positions [T] -> hidden [T, H]; writes the batch's KV into the pool."""
        eps, groups = self._config.rms_norm_eps, rows_by_adapter(batch, self._fixed_shapes)
        residual = self._shards.embed(token_ids, self._embedding)
        rotation = Rotation.at(positions, self._frequencies, residual.dtype, self._attention_factor)
        if self.step is not None and not groups:
            pools = self.step.pools(batch, token_ids.shape[0])
            if pools is not None:
                return self.step.run(residual, positions, rotation, batch, pools)
        between, reduce, delta = self._between, self._shards.reduce, None
        for index, layer in enumerate(self._layers):
            residual, hidden = between.add_norm(residual, delta, layer.input_norm, eps)
            queries, keys, values = self._heads(layer, hidden, rotation, groups)
            attended = batch.attend(index, queries, keys, values)
            delta = layer.output.summed(attended.flatten(1), groups, reduce)
            residual, hidden = between.add_norm(residual, delta, layer.mlp_norm, eps)
            delta = layer.mlp.summed(hidden, groups, reduce)
        return between.add_norm(residual, delta, self._final_norm, eps)[1]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> [N, vocab] float32."""
        return self._shards.gather(in_float32(self._head, hidden))

    def _heads(
        self,
        layer: DecoderLayer,
        hidden: Tensor,
        rotation: Rotation,
        groups: Sequence[AdapterRows],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [T, H] -> query [T, heads, D], key and value [T, kv_heads, D]."""
        config = self._config
        heads = config.num_heads + 2 * config.num_kv_heads
        qkv = layer.qkv(hidden, groups).view(-1, heads, config.head_dim)
        return self._between.rotate(qkv, rotation, config.num_heads, layer.head_norms)


def tensor_names(config: DecoderConfig) -> Iterator[str]:
    """Every tensor that a checkpoint of this config holds; a tied head may be stored once more."""
    yield "model.embed_tokens.weight"
    yield "model.norm.weight"
    if not config.tied_embeddings:
        yield "lm_head.weight"
    attention = {
        "self_attn.q_proj": config.qkv_bias,
        "self_attn.k_proj": config.qkv_bias,
        "self_attn.v_proj": config.qkv_bias,
        "self_attn.o_proj": config.output_bias,
    }
    dense = dict.fromkeys(("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), config.mlp_bias)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config.qk_norm:
        norms += ["self_attn.q_norm", "self_attn.k_norm"]
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        sparse = config.experts is not None and index in config.experts.layers
        biased = attention if sparse else attention | dense
        yield from (f"{prefix}{name}.weight" for name in (*norms, *biased))
        yield from (f"{prefix}{name}.bias" for name, has_bias in biased.items() if has_bias)
        if config.experts is not None and sparse:
            yield from (f"{prefix}{name}.weight" for name in _expert_names(config.experts))


def _expert_names(config: ExpertsConfig) -> Iterator[str]:
    """The projections of a sparse layer."""
    yield config.prefix + "gate"
    for expert in range(config.count):
        yield from (f"{config.prefix}experts.{expert}.{part}" for part in config.parts)
    if config.shared_size:
        yield config.prefix + "shared_expert_gate"
        yield from (f"{config.prefix}shared_expert.{part}" for part in config.parts)


@dataclass(frozen=True, slots=True)
class _Builder:
    """Reads layers out of a checkpoint."""

    config: DecoderConfig
    read: ReadTensor
    linears: Linears
    fixed_shapes: bool
    between: Elementwise

    def layer(self, index: int) -> DecoderLayer:
        config, prefix = self.config, f"model.layers.{index}."
        attention = prefix + "self_attn."
        experts = config.experts
        sparse = experts is not None and index in experts.layers
        return DecoderLayer(
            input_norm=self.read(prefix + "input_layernorm.weight"),
            qkv=self._projection(attention, ("q_proj", "k_proj", "v_proj"), config.qkv_bias),
            head_norms=self._head_norms(attention) if config.qk_norm else None,
            output=self._projection(attention, ("o_proj",), config.output_bias),
            mlp_norm=self.read(prefix + "post_attention_layernorm.weight"),
            mlp=self._experts(experts, prefix + experts.prefix)
            if experts is not None and sparse
            else self._mlp(prefix + "mlp."),
        )

    def _head_norms(self, prefix: str) -> HeadNorms:
        query, key = (self.read(f"{prefix}{name}_norm.weight") for name in ("q", "k"))
        return HeadNorms(query, key, self.config.rms_norm_eps)

    def _projection(self, prefix: str, names: tuple[str, ...], has_bias: bool) -> Projection:
        """Projections of one input, stacked along their outputs."""
        modules = [prefix + name for name in names]
        ends = self._ends(names)
        parts = {
            module: slice(start, stop)
            for module, start, stop in zip(modules, [0, *ends], ends, strict=False)
        }
        return Projection(self.linears.read(modules, has_bias), parts, self._inputs(names[0]))

    def _inputs(self, name: str) -> int:
        config = self.config
        sizes = {
            "o_proj": config.num_heads * config.head_dim,
            "down_proj": config.intermediate_size,
        }
        return sizes.get(name, config.hidden_size)

    def _ends(self, names: tuple[str, ...]) -> list[int]:
        """Where the outputs of each projection end, once stacked."""
        config = self.config
        sizes = {
            "q_proj": config.num_heads * config.head_dim,
            "k_proj": config.num_kv_heads * config.head_dim,
            "v_proj": config.num_kv_heads * config.head_dim,
            "gate_proj": config.intermediate_size,
            "up_proj": config.intermediate_size,
        }
        ends: list[int] = []
        for name in names:
            size = sizes.get(name, config.hidden_size)
            ends.append((ends[-1] if ends else 0) + size)
        return ends

    def _mlp(self, prefix: str) -> Mlp:
        bias = self.config.mlp_bias
        return Mlp(
            self._projection(prefix, ("gate_proj", "up_proj"), bias),
            self._projection(prefix, ("down_proj",), bias),
            self.between,
        )

    def _experts(self, config: ExpertsConfig, prefix: str) -> Experts:
        shared = None
        if config.shared_size:
            gate = self.read(prefix + "shared_expert_gate.weight")
            shared = SharedExpert(self._expert(config, prefix + "shared_expert."), gate)
        layer = Experts(
            router=self.read(prefix + "gate.weight"),
            experts=tuple(
                self._expert(config, f"{prefix}experts.{index}.") for index in range(config.count)
            ),
            per_token=config.per_token,
            normalized=config.normalized,
            shared=shared,
            fixed_shapes=self.fixed_shapes,
        )
        if isinstance(self.between, CompiledElementwise):
            return compiled_experts(layer, self.between.kernels)
        if not triton_serves(layer.router.device):
            return layer
        from baton.engine.models.experts_gpu import stacked  # imports triton

        return stacked(layer)

    def _expert(self, config: ExpertsConfig, prefix: str) -> Expert:
        gate, up, down = (prefix + part for part in config.parts)
        return Expert(self.linears.read((gate, up), False), self.linears.read((down,), False))
