"""The sizes of a draft head, from config.json alone; see models/draft_heads.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from baton.engine.loading.model_shape import ModelShape, model_shape
from baton.protocol.errors import ModelRefused

# Families whose layer that drafts has full attention, whatever their last layer has.
_HYBRID: Final = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
# Keys that say nothing of that layer.
_OF_OTHERS: Final = ("architectures", "text_config", "vision_config", "mlp_only_layers")


def mtp_shape(config: dict[str, Any]) -> ModelShape:
    """Return the sizes of the layer that drafts behind the last one of a model's config.json.

    Raises ModelRefused if there is none.
    """
    one, more = (model_shape(each) for each in _configs(config))
    join = 2 * one.hidden_size**2
    experts = more.experts
    if experts is not None and one.experts is not None:
        experts = replace(experts, parameters=experts.parameters - one.experts.parameters)
    return replace(
        more,
        parameters=more.parameters - one.parameters + join + 3 * one.hidden_size,
        embedding=0,  # the model's own, as its head
        matrices=more.matrices - one.matrices + join,
        plain=more.plain - one.plain,
        replicated=join + more.replicated - one.replicated,
        routers=more.routers - one.routers,
        experts=experts,
        layers=more.layers[-1:],
    )


def _configs(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configs of two models, of which the second has one layer more: that which drafts.
    Raises ModelRefused if there is none."""
    text = {**config, **(config.get("text_config") or {})}
    count = config.get("num_nextn_predict_layers") or config.get("num_mtp_layers")
    hybrid = text.get("model_type") in _HYBRID
    if hybrid:
        # Lazy: it imports torch, which the families of model_shape.py do without.
        from baton.engine.models.families.hybrid import extra_layers

        count = extra_layers(text)
    if not count:
        raise ModelRefused(
            "the checkpoint has no layer that drafts (num_nextn_predict_layers)",
            field="speculative_method",
        )
    if hybrid:
        plain = {key: value for key, value in text.items() if key not in _OF_OTHERS}
        one, two = (
            {**plain, "num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
            for layers in (1, 2)
        )
        return one, two
    longer = {**config, "num_hidden_layers": config["num_hidden_layers"] + 1}
    for kinds in ("layer_types", "mlp_layer_types"):
        if config.get(kinds):
            longer[kinds] = [*config[kinds], config[kinds][-1]]
    return config, longer


def eagle3_shape(config: dict[str, Any]) -> ModelShape:
    """Return the sizes of an EAGLE-3 head's config.json; it looks tokens up in the model's table.

    Raises ModelRefused as model_shape does.
    """
    shape = model_shape({"model_type": "llama", **config, "tie_word_embeddings": True})
    hidden = shape.hidden_size
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or hidden // heads
    rows = (heads + 2 * (config.get("num_key_value_heads") or heads)) * dim
    joined = 3 * (config.get("target_hidden_size") or hidden) * hidden
    head = (config.get("draft_vocab_size") or shape.vocab_size) * hidden
    return replace(
        shape,
        parameters=shape.parameters - shape.embedding + rows * hidden + joined + head + hidden,
        embedding=0,
        matrices=shape.matrices + rows * hidden + joined + head,
        replicated=shape.replicated + joined + head,
    )
