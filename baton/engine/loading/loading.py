"""From a configuration to a model that can run: open, refuse or build, describe.

    open_checkpoint -> choose_route -> models/decoder.py | models/universal.py -> LoRA adapters
    -> LoadedModel

The lean route serves a checkpoint if it understands every config key and every tensor name.
Otherwise the universal route does, or refuses it with the reason. transformers is imported only for
the universal route.
"""

from __future__ import annotations

import hashlib
import logging
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from baton.engine.checkpoint.checkpoint import Checkpoint, digest, open_checkpoint, parse_modules
from baton.engine.checkpoint.kinds import widened_kind
from baton.engine.checkpoint.seeing import as_served, family_of, processor_digest
from baton.engine.checkpoint.shared_weights import (
    Shared,
    WeightsKey,
    WeightSource,
    WeightsPart,
    shared_file,
    shared_weights,
)
from baton.engine.checkpoint.weight_folder import LEAST_BYTES, WeightCache
from baton.engine.checkpoint.weights import Share, Weights, open_weights
from baton.engine.checkpoint.widening import open_tensors
from baton.engine.config import EngineConfig
from baton.engine.kernels.rope import position_limit, rope_rule
from baton.engine.loading.eagle3 import read_eagle3_head
from baton.engine.loading.route import (
    DTYPES,
    HEAD_METHODS,
    choose_dtype,
    choose_length,
    choose_route,
    classifies,
    head_scheme,
    kept_as,
    leave_lean,
)
from baton.engine.memory.state_sizes import slot_bytes
from baton.engine.models.base import CausalModel
from baton.engine.models.config import DecoderConfig
from baton.engine.models.decoder import Decoder
from baton.engine.models.deterministic import FixedTiles, prove
from baton.engine.models.draft_heads import DraftHead, mtp_config, read_mtp_head
from baton.engine.models.families.keys import NotLean
from baton.engine.models.layers.building import BuildLayers, in_threads, in_turn
from baton.engine.models.lora import read_adapter
from baton.engine.models.tensor_names import is_extra_layer, tensor_names
from baton.engine.quantization.integer import SCHEMES
from baton.engine.state.attention import AttentionLayer
from baton.engine.state.batch import Batch
from baton.engine.state.interface import ModelInfo
from baton.engine.state.place import choose_device
from baton.protocol.errors import ConfigError, ModelRefused
from baton.runtime.cores import parse_cores

if TYPE_CHECKING:  # lazy at run time: most engines have one rank
    from baton.engine.parallel.data_rank import DataRank
    from baton.engine.parallel.group import RankGroup
    from baton.engine.parallel.lockstep import Lockstep
    from baton.engine.parallel.ranks import Ranks
    from baton.engine.parallel.sharding import Cuts
    from baton.engine.vision.images import Images

logger = logging.getLogger(__name__)

