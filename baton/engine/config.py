"""EngineConfig: the options of one engine, frozen; and the reading of memory sizes.

Not here: anything about networks or roles, whose configurations contain this one. Values that
depend on the model or the machine stay None here. `Engine` resolves them; engine.config holds the
resolved values.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from baton.protocol.errors import ConfigError
from baton.runtime.config import AUTO, option, spelled
from baton.runtime.cores import parse_cores

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
DeviceName = Literal["auto", "cpu", "cuda"]
ModelImpl = Literal["auto", "lean", "transformers"]
PreemptionMode = Literal["auto", "swap", "recompute"]
SpeculativeMethod = Literal["none", "ngram", "draft", "mtp", "eagle3"]
# "widened": integers of a GGUF file and 8-bit floats are not kept. Those behind it: as it is
# stored (checkpoint.py).
Quantization = Literal[
    "none", "int8", "w8a8", "int4", "w4a8", "widened", "compressed-tensors", "gptq", "awq", "gguf",
    "fp8", "fbgemm_fp8", "mxfp4", "modelopt", "bitsandbytes",
]  # fmt: skip
QUANTIZATIONS: Final = spelled(
    get_args(Quantization), awq_marlin="awq", gptq_marlin="gptq", modelopt_fp4="modelopt"
)
HeadQuantization = Literal["auto", "none", "int8", "w8a8", "int4", "w4a8"]
GuidedBackend = Literal["auto", "llguidance", "xgrammar"]
KVCacheDtype = Literal["auto", "int8", "fp8"]

# An 8-bit head adds almost nothing to the error of quantized layers. A 4-bit head adds a fifth to
# the error of 4-bit layers, and is most of the error beside others (docs/quantization.md).
AUTO_HEADS: Final = {"int8": "int8", "w8a8": "w8a8", "int4": "int8", "w4a8": "w8a8"}

# Measured on a CPU: paged decode attention was 6 % faster with blocks of 32 than with 16. GPU
# kernels prefer 16.
DEFAULT_BLOCK_SIZE: Final = {"cpu": 32, "cuda": 16}
USUAL_CHUNK: Final = 512  # prompt tokens of a row of an exact request
MAX_BLOCK_SIZE: Final = 1024

_UNITS: Final = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How one engine runs a model. Raises ConfigError for values that no engine could use."""

    model: str = option(help="directory of the checkpoint, or its Hugging Face hub id")
    served_model_name: tuple[str, ...] = option(
        (),
        "names in the API, the first is its own (default: the directory's name, or the hub id)",
        several=True,
    )
    dtype: DtypeName = option(
        "auto",
        "data type of weights and KV",
        choices=spelled(get_args(DtypeName), half="float16", float="float32"),
    )
    device: DeviceName = option("auto", "where the model runs", choices=get_args(DeviceName))
    model_impl: ModelImpl = option(
        "auto",
        "own decoder or transformers' modelling code",
        choices=spelled(get_args(ModelImpl), vllm="auto"),
    )
    tensor_parallel_size: int = option(
        1,
        "ranks that share every layer, a process each; on a CPU they share the node's cores",
        also=("-tp",),
    )
    data_parallel_size: int = option(
        1,
        "ranks with requests of their own that share the experts of a mixture, a node process each",
        also=("-dp",),
    )
    enable_expert_parallel: bool = option(
        False, "each rank of tensor_parallel_size holds some experts whole, not a slice of each"
    )
    quantization: Quantization = option(
        "none",
        "round the weights when loading (a quantized checkpoint says so itself); widened: a GGUF "
        "file's, and 8-bit floats, in the model's dtype",
        choices=QUANTIZATIONS,
        also=("-q",),
    )
    lm_head_quantization: HeadQuantization = option(
        "auto",
        "round the vocabulary head when loading (auto: to 8 bits, if the weights are rounded)",
        choices=get_args(HeadQuantization),
    )
    shared_weights: bool = option(
        True, "hold the weights once for all processes of this host that load the same ones (CPU)"
    )
    shared_weights_cache: str | None = option(
        None,
        "what shared weights that no process uses may take, on disk where that serves as well as "
        "memory: a size as in 8GB, the last used ones stay for the next start; auto: a quarter of "
        "the disk's free space (default: nothing; baton up: auto)",
    )
    kv_cache_dtype: KVCacheDtype = option(
        "auto",
        "how KV is stored: as computed, or rounded",
        choices=spelled(get_args(KVCacheDtype), fp8_e4m3="fp8"),
    )
    deterministic: bool = option(
        False, "a row's result depends on no batch mate, chunk or prefix hit, bit for bit (slower)"
    )
    max_model_len: int | None = option(
        None, "longest prompt plus output, tokens (default: model's)"
    )
    block_size: int | None = option(None, "tokens per KV block (default: 32 on CPU, 16 on GPU)")
    num_kv_blocks: int | None = option(
        None, "blocks in the KV pool (default: from memory)", also=("--num-gpu-blocks-override",)
    )
    kv_cache_memory: str | None = option(
        None, "size of the KV pool, as in 512MB or 4GiB (a draft model's KV included)"
    )
    gpu_memory_utilization: float = option(0.9, "share of GPU memory for weights and KV together")
    max_num_seqs: int = option(64, "most requests that run at once")
    max_num_batched_tokens: int = option(2048, "most tokens that one step computes")
    exact_chunk_tokens: int = option(
        USUAL_CHUNK,
        "most prompt tokens at once of a request with resume=exact, the same on all nodes; fewer if"
        " a step has not the room",
    )
    async_scheduling: bool = option(
        False, "plan the next step while one runs, where that one only decodes"
    )
    language_model_only: bool = option(
        False, "serve a model that reads images for text alone (Gemma 3: by the lean route)"
    )
    vision_tower: bool = option(
        True, "load the vision tower; without it a prefill node takes images from encode nodes only"
    )
    image_cache_memory: str = option(
        "256MB", "memory for images that were read: pixels, and what the vision tower made of them"
    )
    lora_modules: tuple[str, ...] = option(
        (), "LoRA adapters to serve, as NAME=DIR (repeatable; PEFT's format)"
    )
    enable_prefix_caching: bool = option(True, "reuse the KV blocks of equal prefixes")
    num_state_checkpoints: int | None = option(
        None,
        "copies of recurrent state behind prefixes, without which no prefix of such a model is "
        "reused (default: one per 4,096 tokens of KV, in a quarter of its memory at most)",
    )
    state_checkpoint_spacing: int = option(
        256, "fewest prompt tokens between two of these copies, or before the first"
    )
    preemption_mode: PreemptionMode = option(
        "auto",
        "what a request loses without room: its place (swap) or its KV (recompute)",
        choices=get_args(PreemptionMode),
    )
    speculative_method: SpeculativeMethod = option(
        "none",
        "who guesses tokens ahead: n-grams, a draft model, the model's own head (mtp), EAGLE-3",
        choices=get_args(SpeculativeMethod),
    )
    num_speculative_tokens: int = option(4, "most tokens guessed ahead in one step")
    speculative_model: str | None = option(
        None, "checkpoint of the draft model, or of the EAGLE-3 head"
    )
    guided_decoding_backend: GuidedBackend = option(
        "auto",
        "accepted, and changes nothing: llguidance follows all grammars",
        choices=spelled(get_args(GuidedBackend), guidance="llguidance"),
    )
    memory_bandwidth: float | None = option(
        None, "read bandwidth of the device, GB/s, for MBU (default: measured at start)"
    )
    peak_flops: float | None = option(
        None, "rate of matrix products, TFLOP/s, for MFU (default: measured at start)"
    )
    measure_limits: bool = option(True, "measure what of these two is not given, once per boot")
    threads: int | None = option(None, "CPU threads of the model (default: torch's own choice)")
    core_board: str | None = option(
        None, "file in which the processes of this host tell which of their cores are idle"
    )
    spare_cores: str | None = option(
        None, 'cores of other processes, e.g. "4-7", for steps while --core-board says: idle'
    )
    check_invariants: bool = option(False, "prove block accounting after every step (slow)")

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, get_args(DtypeName))
        _one_of("device", self.device, get_args(DeviceName))
        _one_of("model_impl", self.model_impl, get_args(ModelImpl))
        _one_of("quantization", self.quantization, get_args(Quantization))
        _one_of("lm_head_quantization", self.lm_head_quantization, get_args(HeadQuantization))
        _one_of("kv_cache_dtype", self.kv_cache_dtype, get_args(KVCacheDtype))
        _at_least("tensor_parallel_size", self.tensor_parallel_size, 1)
        _at_least("data_parallel_size", self.data_parallel_size, 1)
        _at_least("max_model_len", self.max_model_len, 2)
        _at_least("block_size", self.block_size, 1)
        _at_least("num_kv_blocks", self.num_kv_blocks, 2)
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        _at_least("exact_chunk_tokens", self.exact_chunk_tokens, 1)
        _at_least("num_state_checkpoints", self.num_state_checkpoints, 0)
        _at_least("state_checkpoint_spacing", self.state_checkpoint_spacing, 1)
        _at_least("threads", self.threads, 1)
        _positive("memory_bandwidth", self.memory_bandwidth)
        _positive("peak_flops", self.peak_flops)
        _one_of("preemption_mode", self.preemption_mode, get_args(PreemptionMode))
        _one_of("guided_decoding_backend", self.guided_decoding_backend, get_args(GuidedBackend))
        _one_of("speculative_method", self.speculative_method, get_args(SpeculativeMethod))
        _at_least("num_speculative_tokens", self.num_speculative_tokens, 1)
        if (self.speculative_method in ("draft", "eagle3")) != (self.speculative_model is not None):
            raise ConfigError(
                "speculative_method draft or eagle3 and speculative_model come together",
                field="speculative_model",
            )
        if self.block_size is not None and self.block_size > MAX_BLOCK_SIZE:
            raise ConfigError(f"block_size must be at most {MAX_BLOCK_SIZE}", field="block_size")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                "gpu_memory_utilization must be above 0 and at most 1",
                field="gpu_memory_utilization",
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            # Otherwise decode rows alone could fill every step, and prompts would never advance.
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must not be below "
                f"max_num_seqs ({self.max_num_seqs})",
                field="max_num_batched_tokens",
            )
        self._check_cores()
        if self.kv_cache_memory is not None:
            parse_bytes(self.kv_cache_memory, field="kv_cache_memory")
        parse_bytes(self.image_cache_memory, field="image_cache_memory")
        _ = self.kept_weight_bytes

    def _check_cores(self) -> None:
        if (self.core_board is None) != (self.spare_cores is None):
            raise ConfigError("core_board and spare_cores come together", field="core_board")
        if self.spare_cores is None:
            return
        parse_cores(self.spare_cores, "spare_cores")
        if self.deterministic or self.tensor_parallel_size > 1 or self.data_parallel_size > 1:
            raise ConfigError(
                "spare_cores goes neither with deterministic nor with several ranks",
                field="spare_cores",
            )

    @property
    def exact_chunk(self) -> int:
        """The prompt tokens that a row of an exact request computes (baton/engine/core/replay.py).

        The chunk is so small that a step always has room for it once no older prompt takes the
        room: decode rows never take more than max_num_seqs, and drafts half of what these leave.
        """
        room = (self.max_num_batched_tokens - self.max_num_seqs) // 2
        return max(1, min(self.exact_chunk_tokens, room))

    @property
    def speculates(self) -> bool:
        """Whether steps may verify drafts."""
        return self.speculative_method != "none"

    @property
    def image_cache_bytes(self) -> int:
        """What pixels and rows of images may take, in a model that reads images."""
        return parse_bytes(self.image_cache_memory, field="image_cache_memory")

    @property
    def kept_weight_bytes(self) -> int | None:
        """What shared weights that no process uses may take; None = auto. Raises ConfigError."""
        kept = self.shared_weights_cache
        if kept == AUTO:
            return None
        return 0 if kept is None else parse_bytes(kept, field="shared_weights_cache")

    @property
    def model_name(self) -> str:
        """Return the model's name in the API, which never tells where the model lies on this
        machine.
        """
        names = self.served_model_name
        if names:
            return names if isinstance(names, str) else names[0]  # Python callers may pass one text
        path = Path(self.model).expanduser()
        if path.is_dir():
            return path.resolve().name
        return path.stem if path.suffix == ".gguf" else self.model


def head_quantization(head: str, weights: str) -> str:
    """Return the scheme of the head: `head`, or what "auto" means beside weights in `weights`."""
    return AUTO_HEADS.get(weights, "none") if head == AUTO else head


def parse_bytes(text: str, *, field: str) -> int:
    """Return the bytes of "512MB", "4GiB" or "1000000". Raises ConfigError naming `field`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = match.group(2).upper() if match else ""
    if match is None or unit not in _UNITS:
        raise ConfigError(f"{field}: {text!r} is not a size such as 512MB or 4GiB", field=field)
    return int(float(match.group(1)) * _UNITS[unit])


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}", field=name)


def _positive(name: str, value: float | None) -> None:
    if value is not None and not 0.0 < value < math.inf:
        raise ConfigError(f"{name} must be a number above 0, got {value}", field=name)


def _at_least(name: str, value: int | None, minimum: int) -> None:
    if value is not None and value < minimum:
        raise ConfigError(f"{name} must be at least {minimum}, got {value}", field=name)
