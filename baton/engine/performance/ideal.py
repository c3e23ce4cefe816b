"""What a model needs, and how fast a machine could serve it at best: arithmetic, nothing runs.

    weights   parameters x bytes each          KV       bytes per token x tokens
    TTFT      tokens x 2 x active parameters / FLOP/s       (prefill computes)
    TPOT      bytes read per step / bandwidth               (decode reads weights once for the
              whole batch, and the KV of every request; of an MoE the experts that the batch is
              expected to use); or the time to compute the batch, if that is longer
    MBU       bytes read per step / (measured TPOT x bandwidth): the share of the ideal reached
With tensor parallelism all numbers are per device, without communication. No machine reaches these
ideal numbers. Not here: the command and its table (estimate.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from baton.engine.config import QUANTIZATIONS, head_quantization, parse_bytes
from baton.engine.loading.model_shape import ModelShape
from baton.engine.loading.stored_weights import StoredWeights
from baton.engine.memory.layer_groups import MIN_BLOCKS, LayerGroups, group_layers
from baton.engine.memory.state_sizes import (
    ALIGNMENT,
    checkpoints_within,
    sequences_within,
    slot_bytes,
    slots_per_sequence,
    slots_within,
)
from baton.engine.performance.device_share import DeviceShare, kv_token_bytes, per_device
from baton.engine.performance.units import parse_rate, parse_seconds
from baton.protocol.errors import ConfigError
from baton.protocol.kv_spec import DTYPE_BYTES, LayerSpec
from baton.runtime.config import option

WEIGHT_BYTES: Final = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
QUANTIZED: Final = {
    **{name: StoredWeights(name, 8) for name in ("int8", "w8a8", "fp8")},
    **{name: StoredWeights(name, 4, 64) for name in ("int4", "w4a8")},
}
DEFAULT_CONTEXT: Final = 4096
DEFAULT_PROMPT: Final = 1024


@dataclass(frozen=True, slots=True)
class EstimateOptions:
    """The flags of `baton estimate`. Without the machine's numbers its times are not estimated."""

    model: Path = option(help="directory of a checkpoint, or a config.json alone")
    speculative_model: Path | None = option(
        None, "a draft model or head that shares the memory: its directory, or its config.json"
    )
    speculative_method: str = option(
        "draft",
        "what --speculative-model is, or the model's own layer that drafts (mtp)",
        choices=("draft", "mtp", "eagle3"),
    )
    memory: str | None = option(None, "memory of one device, as in 80GB")
    bandwidth: str | None = option(None, "its memory bandwidth, as in 3.3TB/s")
    flops: str | None = option(None, "its dense FLOP/s in the dtype used, as in 990T")
    dtype: str = option("auto", "data type of weights", choices=("auto", *WEIGHT_BYTES))
    quantization: str = option("none", "rounded or stored as", choices=QUANTIZATIONS, also=("-q",))
    lm_head_quantization: str = option(
        "auto", "round the head to (auto: as an engine would)", choices=("auto", "none", *QUANTIZED)
    )
    kv_cache_dtype: str = option("auto", "data type of KV", choices=("auto", *DTYPE_BYTES))
    tensor_parallel_size: int = option(1, "devices that share every layer")
    data_parallel_size: int = option(1, "ranks that share the experts of a mixture")
    enable_expert_parallel: bool = option(False, "each of them holds some experts whole")
    language_model_only: bool = option(False, "of a model that reads images, for text alone")
    gpu_memory_utilization: float = option(0.9, "share of memory for weights and KV together")
    block_size: int = option(16, "tokens per KV block")
    max_num_batched_tokens: int = option(2048, "most tokens that one step computes")
    max_num_seqs: int = option(64, "most requests that run at once")
    num_state_checkpoints: int | None = option(None, "recurrent states kept for prefixes")
    context: int | None = option(None, "tokens of a request in decode (default: 4096)")
    prompt: int | None = option(None, "tokens of a prompt in prefill (default: 1024)")
    batch: int = option(1, "requests in one decode step")
    measured_tpot: str | None = option(None, "as in 12ms: the MBU that this would be")
    json: bool = option(False, "print JSON instead of a table")

    def __post_init__(self) -> None:
        positive = (
            "tensor_parallel_size", "data_parallel_size", "block_size", "max_num_batched_tokens",
            "max_num_seqs", "context", "prompt", "batch",
        )  # fmt: skip
        for name in positive:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}", field=name)
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                "gpu_memory_utilization must be above 0 and at most 1",
                field="gpu_memory_utilization",
            )

    @property
    def speculates(self) -> bool:
        """Whether a draft model, or a draft head, is asked for."""
        return self.speculative_model is not None or self.speculative_method == "mtp"


