"""How many KV blocks fit the machine: what is left after weights and a measured forward.

    GPU   utilization x total - in use (weights, context, others) - peak of a forward = KV bytes
    CPU   kv_cache_memory, else a share of the available memory
either way: KV bytes / bytes of a block = blocks; below two the start is refused, with the sums

A draft model is in the sums: its weights are loaded before, the peak is the larger of the two
models', and each block is paid for twice, once in the target's KV and once in the draft's.

The peak is that of a dummy step at max_num_batched_tokens through a scratch arena: few long
prompts (widest attention), then as many short ones as may run (widest logits, sampler). On a GPU
torch's allocator counts it exactly. On a CPU `HostMemory` reads the growth of the process' resident
set: it sees oneDNN's scratch too, but misses what fits memory the process already holds (2 % of
400 MB in a trial), and it costs a forward per start. So a CPU pool does not subtract it: it is
reported by `bench.engine_memory`, and lives in the three quarters that the pool leaves free.
The GPU path has run over a fake device only, so far.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import torch

from baton.engine.config import EngineConfig, parse_bytes
from baton.engine.loading.loading import LoadedModel
from baton.engine.memory.available_memory import CGROUP, PROC, available_memory, kilobytes
from baton.engine.memory.kv_cache import KVArena, MakeMemory, bytes_per_block
from baton.engine.memory.layer_groups import MIN_BLOCKS, group_layers, one_group
from baton.engine.running.runner import ModelRunner
from baton.engine.state.interface import SequenceChunk
from baton.protocol.errors import ConfigError
from baton.protocol.kv_spec import HeldBlocks
from baton.protocol.sampling import SamplingParams

log = logging.getLogger(__name__)

CPU_MEMORY_SHARE: Final = 0.25  # of the available memory: several nodes share one machine
_RESET_PEAK: Final = "5"  # proc(5): written to clear_refs, it resets VmHWM


class DeviceMemory(Protocol):
    """What sizing asks of a device. All numbers are bytes."""

    def total(self) -> int:
        """Memory of the whole device."""
        ...

    def in_use(self) -> int:
        """Taken at this moment, by this process (weights included) and by others."""
        ...

    def peak_of(self, run: Callable[[], object]) -> int | None:
        """Most that `run` holds at once, beyond what is in use before; None = unknown."""
        ...


class CudaMemory:
    """One CUDA device, by torch's allocator. Source: torch.cuda memory statistics."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        """See DeviceMemory.total."""
        return torch.cuda.mem_get_info(self._device)[1]

    def in_use(self) -> int:
        """See DeviceMemory.in_use."""
        torch.cuda.empty_cache()  # what the allocator merely keeps is not in use
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def peak_of(self, run: Callable[[], object]) -> int:
        """See DeviceMemory.peak_of. Reserved, not allocated: fragments cost memory too."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_reserved(self._device)
        run()
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_reserved(self._device) - before
        torch.cuda.empty_cache()
        return peak


class HostMemory:
    """This process in main memory, by the kernel's account. Linux; elsewhere peaks are unknown."""

    def __init__(self, proc: Path = PROC, cgroup: Path = CGROUP) -> None:
        self._proc = proc
        self._cgroup = cgroup

    def total(self) -> int:
        """See DeviceMemory.total."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def in_use(self) -> int:
        """See DeviceMemory.in_use."""
        return max(0, self.total() - self.available())

    def available(self) -> int:
        """See available_memory."""
        return available_memory(self._proc, self._cgroup)

    def peak_of(self, run: Callable[[], object]) -> int | None:
        """See DeviceMemory.peak_of. Too low by what fits memory that the process already holds."""
        try:
            (self._proc / "self" / "clear_refs").write_text(_RESET_PEAK)
            before = _status_bytes(self._proc, "VmRSS")
            run()
            return max(0, _status_bytes(self._proc, "VmHWM") - before)
        except (OSError, StopIteration, ValueError) as error:
            log.info("the peak of a forward cannot be measured here: %s", error)
            return None


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes for KV, and the sentence that says where they come from."""

    num_bytes: int
    origin: str
    field: str
    explicit: bool = False  # given by the user: taken whole, needed or not


