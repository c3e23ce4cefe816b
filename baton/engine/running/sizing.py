"""How many KV blocks fit the machine: what is left after weights and a measured forward pass.

    GPU   utilization x total - in use (weights, context, others) - peak of a forward = KV bytes
    CPU   kv_cache_memory, else a share of the available memory
either way: KV bytes / bytes of a block = blocks; with fewer than two the engine does not start

A draft model is included: its weights are loaded before, the peak is the larger of the two models',
and each block is counted twice, once in the target's KV and once in the draft's.

The peak is that of dummy steps of max_num_batched_tokens through a scratch arena: first few long
prompts (widest attention), then as many short ones as may run (widest logits, sampler). On a GPU
torch's allocator counts it exactly. On a CPU `HostMemory` reads the growth of the process' resident
set. That includes oneDNN's scratch, but misses what fits memory that the process already holds (2 %
of 400 MB in a trial), and it costs a forward pass per start. So a CPU pool does not subtract the
peak: `bench.engine_memory` reports it, and three quarters of the memory stay free for it.
The GPU path has run over a fake device only, so far.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

import torch

from baton.engine.config import EngineConfig, parse_bytes
from baton.engine.loading.loading import LoadedModel
from baton.engine.memory.available_memory import CGROUP, PROC, available_memory, kilobytes
from baton.engine.memory.kv_cache import KVArena, MakeMemory, bytes_per_block
from baton.engine.memory.layer_groups import MIN_BLOCKS, group_layers, one_group
from baton.engine.memory.state_sizes import (
    checkpoints_within,
    slot_bytes,
    slots_per_sequence,
    slots_within,
)
from baton.engine.running.head_drafts import make_runner
from baton.engine.state.interface import ModelInfo, SequenceChunk
from baton.protocol.errors import ConfigError
from baton.protocol.kv_spec import HeldBlocks
from baton.protocol.sampling import SamplingParams

log = logging.getLogger(__name__)

CPU_MEMORY_SHARE: Final = 0.25  # of the available memory: several nodes share one machine
_RESET_PEAK: Final = "5"  # proc(5): written to clear_refs, it resets VmHWM


class DeviceMemory(Protocol):
    """What sizing asks about a device's memory. All numbers are bytes."""

    def total(self) -> int:
        """Return the memory of the whole device."""
        ...

    def in_use(self) -> int:
        """Return the memory in use now, by this process (weights included) and by others."""
        ...

    def peak_of(self, run: Callable[[], object]) -> int | None:
        """Return the most memory that `run` takes in addition to what is in use; None = unknown."""
        ...


class CudaMemory:
    """Memory of one CUDA device, as torch's allocator counts it. Source: torch.cuda memory
    statistics.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        """Return the memory of the whole device."""
        return torch.cuda.mem_get_info(self._device)[1]

    def in_use(self) -> int:
        """See DeviceMemory.in_use."""
        torch.cuda.empty_cache()  # memory that the allocator caches is not in use
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def peak_of(self, run: Callable[[], object]) -> int:
        """See DeviceMemory.peak_of. Counts reserved memory, because fragments cost memory, too."""
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
    """Main memory of this process, as the kernel counts it. Peaks are unknown except on Linux."""

    def __init__(self, proc: Path = PROC, cgroup: Path = CGROUP) -> None:
        self._proc = proc
        self._cgroup = cgroup

    def total(self) -> int:
        """Return the machine's memory; a limit on this process is not seen here."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def in_use(self) -> int:
        """See DeviceMemory.in_use."""
        return max(0, self.total() - self.available())

    def available(self) -> int:
        """See available_memory. Files that this process has mapped do not count as available:
        weights on a disk lie in the page cache, which must have room for them."""
        mapped = 0
        with suppress(OSError, StopIteration, ValueError):
            mapped = _status_bytes(self._proc, "RssFile")
        return max(0, available_memory(self._proc, self._cgroup) - mapped)

    def peak_of(self, run: Callable[[], object]) -> int | None:
        """See DeviceMemory.peak_of. The result misses what fits memory that the process already
        holds.
        """
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
    """Bytes for KV, and the words of an error message that say where they come from."""

    num_bytes: int
    origin: str
    field: str
    explicit: bool = False  # the user gave it: it is spent whole, needed or not


