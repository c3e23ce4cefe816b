"""Chooses the route for a config.json and a configuration, or refuses them. No tensor is looked at.

The loader calls it before it reads gigabytes, `baton estimate` for models that are not on disk:

    kind of model, dtype, length -> quantization -> ranks -> lean | universal (its own refusals)
"""

from __future__ import annotations

import logging
from typing import Any, Final

import torch

from baton.engine.checkpoint.checkpoint import text_config
from baton.engine.checkpoint.kinds import Kind, rounded_inputs, unstated_dtype
from baton.engine.checkpoint.quantized_checkpoint import IntegerLayout, refuse_uneven
from baton.engine.checkpoint.seeing import family_of
from baton.engine.checkpoint.widening import integer_layout
from baton.engine.config import EngineConfig, head_quantization
from baton.engine.kernels.gpu.support import float8_serves
from baton.engine.kernels.rope import position_limit
from baton.engine.models.config import DecoderConfig
from baton.engine.models.families.keys import NotLean
from baton.engine.models.families.read import decoder_config
from baton.engine.models.tensor_names import product_inputs
from baton.engine.quantization.integer import SCHEMES, Scheme
from baton.engine.state.place import LEADER, RankPlace, choose_device
from baton.protocol.errors import ConfigError, ModelRefused

logger = logging.getLogger(__name__)

DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
HEAD_METHODS: Final = (
    "mtp",
    "eagle3",
)  # speculative methods with a draft head (models/draft_heads.py)
_CLASSIFIER: Final = "ForSequenceClassification"
_NO_DECODERS: Final = (
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForRewardModel",
)
# Qwen3-Reranker's config names a classifier for other servers, but the model is a language model.
_STILL_GENERATES: Final = ("classifier_from_token", "is_original_qwen3_reranker")


def choose_route(values: dict[str, Any], config: EngineConfig) -> DecoderConfig | None:
    """Return the lean route's config for `values`, a config.json; None = the universal route.

    Raises ModelRefused for a model that is not served, ConfigError for options that do not go with
    the model.
    """
    _refuse_kind(values)
    choose_dtype(config.dtype, values)
    stated = position_limit(text_config(values))
    if stated is not None:
        choose_length(config.max_model_len, stated)
    quantized = values.get("quantization_config")
    integers = integer_layout(quantized) is not None
    if integers and config.quantization != "none":
        method = (quantized or {}).get("quant_method")
        raise ConfigError(
            f"the checkpoint is quantized already ({method}): --quantization "
            f"{config.quantization} is for unquantized ones",
            field="quantization",
        )
    if config.tensor_parallel_size > 1:
        _refuse_ranks(config, classifies(values))
    lean = None
    if config.model_impl == "transformers":
        leave_lean(values, config, "not with model_impl transformers")
    elif family_of(values) is not None:
        leave_lean(values, config, "it reads images (--language-model-only: text alone)")
    else:
        try:
            lean = _lean(values, config)
        except NotLean as reason:
            leave_lean(values, config, str(reason))
    if config.speculative_method in HEAD_METHODS:
        _refuse_head(config, lean, values)
    if config.data_parallel_size > 1:
        from baton.engine.parallel import data_rank  # lazy: as above

        data_rank.refuse(config, lean, classifies(values))
    if lean is not None:
        return lean
    # Lazy: transformers takes seconds, and the lean route starts without it.
    from baton.engine.models.causal import causal_class, named_refusals, refuse_layers

    with named_refusals(values):
        refuse_layers(*causal_class(values))
    return None


def leave_lean(values: dict[str, Any], config: EngineConfig, reason: str) -> None:
    """Raise ModelRefused if `config` or the model needs the lean route, which cannot serve it for
    `reason`. Otherwise log that the universal route is used."""
    if classifies(values):
        message = f"only the lean route serves classifiers, and it cannot serve this: {reason}"
        raise ModelRefused(message, field="model")
    if config.model_impl == "lean":
        raise ModelRefused(f"the lean route cannot serve this: {reason}", field="model_impl")
    if rounds(config):
        raise ModelRefused(
            f"only the lean route rounds weights, and it cannot serve this: {reason}",
            field="quantization",
        )
    if config.tensor_parallel_size > 1 and config.lora_modules:
        raise ModelRefused("only the lean route splits adapters over ranks", field="lora_modules")
    if config.enable_expert_parallel:
        raise ModelRefused(
            f"only the lean route has experts over ranks, and it cannot serve this: {reason}",
            field="enable_expert_parallel",
        )
    if config.model_impl == "auto":
        logger.info("universal route for %s: %s", config.model, reason)


def choose_dtype(name: str, values: dict[str, Any]) -> str:
    """Return the configured dtype; for "auto" the checkpoint's own (`unstated_dtype` if it states
    none). Raises ModelRefused for a dtype of the checkpoint that is not served."""
    if name != "auto":
        return name
    for part in (text_config(values), values):
        value = part.get("dtype") or part.get("torch_dtype")
        if value is not None:
            stored = str(value).removeprefix("torch.")
            if stored not in DTYPES:
                raise ModelRefused(f"weights of dtype {stored} are not served", field="dtype")
            return stored
    return unstated_dtype(values)


