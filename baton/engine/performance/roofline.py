"""The machine's limits, measured: how fast it reads memory, and how fast it multiplies matrices.

Both are measured with the threads in use, in a fraction of a second. Products are tried with torch
and with the engine's own layers; the faster one counts. The result is kept until the machine boots
again, per set of cores, threads and dtype. Processes that start together measure one after the
other. Beside other work the measured limits are too low. A share above 1 reveals it, and they are
measured again (meter.py). Users who know the limits can give them (--memory-bandwidth,
--peak-flops). Not here: what a step needs (work.py).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from baton.engine.config import EngineConfig
from baton.engine.quantization.linear import choose_linear
from baton.engine.state.work import Limits
from baton.runtime.cache_folder import alone, cache_folder, keep

log = logging.getLogger(__name__)

READ_BYTES: Final = {"cpu": 256 << 20, "cuda": 1 << 30}  # more than fits in the caches
SIZES: Final = {"cpu": (512, 1024, 2048), "cuda": (4096, 8192)}  # rows and columns of a product
BUDGET_S: Final = 0.06  # for each of the two measurements
GIGA, TERA = 1e9, 1e12
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def limits_of(
    config: EngineConfig, device: torch.device, dtype: torch.dtype, folder: Path | None = None
) -> Limits | None:
    """Return the limits: as configured, else as measured; None if the configuration forbids
    measuring.

    A measurement since the last boot is read from `folder` (by default the user's cache).
    """
    given, flops = config.memory_bandwidth, config.peak_flops
    if given is not None and flops is not None:
        return Limits(given * GIGA, flops * TERA)
    if not config.measure_limits:
        return None
    found = _kept(device, dtype, folder, None)
    return _logged("limits", config, found, dtype)


def limits_again(
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    before: Limits,
    folder: Path | None = None,
) -> Limits:
    """Measure again, and keep the higher value of each limit: other work can only have lowered
    it.
    """
    found = _kept(device, dtype, folder, before)
    return _logged("limits, measured again", config, found, dtype)


def _logged(name: str, config: EngineConfig, found: Limits, dtype: torch.dtype) -> Limits:
    """Replace what the configuration states in `found`, log the limits and return them."""
    given, flops = config.memory_bandwidth, config.peak_flops
    limits = Limits(
        found.read_bytes_per_s if given is None else given * GIGA,
        found.flops_per_s if flops is None else flops * TERA,
    )
    log.info(
        "%s: reads %.1f GB/s, %s products %.2f TFLOP/s",
        name, limits.read_bytes_per_s / GIGA, dtype, limits.flops_per_s / TERA,
    )  # fmt: skip
    return limits


def measure(device: torch.device, dtype: torch.dtype, budget_s: float = BUDGET_S) -> Limits:
    """Measure both limits now, for about `budget_s` each."""
    kind = device.type
    source = torch.ones(READ_BYTES[kind] // 8, dtype=torch.float64, device=device)
    if kind == "cuda":  # a copy reads and writes: its bytes count twice
        target = torch.empty_like(source)
        read = 2 * source.nbytes / _fastest(lambda: target.copy_(source), device, budget_s)
    else:
        read = source.nbytes / _fastest(source.sum, device, budget_s)
    flops, make_layer = 0.0, choose_linear(dtype, device)
    until = time.perf_counter() + budget_s
    for size in SIZES[kind]:
        a = torch.full((size, size), 0.5, dtype=dtype, device=device)
        b = torch.full((size, size), 0.25, dtype=dtype, device=device)
        layer = make_layer(b, None)
        share_s = budget_s / len(SIZES[kind]) / 2
        seconds = min(
            _fastest(lambda a=a, b=b: a @ b, device, share_s),
            _fastest(lambda a=a, layer=layer: layer(a), device, share_s),
        )
        flops = max(flops, 2 * size**3 / seconds)
        # The next size takes eight times as long, and is measured with two kinds of products.
        if time.perf_counter() + 16 * seconds > until:
            break
    return Limits(read, flops)


def _fastest(work: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Return the seconds of the fastest call within the budget; the first call does not count."""

    def once() -> float:
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    first = once()
    until = time.perf_counter() + budget_s - first
    best = once()
    while time.perf_counter() + best < until:
        best = min(best, once())
    return max(best, 1e-9)


def _kept(
    device: torch.device, dtype: torch.dtype, folder: Path | None, low: Limits | None
) -> Limits:
    """Return the limits from the file, or measure them and write them there.

    If `low` is given, the file's limits are too low: measure, and keep the higher of each.
    """
    key = _key(device, dtype)
    if key is None:
        return _highest(measure(device, dtype), low)
    try:
        folder = cache_folder("limits") if folder is None else folder
        path = folder / f"{key}.json"
        found = _read(path)
        if found is not None and low is None:
            return found
        with alone(folder):
            found = _read(path)
            if found is None or low is not None:
                found = _highest(measure(device, dtype), found)
            keep(path, json.dumps([found.read_bytes_per_s, found.flops_per_s]))
            return found
    except OSError as error:
        log.info("limits are not kept: %s", error)
        return _highest(measure(device, dtype), low)


def _highest(found: Limits, other: Limits | None) -> Limits:
    if other is None:
        return found
    return Limits(
        max(found.read_bytes_per_s, other.read_bytes_per_s),
        max(found.flops_per_s, other.flops_per_s),
    )


def _key(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return a name for all that the limits depend on; None if this boot has no id."""
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:
        return None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    cores = sorted(os.sched_getaffinity(0))
    parts = [boot, cores, torch.get_num_threads(), name, str(dtype), torch.__version__]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]


def _read(path: Path) -> Limits | None:
    try:
        read, flops = json.loads(path.read_text())
        return Limits(float(read), float(flops))
    except (OSError, ValueError, TypeError):
        return None  # not there, or cut short
