"""From a configuration to a model that can run: open, refuse or build, describe.

    open_checkpoint -> device, dtype, length -> models/decoder.py | models/universal.py ->
    LoadedModel

The lean route is taken when every config key and every tensor name is understood; else the
universal one, which refuses by name what it cannot serve. transformers is imported only for the
latter.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from baton.engine.attention.base import AttentionLayer
from baton.engine.batch import Batch
from baton.engine.checkpoint import Checkpoint, TensorReader, digest, open_checkpoint
from baton.engine.config import EngineConfig
from baton.engine.interface import ModelInfo
from baton.engine.linear import choose_linear
from baton.engine.models.config import DecoderConfig, NotLean, decoder_config
from baton.engine.models.decoder import Decoder, tensor_names
from baton.engine.models.rope import rope_rule
from baton.errors import ConfigError, ModelRefused
from baton.kv_spec import LayerSpec

logger = logging.getLogger(__name__)

_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_LENGTH_KEYS: Final = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")


class CausalModel(Protocol):
    """What both routes offer. Both own weights only; KV comes with the batch."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        ...

    @property
    def max_positions(self) -> int | None:
        """Positions the model was made for; None if it does not say."""
        ...

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """What each layer stores per token."""
        ...

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """How each layer attends."""
        ...

    def forward(self, token_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """token_ids [T], positions [T] int64 -> hidden [T, H]; writes the batch's KV."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> [N, vocab] float32."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory. `weight_bytes` counts its parameters once, in their storage dtype."""

    info: ModelInfo
    model: CausalModel
    device: torch.device
    dtype: torch.dtype
    weight_bytes: int

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """How each layer attends."""
        return self.model.attention_layers

    def forward(self, token_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """See CausalModel.forward."""
        return self.model.forward(token_ids, positions, batch)

    def logits(self, hidden: Tensor) -> Tensor:
        """See CausalModel.logits."""
        return self.model.logits(hidden)


def load_model(config: EngineConfig) -> LoadedModel:
    """Load `config.model`.

    Raises ModelRefused for a checkpoint that cannot be served, ConfigError for a configuration that
    the model or the machine cannot meet.
    """
    checkpoint = open_checkpoint(config.model)
    _refuse(checkpoint)
    device = choose_device(config.device)
    dtype_name = choose_dtype(config.dtype, checkpoint)
    dtype = _DTYPES[dtype_name]
    stated = next(
        (checkpoint.text_config[k] for k in _LENGTH_KEYS if k in checkpoint.text_config), None
    )
    if stated is not None:  # refuse before reading gigabytes
        _max_model_len(config.max_model_len, stated)
    impl, model, weight_bytes = _build(config.model_impl, checkpoint, dtype, device)
    max_model_len = _max_model_len(config.max_model_len, stated or model.max_positions)
    rule = rope_rule(checkpoint.text_config)
    info = ModelInfo(
        name=config.model_name,
        digest=digest(checkpoint),
        layers=model.layers,
        rope=rule.text if rule else "none",
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=checkpoint.eos_token_ids,
        kv_dtype=dtype_name,
        model_impl=impl,
    )
    logger.info(
        "loaded %s: %s route, %s on %s, %d layers, %.1f MB of weights, up to %d tokens",
        info.name, impl, dtype_name, device, len(info.layers), weight_bytes / 1e6, max_model_len,
    )  # fmt: skip
    return LoadedModel(info, model, device, dtype, weight_bytes)


def choose_device(name: str) -> torch.device:
    """The device of "auto", "cpu" or "cuda". Raises ConfigError for CUDA without a usable GPU."""
    available = torch.cuda.is_available() if name != "cpu" else False
    if name == "cuda" and not available:
        raise ConfigError("device is cuda, but torch sees no GPU", field="device")
    return torch.device("cuda" if available else "cpu")


def choose_dtype(name: str, checkpoint: Checkpoint) -> str:
    """The configured dtype, for "auto" the checkpoint's own (float32 if it does not say)."""
    if name != "auto":
        return name
    for config in (checkpoint.text_config, checkpoint.config):
        value = config.get("dtype") or config.get("torch_dtype")
        if value is not None:
            stored = str(value).removeprefix("torch.")
            if stored not in _DTYPES:
                raise ModelRefused(f"weights of dtype {stored} are not served", field="dtype")
            return stored
    return "float32"


def _refuse(checkpoint: Checkpoint) -> None:
    """Raise ModelRefused for what neither route serves, before any weight is read."""
    if "quantization_config" in checkpoint.config:
        method = checkpoint.config["quantization_config"].get("quant_method", "unknown")
        raise ModelRefused(
            f"quantized checkpoints ({method}) are not served: use the unquantized one",
            field="model",
        )
    if checkpoint.config.get("is_encoder_decoder"):
        raise ModelRefused(
            f"{checkpoint.model_type} is an encoder-decoder model; only decoders are served",
            field="model",
        )


def _max_model_len(requested: int | None, known: int | None) -> int:
    """Tokens of prompt plus output. Raises ConfigError for more than the model knows."""
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


def _build(
    impl: str, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> tuple[str, CausalModel, int]:
    """(route taken, model, bytes of its weights). `impl` is auto, lean or transformers."""
    if impl != "transformers":
        reader = TensorReader(checkpoint, dtype, device)
        try:
            config = _lean_config(checkpoint, reader)
        except NotLean as reason:
            if impl == "lean":
                raise ModelRefused(
                    f"the lean route cannot serve {checkpoint.path}: {reason}", field="model_impl"
                ) from reason
            logger.info("universal route for %s: %s", checkpoint.path, reason)
        else:
            sizes: dict[str, int] = {}

            def read(name: str) -> Tensor:
                tensor = reader.read(name)
                sizes[name] = tensor.nbytes
                return tensor

            decoder = Decoder(config, read, choose_linear(dtype, device))
            return "lean", decoder, sum(sizes.values())
    return _build_universal(checkpoint, dtype, device)


def _lean_config(checkpoint: Checkpoint, reader: TensorReader) -> DecoderConfig:
    """The decoder's config. Raises NotLean also if tensors are missing or unknown."""
    config = decoder_config(checkpoint.config)
    expected = set(tensor_names(config))
    missing = sorted(expected - reader.names)
    ignored = {"lm_head.weight"} if config.tied_embeddings else set[str]()
    extra = {name for name in reader.names - expected if not name.endswith("rotary_emb.inv_freq")}
    unknown = sorted(extra - ignored)
    if missing or unknown:
        raise NotLean(f"tensors missing: {missing[:3]}, not understood: {unknown[:3]}")
    return config


def _build_universal(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> tuple[str, CausalModel, int]:
    # Imported here: transformers takes seconds, and the lean route must start without it.
    from baton.engine.models.universal import load_universal

    model: Any = load_universal(checkpoint.path, checkpoint.config, dtype, device)
    return "transformers", model, model.weight_bytes