def choose_length(requested: int | None, known: int | None) -> int:
    """Return the longest context: tokens of prompt plus output. `known`: the model's own limit.
    Raises ConfigError if `requested` exceeds it, or if both are None."""
    if known is None:
        if requested is None:
            raise ConfigError(
                "the model does not say how long a context may be: set --max-model-len",
                field="max_model_len",
            )
        return requested
    if requested is not None and requested > known:
        raise ConfigError(
            f"max_model_len {requested} exceeds the model's own {known} positions",
            field="max_model_len",
        )
    return known if requested is None else requested


def kept_as(kind: Kind | None, quantized: dict[str, Any], config: EngineConfig) -> str | None:
    """Return what the lean route keeps of weights of this kind; None if it widens them."""
    if config.quantization != "none":
        return None
    if kind == "gguf":
        return "integers"
    floats = kind == "fp8" and rounded_inputs(quantized) is not None
    return "products" if floats and float8_serves(choose_device(config.device)) else None


def rounds(config: EngineConfig) -> bool:
    """Whether the configuration asks to round weights while loading."""
    return config.quantization in SCHEMES or head_scheme(config) is not None


def head_scheme(config: EngineConfig) -> Scheme | None:
    """Return the scheme that a head of floating-point numbers is rounded to; None = it is not
    rounded."""
    asked = head_quantization(config.lm_head_quantization, config.quantization)
    return next((scheme for scheme in SCHEMES if scheme == asked), None)


def classifies(values: dict[str, Any]) -> bool:
    """Whether the model has a head of classes, like transformers' sequence classifiers."""
    named: list[str] = values.get("architectures") or [""]
    return named[0].endswith(_CLASSIFIER) and not any(values.get(key) for key in _STILL_GENERATES)


def _refuse_kind(values: dict[str, Any]) -> None:
    """Raise ModelRefused if the config names an encoder-decoder, or a class without a head for
    tokens that is not served."""
    if values.get("is_encoder_decoder"):
        raise ModelRefused(
            f"{values.get('model_type')} is an encoder-decoder model; only decoders are served",
            field="model",
        )
    named: list[str] = values.get("architectures") or [""]
    if named[0].endswith(_NO_DECODERS):
        raise ModelRefused(
            f"{named[0]} cannot be served: it gives classes or scores and has no head for tokens; "
            "serve a model that generates (for reranking one that answers yes or no, such as "
            "Qwen3-Reranker)",
            field="model",
        )


def _refuse_ranks(config: EngineConfig, classifier: bool) -> None:
    """Raise ConfigError or ModelRefused for what tensor parallelism does not support on any
    route."""
    from baton.engine.parallel.rank import refuse  # lazy: most engines have one rank

    refuse(config)
    if classifier:
        message = "classifiers are not split over ranks yet"
        raise ModelRefused(message, field="tensor_parallel_size")


def _refuse_head(config: EngineConfig, lean: DecoderConfig | None, values: dict[str, Any]) -> None:
    """Raise ConfigError if this model, or these options, cannot have a draft head."""
    method, reason = config.speculative_method, None
    if config.data_parallel_size > 1:
        reason = "data-parallel ranks have no draft head yet"
    elif classifies(values):
        reason = "a classifier generates nothing"
    elif lean is None:
        reason = "only the lean route runs a draft head, and it does not serve this model"
        if family_of(values) is not None:
            reason += " with images (--language-model-only: text alone)"
    elif method == "mtp" and not lean.extra_layers:
        reason = "the checkpoint has no layer that drafts (num_nextn_predict_layers)"
    elif method == "mtp" and text_config(values).get("mtp_use_dedicated_embeddings"):
        reason = "its layer that drafts has an embedding of its own (mtp_use_dedicated_embeddings)"
    if reason is not None:
        raise ConfigError(f"speculative_method {method}: {reason}", field="speculative_method")


def _lean(values: dict[str, Any], config: EngineConfig) -> DecoderConfig:
    """Return the lean route's config of the model. Raises NotLean; ModelRefused for more experts
    per token than there are, and for ranks that it cannot be split over."""
    plain = {key: value for key, value in values.items() if key != "quantization_config"}
    if classifies(values):  # read as a decoder with a tied head, which is never used
        plain |= {"architectures": None, "tie_word_embeddings": True}
    lean = decoder_config(plain)
    mixture = lean.experts
    if mixture is not None and mixture.per_token > mixture.count:
        message = f"num_experts_per_tok: {mixture.per_token} of {mixture.count} experts"
        raise ModelRefused(message, field="model")
    if config.enable_expert_parallel and mixture is None:
        message = f"{values.get('model_type')} has no experts to lie on different ranks"
        raise ModelRefused(message, field="enable_expert_parallel")
    if config.tensor_parallel_size > 1:
        from baton.engine.parallel.sharding import rank_config  # lazy: as above

        place = RankPlace(LEADER, config.tensor_parallel_size)
        rank_config(lean, place, config.enable_expert_parallel)
    layout = integer_layout(values.get("quantization_config"))
    if layout is not None:
        _refuse_groups(layout, lean)
    return lean


def _refuse_groups(layout: IntegerLayout, lean: DecoderConfig) -> None:
    """Raise ModelRefused, as the reader would, if groups of integers do not divide the inputs of a
    product. A config names modules as the checkpoint does, or without the prefix."""
    for module, inputs in product_inputs(lean):
        own = module.removeprefix("model.") if lean.prefix.startswith("model.") else module
        if layout.group_size(lean.prefix + own) is not None:
            refuse_uneven(module, inputs, layout.group_size(module))
