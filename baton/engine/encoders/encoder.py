"""Encoder: one model of a served encoder family, from configuration to vectors and logits.

    files and options checked (refuse) -> transformers' own class, weights from safetensors
    -> packed or grouped (packed.py) -> the same texts together and each alone: equal, or refused
    -> vectors by the checkpoint's modules (vectors.py), or logits of its classes

No KV, no steps, no requests: a caller gives texts as token ids and gets one result each.
baton/node/pooling.py makes batches of what waits on a node.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from typing import Any, Final

import torch
import transformers
from torch import Tensor
from torch.nn import functional
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
)
from transformers.utils import logging as transformers_logging

from baton.engine.checkpoint.checkpoint import Checkpoint, digest, open_checkpoint
from baton.engine.checkpoint.widening import open_tensors
from baton.engine.config import EngineConfig
from baton.engine.encoders.packed import PACKED, EncoderForward
from baton.engine.encoders.vectors import VectorMaker
from baton.engine.kernels.rope import position_limit
from baton.engine.loading.route import DTYPES, choose_dtype, choose_length
from baton.engine.models.causal import named_refusals
from baton.engine.state.encoder_texts import EncoderText, VectorAsk
from baton.engine.state.interface import ModelInfo
from baton.engine.state.place import choose_device
from baton.protocol.errors import ConfigError, ContextLengthExceeded, InvalidRequest, ModelRefused
from baton.protocol.kv_spec import LayerSpec
from baton.text.sentence_files import (
    FAMILIES,
    PoolingModule,
    SentenceFiles,
    module_files,
    sentence_files,
)

log = logging.getLogger(__name__)

# Families that count positions from `pad_token_id` + 1.
_BEHIND_PADDING: Final = frozenset(
    {
        "camembert", "data2vec-text", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta",
        "xlm-roberta-xl",
    }
)  # fmt: skip
# Options of an engine that mean nothing here, with the only value that each may have.
_PLAIN: Final[dict[str, object]] = {
    "quantization": "none",
    "lm_head_quantization": "auto",
    "kv_cache_dtype": "auto",
    "tensor_parallel_size": 1,
    "data_parallel_size": 1,
    "enable_expert_parallel": False,
    "deterministic": False,
    "lora_modules": (),
    "speculative_method": "none",
}
_HEADLESS: Final = ("Model", "ForMaskedLM", "ForPreTraining")
_CLASSIFIER: Final = "ForSequenceClassification"
# A node's pool must have a layer. An encoder's has one of two numbers per token, which stay zero.
NO_KV: Final = LayerSpec(kv_heads=1, k_dim=1, v_dim=1)
_CHECK_LENGTHS: Final = (80, 5, 11, 5)  # tokens of the texts that are compared at the start
# Greatest mean error over mean: two orders of sums differ by 1e-6 in float32.
_TOLERANCE: Final = {torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.1}
_OVERRIDES: Final = {"last": PoolingModule(("lasttoken",)), "mean": PoolingModule(("mean",))}


class Encoder:
    """A loaded encoder. Not thread-safe: the engine's thread alone runs it."""

    def __init__(
        self, info: ModelInfo, files: SentenceFiles, forward: EncoderForward, maker: VectorMaker
    ) -> None:
        self.info = info
        self.files = files
        self._forward = forward
        self._maker = maker

    def check(self, texts: Sequence[EncoderText], ask: VectorAsk) -> None:
        """Raise InvalidRequest (the field is named) or ContextLengthExceeded for what run() cannot
        compute."""
        if (ask.kind == "classify") != bool(self.files.labels):
            what = "makes classes, no vectors" if self.files.labels else "has no classes"
            raise InvalidRequest(f"this encoder {what}", field="model")
        if ask.kind not in ("own", "classify", *_OVERRIDES):
            raise InvalidRequest(f"an encoder has no {ask.kind!r}", field="kind")
        if ask.dimensions > self._maker.size:
            raise InvalidRequest(
                f"dimensions: this model's vectors have {self._maker.size}", field="dimensions"
            )
        vocab_size, limit = self.info.vocab_size, self.info.max_model_len
        for text in texts:
            if not text.ids:
                raise InvalidRequest("a prompt is empty", field="prompt")
            if min(text.ids) < 0 or max(text.ids) >= vocab_size:
                message = f"token ids must be at least 0 and below {vocab_size}"
                raise InvalidRequest(message, field="prompt")
            if len(text.ids) > limit:
                message = f"a prompt has {len(text.ids)} tokens; the limit is {limit}"
                raise ContextLengthExceeded(message, field="prompt")

    def run(self, texts: Sequence[EncoderText], asks: Sequence[VectorAsk]) -> list[Tensor]:
        """Return one result per text, [its numbers] float32: one forward over all texts.

        `asks[i]` is what is wanted of texts[i]; check() has passed."""
        if self.files.labels:
            return list(self._forward.logits(texts))
        hidden = self._forward.hidden(texts)
        return [self._vector(rows, ask) for rows, ask in zip(hidden, asks, strict=True)]

    def _vector(self, rows: Tensor, ask: VectorAsk) -> Tensor:
        vector = self._maker.vector(rows, _OVERRIDES.get(ask.kind))
        if ask.dimensions:
            vector = vector[: ask.dimensions]
        return functional.normalize(vector, dim=-1) if ask.normalize else vector