@dataclass(frozen=True, slots=True)
class Decode:
    """One ideal decode step of `batch` requests with the given context, on each device."""

    batch: int
    weight_bytes: int
    kv_bytes: int
    tpot_s: float
    bound: str  # "memory" or "compute"

    @property
    def bytes_read(self) -> int:
        return self.weight_bytes + self.kv_bytes


@dataclass(frozen=True, slots=True)
class Estimate:
    """All numbers, in bytes and seconds; None where the machine is not known. Memory is per
    device.
    """

    model_type: str
    note: str
    parameters: int
    active_parameters: int
    dtype: str
    quantization: str | None
    lm_head_quantization: str | None
    kv_cache_dtype: str
    tensor_parallel_size: int
    data_parallel_size: int
    weight_bytes: int
    stored_bytes: int | None  # in the checkpoint's files; None without files
    kv_bytes_per_token: int
    block_size: int
    block_bytes: int
    context: int
    prompt: int
    activation_bytes: int
    kv_bytes: int | None = None  # what memory leaves for KV
    num_blocks: int | None = None
    kv_tokens: int | None = None
    concurrency: int | None = None  # requests of `context` tokens that fit at once
    ttft_s: float | None = None
    decode: tuple[Decode, ...] = ()
    mbu: float | None = None
    draft_weight_bytes: int = 0
    draft_kv_bytes_per_token: int = 0
    state_bytes: int = 0  # recurrent state of one sequence, on each device
    state_slots: int | None = None  # for which memory leaves room
    state_checkpoints: int | None = None  # the same, for the states of prefixes
    tower_bytes: int = 0  # of the weights: a vision tower's, which only the first rank has
    refused: str | None = None  # why Baton would refuse to serve it; None = it would serve it


@dataclass(frozen=True, slots=True)
class Precision:
    """How weights and KV are stored."""

    dtype: str
    stored: StoredWeights | None
    kv_dtype: str
    head: StoredWeights | None = None

    @property
    def matrix_bytes(self) -> float:
        """Of one number of what is narrow, if anything is."""
        return WEIGHT_BYTES[self.dtype] if self.stored is None else self.stored.bytes_per_weight

    def of_device(self, shape: ModelShape, num_bytes: int, options: EstimateOptions) -> int:
        """Of `num_bytes` of the model's weights what one tensor-parallel device has."""
        share = DeviceShare(
            shape, WEIGHT_BYTES[self.dtype], self.stored,
            options.tensor_parallel_size, options.enable_expert_parallel,
        )  # fmt: skip
        return share.num_bytes(num_bytes)

    def held_bytes(self, shape: ModelShape) -> int:
        """Return the bytes of all weights in memory.

        With tied embeddings a quantized head is a copy beside the embedding.
        """
        replaced = 0 if shape.tied else shape.embedding
        return int(self._plain_head(shape, shape.parameters) + self._head(shape, replaced))

    def read_bytes(self, shape: ModelShape) -> int:
        """Return the bytes of all weights that a step reads if it uses every expert."""
        read = self._plain_head(shape, shape.read_parameters)
        return int(read + self._head(shape, shape.embedding))

    def rank_bytes(self, shape: ModelShape, ranks: int) -> int:
        """Of all parameters that lie on one of so many data-parallel ranks."""
        elsewhere = 0 if shape.experts is None else shape.experts.parameters * (ranks - 1) // ranks
        return self.held_bytes(shape) - int(elsewhere * self.matrix_bytes)

    def _plain_head(self, shape: ModelShape, parameters: int) -> float:
        """Return the bytes of `parameters` of the model with a plain head; its matrices may be
        quantized.
        """
        plain = WEIGHT_BYTES[self.dtype]
        if self.stored is None:
            return parameters * plain
        narrow = shape.matrices - shape.plain
        if self.stored.only_experts:
            narrow = 0 if shape.experts is None else shape.experts.parameters - shape.experts.plain
        narrow = min(narrow, parameters)
        return (parameters - narrow) * plain + narrow * self.stored.bytes_per_weight

    def _head(self, shape: ModelShape, replaced: int) -> float:
        """Return the bytes that a quantized head adds, less those of `replaced` plain numbers."""
        if self.head is None:
            return 0.0
        rounded = shape.embedding * self.head.bytes_per_weight
        return rounded - replaced * WEIGHT_BYTES[self.dtype]