CLASSIFIER: Final = "score.weight"
ALONE: Final = (
    "data_parallel_size is for nodes (baton prefill, baton decode, baton up); an engine in one "
    "process has one rank"
)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory. `weight_bytes` counts its parameters once, in their storage dtype.

    `deterministic`: the model needs attention with a fixed order of sums (attention/choice.py).
    `ranks`: the ranks that hold the other shares of this model; None = it is whole, or a share
    itself. `lockstep`: set on a data-parallel rank, whose forwards run together with those of the
    other ranks.
    """

    info: ModelInfo
    model: CausalModel
    device: torch.device
    dtype: torch.dtype
    weight_bytes: int
    deterministic: bool = False
    ranks: Ranks | None = None
    rounded_head_bytes: int = 0  # the part of weight_bytes that is a head of integers
    classifier: Tensor | None = None  # [classes, H] in place of a head for tokens
    lockstep: Lockstep | None = None
    head: DraftHead | None = None  # its layer is the last one of info.layers
    images: Images | None = None  # of a model that reads images

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """How each layer attends, the draft head's included."""
        own = () if self.head is None else self.head.config.attention_layers
        return (*self.model.attention_layers, *own)

    def forward(self, token_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """See CausalModel.forward."""
        return self.model.forward(token_ids, positions, batch)

    def logits(self, hidden: Tensor) -> Tensor:
        """See CausalModel.logits."""
        return self.model.logits(hidden)


def load_model(
    config: EngineConfig, group: RankGroup | None = None, data: DataRank | None = None
) -> LoadedModel:
    """Load `config.model`. `group`: load the share of this tensor-parallel rank; None = start all
    ranks if the configuration asks for several. `data`: this rank of a data-parallel group.

    Raises ModelRefused for a checkpoint that cannot be served, ConfigError for a configuration that
    the model or the machine cannot meet.
    """
    checkpoint = as_served(open_checkpoint(config.model), config)
    lean = choose_route(checkpoint.config, config)
    if config.data_parallel_size > 1 and data is None:
        raise ConfigError(ALONE, field="data_parallel_size")
    if config.tensor_parallel_size > 1 and group is None:
        from baton.engine.loading.leader import load_leader

        return load_leader(config)
    modules = parse_modules(config.lora_modules)
    device = choose_device(config.device)
    dtype_name = choose_dtype(config.dtype, checkpoint.config)
    dtype = DTYPES[dtype_name]
    built = _build(config, checkpoint, lean, Placement(dtype, device, group, data))
    model, weight_bytes, is_lean = built.model, built.weight_bytes, built.impl == "lean"
    stated = position_limit(checkpoint.text_config)
    max_model_len = choose_length(config.max_model_len, stated or model.max_positions)
    adapters = [read_adapter(name, path, dtype, device) for name, path in modules.items()]
    for adapter in adapters:
        model.add_adapter(adapter)
        weight_bytes += adapter.num_bytes
    rule = rope_rule(checkpoint.text_config)
    info = ModelInfo(
        name=config.model_name,
        digest=model_digest(checkpoint, config, lean=is_lean),
        layers=(*model.layers, *(() if built.head is None else built.head.layers)),
        rope=rule.text if rule else "none",
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=checkpoint.eos_token_ids,
        kv_dtype=dtype_name if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        model_impl=built.impl,
        adapters=tuple(adapter.id for adapter in adapters),
        generates=built.classifier is None,
        dtype=dtype_name,
        sees=built.images is not None,
        outputs_differ=built.outputs_differ,
    )
    read_as = _read_as(checkpoint, config, lean=is_lean)
    logger.info(
        "loaded %s: %s route, %s%s on %s, %d layers, %.1f MB of weights, up to %d tokens",
        info.name, built.impl, dtype_name, f" ({read_as})" if read_as else "", device,
        len(info.layers), weight_bytes / 1e6, max_model_len,
    )  # fmt: skip
    if isinstance(model, FixedTiles):
        prove(model, info, device)
    return LoadedModel(
        info, model, device, dtype, weight_bytes, config.deterministic,
        rounded_head_bytes=built.rounded_head_bytes, classifier=built.classifier,
        lockstep=None if data is None else data.lockstep, head=built.head, images=built.images,
    )  # fmt: skip


def _read_as(checkpoint: Checkpoint, config: EngineConfig, *, lean: bool) -> str:
    """Return how quantized weights were read: widened, or as integers or products of the format
    that is named. "" for integers that are kept in the form in which they are stored."""
    quantized = checkpoint.config.get("quantization_config")
    kind = widened_kind(quantized)
    if quantized is None or (kind is None and lean):
        return ""
    if kind is None:
        return f"widened integers of {quantized['quant_method']}"
    kept = kept_as(kind, quantized, config) if lean else None
    return f"widened {kind}" if kept is None else f"{kept} of {kind}"


def model_digest(checkpoint: Checkpoint, config: EngineConfig, *, lean: bool = True) -> str:
    """Return a digest of the checkpoint and of how its weights were read and rounded. `lean`: by
    the lean route.

    Adapters are not in it, as they may change. An adapter's id depends on its contents, and KV is
    bound to the id.
    """
    base = digest(checkpoint)
    named: list[str] = []
    if read_as := _read_as(checkpoint, config, lean=lean):
        named.append(read_as)
    if config.quantization in SCHEMES:
        named.append(f"quantization {config.quantization}")
    if family_of(checkpoint.config) is not None:
        named.append(f"images {processor_digest(checkpoint.path)}")
    if config.lm_head_quantization != "auto":
        named.append(f"head {config.lm_head_quantization}")
    if config.speculative_method in HEAD_METHODS:  # its KV is one more layer
        of = config.speculative_model
        own = digest(open_checkpoint(of, has_tokenizer=False)) if of else ""
        named.append(f"draft head {config.speculative_method} {own}")
    if not named:
        return base
    return hashlib.sha256("\n".join([base, *named]).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class _Built:
    """A model and the route that built it (`impl`). For the other fields see LoadedModel."""

    impl: str
    model: CausalModel
    weight_bytes: int
    rounded_head_bytes: int = 0
    classifier: Tensor | None = None
    head: DraftHead | None = None
    images: Images | None = None
    outputs_differ: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """The dtype and device of a model, and its rank in a group; see load_model."""

    dtype: torch.dtype
    device: torch.device
    group: RankGroup | None
    data: DataRank | None


def _build(
    config: EngineConfig, checkpoint: Checkpoint, lean: DecoderConfig | None, at: Placement
) -> _Built:
    """Build the model. `lean`: what choose_route returned. If the tensors' names do not fit it, the
    universal route builds the model; or ModelRefused is raised if only the lean route could."""
    dtype, device, group = at.dtype, at.device, at.group
    if lean is not None:
        quantized = checkpoint.config.get("quantization_config")
        scheme = next((each for each in SCHEMES if each == config.quantization), None)
        reader = open_tensors(
            checkpoint,
            dtype,
            device,
            prefix=lean.prefix,
            unstacked=None if lean.experts is None else lean.experts.stacked,
            kept=config.quantization == "none",
        )
        share = None if group is None else _share(config, lean, group)
        weights = open_weights(reader, quantized, scheme, device, head_scheme(config), share)
        try:
            _check_names(lean, weights.names, checkpoint.config)
        except NotLean as reason:
            leave_lean(checkpoint.config, config, str(reason))
        else:
            built = _build_lean(config, checkpoint, lean, weights, at)
            if not classifies(checkpoint.config):
                return built
            return replace(built, classifier=weights.tensor(CLASSIFIER))
    return _build_universal(config, checkpoint, at)


def _check_names(config: DecoderConfig, names: frozenset[str], values: dict[str, Any]) -> None:
    """Raise NotLean if tensors are missing or unknown."""
    expected = set(tensor_names(config)) | ({CLASSIFIER} if classifies(values) else set())
    missing = sorted(expected - names)
    ignored = {"lm_head.weight"} if config.tied_embeddings else set[str]()
    extra = {name for name in names - expected if not name.endswith("rotary_emb.inv_freq")}
    extra = {name for name in extra if not is_extra_layer(config, name)}
    unknown = sorted(extra - ignored)
    if missing or unknown:
        raise NotLean(f"tensors missing: {missing[:3]}, not understood: {unknown[:3]}")


def _cuts(config: EngineConfig, lean: DecoderConfig, group: RankGroup) -> Cuts:
    """Return how the whole model's products are cut for this rank."""
    from baton.engine.parallel.sharding import Cuts

    return Cuts(lean, group.place, config.enable_expert_parallel)


def _share(config: EngineConfig, lean: DecoderConfig, group: RankGroup) -> Share:
    """Return what cuts weights to this rank's share."""
    from baton.engine.parallel.sharding import RankShare

    return RankShare(_cuts(config, lean, group), group)


def _build_lean(
    config: EngineConfig,
    checkpoint: Checkpoint,
    lean: DecoderConfig,
    weights: Weights,
    at: Placement,
) -> _Built:
    if at.data is not None:
        return _build_data_rank(config, checkpoint, lean, weights, at)
    head: DraftHead | None = None
    own = 0  # bytes of a head with a checkpoint of its own
    with _once_per_host(config, checkpoint, weights, at) as source:
        if at.group is not None:  # this rank's share
            from baton.engine.parallel.rank import RankModel

            cuts = _cuts(config, lean, at.group)
            model: CausalModel = RankModel.of(cuts, source, at.group)
            decoder, part = model.decoder, cuts.own
        else:
            build = layer_builder(config, source)
            fixed = config.deterministic
            decoder, part = Decoder(lean, source.tensor, source, fixed, build=build), lean
            if config.deterministic:
                _refuse_states(decoder)
            model = FixedTiles(decoder) if config.deterministic else decoder
        if config.speculative_method == "mtp":
            layers = mtp_config(lean).layers
            head = read_mtp_head(part, decoder, source, weights.names, layers)
        elif config.speculative_method == "eagle3":
            head, own = read_eagle3_head(config, lean, decoder, at.group)
    num_bytes = source.num_bytes + own
    return _Built("lean", model, num_bytes, source.rounded_head_bytes, head=head)


def layer_builder(config: EngineConfig, source: WeightSource) -> BuildLayers:
    """Return what builds the layers whose weights come from `source`: one after the other, unless
    `source` writes them to a file."""
    cores = os.sched_getaffinity(0)
    if config.spare_cores is not None:
        cores = cores | set(parse_cores(config.spare_cores, "spare_cores"))
    writes = isinstance(source, Shared) and source.writes
    return partial(in_threads, cores) if writes and len(cores) > 1 else in_turn


def _refuse_states(model: CausalModel) -> None:
    """Raise ModelRefused for a model whose results --deterministic cannot fix."""
    if slot_bytes(model.layers):
        raise ModelRefused(
            "deterministic: a recurrent state depends on how the prompt is cut into steps",
            field="deterministic",
        )


def _build_data_rank(
    config: EngineConfig,
    checkpoint: Checkpoint,
    lean: DecoderConfig,
    weights: Weights,
    at: Placement,
) -> _Built:
    """Build a data-parallel rank's model, from a file of the weights that all ranks have and from
    one of its own experts."""
    from baton.engine.parallel.data_weights import DenseWeights, RankWeights

    assert at.data is not None
    with _once_per_host(config, checkpoint, weights, at, WeightsPart.DENSE) as source:
        dense = DenseWeights.of(lean, source)
    experts = weights.counting_anew()
    with _once_per_host(config, checkpoint, experts, at, WeightsPart.ROUTED) as source:
        own = RankWeights(dense, source)
        model = at.data.model(lean, own)
    return _Built("lean", model, own.num_bytes, own.rounded_head_bytes)


def _once_per_host(
    config: EngineConfig,
    checkpoint: Checkpoint,
    weights: Weights,
    at: Placement,
    part: WeightsPart = WeightsPart.ALL,
) -> AbstractContextManager[WeightSource]:
    """Return the weights to build from: shared with other processes of this host, or `weights`.
    `part`: what is read of them."""
    if not _shares(config, checkpoint, weights.device):
        return nullcontext(weights)
    key = WeightsKey(model_digest(checkpoint, config), weights.dtype, part=part)
    ranks = at.group if at.group is not None else at.data
    if ranks is not None and part != WeightsPart.DENSE:
        place, whole = ranks.place, config.enable_expert_parallel
        key = replace(key, rank=place.rank, num_ranks=place.size, whole_experts=whole)
    return shared_weights(weights, key, _cache(config, checkpoint), at.group)


def _shares(config: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> bool:
    """Whether configuration, device and size allow to share weights with other processes."""
    large = checkpoint.stored_bytes >= LEAST_BYTES
    return config.shared_weights and device.type == "cpu" and large


def _cache(config: EngineConfig, checkpoint: Checkpoint) -> WeightCache:
    """Return what the configuration keeps of shared weights for the next start."""
    asked = config.shared_weights_cache is not None
    return WeightCache(config.kept_weight_bytes, checkpoint.stored_bytes, asked)


def _build_universal(config: EngineConfig, checkpoint: Checkpoint, at: Placement) -> _Built:
    # Imported here: transformers takes seconds, and the lean route must start without it.
    from baton.engine.loading.universal import HowToLoad, load_universal
    from baton.engine.models.causal import ModelPart

    sees = family_of(checkpoint.config) is not None
    if config.deterministic and sees:
        raise ModelRefused(
            "deterministic: not with images (--language-model-only: text alone)",
            field="deterministic",
        )
    once = _shares(config, checkpoint, at.device)
    encodes = config.vision_tower and (at.group is None or at.group.place.leads)
    # A rank that encodes nothing reads no tower, unless it maps the file that the leader maps.
    blind = not config.vision_tower or not (encodes or once)
    part = ModelPart.TEXT if sees and blind else ModelPart.WHOLE
    shared = None
    if once:
        made_by = (
            f"{model_digest(checkpoint, config, lean=False)} transformers {version('transformers')}"
        )
        if part is not ModelPart.WHOLE:
            made_by += f" {part.value}"
        key = WeightsKey(made_by, at.dtype, part=WeightsPart.MODULES)
        shared = shared_file(key, _cache(config, checkpoint))
    how = HowToLoad(at.dtype, at.device, config.deterministic, shared, part, at.group)
    model = load_universal(checkpoint, how)
    if model.tower is not None:
        from baton.engine.vision.images import Images
        from baton.engine.vision.pixels import PixelReader

        reader = None
        if encodes:
            reader = PixelReader(checkpoint.path, model.tower.reading)
        images = Images(reader, model.tower, config.image_cache_bytes)
        return _Built("transformers", model, model.weight_bytes, images=images)
    if not config.deterministic:
        differ = model.outputs_differ
        return _Built("transformers", model, model.weight_bytes, outputs_differ=differ)
    _refuse_states(model)
    if model.has_index:
        raise ModelRefused(
            "deterministic: the scores of index keys have no fixed order of sums",
            field="deterministic",
        )
    tiles = FixedTiles(model, 1) if model.has_experts else FixedTiles(model)
    return _Built("transformers", tiles, model.weight_bytes)
