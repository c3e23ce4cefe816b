"""Layers of the lean decoder: what a layer consists of, and how it is read from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from baton.engine.kernels.cpu.delta_rule import CompiledDeltaRule
from baton.engine.kernels.cpu.latent import CompiledLatents
from baton.engine.kernels.cpu.library import HeadNorms
from baton.engine.kernels.cpu.step import StepLayer
from baton.engine.kernels.delta_rule import DeltaWeights
from baton.engine.kernels.gpu.support import triton_serves
from baton.engine.models.compiled_step import step_linears
from baton.engine.models.config import DecoderConfig, DeltaConfig, ExpertsConfig, LatentConfig
from baton.engine.models.elementwise import CompiledElementwise, Elementwise
from baton.engine.models.experts import (
    Expert,
    ExpertDispatch,
    Experts,
    SharedExpert,
    compiled_experts,
)
from baton.engine.models.layers.attention import HeadAttention
from baton.engine.models.layers.delta import DeltaAttention, choose_rule
from baton.engine.models.layers.gates import (
    ChosenGate,
    ExpertGate,
    ExpertGroups,
    SigmoidGate,
    SoftmaxGate,
    compiled_gate,
)
from baton.engine.models.layers.latent import (
    EPSILON,
    LatentAttention,
    Latents,
    LowRankQueries,
    TorchLatents,
    latent_kernels,
)
from baton.engine.models.layers.projection import Mlp, Projection
from baton.engine.models.mla import Absorbed, absorb
from baton.engine.quantization.linear import Linears

# Reads a checkpoint's tensor by its name, in the model's dtype and on its device. With several
# names, their tensors are stacked.
ReadTensor = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer. H = hidden."""

    input_norm: Tensor  # [H]
    attention: HeadAttention | LatentAttention | DeltaAttention
    mlp_norm: Tensor  # [H]
    mlp: Mlp | Experts
    # [H]: norms of the outputs of attention and MLP, before the residual is added; None = no norm.
    attention_output_norm: Tensor | None = None
    mlp_output_norm: Tensor | None = None
    rotation: int = 0  # index of the RoPE rule of its heads in the config's `ropes`
    sinks: Tensor | None = None  # [heads], see AttentionLayer

    @property
    def projections(self) -> list[Projection]:
        """The products that an adapter can change."""
        return [*self.attention.projections, *self.mlp.projections]

    def step_layer(self) -> StepLayer | None:
        """Return the layer in the form of the compiled step. None if the layer has linear or latent
        attention that is not compiled, or experts that the step does not support, or if the step
        does not support the format of a weight."""
        attention, mlp = self.attention, self.mlp
        head_norms, delta, latents, experts = None, None, None, None
        if isinstance(attention, HeadAttention):
            head_norms = attention.head_norms
        elif isinstance(attention, DeltaAttention):
            if not isinstance(attention.rule, CompiledDeltaRule) or attention.by_head:
                return None
            delta = attention.rule
        if isinstance(mlp, Mlp):
            dense = mlp
        elif (experts := mlp.step_experts()) is None:
            return None
        else:
            dense = None if mlp.shared is None else mlp.shared.mlp
        products = attention.projections + ([] if dense is None else dense.projections)
        linears = step_linears([projection.linear for projection in products])
        if linears is None:
            return None
        count = len(attention.projections)
        qkv, *up, output = linears[:count]
        gate_up, down = linears[count:] or (None, None)
        if isinstance(attention, LatentAttention):
            latents = attention.step_latents(up)
            if latents is None:
                return None
        inner = 0 if dense is None else dense.down.num_inputs
        return StepLayer(
            self.input_norm, qkv, head_norms, output, self.mlp_norm, gate_up, down, inner,
            self.attention_output_norm, self.mlp_output_norm, self.rotation, delta, latents,
            experts,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerBuilder:
    """Reads layers from a checkpoint. `fixed_shapes`, `dispatch`: see Experts."""

    config: DecoderConfig
    read: ReadTensor
    linears: Linears
    fixed_shapes: bool
    between: Elementwise
    dispatch: ExpertDispatch | None = None

    def layer(self, index: int, prefix: str = "") -> DecoderLayer:
        """Read all weights of layer `index`. `prefix`: stands before their names; "" = the
        model's own."""
        config, prefix = self.config, prefix or f"model.layers.{index}."
        experts, attention = config.experts, prefix + "self_attn."
        sparse = experts is not None and index in experts.layers
        names = config.names
        return DecoderLayer(
            input_norm=self._norm(prefix + "input_layernorm"),
            attention=self._attention(index, prefix),
            mlp_norm=self._norm(prefix + names.mlp_norm),
            mlp=self._experts(experts, prefix + experts.prefix)
            if experts is not None and sparse
            else self._mlp(prefix + "mlp.", config.intermediate_size),
            attention_output_norm=self._optional_norm(prefix, names.attention_output_norm),
            mlp_output_norm=self._optional_norm(prefix, names.mlp_output_norm),
            rotation=config.rope_of(index),
            sinks=self.read(attention + "sinks") if config.sinks else None,
        )

    def _attention(
        self, index: int, prefix: str
    ) -> HeadAttention | LatentAttention | DeltaAttention:
        config = self.config
        if config.delta is not None and index in config.delta.layers:
            return self._delta(index, config.delta, prefix + "linear_attn.")
        if config.latent is not None:
            return self._latent(index, config.latent, prefix + "self_attn.")
        return self._heads(index, prefix + "self_attn.")

    def _norm(self, name: str) -> Tensor:
        """Read the weight of the norm `name`, as `between` takes it."""
        return self.between.norm_weight(self.read(f"{name}.weight"))

    def _optional_norm(self, prefix: str, name: str | None) -> Tensor | None:
        return None if name is None else self._norm(prefix + name)

    def _heads(self, index: int, prefix: str) -> HeadAttention:
        config = self.config
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        stacked = {"q_proj": queries * (2 if config.gated else 1), "k_proj": keys, "v_proj": keys}
        if config.names.fused_qkv:
            stacked = {"qkv_proj": queries + 2 * keys}
        return HeadAttention(
            layer=index,
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            qkv=self._projection(prefix, stacked, config.hidden_size, config.qkv_bias),
            head_norms=self._head_norms(prefix) if config.qk_norm else None,
            output=self._output(prefix, queries),
            between=self.between,
            gated=config.gated,
        )

    def _delta(self, index: int, delta: DeltaConfig, prefix: str) -> DeltaAttention:
        config, sizes = self.config, delta.sizes
        weights = DeltaWeights(
            conv=self.read(prefix + "conv1d.weight").squeeze(1),
            decay=-self.read(prefix + "A_log").float().exp(),
            step_bias=self.read(prefix + "dt_bias").float(),
            norm=self.read(prefix + "norm.weight"),
            epsilon=config.rms_norm_eps,
        )
        outputs = {"out_proj": config.hidden_size}
        return DeltaAttention(
            layer=index,
            sizes=sizes,
            inputs=self._projection(prefix, delta.inputs, config.hidden_size, False),
            rule=choose_rule(sizes, weights, self.between),
            output=self._projection(prefix, outputs, sizes.values, False),
            by_head=delta.by_head,
        )

    def _head_norms(self, prefix: str) -> HeadNorms:
        query, key = (self._norm(f"{prefix}{name}_norm") for name in ("q", "k"))
        return HeadNorms(query, key, self.config.rms_norm_eps, self.config.norm_offset)

    def _latent(self, index: int, latent: LatentConfig, prefix: str) -> LatentAttention:
        config, up, first = self.config, None, "q_proj"
        queries = config.num_heads * latent.query_dim
        if latent.query_rank:
            first = "q_a_proj"
            norm = self.read(prefix + "q_a_layernorm.weight")
            stacked = {"q_b_proj": queries}
            up = LowRankQueries(norm, self._projection(prefix, stacked, latent.query_rank, False))
        inputs = {
            first: latent.query_rank or queries,
            "kv_a_proj_with_mqa": latent.rank + latent.rope_dim,
        }
        return LatentAttention(
            layer=index,
            key_dim=latent.rank + latent.rope_dim,
            inputs=self._projection(prefix, inputs, config.hidden_size, config.qkv_bias),
            low=up,
            latents=self._latents(latent, prefix),
            output=self._output(prefix, config.num_heads * latent.value_dim),
            between=self.between,
        )

    def _latents(self, latent: LatentConfig, prefix: str) -> Latents:
        norm, name = self.read(prefix + "kv_a_layernorm.weight"), prefix + "kv_b_proj.weight"
        sizes = latent.sizes(self.config.num_heads)
        kernels = latent_kernels(sizes, self.between)

        def halves(weight: Tensor) -> Absorbed:  # widened, if stored as integers
            return absorb(weight, latent.nope_dim, latent.value_dim)

        if kernels is None:
            return TorchLatents(halves(self.read(name)), norm, latent.pairs, self.between)

        def keys(weight: Tensor) -> Tensor:
            return kernels.pack(halves(weight).key.transpose(1, 2))

        def values(weight: Tensor) -> Tensor:
            return kernels.pack(halves(weight).value)

        key, value = (self.linears.derived(name, make) for make in (keys, values))
        return CompiledLatents(kernels, sizes, norm, key, value, EPSILON)

    def _output(self, prefix: str, inputs: int) -> Projection:
        """Read the product that follows attention (o_proj)."""
        config = self.config
        return self._projection(prefix, {"o_proj": config.hidden_size}, inputs, config.output_bias)

    def _projection(
        self, prefix: str, outputs: Mapping[str, int], inputs: int, has_bias: bool
    ) -> Projection:
        """Read projections of one input, stacked along their outputs. `outputs`: how many outputs
        each has, by name."""
        parts: dict[str, slice] = {}
        end = 0
        for name, count in outputs.items():
            parts[prefix + name] = slice(end, end + count)
            end += count
        return Projection(self.linears.read(list(parts), has_bias), parts, inputs)

    def _mlp(self, prefix: str, size: int) -> Mlp:
        hidden, bias = self.config.hidden_size, self.config.mlp_bias
        stacked = {"gate_proj": size, "up_proj": size}
        if self.config.names.fused_gate_up:
            stacked = {"gate_up_proj": 2 * size}
        return Mlp(
            self._projection(prefix, stacked, hidden, bias),
            self._projection(prefix, {"down_proj": hidden}, size, bias),
            self.between,
        )

    def _experts(self, config: ExpertsConfig, prefix: str) -> Experts:
        layer = Experts(
            gate=self._gate(config, f"{prefix}{config.router}."),
            experts=tuple(
                self._expert(config, f"{prefix}experts.{index}.") for index in config.here
            ),
            shared=self._shared(config, prefix + config.shared) if config.shared_size else None,
            fixed_shapes=self.fixed_shapes,
            first=config.here.start,
            elsewhere=len(config.here) < config.count,
            dispatch=self.dispatch,
        )
        if isinstance(self.between, CompiledElementwise):
            return compiled_experts(layer, self.between.kernels)
        if not triton_serves(layer.gate.router.device):
            return layer
        from baton.engine.models.experts_gpu import stacked  # imports triton

        return stacked(layer)

    def _gate(self, config: ExpertsConfig, prefix: str) -> ExpertGate:
        gate, router = config.gate, self.read(prefix + "weight")
        router = router.float() if gate.in_float32 else router
        if gate.biased:
            return ChosenGate(router, self.read(prefix + "bias"), config.per_token)
        groups = ExpertGroups(gate.groups, gate.kept_groups) if gate.groups > 1 else None
        per_token, normalized, scaling = config.per_token, config.normalized, gate.scaling
        if gate.sigmoid:
            bias = self.read(prefix + "e_score_correction_bias")
            found = SigmoidGate(router, bias, per_token, normalized, groups, scaling)
        else:
            found = SoftmaxGate(router, per_token, normalized, groups, scaling)
        if self.fixed_shapes or not isinstance(self.between, CompiledElementwise):
            return found
        return compiled_gate(found, self.between.kernels)

    def _shared(self, config: ExpertsConfig, prefix: str) -> SharedExpert:
        gate = self.read(prefix + "_gate.weight") if config.shared_gated else None
        return SharedExpert(self._mlp(prefix + ".", config.shared_size), gate)

    def _expert(self, config: ExpertsConfig, prefix: str) -> Expert:
        gate, up, down = (prefix + part for part in config.parts)
        gate_up = self.linears.read((gate, up), config.biased)
        return Expert(gate_up, self.linears.read((down,), config.biased), config.clamped)