@dataclass(frozen=True, slots=True)
class PoolSize:
    """KV blocks, slots of recurrent state (0 = the model keeps none), and checkpoints of it."""

    num_blocks: int
    num_slots: int
    num_checkpoints: int = 0


def size_pool(
    config: EngineConfig,
    model: LoadedModel,
    block_size: int,
    max_model_len: int,
    draft: LoadedModel | None = None,
) -> PoolSize:
    """Return how many blocks `model` gets, and `draft` too; the weights of both are in memory by
    now. A model with recurrent state gets slots and checkpoints for it first.

    The number of blocks is as configured (num_kv_blocks, kv_cache_memory). Otherwise it is what the
    device has left, but at most what max_num_seqs requests of max_model_len tokens can use. Raises
    ConfigError, with the arithmetic, if it is too small or does not fit.
    """
    info = model.info
    groups = group_layers(info.layers, info.kv_dtype)
    block_bytes = bytes_per_block(groups, block_size, info.kv_dtype)
    layout = f"{groups.num_slots} of {len(info.layers)} layers, {info.kv_dtype}"
    if groups.num_groups == 1:
        layout = f"{len(info.layers)} layers, {info.kv_dtype}"
    block = f"{block_size} tokens ({layout}"
    if draft is not None:
        # The draft's pool holds equally many tokens: one draft block per block of each group.
        whole = bytes_per_block(one_group(draft.info.layers), block_size, draft.info.kv_dtype)
        drafts = -(-whole // groups.num_groups)
        block_bytes += drafts
        block += f"; {drafts:,} bytes are for the draft model {draft.info.name}"
    # For each group, because a prompt takes blocks for its whole length, whatever a window frees
    # later.
    useful = config.max_num_seqs * -(-max_model_len // block_size) * groups.num_groups
    slot, fixed = slot_bytes(info.layers), config.num_kv_blocks
    num_slots = config.max_num_seqs * slots_per_sequence(speculates=config.speculates)
    if fixed is not None:
        num_slots = num_slots if slot else 0
        asked, tokens = fixed * block_bytes + num_slots * slot, fixed * block_size
        num_checkpoints = _num_checkpoints(config, info, asked, tokens // groups.num_groups)
        asked += num_checkpoints * slot
        budget = Budget(asked, f"num_kv_blocks {fixed}", "num_kv_blocks", True)
    else:
        budget = _budget(config, model, block_size, draft)
        num_slots = slots_within(budget.num_bytes, info.layers, num_slots)
        tokens = None if budget.explicit else useful // groups.num_groups * block_size
        num_checkpoints = _num_checkpoints(config, info, budget.num_bytes, tokens)
    if budget.explicit and model.device.type == "cpu":
        refuse_beyond(budget, HostMemory())
    for_blocks = replace(budget, num_bytes=budget.num_bytes - (num_slots + num_checkpoints) * slot)
    count = num_blocks(for_blocks, block_bytes, useful, block + ")", MIN_BLOCKS * groups.num_groups)
    return PoolSize(count, num_slots, num_checkpoints)


def _budget(
    config: EngineConfig, model: LoadedModel, block_size: int, draft: LoadedModel | None
) -> Budget:
    """Return the configured memory for KV and states, else what the device has left."""
    if config.kv_cache_memory is not None:
        asked = parse_bytes(config.kv_cache_memory, field="kv_cache_memory")
        origin = f"kv_cache_memory of {config.kv_cache_memory}"
        return Budget(asked, origin, "kv_cache_memory", True)
    if model.device.type == "cuda":
        return device_budget(config, CudaMemory(model.device), model, block_size, draft)
    # Ranks of a data-parallel group, on one host, take their pools at about the same time.
    return host_budget(HostMemory().available() // config.data_parallel_size)


def _num_checkpoints(
    config: EngineConfig, info: ModelInfo, num_bytes: int, num_tokens: int | None
) -> int:
    """Return how many state checkpoints are configured, else what checkpoints_within() says."""
    if not config.enable_prefix_caching or not slot_bytes(info.layers):
        return 0
    if config.num_state_checkpoints is not None:
        return config.num_state_checkpoints
    return checkpoints_within(num_bytes, info.layers, info.kv_dtype, num_tokens)


def num_blocks(
    budget: Budget, block_bytes: int, useful: int, block: str, least: int = MIN_BLOCKS
) -> int:
    """Return how many blocks of `block_bytes` bytes the budget pays for.

    `block` describes a block for error messages. `useful` is the most blocks that can be of use; an
    explicit budget is spent whole all the same. Raises ConfigError, with the arithmetic, below
    `least` blocks.
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
    """Return a budget of CPU_MEMORY_SHARE of the `available` bytes of main memory."""
    origin = f"{CPU_MEMORY_SHARE:.0%} of the {available:,} bytes of available memory"
    return Budget(int(CPU_MEMORY_SHARE * available), origin, "kv_cache_memory")


def refuse_beyond(budget: Budget, memory: HostMemory) -> None:
    """Raise ConfigError for a pool that main memory cannot hold: later the kernel would kill us.

    If the kernel does not report the available memory, nothing is checked.
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
    """Return utilization x total - in use - measured peak of a forward at max_num_batched_tokens.

    Of two models the larger peak counts, because they never run at once. Raises ConfigError, with
    the arithmetic, if nothing is left.
    """
    in_use = memory.in_use()  # before the scratch arena is made, which does not stay
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
    model: LoadedModel, size: PoolSize, block_size: int, memory: MakeMemory | None
) -> KVArena:
    """Make the pool of `model`, and of its ranks.

    Without ranks and on a CPU, the pool lies in `memory`, if that is given.
    """
    info, num_blocks = model.info, size.num_blocks
    if model.ranks is not None:
        states = (size.num_slots, size.num_checkpoints)
        arena: KVArena = model.ranks.make_pool(info, num_blocks, block_size, states)
    else:
        placed = memory if model.device.type == "cpu" else None
        arena = KVArena(info.layers, num_blocks, block_size, info.kv_dtype, model.device, placed)
        arena.keep_states(size.num_slots, size.num_checkpoints)
    log.info(
        "KV pool: %d blocks of %d tokens and %d of %d layers each, %.1f MB",
        num_blocks, block_size, arena.groups.num_slots, len(info.layers), arena.num_bytes / 1e6,
    )  # fmt: skip
    if arena.states is not None:
        log.info(
            "recurrent states: %d slots of %d bytes and %d checkpoints of prefixes, %.1f MB",
            size.num_slots, arena.states.slot_bytes, size.num_checkpoints,
            arena.states.num_bytes / 1e6,
        )  # fmt: skip
    return arena


# ---- the measured forward ----


def dummy_steps(config: EngineConfig, model: LoadedModel, block_size: int) -> Callable[[], None]:
    """Return a function that runs two full steps of made-up tokens over a scratch arena made
    here.
    """
    limit = min(model.info.max_model_len, config.max_num_batched_tokens)
    table = range(-(-limit // block_size))
    info = model.info
    groups = one_group(info.layers)
    arena = KVArena(groups, len(table), block_size, info.kv_dtype, model.device)
    arena.keep_states(1 if slot_bytes(info.layers) else 0)
    runner = make_runner(model, arena, config.num_speculative_tokens)

    def run() -> None:
        for count in (1, config.max_num_seqs):
            lengths = dummy_lengths(config.max_num_batched_tokens, count, limit)
            runner.run(dummy_chunks(lengths, table, info.vocab_size))

    return run


def dummy_lengths(num_tokens: int, num_sequences: int, limit: int) -> list[int]:
    """Split `num_tokens` into at least `num_sequences` lengths, none above `limit`.

    There are fewer lengths if there are fewer tokens than sequences.
    """
    count = min(num_tokens, max(num_sequences, -(-num_tokens // limit)))
    share, rest = divmod(num_tokens, count)
    return [share + (index < rest) for index in range(count)]


def dummy_chunks(
    lengths: Sequence[int], table: Sequence[int], vocab_size: int
) -> list[SequenceChunk]:
    """Return prompts of these lengths, all over the same blocks: nobody reads what they compute."""
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
            state_slot=0,
        )
        for index, length in enumerate(lengths)
    ]


# ---- what the kernel says ----


def _status_bytes(proc: Path, name: str) -> int:
    return kilobytes(proc / "self" / "status", name)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