def estimate(
    shape: ModelShape,
    options: EstimateOptions,
    stored_bytes: int | None = None,
    draft: ModelShape | None = None,
) -> Estimate:
    """Compute everything that can be said of the model.

    `stored_bytes` (of the checkpoint's files) is passed on. `draft` (a draft model or head) shares
    the memory; times are those without it. Raises ConfigError for bad units or too little memory.
    """
    tp, dp = options.tensor_parallel_size, options.data_parallel_size
    precision = _precision(shape, options)
    specs = [per_device(spec, tp) for spec in shape.layers]
    token_bytes = _token_bytes(shape, precision, tp)
    drafts = _Drafts() if draft is None else _drafts(draft, options)
    longest = shape.max_positions
    context = options.context or _cut(DEFAULT_CONTEXT, longest)
    weight_bytes = precision.of_device(shape, precision.rank_bytes(shape, dp), options)
    activations = _activation_bytes(shape, options, precision)
    groups = group_layers(specs, precision.kv_dtype)
    least = ALIGNMENT if specs else 0  # an encoder keeps no KV
    block_bytes = max(least, groups.page_bytes(options.block_size, precision.kv_dtype))
    pool: dict[str, Any] = {}
    if options.memory is not None and not specs:  # only that it fits is asked
        _kv_memory(options, weight_bytes, activations, drafts.weights)
    elif options.memory is not None:
        activations = max(activations, drafts.activations)
        kv_bytes = _kv_memory(options, weight_bytes, activations, drafts.weights)
        groups = group_layers([*specs, *_head_layers(draft, options)], precision.kv_dtype)
        both = _page_bytes(groups, draft, options, precision)
        pool = _pool(groups, options, kv_bytes, both, context, precision.kv_dtype)
    result = Estimate(
        model_type=shape.model_type,
        note=_note(shape, precision),
        parameters=shape.parameters,
        active_parameters=shape.text_alone.active_parameters,
        dtype=precision.dtype,
        quantization=precision.stored.method if precision.stored else None,
        lm_head_quantization=precision.head.method if precision.head else None,
        kv_cache_dtype=precision.kv_dtype,
        tensor_parallel_size=tp,
        data_parallel_size=dp,
        weight_bytes=weight_bytes,
        stored_bytes=stored_bytes,
        kv_bytes_per_token=token_bytes,
        block_size=options.block_size,
        block_bytes=block_bytes,
        context=context,
        prompt=options.prompt or _cut(DEFAULT_PROMPT, longest),
        activation_bytes=activations,
        draft_weight_bytes=drafts.weights,
        draft_kv_bytes_per_token=drafts.token,
        state_bytes=slot_bytes(specs),
        tower_bytes=int(shape.tower * WEIGHT_BYTES[precision.dtype]),
        **pool,
    )
    return _with_times(result, shape.text_alone, options, precision)


def _head_layers(draft: ModelShape | None, options: EstimateOptions) -> list[LayerSpec]:
    """Return what one device stores of a draft head's layer; of a draft model, whose pool is its
    own, nothing."""
    if draft is None or options.speculative_method == "draft":
        return []
    return [per_device(spec, options.tensor_parallel_size) for spec in draft.layers]


def _page_bytes(
    groups: LayerGroups, draft: ModelShape | None, options: EstimateOptions, precision: Precision
) -> int:
    """Return the bytes of a page, and of a draft model's KV of as many tokens."""
    page = max(ALIGNMENT, groups.page_bytes(options.block_size, precision.kv_dtype))
    if draft is None or options.speculative_method != "draft":
        return page
    return page + _drafts(draft, options).token * options.block_size // groups.num_groups


