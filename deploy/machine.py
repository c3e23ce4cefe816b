"""What `baton doctor` reports of the machine: processor, memory, /dev/shm, Redis, kernels, GPU."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from redis.exceptions import RedisError

from baton import WAITING, sets_waiting
from baton.engine.checkpoint.weight_folder import held_bytes
from baton.runtime.cache_folder import cache_folder
from baton.runtime.redis.connections import connect
from baton.runtime.redis.urls import check_redis_url
from deploy.redis_server import find_redis_binary

SHM: Final = Path("/dev/shm")
COPY_BYTES: Final = 64 << 20
COPIES: Final = 3
REDIS_S: Final = 2.0
# Flags of /proc/cpuinfo that CPU kernels need, best first.
FEATURES: Final = ("amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni", "avx512f", "avx2")


# docs/kernels.md
OVERRIDES: Final = (
    "BATON_CPU_KERNELS=amx|avx512bf16|avx512|avx2|off, BATON_CPU_ASKING=1|2|4 and "
    "BATON_CPU_ASKING_KEYS=far|near (prefetch), "
    "OMP_WAIT_POLICY, GOMP_SPINCOUNT (how threads wait)"
)


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Facts in bytes, GB/s and counts; "" or None if this system does not tell."""

    processor: str
    features: tuple[str, ...]
    cores: int
    copy_gb_per_s: float
    shm_bytes: int | None
    shm_free_bytes: int | None
    redis: str
    torch: str
    torch_threads: int
    waiting: str
    kernels: str
    asking: str
    integer_kernels: str
    gpu: str
    kept_weights: str = ""

    def rows(self) -> Iterable[tuple[str, str]]:
        """Yield the rows of a table for people."""
        yield "processor", f"{self.processor or 'unknown'}, {self.cores} cores"
        yield "instructions", " ".join(self.features) or "none of AMX, AVX-512, AVX2"
        yield "memory", f"copies {self.copy_gb_per_s:.1f} GB/s on one core"
        if self.shm_bytes is None or self.shm_free_bytes is None:
            yield str(SHM), "missing: no shm lane"
        else:
            free = f"{self.shm_free_bytes / 1e9:.1f} of {self.shm_bytes / 1e9:.1f} GB free"
            yield str(SHM), free
        yield "Redis", self.redis
        threads = "1 thread" if self.torch_threads == 1 else f"{self.torch_threads} threads"
        yield "torch", f"{self.torch}, {threads} in a node of `baton up`"
        yield "threads wait", self.waiting
        yield "CPU kernels", self.kernels
        if self.asking:
            yield "prefetch", self.asking
        yield "integer weights", self.integer_kernels
        yield "overrides", OVERRIDES
        yield "GPU", self.gpu
        yield "kept weights", self.kept_weights or "none"


async def machine_facts(redis_url: str, engine: Mapping[str, Any]) -> MachineFacts:
    """Collect the facts.

    `redis_url` "" = only look whether a server could be started here. `engine` are the facts from a
    process that imports torch.
    """
    name, flags = await asyncio.to_thread(processor)
    usage = shutil.disk_usage(SHM) if SHM.is_dir() else None
    return MachineFacts(
        processor=name,
        features=tuple(feature for feature in FEATURES if feature in flags),
        cores=len(os.sched_getaffinity(0)),
        copy_gb_per_s=await asyncio.to_thread(copy_rate),
        shm_bytes=None if usage is None else usage.total,
        shm_free_bytes=None if usage is None else usage.free,
        redis=await redis_state(redis_url),
        torch=engine["torch"],
        torch_threads=engine["torch_threads"],
        waiting=waiting(os.environ),
        kernels=engine["kernels"],
        asking=engine["asking"],
        integer_kernels=engine["integer_kernels"],
        gpu=engine["gpu"],
        kept_weights=kept_weights(),
    )


def waiting(environ: Mapping[str, str]) -> str:
    """Return how threads wait for each other, as the environment says it to OpenMP."""
    told = " ".join(f"{name}={environ[name]}" for name in WAITING if name in environ)
    return f"{told}, {'as Baton sets it' if sets_waiting else 'as the environment says'}"


def kept_weights() -> str:
    """Return what packed weights take on the disk, and where; "" if none are kept."""
    try:
        folder = cache_folder("weights")
        held = held_bytes(folder)
    except OSError:
        return ""
    if not held:
        return ""
    return f"{held / 1e9:.1f} GB in {folder} (--shared-weights-cache bounds them)"


def processor(path: Path = Path("/proc/cpuinfo")) -> tuple[str, frozenset[str]]:
    """Return name and flags of the first processor; empty without such a file."""
    name, flags = "", frozenset[str]()
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return name, flags
    for line in text.partition("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = frozenset(value.split())
    return name, flags


def copy_rate() -> float:
    """Return the GB/s of a plain copy on one core, the best of a few."""
    source, target = bytearray(COPY_BYTES), memoryview(bytearray(COPY_BYTES))
    target[:] = source  # touch every page
    seconds: list[float] = []
    for _ in range(COPIES):
        began = time.perf_counter()
        target[:] = source
        seconds.append(time.perf_counter() - began)
    return COPY_BYTES / 1e9 / min(seconds)


async def redis_state(url: str) -> str:
    """Return a text about the Redis at `url`. Raises ConfigError for an invalid URL."""
    if not url:
        binary = find_redis_binary()
        return "no --redis-url; a server can be started" if binary else "none (in-memory store)"
    check_redis_url(url)
    client = connect(url, REDIS_S)
    try:
        began = time.perf_counter()
        async with asyncio.timeout(2 * REDIS_S):
            await client.ping()
        return f"answers in {(time.perf_counter() - began) * 1e3:.1f} ms"
    except (RedisError, OSError, TimeoutError) as error:
        return f"not reachable: {error}"
    finally:
        await client.aclose()
