"""ModelShape of any causal language model that transformers knows, built on torch's meta device.

Nothing is loaded or computed: tensors have shapes only. What each layer stores is found like on the
universal route, by a forward that records instead of attending. If a model's code needs real
numbers for that, the usual keys of its config are read instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModel, AutoModelForSequenceClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging as transformers_logging

from baton.engine.checkpoint.seeing import family_of
from baton.engine.loading.model_shape import (
    ExpertsShape,
    ModelShape,
    RowProduct,
    layer_windows,
    row_products,
)
from baton.engine.loading.stored_weights import stored_dtype, stored_weights
from baton.engine.models.causal import causal_class, named_refusals
from baton.engine.models.config import layer_spec
from baton.engine.models.families.keys import NotLean
from baton.engine.models.families.read import decoder_config
from baton.engine.models.module_shares import first_calls, shared_tensors
from baton.engine.models.tower import VisionTower
from baton.engine.models.universal import UniversalModel, use_paged_attention
from baton.protocol.errors import ModelRefused
from baton.protocol.kv_spec import LayerSpec
from baton.text.sentence_files import is_encoder, labels_of

_ROUTED_NAMES = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN_NAMES = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k_experts")


@torch.inference_mode()
def shape_on_meta(config: dict[str, Any]) -> ModelShape:
    """Build the model of a config.json without memory. Raises ModelRefused if that fails."""
    transformers_logging.set_verbosity_error()
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    if is_encoder(plain):
        return _encoder_shape(plain)
    with named_refusals(config):
        family, known = causal_class(plain)
        with torch.device("meta"):
            # batched_mm: the only implementation of experts that does not read numbers of tensors.
            causal: Any = family._from_config(
                known, attn_implementation="eager", experts_implementation="batched_mm"
            )
    text = known.get_text_config().to_dict()
    table = causal.get_input_embeddings().weight
    head = causal.get_output_embeddings()
    sizes = {name: parameter.numel() for name, parameter in causal.named_parameters()}
    tables = {id(table), id(head.weight) if head is not None else None}
    with first_calls(causal) as calls:
        layers, note, refused = _layers(config, causal, text)
    # The head is not called; of what its forward would have called, nothing is known with a note.
    modules = causal.modules() if note or head is None else [*calls, head]
    sees = family_of(plain) is not None
    by_module = sees or not _is_lean(plain)
    matrices = sum(p.numel() for p in causal.parameters() if p.dim() > 1 and id(p) not in tables)
    stored = stored_weights(config)  # the universal route widens them
    return ModelShape(
        model_type=str(config["model_type"]),
        parameters=sum(sizes.values()),
        embedding=table.numel(),
        matrices=matrices,
        tied=head is not None and head.weight is table,
        hidden_size=table.shape[1],
        widest=3 * max(_inner(text), table.shape[1]),
        vocab_size=table.shape[0],
        layers=layers,
        max_positions=text.get("max_position_embeddings"),
        dtype=stored_dtype({**config, **(config.get("text_config") or {})}),
        experts=_experts(text, sizes),
        replicated=sum(sizes.values()) - _split(modules, table) if by_module else 0,
        row_products=() if by_module else _row_products(causal),
        by_module=by_module,
        tower=_tower(causal) if sees else 0,
        stored=None if stored is None else replace(stored, widened=True),
        note=note,
        refused=refused,
    )


def _is_lean(config: dict[str, Any]) -> bool:
    """Whether the lean route serves the model: its ranks cut tensor by tensor."""
    try:
        decoder_config(config)
    except NotLean:
        return False
    return True


def _split(modules: Iterable[torch.nn.Module], table: torch.nn.Parameter) -> int:
    """Count the parameters that the universal route's ranks share."""
    split = shared_tensors(modules)
    return sum(each.numel() for key, each in split.items() if key != id(table))


def _tower(causal: torch.nn.Module) -> int:
    """Count the parameters of the vision tower, which the first rank alone keeps."""
    tower = VisionTower.of(causal)
    return 0 if tower is None else sum(each.numel() for each in tower.parameters)


def _row_products(causal: torch.nn.Module) -> tuple[RowProduct, ...]:
    """Return the products that the lean route's ranks cut by inputs."""
    return row_products(
        RowProduct(p.shape[1], p.numel())
        for name, p in causal.named_parameters()
        if name.endswith(("o_proj.weight", "down_proj.weight"))
    )


def _encoder_shape(config: dict[str, Any]) -> ModelShape:
    """Count an encoder, which stores nothing per token: it has no `layers`."""
    with named_refusals(config), torch.device("meta"):
        known: Any = CONFIG_MAPPING[config["model_type"]].from_dict(config)
        classes = bool(labels_of(config))
        made: Any = AutoModelForSequenceClassification if classes else AutoModel
        model: Any = made.from_config(known)
    table = model.get_input_embeddings().weight
    matrices = [p.numel() for p in model.parameters() if p.dim() > 1 and p is not table]
    text = known.to_dict()
    return ModelShape(
        model_type=str(config["model_type"]),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        embedding=table.numel(),
        matrices=sum(matrices),
        tied=False,
        hidden_size=known.hidden_size,
        widest=3 * max(_inner(text), known.hidden_size),
        vocab_size=table.shape[0],
        layers=(),
        max_positions=text.get("max_position_embeddings"),
        dtype=stored_dtype(config),
        note="an encoder: it keeps no KV and needs no decode nodes",
    )


def _layers(
    config: dict[str, Any], causal: Any, text: dict[str, Any]
) -> tuple[tuple[LayerSpec, ...], str, str | None]:
    """Return what each layer stores; a note if this is uncertain, else ""; and why the universal
    route refuses the model, None if it does not."""
    refused = None
    try:
        use_paged_attention(causal.eval())
        with named_refusals(config):
            return UniversalModel(causal).layers, "", None
    except ModelRefused as reason:
        if isinstance(reason.__cause__, ModelRefused):
            refused = str(reason)
    note = "KV as its config suggests"
    heads = text.get("num_attention_heads") or text.get("n_head") or 1
    kv_heads = 1 if text.get("multi_query") else text.get("num_key_value_heads") or heads
    dim = text.get("head_dim") or (text.get("hidden_size") or text.get("n_embd") or 0) // heads
    count = text.get("num_hidden_layers") or text.get("n_layer") or 0
    windows = layer_windows({**text, "num_hidden_layers": count})
    return tuple(layer_spec(kv_heads, dim, dim, window) for window in windows), note, refused


def _experts(text: dict[str, Any], sizes: dict[str, int]) -> ExpertsShape | None:
    routed = next((text[name] for name in _ROUTED_NAMES if text.get(name)), None)
    chosen = next((text[name] for name in _CHOSEN_NAMES if text.get(name)), None)
    parameters = sum(size for name, size in sizes.items() if ".experts." in name)
    if routed is None or chosen is None or not parameters:
        return None
    return ExpertsShape(routed, chosen, parameters)


def _inner(text: dict[str, Any]) -> int:
    inner = text.get("intermediate_size") or text.get("n_inner") or text.get("ffn_dim") or 0
    return max(inner) if isinstance(inner, list) else inner
