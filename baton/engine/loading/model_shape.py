"""ModelShape: how many parameters a model has and what it stores per token, from config.json alone.

It only counts: no torch, no weights. The families below are counted by formulas. For all others,
transformers builds the model on torch's meta device (shape_on_meta.py), which takes seconds but no
memory.
    experts   a token meets `per_token` of the `routed` experts of an MoE layer, so fewer
              parameters are active than there are
    MLA       one latent [kv_lora_rank + rope dims] per token and layer, no V
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

from baton.engine.loading.stored_weights import StoredWeights, stored_dtype, stored_weights
from baton.protocol.errors import ModelRefused
from baton.protocol.kv_spec import LayerSpec, StateSpec


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """Routed experts of all layers together."""

    routed: int  # experts of one MoE layer
    per_token: int  # of them, how many a token meets
    parameters: int  # of all routed experts of all layers
    plain: int = 0  # of these, how many no quantization shrinks

    @property
    def idle_parameters(self) -> int:
        """Parameters of routed experts that one token does not meet."""
        return self.parameters * (self.routed - self.per_token) // self.routed

    def share_met(self, batch: int) -> float:
        """Return the expected share of experts that `batch` tokens meet, if all experts are equally
        likely."""
        return 1 - (1 - self.per_token / self.routed) ** batch


@dataclass(frozen=True, slots=True)
class RowProduct:
    """Products of one kind (o, down) in all layers together: tensor-parallel ranks cut them by
    their inputs."""

    inputs: int  # of one product
    parameters: int  # of all of them
    routed: bool = False  # products of routed experts


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model. `embedding`: parameters of the input table. `matrices`: parameters of the
    projections in the layers. Quantization shrinks them, except for the `plain` ones among them
    (routers, and kv_b_proj of latents). Every tensor-parallel rank holds whole: `replicated` of the
    parameters that it shrinks, and the `routers`. `row_products`: what ranks cut by inputs.
    `by_module`: ranks cut it as the universal route does (models/module_shares.py). `tower`: those
    of the `replicated` parameters that turn images into rows; no token meets them."""

    model_type: str
    parameters: int
    embedding: int
    matrices: int
    tied: bool  # the head multiplies with the input table
    hidden_size: int
    widest: int  # numbers in the widest intermediate results of one token within a layer
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    max_positions: int | None
    dtype: str
    experts: ExpertsShape | None = None
    stored: StoredWeights | None = None
    plain: int = 0
    replicated: int = 0
    routers: int = 0
    row_products: tuple[RowProduct, ...] = ()
    by_module: bool = False
    tower: int = 0
    note: str = ""  # what is not certain about these numbers
    refused: str | None = None  # why no route serves the model, if its layers show a reason

    @property
    def text_alone(self) -> ModelShape:
        """The model without its vision tower."""
        rest, replicated = self.parameters - self.tower, self.replicated - self.tower
        return replace(self, parameters=rest, replicated=replicated, tower=0)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token meets."""
        return self.parameters - (self.experts.idle_parameters if self.experts else 0)

    @property
    def read_parameters(self) -> int:
        """Parameters that a step reads if its tokens meet every expert. An untied input table is
        left out: a step looks up a few rows of it."""
        return self.parameters - (0 if self.tied else self.embedding)


def model_shape(config: dict[str, Any]) -> ModelShape:
    """Return the sizes of the model of a config.json; for a multimodal model those of its language
    model.

    Raises ModelRefused for what is no decoder-only language model.
    """
    text = {**config, **(config.get("text_config") or {})}
    count = FAMILIES.get(text.get("model_type", ""))
    if count is None:
        # Lazy: transformers takes seconds, and the families below must not wait for it.
        from baton.engine.loading.shape_on_meta import shape_on_meta

        return shape_on_meta(config)
    try:
        return count(text)
    except KeyError as missing:
        name = text["model_type"]
        raise ModelRefused(f"the config of {name} lacks {missing}", field="model") from missing


# ---- parts ----


@dataclass(frozen=True, slots=True)
class _Layer:
    """Parameters of one layer: `matrices` in its projections, `vectors` in norms and biases;
    `plain`, `replicated`, `routers`, `rows` (those of this layer): see ModelShape."""

    matrices: int
    vectors: int
    experts: int = 0  # the part of `matrices` that belongs to routed experts
    plain: int = 0
    replicated: int = 0
    routers: int = 0
    rows: tuple[RowProduct, ...] = ()


def _attention(c: dict[str, Any], *, qkv_bias: bool, output_bias: bool, qk_norm: bool) -> _Layer:
    hidden, heads, kv_heads, dim = _heads(c)
    queries, keys = heads * dim, kv_heads * dim
    vectors = (queries + 2 * keys) * qkv_bias + hidden * output_bias + 2 * dim * qk_norm
    rows = (RowProduct(queries, queries * hidden),)
    return _Layer(hidden * (2 * queries + 2 * keys), vectors, rows=rows)


def _latent_attention(c: dict[str, Any]) -> _Layer:
    """Count latent attention (MLA). Source: transformers,
    models/deepseek_v3/modeling_deepseek_v3.py."""
    hidden, heads, latent = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    queries, rank = heads * (nope + rope), c.get("q_lora_rank")
    up, whole = latent * heads * (nope + value), hidden * (latent + rope + (rank or 0))
    matrices = whole + up + heads * value * hidden + (rank or hidden) * queries
    vectors = latent + (rank or 0)
    if c.get("attention_bias", False):
        vectors += latent + rope + hidden + (rank or 0)
    rows = (RowProduct(heads * value, heads * value * hidden),)
    return _Layer(matrices, vectors, plain=up, replicated=whole, rows=rows)


def _mlp(hidden: int, inner: int, *, bias: bool = False) -> _Layer:
    rows = (RowProduct(inner, hidden * inner),)
    return _Layer(3 * hidden * inner, (2 * inner + hidden) * bias, rows=rows)


def _experts(hidden: int, inner: int, routed: int, shared: int = 0) -> _Layer:
    """Count a mixture with its router. `shared`: the inner size of its shared experts together."""
    routed_parameters = routed * 3 * hidden * inner
    router = routed * hidden
    matrices = routed_parameters + router + 3 * hidden * shared
    rows = (RowProduct(inner, routed * hidden * inner, routed=True),)
    if shared:
        rows += (RowProduct(shared, hidden * shared),)
    return _Layer(matrices, 0, routed_parameters, plain=router, routers=router, rows=rows)


def _heads(c: dict[str, Any]) -> tuple[int, int, int, int]:
    """Return (hidden size, query heads, KV heads, head_dim)."""
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    kv_heads = c.get("num_key_value_heads") or heads
    return hidden, heads, kv_heads, c.get("head_dim") or hidden // heads


def _sum(
    c: dict[str, Any], attention: _Layer, mlps: list[_Layer], specs: tuple[LayerSpec, ...]
) -> ModelShape:
    """Sum the parts of a model: per layer one attention, two norms and one of `mlps`."""
    hidden, vocab = c["hidden_size"], c["vocab_size"]
    num_layers = len(mlps)
    tied = bool(c.get("tie_word_embeddings", False))
    matrices = num_layers * attention.matrices + sum(mlp.matrices for mlp in mlps)
    vectors = num_layers * (attention.vectors + 2 * hidden) + sum(m.vectors for m in mlps) + hidden
    routed = _routed(c)
    expert_parameters = sum(mlp.experts for mlp in mlps)
    experts = None
    if routed and expert_parameters:
        experts = ExpertsShape(routed, c["num_experts_per_tok"], expert_parameters)
    return ModelShape(
        model_type=c["model_type"],
        parameters=matrices + vectors + vocab * hidden * (1 if tied else 2),
        embedding=vocab * hidden,
        matrices=matrices,
        tied=tied,
        hidden_size=hidden,
        widest=_widest(c),
        vocab_size=vocab,
        layers=specs,
        max_positions=c.get("max_position_embeddings"),
        dtype=stored_dtype(c),
        experts=experts,
        stored=stored_weights(c),
        plain=num_layers * attention.plain + sum(mlp.plain for mlp in mlps),
        replicated=num_layers * attention.replicated,
        routers=sum(mlp.routers for mlp in mlps),
        row_products=row_products(
            row for layer in (*mlps, *[attention] * num_layers) for row in layer.rows
        ),
    )


def row_products(each: Iterable[RowProduct]) -> tuple[RowProduct, ...]:
    """Return the products of all layers, those of one kind together."""
    sums: Counter[tuple[int, bool]] = Counter()
    for row in each:
        sums[row.inputs, row.routed] += row.parameters
    return tuple(RowProduct(inputs, sums[inputs, routed], routed) for inputs, routed in sums)


def _widest(c: dict[str, Any]) -> int:
    """Return how many numbers gate, up and their product have for one token, in all experts that
    it meets."""
    inner = c.get("moe_intermediate_size") or c.get("intermediate_size") or 4 * c["hidden_size"]
    met = c.get("num_experts_per_tok") or 1
    return 3 * max(inner * met, c.get("intermediate_size") or 0)


def _routed(c: dict[str, Any]) -> int | None:
    """Return the number of experts per MoE layer, whatever the family's key; None without any."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next((c[name] for name in names if c.get(name)), None)


