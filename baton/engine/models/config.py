"""The canonical config of a lean decoder: what `families/` reads out of a config.json."""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.kernels.rope import PairRotation, RopeRule, softmax_factor
from baton.engine.state.attention import AttentionLayer
from baton.engine.state.work import ParameterCounts
from baton.protocol.kv_spec import LayerSpec


@dataclass(frozen=True, slots=True)
class GateConfig:
    """How a token's experts are chosen; see gates.py. `groups` 1 = out of all experts.

    `in_float32`: so is the router multiplied. `scaling`: of the chosen experts' weights.
    """

    sigmoid: bool = False
    in_float32: bool = False
    groups: int = 1
    kept_groups: int = 1
    scaling: float = 1.0


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts in place of an MLP, in each layer of `layers`.

    `prefix` and `parts` (gate, up, down) name the tensors. `normalized`: the chosen experts'
    weights sum to 1. `shared_size` > 0: one more expert for every token, named `shared`, behind a
    gate of its own if `shared_gated`. `held`: the experts that are here, None = all `count`.
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
    held: range | None = None

    @property
    def here(self) -> range:
        """The experts that are here, by their numbers in the whole mixture."""
        return range(self.count) if self.held is None else self.held


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Latent attention (MLA) in place of heads' own keys and values.

    `query_rank` 0: queries come straight from the hidden state.
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

    def num_parameters(self, hidden: int, heads: int) -> int:
        """Of the matrices of one layer."""
        queries = self.query_rank * (hidden + heads * self.query_dim)
        queries = queries or hidden * heads * self.query_dim
        latents = hidden * (self.rank + self.rope_dim)
        per_head = self.rank * (self.nope_dim + self.value_dim) + self.value_dim * hidden
        return queries + latents + heads * per_head


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Everything `Decoder` needs to know. `windows[l]` 0 = full attention in layer l.

    With `latent`, `head_dim` is that of the rotated part. `extra_layers`: layers that a checkpoint
    may hold behind the last one (they draft tokens), which are not read.
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

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """What each layer stores per token."""
        if self.latent is not None:
            return (latent_spec(self.latent.rank + self.latent.rope_dim, 0),) * self.num_layers
        return tuple(
            layer_spec(self.num_kv_heads, self.head_dim, self.head_dim, w) for w in self.windows
        )

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """How each layer attends."""
        if self.latent is not None:
            scale = self.latent.query_dim**-0.5 * softmax_factor(self.rope)
            layer = AttentionLayer(self.num_heads, scale, latent=self.latent.rank)
            return (layer,) * self.num_layers
        scale = self.head_dim**-0.5
        return tuple(AttentionLayer(self.num_heads, scale, window) for window in self.windows)

    @property
    def parameter_counts(self) -> ParameterCounts:
        """Of all matrices; norms and biases are left out."""
        hidden, experts = self.hidden_size, self.experts
        num_sparse = len(experts.layers) if experts else 0
        if self.latent is None:
            heads = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
            dense = self.num_layers * hidden * heads
        else:
            dense = self.num_layers * self.latent.num_parameters(hidden, self.num_heads)
        dense += (self.num_layers - num_sparse) * 3 * hidden * self.intermediate_size
        head = self.vocab_size * hidden
        if experts is None:
            return ParameterCounts(dense, head, self.tied_embeddings)
        router = experts.count + (1 if experts.shared_size and experts.shared_gated else 0)
        dense += num_sparse * hidden * (router + 3 * experts.shared_size)
        routed = num_sparse * len(experts.here) * 3 * hidden * experts.size
        return ParameterCounts(
            dense, head, self.tied_embeddings, routed, experts.count, experts.per_token
        )


def layer_spec(kv_heads: int, k_dim: int, v_dim: int, window: int) -> LayerSpec:
    """The spec both routes derive, so that a lean node and a universal one agree on the layout."""
    return LayerSpec(kv_heads, k_dim, v_dim, window, "sliding" if window else "full")


def latent_spec(dims: int, window: int) -> LayerSpec:
    """The spec of a layer that stores one latent of `dims` per token (MLA)."""
    return LayerSpec(kv_heads=1, k_dim=dims, v_dim=0, window=window, kind="mla")
