"""The canonical config of a lean decoder, read from a config.json without transformers.

A checkpoint is lean only if every key is understood: one unknown key and the universal route serves
it instead, so that a model is never run with a feature silently missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from baton.engine.kernels.rope import (
    LEAN_KINDS,
    PairRotation,
    RopeRule,
    rope_rule,
    softmax_factor,
)
from baton.engine.state.attention import AttentionLayer
from baton.engine.state.work import ParameterCounts
from baton.protocol.kv_spec import LayerSpec

ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
}
LATENT: Final = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2")  # families with MLA
_QWEN_MOE: Final = {
    "num_key_value_heads", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
}  # fmt: skip
_LATENT_MOE: Final = {
    "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size",
    "routed_scaling_factor", "rms_norm_eps",
}  # fmt: skip
_NOAUX_TC: Final = _LATENT_MOE | {"n_group", "topk_group", "norm_topk_prob"}
_LATENT_OPTIONAL: Final = {
    "qk_head_dim", "num_local_experts", "num_experts", "first_k_dense_replace", "moe_layer_freq",
    "scoring_func", "topk_method", "n_group", "topk_group", "norm_topk_prob",
    "num_nextn_predict_layers", "num_mtp_layers",
}  # fmt: skip
_COUNTS: Final = ("num_experts", "num_local_experts")  # transformers 5 writes the latter for both
# Keys whose absence means a family-dependent default in transformers: absent, the universal route
# decides.
_REQUIRED: Final = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings",
}  # fmt: skip
_REQUIRED_BY_FAMILY: Final = {
    "llama": set[str](),
    "mistral": {"num_key_value_heads", "sliding_window"},
    "qwen2": {"num_key_value_heads"},
    "qwen3": {"num_key_value_heads", "head_dim"},
    "mixtral": {"num_key_value_heads", "num_experts_per_tok", "rms_norm_eps"},
    "qwen2_moe": _QWEN_MOE | {"shared_expert_intermediate_size"},
    "qwen3_moe": _QWEN_MOE,
    "deepseek_v2": _LATENT_MOE | {"first_k_dense_replace", "topk_method"},
    "deepseek_v3": _NOAUX_TC | {"first_k_dense_replace"},
    "glm4_moe_lite": _NOAUX_TC,
    "kimi_k2": _NOAUX_TC | {"first_k_dense_replace"},
}
_UNDERSTOOD: Final = _REQUIRED | {
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "tie_word_embeddings",
    "rope_theta", "rope_scaling", "rope_parameters", "attention_bias", "mlp_bias",
    "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "pretraining_tp",
}  # fmt: skip
_UNDERSTOOD_BY_FAMILY: Final = {
    "mixtral": {*_COUNTS},
    "qwen2_moe": {*_COUNTS, "decoder_sparse_step", "mlp_only_layers", "qkv_bias"},
    "qwen3_moe": {*_COUNTS, "decoder_sparse_step", "mlp_only_layers"},
    "deepseek_v2": _LATENT_OPTIONAL,
    "deepseek_v3": _LATENT_OPTIONAL | {"rope_interleave"},
    "glm4_moe_lite": _LATENT_OPTIONAL | {
        "rope_interleave", "mlp_layer_types", "partial_rotary_factor",
    },
    "kimi_k2": _LATENT_OPTIONAL,
}  # fmt: skip
# Keys that change nothing in a forward pass of inference.
_IRRELEVANT: Final = {
    "model_type", "architectures", "transformers_version", "torch_dtype", "dtype", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "attention_dropout",
    "output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward",
    "is_encoder_decoder", "id2label", "label2id", "problem_type", "_name_or_path", "auto_map",
    "unsloth_fixed", "unsloth_version", "output_router_logits", "router_aux_loss_coef",
    "router_jitter_noise", "aux_loss_alpha", "seq_aux", "ep_size",
}  # fmt: skip


class NotLean(Exception):
    """The reason why a checkpoint needs the universal route; never leaves the loader."""


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
    gate of its own if `shared_gated`.
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
        routed = num_sparse * experts.count * 3 * hidden * experts.size
        return ParameterCounts(
            dense, head, self.tied_embeddings, routed, experts.count, experts.per_token
        )


def layer_spec(kv_heads: int, k_dim: int, v_dim: int, window: int) -> LayerSpec:
    """The spec both routes derive, so that a lean node and a universal one agree on the layout."""
    return LayerSpec(kv_heads, k_dim, v_dim, window, "sliding" if window else "full")


def latent_spec(dims: int, window: int) -> LayerSpec:
    """The spec of a layer that stores one latent of `dims` per token (MLA)."""
    return LayerSpec(kv_heads=1, k_dim=dims, v_dim=0, window=window, kind="mla")


def decoder_config(config: dict[str, Any]) -> DecoderConfig:
    """Read a config.json of one of the ARCHITECTURES. Raises NotLean with the reason."""
    family = config.get("model_type", "")
    _check_understood(family, config)
    heads, num_layers = config["num_attention_heads"], config["num_hidden_layers"]
    rope = rope_rule(config) or RopeRule("default", 10000.0)
    attention_bias = bool(config.get("attention_bias", False))
    latent = _latent(family, config)
    return DecoderConfig(
        vocab_size=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=latent.rope_dim
        if latent
        else config.get("head_dim") or config["hidden_size"] // heads,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        tied_embeddings=config.get("tie_word_embeddings", False),
        qkv_bias=family == "qwen2" or attention_bias or _qkv_bias(family, config),
        output_bias=attention_bias and family != "qwen2",
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family in ("qwen3", "qwen3_moe"),
        windows=_windows(family, config, num_layers),
        rope=rope,
        experts=_experts(family, config, num_layers),
        latent=latent,
        extra_layers=config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 0,
    )


def _check_understood(family: str, config: dict[str, Any]) -> None:
    """Raise NotLean unless each key is known and has a value that the lean decoder implements."""
    if family not in ARCHITECTURES:
        raise NotLean(f"model_type {family!r} has no lean decoder")
    architectures = config.get("architectures") or [ARCHITECTURES[family]]
    if ARCHITECTURES[family] not in architectures:
        raise NotLean(f"architecture {architectures[0]} is not {ARCHITECTURES[family]}")
    understood = _UNDERSTOOD | _UNDERSTOOD_BY_FAMILY.get(family, set()) | _IRRELEVANT
    understood |= _REQUIRED_BY_FAMILY[family]
    unknown = sorted(key for key in config if key not in understood)
    if unknown:
        raise NotLean(f"config keys {unknown} are not understood")
    required = _REQUIRED | _REQUIRED_BY_FAMILY[family]
    missing = sorted(key for key in required if key not in config)
    if missing:
        raise NotLean(f"config keys {missing} are absent")
    if config.get("hidden_act", "silu") != "silu":
        raise NotLean(f"hidden_act {config['hidden_act']!r}")
    if config.get("pretraining_tp", 1) != 1:
        raise NotLean("pretraining_tp above 1")
    if family not in ("llama", "qwen3", "qwen3_moe", *LATENT) and config.get("attention_bias"):
        raise NotLean(f"attention_bias in {family}")
    if family in _UNDERSTOOD_BY_FAMILY and "rope_theta" not in {**config, **_rope_of(config)}:
        raise NotLean("rope_theta is absent")
    if family != "llama" and config.get("mlp_bias"):
        raise NotLean(f"mlp_bias in {family}")
    if family in ("llama", *LATENT) and (config.get("sliding_window") or config.get("layer_types")):
        raise NotLean(f"windows in {family}")
    _check_rope(rope_rule(config))


def _check_rope(rule: RopeRule | None) -> None:
    if rule is None:
        return
    parameters = {name for name, value in rule.parameters if value is not None}
    if dict(rule.parameters).get("partial_rotary_factor") == 1:  # all dims are rotated
        parameters -= {"partial_rotary_factor"}
    needed, allowed = LEAN_KINDS.get(rule.kind, (set[str](), set[str]()))
    if rule.kind not in LEAN_KINDS or not needed <= parameters <= needed | allowed:
        raise NotLean(f"RoPE rule {rule.text}")


def _windows(family: str, config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Window of each layer, as transformers derives it: 0 = full attention."""
    window = config.get("sliding_window") or 0
    if family in ("mistral", "mixtral"):
        if config.get("layer_types") is not None:
            raise NotLean(f"layer_types in {family}")
        return (window,) * num_layers
    if family in ("llama", *LATENT) or not config.get("use_sliding_window", False) or not window:
        kinds = set(config.get("layer_types") or ()) - {"full_attention"}
        if kinds and family == "qwen2_moe":
            raise NotLean(f"layer_types {sorted(kinds)} without a window")
        return (0,) * num_layers
    if family in _UNDERSTOOD_BY_FAMILY:
        raise NotLean(f"windows in {family}")
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", 28)
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    if len(kinds) != num_layers or set(kinds) - {"full_attention", "sliding_attention"}:
        raise NotLean(f"layer_types {sorted(set(kinds))}")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _rope_of(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("rope_parameters") or {}


def _qkv_bias(family: str, config: dict[str, Any]) -> bool:
    """Biases that Qwen2-MoE has unless its config says otherwise."""
    return family == "qwen2_moe" and bool(config.get("qkv_bias", True))


def _experts(family: str, config: dict[str, Any], num_layers: int) -> ExpertsConfig | None:
    """The mixture of experts, None for a dense family."""
    if family not in _UNDERSTOOD_BY_FAMILY:
        return None
    if family in LATENT:
        return _deepseek_experts(family, config, num_layers)
    counts = {config[key] for key in _COUNTS if key in config}
    if len(counts) != 1:
        raise NotLean(f"{' and '.join(_COUNTS)} are absent or differ")
    count: int = counts.pop()
    if family == "mixtral":
        return ExpertsConfig(
            count=count,
            per_token=config["num_experts_per_tok"],
            size=config["intermediate_size"],
            normalized=True,
            prefix="block_sparse_moe.",
            parts=("w1", "w3", "w2"),
            layers=frozenset(range(num_layers)),
        )
    dense: set[int] = set(config.get("mlp_only_layers") or ())
    every = config.get("decoder_sparse_step", 1)
    sparse = (layer for layer in range(num_layers) if (layer + 1) % every == 0)
    return ExpertsConfig(
        count=count,
        per_token=config["num_experts_per_tok"],
        size=config["moe_intermediate_size"],
        normalized=config["norm_topk_prob"],
        prefix="mlp.",
        parts=("gate_proj", "up_proj", "down_proj"),
        layers=frozenset(layer for layer in sparse if layer not in dense),
        shared_size=config.get("shared_expert_intermediate_size", 0),
    )


def _latent(family: str, config: dict[str, Any]) -> LatentConfig | None:
    """Latent attention, None for a family without."""
    if family not in LATENT:
        return None
    heads = config["num_attention_heads"]
    if config.get("num_key_value_heads", heads) not in (None, heads):
        raise NotLean("latents that not all heads share")
    if config.get("partial_rotary_factor", 1) != 1:
        raise NotLean("a rotated part of which not all dims are rotated")
    if config.get("attention_bias") and not config["q_lora_rank"]:
        raise NotLean("attention_bias without q_lora_rank")
    regrouped = config.get("rope_interleave", True)
    pairs = PairRotation.REGROUPED if regrouped else PairRotation.HALVES
    return LatentConfig(
        query_rank=config["q_lora_rank"] or 0,
        rank=config["kv_lora_rank"],
        nope_dim=config["qk_nope_head_dim"],
        rope_dim=config["qk_rope_head_dim"],
        value_dim=config["v_head_dim"],
        pairs=PairRotation.NEIGHBOURS if family == "deepseek_v2" else pairs,
    )


def _deepseek_experts(family: str, config: dict[str, Any], num_layers: int) -> ExpertsConfig:
    """The mixture of a family with latent attention."""
    count, shared = config["n_routed_experts"], config["n_shared_experts"]
    if any(config.get(key, count) != count for key in _COUNTS):
        raise NotLean(f"n_routed_experts and {' or '.join(_COUNTS)} differ")
    if not shared:
        raise NotLean("no shared experts")
    if config.get("moe_layer_freq", 1) != 1:
        raise NotLean("moe_layer_freq above 1")
    return ExpertsConfig(
        count=count,
        per_token=config["num_experts_per_tok"],
        size=config["moe_intermediate_size"],
        normalized=bool(config.get("norm_topk_prob", False)),
        prefix="mlp.",
        parts=("gate_proj", "up_proj", "down_proj"),
        layers=_sparse_layers(family, config, num_layers),
        shared_size=shared * config["moe_intermediate_size"],
        shared="shared_experts",
        shared_gated=False,
        gate=_gate(family, config, count),
    )


def _sparse_layers(family: str, config: dict[str, Any], num_layers: int) -> frozenset[int]:
    if family != "glm4_moe_lite":
        return frozenset(range(config["first_k_dense_replace"], num_layers))
    kinds = config.get("mlp_layer_types") or ["dense"] + ["sparse"] * (num_layers - 1)
    sparse = frozenset(layer for layer, kind in enumerate(kinds) if kind == "sparse")
    first = config.get("first_k_dense_replace")
    if len(kinds) != num_layers or (first is not None and min(sparse, default=first) != first):
        raise NotLean("mlp_layer_types and first_k_dense_replace do not fit")
    return sparse


def _gate(family: str, config: dict[str, Any], count: int) -> GateConfig:
    """Raises NotLean for a way to choose experts that transformers does not compute so."""
    sigmoid = family != "deepseek_v2"
    scoring, method = ("sigmoid", "noaux_tc") if sigmoid else ("softmax", config["topk_method"])
    if config.get("scoring_func", scoring) != scoring:
        raise NotLean(f"scoring_func {config['scoring_func']!r} in {family}")
    if config.get("topk_method", method) != method or (
        not sigmoid and method not in ("greedy", "group_limited_greedy")
    ):
        raise NotLean(f"topk_method {config['topk_method']!r} in {family}")
    if not sigmoid and config.get("norm_topk_prob"):
        raise NotLean(f"norm_topk_prob in {family}")
    groups, kept = (
        (1, 1)
        if method == "greedy"
        else (config.get("n_group") or 1, config.get("topk_group") or 1)
    )
    if count % groups or kept > groups or config["num_experts_per_tok"] > kept * count // groups:
        raise NotLean(f"{kept} of {groups} groups of {count} experts")
    if sigmoid and groups > 1 and count // groups < 2:
        raise NotLean("groups of one expert")
    return GateConfig(sigmoid, True, groups, kept, config["routed_scaling_factor"])