def layer_windows(c: dict[str, Any]) -> tuple[int, ...]:
    """Return the window of each layer, as transformers derives it; 0 = full attention."""
    num_layers, window = c["num_hidden_layers"], c.get("sliding_window") or 0
    kinds = c.get("layer_types")
    if kinds is None and c["model_type"] == "gpt_oss":
        return tuple(window * (layer % 2 == 0) for layer in range(num_layers))
    if kinds is not None:
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    if c["model_type"].startswith("qwen"):
        if not c.get("use_sliding_window", False):
            return (0,) * num_layers
        first = c.get("max_window_layers", 28)
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    if c["model_type"] in ("mistral", "mixtral"):
        return (window,) * num_layers
    return (0,) * num_layers


def _paged(c: dict[str, Any]) -> tuple[LayerSpec, ...]:
    _, _, kv_heads, dim = _heads(c)
    return tuple(
        LayerSpec(kv_heads, dim, dim, window, "sliding" if window else "full")
        for window in layer_windows(c)
    )


# ---- families ----


def _llama(c: dict[str, Any]) -> ModelShape:
    bias = bool(c.get("attention_bias", False))
    attention = _attention(
        c,
        qkv_bias=bias or c["model_type"] == "qwen2",
        output_bias=bias and c["model_type"] != "qwen2",
        qk_norm=c["model_type"] == "qwen3",
    )
    mlp = _mlp(c["hidden_size"], c["intermediate_size"], bias=bool(c.get("mlp_bias", False)))
    return _sum(c, attention, [mlp] * c["num_hidden_layers"], _paged(c))


