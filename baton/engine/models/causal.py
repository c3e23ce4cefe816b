"""transformers' own language model of a checkpoint: its class, refusals by its config, its weights.

config.json -> causal_class -> refuse_layers          (no tensor is looked at; `baton estimate`
                                                       calls these two as well)
checkpoint  -> read_causal                            (the universal route runs what this reads)
"""

from __future__ import annotations

import enum
import functools
import inspect
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
)
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from baton.engine.checkpoint.checkpoint import Checkpoint
from baton.engine.checkpoint.quantized_checkpoint import module_names, widened
from baton.engine.checkpoint.seeing import FAMILIES, family_of
from baton.engine.checkpoint.tensors import LazyTensor
from baton.engine.checkpoint.widening import integer_layout, open_tensors
from baton.protocol.errors import ModelRefused

logger = logging.getLogger(__name__)

_SERVED_LAYER_TYPES: Final = {
    "attention", "chunked_attention", "full_attention", "sliding_attention",
}  # fmt: skip
# Models whose layers choose the keys that they attend to, with index keys of their own.
_INDEXED: Final = {"axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4"}
# Models with recurrent state, proven token for token against transformers' generate, in chunks and
# in batches. Other models that keep state are refused.
SERVED_STATES: Final = {
    "bamba", "falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2", "lfm2_moe", "mamba2",
    "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "zamba2",
}  # fmt: skip
_WRONG_IN_CHUNKS: Final = {"falcon_mamba", "jamba", "mamba", "minimax"}
# While transformers makes a model, it changes torch's initializers for the whole process.
_ONE_AT_A_TIME: Final = threading.Lock()
_CACHE_NAMES: Final = ("cache", "past_key_values", "cache_params")  # the first: since 5.24
_ENCODER: Final = (
    "it is an encoder, which writes no text, or of a family that is not served (docs/models.md "
    "lists those that are); serve another, or a decoder such as Qwen3-Embedding and Qwen3-Reranker"
)


class ModelPart(enum.Enum):
    """What is read of a model with images."""

    WHOLE = "whole"
    TOWER = "tower"  # vision tower and projector
    TEXT = "text"  # all but these


@contextmanager
def named_refusals(values: dict[str, Any]) -> Iterator[None]:
    """Turn every error inside into a ModelRefused that names the architecture and the reason."""
    architecture = (values.get("architectures") or [values.get("model_type") or "unknown"])[0]
    try:
        yield
    except ModelRefused as reason:
        raise ModelRefused(f"{architecture} cannot be served: {reason}", field="model") from reason
    except Exception as error:
        # Exotic modelling code fails in exotic ways; whatever it is, this model is not served.
        detail = f"{type(error).__name__}: {error}"
        raise ModelRefused(f"{architecture} cannot be served: {detail}", field="model") from error


def causal_class(values: dict[str, Any]) -> tuple[Any, Any]:
    """Return transformers' class and config for a config.json. For a multimodal model whose images
    are not read they are those of its language model, if transformers has a class of that. Raises
    ModelRefused if transformers has no class that generates text."""
    kind: str = values.get("model_type") or "unknown"
    if kind not in CONFIG_MAPPING:
        raise ModelRefused(
            "it is not an architecture that transformers knows (code from checkpoints is never run)"
        )
    if kind == "mistral" and "layer_types" in values:
        kind = "ministral"  # as AutoConfig reads it
    own = json.loads(json.dumps(values), object_hook=_special_float)
    config: Any = CONFIG_MAPPING[kind].from_dict(own)
    alone = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if family_of(values) is not None or (kind in FAMILIES and not alone):
        return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)], config
    if not alone:
        raise ModelRefused(_why_no_class(config))
    family: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if family.config_class is config.sub_configs.get("text_config"):
        config = config.get_text_config()
    return family, config


def _special_float(node: dict[str, Any]) -> Any:
    """Return the float for an object {"__float__": "Infinity"}, as transformers writes infinity;
    any other object as it is."""
    return float(node["__float__"]) if node.keys() == {"__float__"} else node


def _why_no_class(config: Any) -> str:
    text = config.get_text_config()
    if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
        alone: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
        return (
            f"it takes more than text; its language model, a {alone.__name__}, can be served once "
            "it is saved alone (docs/models.md says how)"
        )
    if text is not config:
        return "it takes more than text, and transformers has no language model of it alone"
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING:
        return _ENCODER
    return "transformers has no causal language model of this kind"


def refuse_layers(family: Any, config: Any) -> None:
    """Raise ModelRefused for layers that need more state than a KV cache, and for encoders."""
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        raise ModelRefused(_ENCODER)
    text = config.get_text_config()
    if text.model_type in SERVED_STATES:
        return
    if text.model_type in _WRONG_IN_CHUNKS:
        raise ModelRefused(
            "transformers computes its recurrent state wrongly when a prompt comes in chunks"
        )
    kinds = set(getattr(text, "layer_types", None) or ())
    served = _SERVED_LAYER_TYPES
    if text.model_type in _INDEXED:
        served = served | {"indexed_attention"}
    unserved = kinds - served
    if unserved:
        raise ModelRefused(f"layers of type {', '.join(sorted(unserved))}")
    # A class may keep recurrent state in some checkpoints and in others none.
    if family._is_stateful and not kinds:
        raise ModelRefused("it keeps recurrent state")


