"""The canonical config of a lean decoder: what `families/` reads out of a config.json."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

import torch

from baton.engine.checkpoint.stacked_experts import Stacking
from baton.engine.kernels.cpu.latent import LatentSizes
from baton.engine.kernels.delta_rule import DeltaSizes
from baton.engine.kernels.rope import PairRotation, RopeRule, softmax_factor
from baton.engine.state.attention import AttentionLayer
from baton.engine.state.work import ParameterCounts
from baton.protocol.kv_spec import LayerSpec, StateSpec

Activation = Literal["silu", "gelu_tanh"]  # the function that an MLP applies to its gate
NO_ATTENTION: Final = AttentionLayer(query_heads=0, scale=1.0)  # of a layer without attention


@dataclass(frozen=True, slots=True)
class GateConfig:
    """How a token's experts are chosen; see gates.py.

    `groups`: groups of experts; 1 = a token chooses out of all experts. `kept_groups`: groups that
    a token chooses its experts from. `in_float32`: the router is multiplied in float32. `scaling`:
    a factor of the chosen experts' weights. `biased`: the router has a bias, and the softmax is
    over the logits of the chosen experts alone.
    """

    sigmoid: bool = False
    in_float32: bool = False
    groups: int = 1
    kept_groups: int = 1
    scaling: float = 1.0
    biased: bool = False


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """The gate of experts that do not use SwiGLU: (up + 1) * gate * sigmoid(alpha * gate), with
    gate clamped to at most `limit` and up to +-`limit`. Source: transformers' GptOssExperts."""

    limit: float
    alpha: float


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts in place of an MLP, in each layer of `layers`.

    `prefix` and `parts` (gate, up, down) name the experts' tensors, `router` the router's.
    `normalized`: the chosen experts' weights sum to 1. `shared_size` > 0: one more expert, named
    `shared`, serves every token; with `shared_gated` it has a gate of its own. `biased`: the
    experts' products have biases. `stacked`: how one tensor may store all experts of a layer
    (checkpoint/stacked_experts.py), None = each expert has its own. `held`: the experts that this
    rank holds, None = all `count`.
    """

    count: int
    per_token: int
    size: int
    normalized: bool
    prefix: str
    parts: tuple[str, str, str]
    layers: frozenset[int]
    shared_size: int = 0
    shared: str = "shared_expert"
    shared_gated: bool = True
    gate: GateConfig = GateConfig()
    router: str = "gate"
    biased: bool = False
    clamped: ClampedGate | None = None
    stacked: Stacking | None = None
    held: range | None = None

    @property
    def here(self) -> range:
        """The experts that this rank holds, by their numbers in the whole mixture."""
        return range(self.count) if self.held is None else self.held


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Sizes of latent attention (MLA), in which heads share latents instead of keys and values.

    `query_rank` 0: one product makes the queries of the hidden state, without a low rank.
    """

    query_rank: int
    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    pairs: PairRotation

    @property
    def query_dim(self) -> int:
        """Dims of one head's query before its latent is absorbed."""
        return self.nope_dim + self.rope_dim

    def sizes(self, heads: int) -> LatentSizes:
        """The sizes of `heads` heads, as kernels take them."""
        return LatentSizes(
            heads, self.nope_dim, self.rope_dim, self.rank, self.value_dim, self.pairs
        )

    def num_parameters(self, hidden: int, heads: int) -> int:
        """Parameters in the attention matrices of one layer."""
        queries = self.query_rank * (hidden + heads * self.query_dim)
        queries = queries or hidden * heads * self.query_dim
        latents = hidden * (self.rank + self.rope_dim)
        per_head = self.rank * (self.nope_dim + self.value_dim) + self.value_dim * hidden
        return queries + latents + heads * per_head


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """Linear attention by the gated delta rule, in each layer of `layers`.

    `by_head`: two tensors store the first product, with the numbers of each key head side by side
    (Qwen3-Next); else four tensors do.
    """

    sizes: DeltaSizes
    layers: frozenset[int]
    by_head: bool

    @property
    def inputs(self) -> dict[str, int]:
        """The projections of the first product, and how many outputs each has."""
        sizes, heads = self.sizes, self.sizes.value_heads
        if self.by_head:
            return {"in_proj_qkvz": sizes.channels + sizes.values, "in_proj_ba": 2 * heads}
        wide = {"in_proj_qkv": sizes.channels, "in_proj_z": sizes.values}
        return wide | {"in_proj_b": heads, "in_proj_a": heads}

    @property
    def layer(self) -> LayerSpec:
        """What such a layer stores: no KV, a state per sequence."""
        sizes = self.sizes
        state = StateSpec(
            conv=(sizes.channels, sizes.taps),
            recurrent=(sizes.value_heads, sizes.key_dim, sizes.value_dim),
            segments=sizes.segments,
        )
        return LayerSpec(0, 0, 0, kind="state", state=state)