def _mixtral(c: dict[str, Any]) -> ModelShape:
    attention = _attention(c, qkv_bias=False, output_bias=False, qk_norm=False)
    mlp = _experts(c["hidden_size"], c["intermediate_size"], c["num_local_experts"])
    return _sum(c, attention, [mlp] * c["num_hidden_layers"], _paged(c))


def _qwen_moe(c: dict[str, Any]) -> ModelShape:
    third = c["model_type"] == "qwen3_moe"
    bias = bool(c.get("attention_bias", False)) if third else bool(c.get("qkv_bias", True))
    attention = _attention(c, qkv_bias=bias, output_bias=bias and third, qk_norm=third)
    return _sum(c, attention, _qwen_mlps(c, shared=not third), _paged(c))


def _qwen_mlps(c: dict[str, Any], *, shared: bool) -> list[_Layer]:
    """Count the MLP or mixture of each layer. `shared`: mixtures have a shared expert."""
    hidden, num_layers = c["hidden_size"], c["num_hidden_layers"]
    routed = _routed(c)
    if routed is None:
        return [_mlp(hidden, c["intermediate_size"])] * num_layers
    inner = c["shared_expert_intermediate_size"] if shared else 0
    sparse = _experts(hidden, c["moe_intermediate_size"], routed, inner)
    if shared:  # one more row in front of the shared expert: its gate
        whole = sparse.plain + hidden
        matrices = sparse.matrices + hidden
        sparse = replace(sparse, matrices=matrices, plain=whole, routers=whole)
    step = c.get("decoder_sparse_step", 1)
    only: set[int] = set(c.get("mlp_only_layers") or ())
    return [
        sparse
        if layer not in only and (layer + 1) % step == 0
        else _mlp(hidden, c["intermediate_size"])
        for layer in range(num_layers)
    ]