def refuse(values: dict[str, Any], config: EngineConfig) -> tuple[Any, Any]:
    """Return transformers' class and config for a config.json of an encoder.

    Raises ModelRefused for a model that is not served, ConfigError for an option that no encoder
    has. Reads no tensor."""
    for name, plain in _PLAIN.items():
        if getattr(config, name) != plain:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} is not for encoders, such as this model", field=name)
    if config.model_impl == "lean":
        raise ModelRefused("the lean route serves no encoders", field="model_impl")
    with named_refusals(values):
        return _class_of(values)


def _class_of(values: dict[str, Any]) -> tuple[Any, Any]:
    if values.get("quantization_config"):
        raise ModelRefused("quantized encoders are not served")
    kind = values.get("position_embedding_type", "absolute")
    if kind not in ("absolute", "rotary", "rope"):
        raise ModelRefused(f"position_embedding_type {kind} is not what transformers computes")
    own: Any = CONFIG_MAPPING[values["model_type"]].from_dict(values)
    named = str((values.get("architectures") or [""])[0])
    known = getattr(transformers, named, None) if named else MODEL_MAPPING[type(own)]
    if known is None or getattr(known, "config_class", None) is not type(own):
        raise ModelRefused(
            f"it is no class of transformers' {values['model_type']} (code from checkpoints is "
            "never run)"
        )
    if named.endswith(_CLASSIFIER):
        return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(own)], own
    if named and not named.endswith(_HEADLESS):
        raise ModelRefused(
            f"of encoders ...{', ...'.join((*_HEADLESS, _CLASSIFIER))} are served, of "
            f"{', '.join(FAMILIES)}"
        )
    return MODEL_MAPPING[type(own)], own


@torch.inference_mode()
def load_encoder(config: EngineConfig) -> Encoder:
    """Load `config.model`, an encoder. Raises ModelRefused, ConfigError."""
    checkpoint = open_checkpoint(config.model)
    family, own = refuse(checkpoint.config, config)
    files = sentence_files(checkpoint.path)
    assert files is not None, "the caller has asked is_encoder"
    device, dtype_name = choose_device(config.device), choose_dtype(config.dtype, checkpoint.config)
    with named_refusals(checkpoint.config):
        model = _read(checkpoint, family, own, DTYPES[dtype_name])
        model.requires_grad_(False).eval().to(device)
        maker = VectorMaker(files, own.hidden_size, device)
        limit = choose_length(config.max_model_len, _longest(own, files))
        forward = _checked(model, files, limit)
    info = ModelInfo(
        name=config.model_name,
        digest=_digest(checkpoint),
        layers=(NO_KV,),
        rope="none",
        vocab_size=own.vocab_size,
        max_model_len=limit,
        eos_token_ids=(),
        kv_dtype=dtype_name,
        model_impl="transformers",
        generates=False,
        dtype=dtype_name,
        encodes=True,
    )
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    log.info(
        "loaded %s: encoder %s, %s on %s, %.1f MB of weights, up to %d tokens",
        info.name, files.family, dtype_name, device, num_bytes / 1e6, limit,
    )  # fmt: skip
    return Encoder(info, files, forward, maker)