@dataclass(frozen=True, slots=True)
class LayerNames:
    """How the tensors of a layer differ from Llama's: the names of its norms, and which products
    are stored in one tensor.

    `attention_output_norm`, `mlp_output_norm`: norms of the outputs of attention and MLP, before
    these are added to the residual; None = no norm. `fused_qkv`: q, k and v are stored in one
    tensor, `qkv_proj`. `fused_gate_up`: gate and up are stored in one tensor, `gate_up_proj`.
    """

    mlp_norm: str = "post_attention_layernorm"
    attention_output_norm: str | None = None
    mlp_output_norm: str | None = None
    fused_qkv: bool = False
    fused_gate_up: bool = False


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Everything `Decoder` needs to know. `windows[l]` 0 = full attention in layer l.

    With `latent`, `head_dim` counts the rotated dims of a head. `extra_layers`: layers that draft
    tokens; a checkpoint may hold them behind the last layer, or under names that begin with
    `extra_prefix`; only a draft head reads them. `norm_offset`: a number that norms add to their
    weights. `scale`: the factor of attention scores, None =
    head_dim ** -0.5. `softcap`: the soft cap of scores; `logit_softcap`: that of logits.
    `rotated_dim`: how many dims of a head rotate, from the first on; 0 = all. `pairs`: see
    PairRotation. `local_rope`: the RoPE rule of layers with a window, None = `rope`. `prefix`:
    stands before tensor names in a checkpoint that holds more than a language model. `sinks`: each
    layer has one logit per head that takes a share of the softmax but has no value. `delta`: the
    layers without attention, None = all layers attend. `gated`: what a query head attended to is
    multiplied by the sigmoid of a gate, which `q_proj` makes too, behind each query.
    """

    vocab_size: int
    max_positions: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]
    rope: RopeRule
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    extra_layers: int = 0
    extra_prefix: str = ""
    names: LayerNames = LayerNames()
    norm_offset: float = 0.0
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    scale: float | None = None
    softcap: float | None = None
    logit_softcap: float | None = None
    rotated_dim: int = 0
    pairs: PairRotation = PairRotation.HALVES
    local_rope: RopeRule | None = None
    prefix: str = ""
    sinks: bool = False
    delta: DeltaConfig | None = None
    gated: bool = False

    @property
    def turned(self) -> int:
        """Dims of a head that rotate."""
        return self.rotated_dim or self.head_dim

    @property
    def ropes(self) -> tuple[RopeRule, ...]:
        """All RoPE rules of the model; `rope_of` says which one a layer uses."""
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)

    def rope_of(self, layer: int) -> int:
        """Index of a layer's rule in `ropes`."""
        return int(self.local_rope is not None and self.windows[layer] > 0)

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """What each layer stores per token; of states, as a float32 model keeps them."""
        if self.latent is not None:
            return (latent_spec(self.latent.rank + self.latent.rope_dim, 0),) * self.num_layers
        specs = [
            layer_spec(self.num_kv_heads, self.head_dim, self.head_dim, w) for w in self.windows
        ]
        if self.delta is not None:
            for layer in self.delta.layers:
                specs[layer] = self.delta.layer
        return tuple(specs)

    def layers_in(self, dtype: torch.dtype) -> tuple[LayerSpec, ...]:
        """What each layer stores in a model of `dtype`, which inputs of convolutions have, too."""
        name = str(dtype).removeprefix("torch.")
        return tuple(
            spec
            if spec.state is None
            else replace(spec, state=replace(spec.state, conv_dtype=name))
            for spec in self.layers
        )

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """How each layer attends, without sinks: those are weights, which `Decoder` adds."""
        if self.latent is not None:
            scale = self.latent.query_dim**-0.5 * softmax_factor(self.rope)
            layer = AttentionLayer(self.num_heads, scale, latent=self.latent.rank)
            return (layer,) * self.num_layers
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        without = frozenset[int]() if self.delta is None else self.delta.layers
        return tuple(
            NO_ATTENTION
            if layer in without
            else AttentionLayer(self.num_heads, scale, window, self.softcap)
            for layer, window in enumerate(self.windows)
        )

    @property
    def parameter_counts(self) -> ParameterCounts:
        """Count the parameters of all matrices; norms and biases are left out. Of the last layer's
        attention no part counts as used by few rows."""
        hidden, experts = self.hidden_size, self.experts
        num_sparse = len(experts.layers) if experts else 0
        if self.latent is None:
            heads = (
                (3 if self.gated else 2) * self.num_heads + 2 * self.num_kv_heads
            ) * self.head_dim
            num_delta = 0 if self.delta is None else len(self.delta.layers)
            dense = (self.num_layers - num_delta) * hidden * heads
            if self.delta is not None:
                sizes = self.delta.sizes
                dense += num_delta * hidden * (sizes.inputs + sizes.values)
                dense += num_delta * sizes.channels * sizes.taps
        else:
            dense = self.num_layers * self.latent.num_parameters(hidden, self.num_heads)
        mlp = 3 * hidden * self.intermediate_size
        dense += (self.num_layers - num_sparse) * mlp
        head = self.vocab_size * hidden
        if experts is None:
            return ParameterCounts(dense, head, self.tied_embeddings, last=mlp)
        router = experts.count + (1 if experts.shared_size and experts.shared_gated else 0)
        beside = hidden * (router + 3 * experts.shared_size)
        routed = len(experts.here) * 3 * hidden * experts.size
        sparse = self.num_layers - 1 in experts.layers
        return ParameterCounts(
            dense + num_sparse * beside, head, self.tied_embeddings, num_sparse * routed,
            experts.count, experts.per_token,
            last=beside if sparse else mlp, last_experts=routed if sparse else 0,
        )  # fmt: skip


def layer_spec(kv_heads: int, k_dim: int, v_dim: int, window: int) -> LayerSpec:
    """Return the spec of a layer with keys and values. Both routes use it, so a lean node and a
    universal node agree on the layout of KV."""
    return LayerSpec(kv_heads, k_dim, v_dim, window, "sliding" if window else "full")


def latent_spec(dims: int, window: int) -> LayerSpec:
    """Return the spec of a layer that stores one latent of `dims` numbers per token (MLA)."""
    return LayerSpec(kv_heads=1, k_dim=dims, v_dim=0, window=window, kind="mla")
