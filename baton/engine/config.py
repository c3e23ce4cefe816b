"""EngineConfig: what one engine is told, frozen; and the reading of memory sizes.

Not here: anything about networks or roles (their own configs compose this one). Values that depend
on the model or the machine stay None here; `Engine` resolves them (engine.config holds the resolved
ones).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, get_args

from baton.config import option
from baton.errors import ConfigError

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
DeviceName = Literal["auto", "cpu", "cuda"]
ModelImpl = Literal["auto", "lean", "transformers"]

# Measured on CPU: blocks of 32 were 6 % faster than 16 in paged decode attention; GPU kernels like
# 16.
DEFAULT_BLOCK_SIZE: Final = {"cpu": 32, "cuda": 16}
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
    served_model_name: str | None = option(None, "name in the API (default: the model as given)")
    dtype: DtypeName = option("auto", "data type of weights and KV", choices=get_args(DtypeName))
    device: DeviceName = option("auto", "where the model runs", choices=get_args(DeviceName))
    model_impl: ModelImpl = option(
        "auto", "own decoder or transformers' modelling code", choices=get_args(ModelImpl)
    )
    max_model_len: int | None = option(
        None, "longest prompt plus output, tokens (default: model's)"
    )
    block_size: int | None = option(None, "tokens per KV block (default: 32 on CPU, 16 on GPU)")
    num_kv_blocks: int | None = option(None, "blocks in the KV pool (default: from memory)")
    kv_cache_memory: str | None = option(None, "size of the KV pool, as in 512MB or 4GiB")
    gpu_memory_utilization: float = option(0.9, "share of GPU memory for weights and KV together")
    max_num_seqs: int = option(64, "most requests that run at once")
    max_num_batched_tokens: int = option(2048, "most tokens that one step computes")
    enable_prefix_caching: bool = option(True, "reuse the KV blocks of equal prefixes")
    threads: int | None = option(None, "CPU threads of the model (default: torch's own choice)")
    check_invariants: bool = option(False, "prove block accounting after every step (slow)")

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, get_args(DtypeName))
        _one_of("device", self.device, get_args(DeviceName))
        _one_of("model_impl", self.model_impl, get_args(ModelImpl))
        _at_least("max_model_len", self.max_model_len, 2)
        _at_least("block_size", self.block_size, 1)
        _at_least("num_kv_blocks", self.num_kv_blocks, 2)
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        _at_least("threads", self.threads, 1)
        if self.block_size is not None and self.block_size > MAX_BLOCK_SIZE:
            raise ConfigError(f"block_size must be at most {MAX_BLOCK_SIZE}", field="block_size")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                "gpu_memory_utilization must be above 0 and at most 1",
                field="gpu_memory_utilization",
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            # Otherwise decode rows alone could fill every step and a prompt would never advance.
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must not be below "
                f"max_num_seqs ({self.max_num_seqs})",
                field="max_num_batched_tokens",
            )
        if self.kv_cache_memory is not None:
            parse_bytes(self.kv_cache_memory, field="kv_cache_memory")

    @property
    def model_name(self) -> str:
        """The name that the API shows."""
        return self.served_model_name or self.model


def parse_bytes(text: str, *, field: str) -> int:
    """Bytes of "512MB", "4GiB" or "1000000". Raises ConfigError naming `field`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = match.group(2).upper() if match else ""
    if match is None or unit not in _UNITS:
        raise ConfigError(f"{field}: {text!r} is not a size such as 512MB or 4GiB", field=field)
    return int(float(match.group(1)) * _UNITS[unit])


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}", field=name)


def _at_least(name: str, value: int | None, minimum: int) -> None:
    if value is not None and value < minimum:
        raise ConfigError(f"{name} must be at least {minimum}, got {value}", field=name)