def _hybrid(c: dict[str, Any]) -> ModelShape:
    """Count Qwen3-Next and Qwen3.5. Source: transformers, models/qwen3_5/modeling_qwen3_5.py."""
    hidden, heads, kv_heads, dim = _heads(c)
    bias = bool(c.get("attention_bias", False))
    full = _attention(c, qkv_bias=bias, output_bias=bias, qk_norm=True)
    queries = heads * dim  # and as many gates
    full = replace(
        full, matrices=full.matrices + hidden * queries, vectors=full.vectors + queries * bias
    )
    linear, state = _linear_attention(c)
    every, kinds = c.get("full_attention_interval") or 4, c.get("layer_types")
    num_layers = c["num_hidden_layers"]
    if kinds is None:
        kinds = [
            "linear_attention" if (layer + 1) % every else "full_attention"
            for layer in range(num_layers)
        ]
    attends = [kind != "linear_attention" for kind in kinds]
    layers = [
        _both(full if full_one else linear, mlp)
        for full_one, mlp in zip(attends, _qwen_mlps(c, shared=True), strict=True)
    ]
    specs = tuple(LayerSpec(kv_heads, dim, dim) if full_one else state for full_one in attends)
    return _sum(c, _Layer(0, 0), layers, specs)


def _linear_attention(c: dict[str, Any]) -> tuple[_Layer, LayerSpec]:
    """Count a layer's gated delta rule, and say what it keeps."""
    hidden, heads, taps = c["hidden_size"], c["linear_num_value_heads"], c["linear_conv_kernel_dim"]
    key_dim, value_dim = c["linear_key_head_dim"], c["linear_value_head_dim"]
    keys, values = c["linear_num_key_heads"] * key_dim, heads * value_dim
    channels = 2 * keys + values
    conv = channels * taps
    matrices = hidden * (channels + 2 * values + 2 * heads) + conv
    state = StateSpec(
        (channels, taps), (heads, key_dim, value_dim), stored_dtype(c),
        segments=(keys, keys, values),
    )  # fmt: skip
    rows = (RowProduct(values, values * hidden),)
    layer = _Layer(matrices, 2 * heads + value_dim, plain=conv, rows=rows)
    return layer, LayerSpec(0, 0, 0, kind="state", state=state)


def _both(attention: _Layer, mlp: _Layer) -> _Layer:
    """Sum the two halves of a layer."""
    return replace(
        mlp,
        matrices=mlp.matrices + attention.matrices,
        vectors=mlp.vectors + attention.vectors,
        plain=mlp.plain + attention.plain,
        rows=mlp.rows + attention.rows,
    )


def _deepseek(c: dict[str, Any]) -> ModelShape:
    hidden, num_layers = c["hidden_size"], c["num_hidden_layers"]
    inner = c["moe_intermediate_size"]
    shared = inner * (c.get("n_shared_experts") or 0)
    sparse = _experts(hidden, inner, c["n_routed_experts"], shared)
    dense = _mlp(hidden, c["intermediate_size"])
    kinds = c.get("mlp_layer_types")
    if kinds is None:
        first = c.get("first_k_dense_replace", 1 if c["model_type"] == "glm4_moe_lite" else 0)
        kinds = ["dense" if layer < first else "sparse" for layer in range(num_layers)]
    mlps = [sparse if kind == "sparse" else dense for kind in kinds]
    latent = LayerSpec(1, c["kv_lora_rank"] + c["qk_rope_head_dim"], 0, kind="mla")
    return _sum(c, _latent_attention(c), mlps, (latent,) * num_layers)


def _gpt_oss(c: dict[str, Any]) -> ModelShape:
    bias = bool(c["attention_bias"])
    attention = _attention(c, qkv_bias=bias, output_bias=bias, qk_norm=False)
    hidden, inner, routed = c["hidden_size"], c["intermediate_size"], c["num_local_experts"]
    sparse = _experts(hidden, inner, routed)
    biases = routed * (2 * inner + hidden)  # stacked: counted with the experts' matrices
    sparse = replace(
        sparse, matrices=sparse.matrices + biases, vectors=c["num_attention_heads"] + routed,
        experts=sparse.experts + biases, plain=sparse.plain + biases,
    )  # fmt: skip
    shape = _sum(c, attention, [sparse] * c["num_hidden_layers"], _paged(c))
    if shape.experts is None:
        return shape
    experts = replace(shape.experts, plain=biases * c["num_hidden_layers"])
    return replace(shape, experts=experts)


FAMILIES: Final[dict[str, Callable[[dict[str, Any]], ModelShape]]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen_moe,
    "qwen3_moe": _qwen_moe,
    "qwen3_next": _hybrid,
    "qwen3_5_text": _hybrid,
    "qwen3_5_moe_text": _hybrid,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "glm4_moe_lite": _deepseek,
    "kimi_k2": _deepseek,
    "gpt_oss": _gpt_oss,
}
