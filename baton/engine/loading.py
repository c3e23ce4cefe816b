"""From a configuration to a model that can run: open, refuse or build, describe.

    open_checkpoint -> device, dtype, length -> models/decoder.py | models/universal.py -> LoRA
    adapters -> LoadedModel

The lean route is taken when every config key and every tensor name is understood; else the
universal one, which refuses by name what it cannot serve. transformers is imported only for the
latter.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from baton.engine.attention.base import AttentionLayer
from baton.engine.batch import Batch
from baton.engine.checkpoint import Checkpoint, digest, open_checkpoint
from baton.engine.config import EngineConfig, head_quantization
from baton.engine.deterministic import FixedTiles, prove
from baton.engine.interface import ModelInfo
from baton.engine.lora import parse_modules, read_adapter
from baton.engine.models.base import CausalModel
from baton.engine.models.config import DecoderConfig, NotLean, decoder_config
from baton.engine.models.decoder import Decoder, tensor_names
from baton.engine.models.rope import position_limit, rope_rule
from baton.engine.quantization import SCHEMES, Scheme
from baton.engine.tensors import TensorReader
from baton.engine.weights import Weights, open_weights
from baton.errors import ConfigError, ModelRefused

if TYPE_CHECKING:  # lazy at run time: most engines have one rank
    from baton.engine.tensor_parallel.group import RankGroup
    from baton.engine.tensor_parallel.ranks import Ranks

logger = logging.getLogger(__name__)

CLASSIFIER: Final = "score.weight"
_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory. `weight_bytes` counts its parameters once, in their storage dtype.

    `deterministic`: it wants attention of a fixed order (attention/choice.py). `ranks`: those that
    hold its other shares; None = it is whole, or a share itself.
    """

    info: ModelInfo
    model: CausalModel
    device: torch.device
    dtype: torch.dtype
    weight_bytes: int
    deterministic: bool = False
    ranks: Ranks | None = None
    rounded_head_bytes: int = 0  # of them, a head of integers
    classifier: Tensor | None = None  # [classes, H] in place of a head for tokens

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


def load_model(config: EngineConfig, group: RankGroup | None = None) -> LoadedModel:
    """Load `config.model`: of several ranks, this one's share for `group`; None = start them all.

    Raises ModelRefused for a checkpoint that cannot be served, ConfigError for a configuration that
    the model or the machine cannot meet.
    """
    if config.tensor_parallel_size > 1 and group is None:
        from baton.engine.tensor_parallel.leader import load_leader

        return load_leader(config)
    checkpoint = open_checkpoint(config.model)
    _refuse(checkpoint)
    modules = parse_modules(config.lora_modules)
    device = choose_device(config.device)
    dtype_name = choose_dtype(config.dtype, checkpoint)
    dtype = _DTYPES[dtype_name]
    stated = position_limit(checkpoint.text_config)
    if stated is not None:  # refuse before reading gigabytes
        _max_model_len(config.max_model_len, stated)
    built = _build(config, checkpoint, dtype, device, group)
    model, weight_bytes = built.model, built.weight_bytes
    max_model_len = _max_model_len(config.max_model_len, stated or model.max_positions)
    adapters = [read_adapter(name, path, dtype, device) for name, path in modules.items()]
    for adapter in adapters:
        model.add_adapter(adapter)
        weight_bytes += adapter.num_bytes
    rule = rope_rule(checkpoint.text_config)
    info = ModelInfo(
        name=config.model_name,
        digest=_digest(checkpoint, config),
        layers=model.layers,
        rope=rule.text if rule else "none",
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=checkpoint.eos_token_ids,
        kv_dtype=dtype_name if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        model_impl=built.impl,
        adapters=tuple(adapter.id for adapter in adapters),
        generates=built.classifier is None,
    )
    logger.info(
        "loaded %s: %s route, %s on %s, %d layers, %.1f MB of weights, up to %d tokens",
        info.name, info.model_impl, dtype_name, device, len(info.layers), weight_bytes / 1e6,
        max_model_len,
    )  # fmt: skip
    if isinstance(model, FixedTiles):
        prove(model, info, device)
    return LoadedModel(
        info, model, device, dtype, weight_bytes, config.deterministic,
        rounded_head_bytes=built.rounded_head_bytes, classifier=built.classifier,
    )  # fmt: skip


def _digest(checkpoint: Checkpoint, config: EngineConfig) -> str:
    """The checkpoint's digest, bound to how its weights were rounded.

    Adapters come and go: their ids are bound to their contents, and KV to the id.
    """
    base = digest(checkpoint)
    named: list[str] = []
    if config.quantization != "none":
        named.append(f"quantization {config.quantization}")
    if config.lm_head_quantization != "auto":
        named.append(f"head {config.lm_head_quantization}")
    if not named:
        return base
    return hashlib.sha256("\n".join([base, *named]).encode()).hexdigest()


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