def size_pool(
    config: EngineConfig,
    model: LoadedModel,
    block_size: int,
    max_model_len: int,
    draft: LoadedModel | None = None,
) -> int:
    """Blocks of the pool of `model`, and of `draft`'s: the weights of both are in memory by now.

    As configured (num_kv_blocks, kv_cache_memory), else what the device has left, but at most what
    max_num_seqs requests of max_model_len tokens can use. Raises ConfigError with the arithmetic.
    """
    info = model.info
    groups = group_layers(info.layers, info.kv_dtype)
    block_bytes = bytes_per_block(groups, block_size, info.kv_dtype)
    layout = f"{groups.num_slots} of {len(info.layers)} layers, {info.kv_dtype}"
    if groups.num_groups == 1:
        layout = f"{len(info.layers)} layers, {info.kv_dtype}"
    block = f"{block_size} tokens ({layout}"
    if draft is not None:
        # The draft's pool holds as many tokens: a block of its own for one of each group.
        whole = bytes_per_block(one_group(draft.info.layers), block_size, draft.info.kv_dtype)
        drafts = -(-whole // groups.num_groups)
        block_bytes += drafts
        block += f"; {drafts:,} bytes are for the draft model {draft.info.name}"
    if config.num_kv_blocks is not None:
        asked = config.num_kv_blocks * block_bytes
        budget = Budget(asked, f"num_kv_blocks {config.num_kv_blocks}", "num_kv_blocks", True)
    elif config.kv_cache_memory is not None:
        asked = parse_bytes(config.kv_cache_memory, field="kv_cache_memory")
        origin = f"kv_cache_memory of {config.kv_cache_memory}"
        budget = Budget(asked, origin, "kv_cache_memory", True)
    elif model.device.type == "cuda":
        budget = device_budget(config, CudaMemory(model.device), model, block_size, draft)
    else:
        # Ranks of a data-parallel group, on one host, take their pools at about the same time.
        budget = host_budget(HostMemory().available() // config.data_parallel_size)
    if budget.explicit and model.device.type == "cpu":
        refuse_beyond(budget, HostMemory())
    # Of each group: a prompt takes blocks for its whole length, whatever a window frees later.
    useful = config.max_num_seqs * -(-max_model_len // block_size) * groups.num_groups
    return num_blocks(budget, block_bytes, useful, block + ")", MIN_BLOCKS * groups.num_groups)


def num_blocks(
    budget: Budget, block_bytes: int, useful: int, block: str, least: int = MIN_BLOCKS
) -> int:
    """Blocks of `block_bytes` that the budget pays for. `block` says what one is.

    `useful`: more than so many never help; an explicit budget is spent whole all the same.
    Raises ConfigError, with the arithmetic, below `least` blocks.
    """
    count = budget.num_bytes // block_bytes
    if count < least:
        raise ConfigError(
            f"{budget.origin} is {budget.num_bytes:,} bytes; one KV block of {block} takes "
            f"{block_bytes:,} bytes, and at least {least} are needed: {least * block_bytes:,} "
            "bytes",
            field=budget.field,
        )
    return count if budget.explicit else min(count, max(useful, least))


def host_budget(available: int) -> Budget:
    """A share of the `available` bytes of main memory."""
    origin = f"{CPU_MEMORY_SHARE:.0%} of the {available:,} bytes of available memory"
    return Budget(int(CPU_MEMORY_SHARE * available), origin, "kv_cache_memory")


def refuse_beyond(budget: Budget, memory: HostMemory) -> None:
    """Raise ConfigError for a pool that main memory cannot hold: the kernel would kill us later.

    Where the kernel does not report what is available, the user's word is taken.
    """
    try:
        available = memory.available()
    except ConfigError as reason:
        log.info("the size of the KV pool cannot be checked: %s", reason)
        return
    if budget.num_bytes > available:
        raise ConfigError(
            f"{budget.origin} is {budget.num_bytes:,} bytes of KV, but only {available:,} bytes of "
            "memory are available",
            field=budget.field,
        )


def device_budget(
    config: EngineConfig,
    memory: DeviceMemory,
    model: LoadedModel,
    block_size: int,
    draft: LoadedModel | None = None,
) -> Budget:
    """utilization x total - in use - measured peak of a forward at max_num_batched_tokens.

    The two models never run at once: the larger peak counts.

    Raises ConfigError with the arithmetic when that is not above 0.
    """
    in_use = memory.in_use()  # before the scratch arena exists: it goes again
    models = [model] if draft is None else [model, draft]
    peak = max(memory.peak_of(dummy_steps(config, each, block_size)) or 0 for each in models)
    weights = sum(each.weight_bytes for each in models)
    drafts = "" if draft is None else f" ({_gb(draft.weight_bytes)} are the draft model's)"
    share = int(config.gpu_memory_utilization * memory.total())
    left = share - in_use - peak
    sums = (
        f"{config.gpu_memory_utilization:g} x {_gb(memory.total())} = {_gb(share)} "
        f"(gpu_memory_utilization), less {_gb(weights)} of weights{drafts}, "
        f"{_gb(max(0, in_use - weights))} in use besides and {_gb(peak)} at the peak of "
        f"a forward of {config.max_num_batched_tokens} tokens"
    )
    if left <= 0:
        raise ConfigError(
            f"nothing is left for KV: {sums}, is {_gb(left)}; raise gpu_memory_utilization, lower "
            "max_num_batched_tokens, or serve a smaller or quantized model",
            field="gpu_memory_utilization",
        )
    log.info("KV memory: %s, is %s", sums, _gb(left))
    return Budget(left, sums, "gpu_memory_utilization")


def make_pool(
    model: LoadedModel, num_blocks: int, block_size: int, memory: MakeMemory | None
) -> KVArena:
    """The pool of `model`, its ranks' too; one on the CPU alone lies in `memory`, if given."""
    info = model.info
    if model.ranks is not None:
        arena: KVArena = model.ranks.make_pool(info, num_blocks, block_size)
    else:
        placed = memory if model.device.type == "cpu" else None
        arena = KVArena(info.layers, num_blocks, block_size, info.kv_dtype, model.device, placed)
    log.info(
        "KV pool: %d blocks of %d tokens and %d of %d layers each, %.1f MB",
        num_blocks, block_size, arena.groups.num_slots, len(info.layers), arena.num_bytes / 1e6,
    )  # fmt: skip
    return arena


# ---- the measured forward ----


def dummy_steps(config: EngineConfig, model: LoadedModel, block_size: int) -> Callable[[], None]:
    """What runs two full steps of made-up tokens; the scratch arena they write is made now."""
    limit = min(model.info.max_model_len, config.max_num_batched_tokens)
    table = range(-(-limit // block_size))
    info = model.info
    groups = one_group(info.layers)
    arena = KVArena(groups, len(table), block_size, info.kv_dtype, model.device)
    runner = ModelRunner(model, arena)

    def run() -> None:
        for count in (1, config.max_num_seqs):
            lengths = dummy_lengths(config.max_num_batched_tokens, count, limit)
            runner.run(dummy_chunks(lengths, table, info.vocab_size))

    return run


def dummy_lengths(num_tokens: int, num_sequences: int, limit: int) -> list[int]:
    """`num_tokens` over at least `num_sequences` sequences
    (fewer if tokens are few), none longer than `limit`."""
    count = min(num_tokens, max(num_sequences, -(-num_tokens // limit)))
    share, rest = divmod(num_tokens, count)
    return [share + (index < rest) for index in range(count)]


def dummy_chunks(
    lengths: Sequence[int], table: Sequence[int], vocab_size: int
) -> list[SequenceChunk]:
    """Prompts of these lengths, all over the same blocks: nobody reads what they compute."""
    params = SamplingParams(seed=0, top_p=0.9, max_tokens=1)
    return [
        SequenceChunk(
            request_id=f"dummy-{index}",
            token_ids=[(index + position) % vocab_size for position in range(length)],
            start=0,
            blocks=(HeldBlocks(table),),
            sample=params,
            history=[(index + position) % vocab_size for position in range(length)],
            num_prompt=length,
        )
        for index, length in enumerate(lengths)
    ]


# ---- what the kernel says ----


def _status_bytes(proc: Path, name: str) -> int:
    return kilobytes(proc / "self" / "status", name)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