def _pool(
    groups: LayerGroups,
    options: EstimateOptions,
    kv_bytes: int,
    block_bytes: int,
    context: int,
    kv_dtype: str,
) -> dict[str, Any]:
    """Return the fields of an Estimate that say what `kv_bytes` of memory hold."""
    speculates = options.speculates
    wanted = options.max_num_seqs * slots_per_sequence(speculates=speculates)
    slots = slots_within(kv_bytes, groups.layers, wanted)
    checkpoints = options.num_state_checkpoints
    if checkpoints is None or not slots:
        checkpoints = checkpoints_within(kv_bytes, groups.layers, kv_dtype)
    left = kv_bytes - (slots + checkpoints) * slot_bytes(groups.layers)
    num_blocks = _num_blocks(left, block_bytes, MIN_BLOCKS * groups.num_groups)
    concurrency = num_blocks // groups.blocks_held(context, options.block_size)
    if slots:
        concurrency = min(concurrency, sequences_within(slots, speculates=speculates))
    return {
        "kv_bytes": kv_bytes,
        "num_blocks": num_blocks,
        "kv_tokens": num_blocks // groups.num_groups * options.block_size,
        "concurrency": concurrency,
        "state_slots": slots,
        "state_checkpoints": checkpoints,
    }


def _with_times(
    result: Estimate, shape: ModelShape, options: EstimateOptions, precision: Precision
) -> Estimate:
    tp = result.tensor_parallel_size
    fields: dict[str, Any] = {}
    flops = None if options.flops is None else parse_rate(options.flops, "flops")
    if flops is not None:
        met = shape.active_parameters if shape.layers else shape.read_parameters
        fields["ttft_s"] = result.prompt * 2 * met / (flops * tp)
    if options.bandwidth is not None and shape.layers:
        bandwidth = parse_rate(options.bandwidth, "bandwidth")
        batches = sorted({options.batch, min(result.concurrency or 1, options.max_num_seqs) or 1})
        fields["decode"] = tuple(
            _decode(shape, precision, result, batch, (bandwidth, flops), options)
            for batch in batches
        )
        if options.measured_tpot is not None:
            step = next(each for each in fields["decode"] if each.batch == options.batch)
            seconds = parse_seconds(options.measured_tpot, "measured_tpot")
            fields["mbu"] = step.bytes_read / (seconds * bandwidth)
    return replace(result, **fields)


def _decode(
    shape: ModelShape,
    precision: Precision,
    result: Estimate,
    batch: int,
    rates: tuple[float, float | None],
    options: EstimateOptions,
) -> Decode:
    """Compute one ideal decode step.

    `rates` are the bandwidth in bytes per second and the FLOP/s (None if unknown), both of one
    device. Of data-parallel ranks each has a batch of its own; its experts meet the rows of all.
    """
    tp, dp = result.tensor_parallel_size, result.data_parallel_size
    met = shape.read_parameters
    if shape.experts is not None:
        missed = 1 - shape.experts.share_met(batch * dp) / dp
        met -= int(shape.experts.parameters * missed)
    weight_bytes = precision.of_device(shape, _read_bytes(shape, precision, met), options)
    kv_bytes = batch * sum(
        min(result.context, spec.window or result.context)
        * kv_token_bytes(per_device(spec, tp), precision.kv_dtype)
        for spec in shape.layers
    )
    kv_bytes += batch * result.state_bytes
    bandwidth, flops = rates
    reading = (weight_bytes + kv_bytes) / bandwidth
    computing = 0.0 if flops is None else batch * 2 * shape.active_parameters / (flops * tp)
    bound = "memory" if reading >= computing else "compute"
    return Decode(batch, weight_bytes, kv_bytes, max(reading, computing), bound)


def _read_bytes(shape: ModelShape, precision: Precision, met: int) -> int:
    """Return the bytes of `met` parameters; those that are not met are matrices of experts."""
    everything = precision.read_bytes(shape)
    missed = shape.read_parameters - met
    return everything - int(missed * precision.matrix_bytes)


# ---- parts ----


def _token_bytes(shape: ModelShape, precision: Precision, tp: int) -> int:
    specs = (per_device(spec, tp) for spec in shape.layers)
    return sum(kv_token_bytes(spec, precision.kv_dtype) for spec in specs)