def cache_name(forward: Callable[..., Any]) -> str | None:
    """Return the name of a forward's parameter for a cache; None = it takes none."""
    names = inspect.signature(forward).parameters
    return next((name for name in _CACHE_NAMES if name in names), None)


def decoder_name(causal: Any) -> str:
    """Return the name of the part of `causal` that makes hidden states; the rest is its head.
    Raises ModelRefused if it has none."""
    prefix: str = causal.base_model_prefix
    if prefix in causal._modules:
        return prefix
    # Llama 4's class names the prefix of the model with images. Its parts are a decoder and a head.
    head = causal.get_output_embeddings()
    others = [name for name, part in causal.named_children() if part is not head]
    if len(others) != 1 or head is None:
        raise ModelRefused("its decoder cannot be told from its head")
    return others[0]


def _unquantized(values: dict[str, Any]) -> dict[str, Any]:
    """Return the config without its quantization: Baton widens such tensors while it reads them, so
    transformers sees weights that are not quantized."""
    return {key: value for key, value in values.items() if key != "quantization_config"}


def read_causal(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    given: Mapping[str, Tensor] | None = None,
    part: ModelPart = ModelPart.WHOLE,
) -> Any:
    """Return transformers' own model on the CPU in `dtype`; each tensor is read once. `given`: what
    it is made of instead of the checkpoint's tensors, by the names of its own state. `part`: what
    is read of a model with images.

    transformers makes the model without memory, renames and merges tensors as the family needs it,
    makes the buffers that no file holds, and ties weights. It gets lazy tensors, which are still in
    their files. If it opened the files itself, it would map all of them beside the cast copies.

    Raises ModelRefused for layers that are not served, before a tensor is read. Raises it also for
    tensors that are missing or have another shape.
    """
    family, config = causal_class(_unquantized(checkpoint.config))
    if part is not ModelPart.TOWER:
        refuse_layers(family, config)
    transformers_logging.disable_progress_bar()
    tensors = _lazy_tensors(checkpoint, dtype) if given is None else dict(given)
    with _ONE_AT_A_TIME:
        loaded: Any = _class_of(family, part).from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below: its own error does not name them
        )
    causal, loading = loaded
    incomplete = sorted(loading["missing_keys"]) + sorted(loading["mismatched_keys"])
    if incomplete:
        raise ModelRefused(f"tensors missing or of a wrong shape: {incomplete[:3]}")
    if loading["unexpected_keys"]:
        unused = sorted(loading["unexpected_keys"])
        logger.warning("tensors of %s not used: %s", checkpoint.path, unused[:3])
    _refuse_transposed(checkpoint, causal)
    return causal


def _class_of(family: Any, part: ModelPart) -> Any:
    """Return the class `family` of a model with images, of which only `part` is kept.

    transformers makes a model without memory and can leave no part out. This class drops one as
    soon as the model is made, so that its weights are never read.
    """
    if part is ModelPart.WHOLE:
        return family

    def make(self: Any, config: Any) -> None:
        family.__init__(self, config)
        base = self.base_model
        if part is ModelPart.TOWER:
            self.lm_head = nn.Identity()
        for name, _ in list(base.named_children()):
            if (name == "language_model") == (part is ModelPart.TOWER):
                setattr(base, name, nn.Identity())

    # By its name and module transformers finds how it renames the family's tensors.
    named = {
        "__init__": make,
        "__module__": family.__module__,
        "_keys_to_ignore_on_load_unexpected": [".*"],  # those of what is dropped
    }
    return type(family.__name__, (family,), named)


def _lazy_tensors(checkpoint: Checkpoint, dtype: torch.dtype) -> Mapping[str, LazyTensor]:
    """Return all tensors by the names that a checkpoint without quantization gives them. None is
    read yet. Integer weights are widened one tensor at a time, when transformers asks for them."""
    reader = open_tensors(checkpoint, dtype, torch.device("cpu"))
    layout = integer_layout(checkpoint.config.get("quantization_config"))
    if layout is None:
        return reader.lazy()
    modules = module_names(reader.names, layout)
    own = {f"{module}.{tensor}" for module in modules for tensor in layout.tensors}
    plain = {name: tensor for name, tensor in reader.lazy().items() if name not in own}
    return plain | {
        f"{module}.weight": LazyTensor(functools.partial(widened, layout, module, reader))
        for module in modules
    }


def _refuse_transposed(checkpoint: Checkpoint, causal: nn.Module) -> None:
    """Raise ModelRefused for integer weights of layers (Conv1D) that store weights as [in, out]: no
    quantization tool states whether it packed them transposed."""
    if integer_layout(checkpoint.config.get("quantization_config")) is None:
        return
    if any(isinstance(module, Conv1D) for module in causal.modules()):
        raise ModelRefused("integer weights of its transposed layers (Conv1D) are not read")