@dataclass(frozen=True, slots=True)
class _Built:
    """A model by the route that was taken; see LoadedModel."""

    impl: str
    model: CausalModel
    weight_bytes: int
    rounded_head_bytes: int = 0
    classifier: Tensor | None = None


def _rounds(config: EngineConfig) -> bool:
    """Whether any weights are to be rounded here."""
    return config.quantization != "none" or _head_scheme(config) is not None


def _head_scheme(config: EngineConfig) -> Scheme | None:
    asked = head_quantization(config.lm_head_quantization, config.quantization)
    return next((scheme for scheme in SCHEMES if scheme == asked), None)


def _build(
    config: EngineConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    group: RankGroup | None = None,
) -> _Built:
    if group is not None:
        return _build_rank(checkpoint, dtype, device, group)
    impl, quantized = config.model_impl, checkpoint.config.get("quantization_config")
    if impl != "transformers":
        reader = TensorReader(checkpoint.weight_files, dtype, device)
        scheme = None if config.quantization == "none" else config.quantization
        weights = open_weights(reader, quantized, scheme, device, _head_scheme(config))
        try:
            lean = _lean_config(checkpoint, weights)
            decoder = Decoder(lean, weights.tensor, weights, config.deterministic)
            model = FixedTiles(decoder) if config.deterministic else decoder
            classifier = weights.tensor(CLASSIFIER) if _classifies(checkpoint) else None
            rounded = weights.rounded_head_bytes
            return _Built("lean", model, weights.num_bytes, rounded, classifier)
        except NotLean as reason:
            if _classifies(checkpoint):
                raise ModelRefused(
                    f"only the lean route serves classifiers, and it cannot serve "
                    f"{checkpoint.path}: {reason}",
                    field="model",
                ) from reason
            if impl == "lean":
                raise ModelRefused(
                    f"the lean route cannot serve {checkpoint.path}: {reason}", field="model_impl"
                ) from reason
            logger.info("universal route for %s: %s", checkpoint.path, reason)
            if quantized is not None or _rounds(config):
                raise ModelRefused(
                    f"quantized weights are served by the lean route alone, and it cannot serve "
                    f"{checkpoint.path}: {reason}",
                    field="quantization",
                ) from reason
    elif _classifies(checkpoint):
        raise ModelRefused(
            "only the lean route serves classifiers, not model_impl transformers", field="model"
        )
    elif quantized is not None or _rounds(config):
        raise ModelRefused(
            "quantized weights are served by the lean route alone, not with model_impl "
            "transformers",
            field="quantization",
        )
    return _build_universal(checkpoint, dtype, device, config.deterministic)


def _build_rank(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, group: RankGroup
) -> _Built:
    """As _build, of one rank's share: the lean route with plain weights alone."""
    from baton.engine.tensor_parallel.rank import RankModel

    if checkpoint.config.get("quantization_config") is not None or _classifies(checkpoint):
        raise ModelRefused(
            "quantized weights and classifiers are not split over ranks yet",
            field="tensor_parallel_size",
        )
    reader = TensorReader(checkpoint.weight_files, dtype, device)
    weights = open_weights(reader, None, None, device)
    try:
        model = RankModel.of(_lean_config(checkpoint, weights), weights, group)
    except NotLean as reason:
        raise ModelRefused(
            f"only the lean route is split over ranks, and it cannot serve {checkpoint.path}: "
            f"{reason}",
            field="tensor_parallel_size",
        ) from reason
    return _Built("lean", model, model.weight_bytes)


def _lean_config(checkpoint: Checkpoint, weights: Weights) -> DecoderConfig:
    """The decoder's config. Raises NotLean also if tensors are missing or unknown."""
    plain = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    if _classifies(checkpoint):  # a decoder whose head, which nobody asks, is that of its words
        plain |= {"architectures": None, "tie_word_embeddings": True}
    config = decoder_config(plain)
    expected = set(tensor_names(config)) | ({CLASSIFIER} if _classifies(checkpoint) else set())
    missing = sorted(expected - weights.names)
    ignored = {"lm_head.weight"} if config.tied_embeddings else set[str]()
    extra = {name for name in weights.names - expected if not name.endswith("rotary_emb.inv_freq")}
    unknown = sorted(extra - ignored)
    if missing or unknown:
        raise NotLean(f"tensors missing: {missing[:3]}, not understood: {unknown[:3]}")
    return config


def _classifies(checkpoint: Checkpoint) -> bool:
    """Whether its head is one of classes, as transformers' sequence classifiers have it."""
    names: list[str] = checkpoint.config.get("architectures") or []
    return any(name.endswith("ForSequenceClassification") for name in names)


def _build_universal(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, deterministic: bool
) -> _Built:
    # Imported here: transformers takes seconds, and the lean route must start without it.
    from baton.engine.models.universal import load_universal

    model = load_universal(checkpoint, dtype, device, deterministic)
    if not deterministic:
        return _Built("transformers", model, model.weight_bytes)
    tiles = FixedTiles(model, 1) if model.has_experts else FixedTiles(model)
    return _Built("transformers", tiles, model.weight_bytes)
