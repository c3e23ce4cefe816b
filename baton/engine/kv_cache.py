"""KVArena: the memory of all KV blocks, one allocation; and how many blocks fit a machine.

Layout of one layer, the same as on the wire (token-major), as long as k_dim == v_dim:
    [num_blocks, 2, block_size, kv_heads, head_dim]
in general a block is its K part [block_size, kv_heads, k_dim] followed by its V part
[block_size, kv_heads, v_dim]; MLA has no V part. Layers follow each other, each on a 64-byte
boundary. Not here: who owns which block (block_pool.py), reading and writing for transfers
(kv_transfer/layout.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from baton.engine.config import EngineConfig, parse_bytes
from baton.errors import ConfigError, InternalError
from baton.kv_spec import LayerSpec

ALIGNMENT: Final = 64  # bytes: a cache line, and the widest vector load
CPU_MEMORY_SHARE: Final = 0.25  # of the available memory: several nodes share one machine
MIN_BLOCKS: Final = 2

_TORCH_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class KVArena:
    """KV of `num_blocks` blocks of `block_size` tokens for every layer, zeroed, on one device.

    Zeroed because a masked score still multiplies the value behind it: 0 * NaN would poison a row.
    """

    def __init__(
        self,
        layers: tuple[LayerSpec, ...],
        num_blocks: int,
        block_size: int,
        dtype: str,
        device: str | torch.device = "cpu",
    ) -> None:
        if dtype not in _TORCH_DTYPES:
            raise ConfigError(f"KV cannot be stored as {dtype!r}", field="dtype")
        self.layers = layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = torch.device(device)
        self._offsets: list[int] = []  # bytes, start of each layer
        total = 0
        for layer in range(len(layers)):
            self._offsets.append(total)
            size = num_blocks * self.block_bytes(layer)
            total += -(-size // ALIGNMENT) * ALIGNMENT
        self.num_bytes = total
        self._memory = torch.zeros(total, dtype=torch.uint8, device=self.device)

    def block_bytes(self, layer: int) -> int:
        """Bytes of one block of one layer, K and V."""
        return self.block_size * self.layers[layer].token_bytes(self.dtype)

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views k, v, each [num_blocks, block_size, kv_heads, k_dim or v_dim].

        Both share the arena's memory; strided over blocks, contiguous within one.
        """
        spec = self.layers[layer]
        flat = self._layer_bytes(layer).view(_TORCH_DTYPES[self.dtype])
        k_size = self.block_size * spec.kv_heads * spec.k_dim
        v_size = self.block_size * spec.kv_heads * spec.v_dim
        blocks = flat.view(self.num_blocks, k_size + v_size)
        shape = (self.num_blocks, self.block_size, spec.kv_heads)
        k = blocks[:, :k_size].unflatten(1, (*shape[1:], spec.k_dim))
        if v_size == 0:
            return k, flat.new_empty((*shape, 0))
        return k, blocks[:, k_size:].unflatten(1, (*shape[1:], spec.v_dim))

    def layer_buffer(self, layer: int) -> memoryview:
        """The layer's bytes, block after block, writable. Raises InternalError off the CPU."""
        if self.device.type != "cpu":
            raise InternalError("only a pool in host memory has a buffer; stage a device pool")
        return self._layer_bytes(layer).numpy().data

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block's KV in every layer: what follows BlockPool.copy_on_write()."""
        for layer in range(len(self.layers)):
            blocks = self._layer_bytes(layer).view(self.num_blocks, self.block_bytes(layer))
            blocks[target] = blocks[source]

    def _layer_bytes(self, layer: int) -> torch.Tensor:
        start = self._offsets[layer]
        return self._memory[start : start + self.num_blocks * self.block_bytes(layer)]


def bytes_per_block(layers: tuple[LayerSpec, ...], block_size: int, dtype: str) -> int:
    """Bytes of one block over all layers."""
    return block_size * sum(layer.token_bytes(dtype) for layer in layers)


def choose_num_blocks(
    config: EngineConfig,
    layers: tuple[LayerSpec, ...],
    block_size: int,
    dtype: str,
    device: torch.device,
    max_model_len: int,
) -> int:
    """Blocks of the pool: as configured, else from kv_cache_memory, else a share of the free
    memory.

    The share is at most what max_num_seqs requests of max_model_len tokens can use.
    Raises ConfigError with the arithmetic when fewer than two blocks fit.
    """
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    block_bytes = bytes_per_block(layers, block_size, dtype)
    useful = config.max_num_seqs * -(-max_model_len // block_size)
    if config.kv_cache_memory is not None:
        budget = parse_bytes(config.kv_cache_memory, field="kv_cache_memory")
        num_blocks = budget // block_bytes
        origin = f"kv_cache_memory of {config.kv_cache_memory}"
    else:
        budget = _free_share(config, device)
        num_blocks = min(budget // block_bytes, max(useful, MIN_BLOCKS))
        origin = f"the {device.type}'s share of free memory"
    if num_blocks < MIN_BLOCKS:
        raise ConfigError(
            f"{origin} is {budget:,} bytes; one KV block of {block_size} tokens takes "
            f"{block_bytes:,} bytes ({len(layers)} layers, {dtype}), and at least {MIN_BLOCKS} "
            f"are needed: {MIN_BLOCKS * block_bytes:,} bytes",
            field="kv_cache_memory",
        )
    return num_blocks


def _free_share(config: EngineConfig, device: torch.device) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # What lies beyond the utilization is left to activations and to others.
        return max(0, int(config.gpu_memory_utilization * total) - (total - free))
    return int(CPU_MEMORY_SHARE * available_memory(Path("/proc/meminfo")))


def available_memory(meminfo: Path) -> int:
    """Bytes that the kernel says new programs can use. Raises ConfigError if `meminfo` does not
    tell."""
    try:
        lines = meminfo.read_text().splitlines()
        kilobytes = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
        return int(kilobytes) * 1024
    except (OSError, StopIteration, ValueError) as error:
        raise ConfigError(
            f"cannot read the available memory from {meminfo}: set kv_cache_memory",
            field="kv_cache_memory",
        ) from error
