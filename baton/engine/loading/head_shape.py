"""The sizes of a draft head, from config.json alone; see models/draft_heads.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from baton.engine.loading.model_shape import ModelShape, model_shape
from baton.protocol.errors import ModelRefused


def mtp_shape(config: dict[str, Any]) -> ModelShape:
    """Return the sizes of the layer that drafts behind the last one of a model's config.json.

    Raises ModelRefused if there is none.
    """
    if not (config.get("num_nextn_predict_layers") or config.get("num_mtp_layers")):
        raise ModelRefused(
            "the checkpoint has no layer that drafts (num_nextn_predict_layers)",
            field="speculative_method",
        )
    longer = dict(config)
    for kinds in ("layer_types", "mlp_layer_types"):
        if config.get(kinds):
            longer[kinds] = [*config[kinds], config[kinds][-1]]
    longer["num_hidden_layers"] = config["num_hidden_layers"] + 1
    one, more = model_shape(config), model_shape(longer)
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
        replicated=0,
        routers=more.routers - one.routers,
        experts=experts,
        layers=more.layers[-1:],
    )


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
    )