@dataclass(frozen=True, slots=True)
class _Drafts:
    """What a draft model takes on each device.

    `weights` are its bytes of weights, `token` the bytes of KV per token, `activations` the peak
    bytes of a step.
    """

    weights: int = 0
    token: int = 0
    activations: int = 0


def _drafts(shape: ModelShape, options: EstimateOptions) -> _Drafts:
    tp = options.tensor_parallel_size
    precision = _precision(shape, options)
    return _Drafts(
        precision.of_device(shape, precision.held_bytes(shape), options),
        _token_bytes(shape, precision, tp),
        _activation_bytes(shape, options, precision),
    )


def _note(shape: ModelShape, precision: Precision) -> str:
    """Return a remark on what is uncertain, and on weights that are widened when they are read."""
    if shape.stored is None or not shape.stored.widened:
        return shape.note
    kept = precision.dtype if precision.stored is None else precision.stored.method
    read = f"weights are stored as {shape.stored.method}, read and kept as {kept}"
    return f"{shape.note}; {read}" if shape.note else read


def _precision(shape: ModelShape, options: EstimateOptions) -> Precision:
    dtype = shape.dtype if options.dtype == "auto" else options.dtype
    if dtype not in WEIGHT_BYTES:
        raise ConfigError(f"weights of dtype {dtype} are not known: set --dtype", field="dtype")
    stored, own_head, kept = shape.stored, None, False
    if stored is not None and stored.widened:
        kept = options.quantization not in ("widened", *QUANTIZED)
        if stored.if_multiplied:
            kept = options.quantization == "fp8"
        if stored.integers is not None and stored.integers.only_experts:
            kept = kept and dtype == "bfloat16"  # the dtype of the kernels for 4-bit floats
        stored, own_head = (stored.integers, stored.head) if kept else (None, None)
    if options.quantization in QUANTIZED and not kept:
        stored = QUANTIZED[options.quantization]
    kv_dtype = dtype if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
    head = head_quantization(options.lm_head_quantization, options.quantization)
    return Precision(dtype, stored, kv_dtype, own_head or QUANTIZED.get(head))


def _activation_bytes(shape: ModelShape, options: EstimateOptions, precision: Precision) -> int:
    """Guess the peak bytes of a full step.

    It counts hidden states and the widest layer for every token, logits and the sampler's copies
    for every request. A real start measures the peak (sizing.py).
    """
    per_token = 4 * shape.hidden_size + shape.widest // options.tensor_parallel_size
    steps = options.max_num_batched_tokens * per_token * WEIGHT_BYTES[precision.dtype]
    logits = options.max_num_seqs * shape.vocab_size * WEIGHT_BYTES["float32"]
    return int(steps + 3 * logits)


def _kv_memory(options: EstimateOptions, weight_bytes: int, activations: int, drafts: int) -> int:
    """Return the bytes left for KV; `drafts` are the bytes of a draft model's weights.

    Raises ConfigError if nothing is left.
    """
    total = parse_bytes(options.memory or "", field="memory")
    share = int(options.gpu_memory_utilization * total)
    left = share - weight_bytes - drafts - activations
    if left <= 0:
        draft = f", {_gb(drafts)} of the draft model's" if drafts else ""
        raise ConfigError(
            f"nothing is left for KV: {options.gpu_memory_utilization:g} x {options.memory} is "
            f"{_gb(share)}; {_gb(weight_bytes)} of weights{draft} and about {_gb(activations)} of "
            f"activations leave {_gb(left)}; "
            f"quantize, or raise {'data' if options.data_parallel_size > 1 else 'tensor'}"
            "_parallel_size",
            field="memory",
        )
    return left


def _num_blocks(kv_bytes: int, block_bytes: int, least: int) -> int:
    """Return how many blocks fit. Raises ConfigError for fewer than `least`."""
    if kv_bytes < least * block_bytes:
        raise ConfigError(
            f"{_gb(kv_bytes)} are left for KV, less than the {least} blocks of {block_bytes:,} "
            "bytes that serving takes",
            field="memory",
        )
    return kv_bytes // block_bytes


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


def _cut(length: int, longest: int | None) -> int:
    return length if longest is None else min(length, longest)