def _read(checkpoint: Checkpoint, family: Any, own: Any, dtype: torch.dtype) -> Any:
    """Return transformers' model on the CPU; each tensor is read once. Raises ModelRefused for
    tensors that are missing or have another shape."""
    transformers_logging.disable_progress_bar()
    loaded: Any = family.from_pretrained(
        None,
        config=own,
        state_dict=open_tensors(checkpoint, dtype, torch.device("cpu")).lazy(),
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported below: its own error does not name them
    )
    model, loading = loaded
    classifies = family is MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(own)]
    missing = {
        name for name in loading["missing_keys"] if classifies or not name.startswith("pooler.")
    }  # no vector is made of the pooler
    incomplete = sorted(map(str, [*missing, *loading["mismatched_keys"]]))
    if incomplete:
        raise ModelRefused(f"tensors missing or of a wrong shape: {incomplete[:3]}")
    return model


def _longest(own: Any, files: SentenceFiles) -> int | None:
    """Return the most tokens of a text: the model's positions, or fewer if its files say so."""
    limit = position_limit(own.to_dict())
    if limit is not None and files.family in _BEHIND_PADDING:
        limit -= own.pad_token_id + 1
    known = [each for each in (limit, files.max_tokens) if each is not None]
    return min(known, default=None)


def _checked(model: Any, files: SentenceFiles, limit: int) -> EncoderForward:
    """Return the model over batches. Raises ModelRefused if texts of a batch, or of a packed row,
    change each other's results."""
    texts = _check_texts(model.config.vocab_size, limit)
    ids = [torch.tensor([text.ids], device=model.device) for text in texts]
    classes = [model(input_ids=each).logits[0] for each in ids] if files.labels else []
    states = [model.base_model(input_ids=each).last_hidden_state[0] for each in ids]
    forward = EncoderForward(model, packs=files.family in PACKED, tells_texts=files.tells_texts)
    _same(torch.cat(forward.hidden(texts)), torch.cat(states))
    if files.labels:
        _same(forward.logits(texts), torch.stack(classes))
    return forward


def _check_texts(vocab_size: int, limit: int) -> list[EncoderText]:
    draw = torch.Generator().manual_seed(0)
    lengths = [min(length, limit) for length in _CHECK_LENGTHS]
    return [
        EncoderText(torch.randint(vocab_size, (length,), generator=draw).tolist())
        for length in lengths
    ]


def _same(together: Tensor, alone: Tensor) -> None:
    """Raise ModelRefused if results of a batch are not those of its texts alone."""
    error = (together.float() - alone.float()).abs().mean() / alone.float().abs().mean()
    if not error <= _TOLERANCE[alone.dtype]:  # also true for NaN
        raise ModelRefused(f"its texts change each other (relative error {float(error):.1e})")


def _digest(checkpoint: Checkpoint) -> str:
    """Return a digest of the checkpoint with the files that decide about its vectors."""
    found = hashlib.sha256(digest(checkpoint).encode())
    for file in module_files(checkpoint.path):
        name = str(file.relative_to(checkpoint.path))
        found.update(json.dumps([name, hashlib.sha256(file.read_bytes()).hexdigest()]).encode())
    return found.hexdigest()
