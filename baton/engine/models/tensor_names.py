"""Names of all tensors that a checkpoint of a lean decoder holds, and its products' inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from baton.engine.models.config import DecoderConfig, DeltaConfig, ExpertsConfig, LayerNames

_DELTA_TENSORS: Final = ("conv1d.weight", "A_log", "dt_bias", "norm.weight")


def tensor_names(config: DecoderConfig) -> Iterator[str]:
    """Yield the name of every tensor that a checkpoint of this config must hold. A tied head is not
    among them, though a checkpoint may store it."""
    yield "model.embed_tokens.weight"
    yield "model.norm.weight"
    if not config.tied_embeddings:
        yield "lm_head.weight"
    fused = config.names.fused_gate_up
    inner = ("mlp.gate_up_proj",) if fused else ("mlp.gate_proj", "mlp.up_proj")
    dense = dict.fromkeys((*inner, "mlp.down_proj"), config.mlp_bias)
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        mixes = config.delta if config.delta and index in config.delta.layers else None
        norms = _layer_norms(config.names) + ([] if mixes else _attention_norms(config))
        attention = _attention_products(config) if mixes is None else _delta_products(mixes)
        sparse = config.experts is not None and index in config.experts.layers
        biased = attention if sparse else attention | dense
        yield from (f"{prefix}{name}.weight" for name in (*norms, *biased))
        yield from (f"{prefix}{name}.bias" for name, has_bias in biased.items() if has_bias)
        if mixes is not None:
            yield from (f"{prefix}linear_attn.{name}" for name in _DELTA_TENSORS)
        if config.sinks:
            yield prefix + "self_attn.sinks"
        if config.experts is not None and sparse:
            yield from (prefix + name for name in _expert_names(config.experts))


def product_inputs(config: DecoderConfig) -> Iterator[tuple[str, int]]:
    """Yield the module, as tensor_names has it, and the number of inputs of each product in the
    layers that tools quantize. Routers and gates of shared experts are not among them."""
    latent, experts = config.latent, config.experts
    value_dim = config.head_dim if latent is None else latent.value_dim
    inner = {"o_proj": config.num_heads * value_dim, "down_proj": config.intermediate_size}
    if latent is not None:
        inner |= {"q_b_proj": latent.query_rank, "kv_b_proj": latent.rank}
    if config.delta is not None:
        inner["out_proj"] = config.delta.sizes.values
    for name in tensor_names(config):
        module, _, kind = name.rpartition(".")
        product, inputs = module.rpartition(".")[2], config.hidden_size
        routed = experts is not None and f"{experts.prefix}experts." in module
        if kind != "weight" or not (routed or product.endswith("_proj")):
            continue
        if experts is None or f".{experts.prefix}" not in module:
            inputs = inner.get(product, inputs)
        elif product == experts.parts[2]:
            shared = f"{experts.prefix}{experts.shared}." in module
            dense = config.intermediate_size  # of a layer without a mixture
            inputs = experts.size if routed else experts.shared_size if shared else dense
        yield module, inputs


def is_extra_layer(config: DecoderConfig, name: str) -> bool:
    """Whether a tensor belongs to a layer behind the model's last one, which drafts tokens."""
    if config.extra_prefix:
        return name.startswith(config.extra_prefix)
    first = config.num_layers
    prefixes = [f"model.layers.{first + index}." for index in range(config.extra_layers)]
    return name.startswith(tuple(prefixes))


def _layer_norms(names: LayerNames) -> list[str]:
    behind = (names.attention_output_norm, names.mlp_output_norm)
    return ["input_layernorm", names.mlp_norm, *(name for name in behind if name is not None)]


def _attention_norms(config: DecoderConfig) -> list[str]:
    if config.latent is not None:
        queries = ["self_attn.q_a_layernorm"] if config.latent.query_rank else []
        return [*queries, "self_attn.kv_a_layernorm"]
    return ["self_attn.q_norm", "self_attn.k_norm"] if config.qk_norm else []


def _attention_products(config: DecoderConfig) -> dict[str, bool]:
    """Return the names of the attention's products, each with whether it has a bias."""
    output = {"self_attn.o_proj": config.output_bias}
    if config.latent is None:
        names: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        if config.names.fused_qkv:
            names = ("self_attn.qkv_proj",)
        return dict.fromkeys(names, config.qkv_bias) | output
    inputs = {"self_attn.kv_a_proj_with_mqa": config.qkv_bias, "self_attn.kv_b_proj": False}
    if not config.latent.query_rank:
        return inputs | output | {"self_attn.q_proj": False}
    low_rank = {"self_attn.q_a_proj": config.qkv_bias, "self_attn.q_b_proj": False}
    return inputs | output | low_rank


def _delta_products(config: DeltaConfig) -> dict[str, bool]:
    """As _attention_products, for a layer with linear attention."""
    return {f"linear_attn.{name}": False for name in (*config.inputs, "out_proj")}


def _expert_names(config: ExpertsConfig) -> Iterator[str]:
    """Yield the names of the tensors of a sparse layer's mixture."""
    router, kinds = config.prefix + config.router, ("weight", "bias")
    yield router + ".weight"
    if config.gate.biased:
        yield router + ".bias"
    if config.gate.sigmoid:
        yield router + ".e_score_correction_bias"
    for expert in range(config.count):
        parts = [f"{config.prefix}experts.{expert}.{part}" for part in config.parts]
        yield from (f"{part}.{kind}" for part in parts for kind in kinds[: 1 + config.biased])
    if config.shared_size:
        shared = config.prefix + config.shared
        yield from (f"{shared}.{part}.weight" for part in config.parts)
        if config.shared_gated:
            yield shared + "_gate.weight"
