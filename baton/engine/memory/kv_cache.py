"""KVArena: the memory of all KV blocks, one allocation, block after block.

A block (a page) holds block_size tokens of one group of layers (layer_groups.py): a slot per layer,
each on a 64-byte boundary. A slot is laid out as on the wire (token-major), as long as
k_dim == v_dim:
    [2, block_size, kv_heads, head_dim]
in general its K part [block_size, kv_heads, k_dim] followed by its V part [block_size, kv_heads,
v_dim]; MLA has no V part. So a copy of a block is one copy, and layers of different groups share a
slot's memory under different block ids. int8 KV has a scale per token and head, float32, behind the
slots of its page: slots of [2, block_size, kv_heads] (MLA: 1 instead of 2).
Views of layers reach beyond the own blocks where the memory does: block ids from `num_blocks` on
name pages of other nodes (adoption.py), to be read only; never touch a view as a whole.
Not here: who owns which block (block_pool.py), reading and writing for transfers
(kv_transfer/pool/layout.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

from baton.engine.memory import huge_pages, pages
from baton.engine.memory.layer_groups import LayerGroups, group_layers
from baton.engine.memory.state_arena import StateArena
from baton.engine.memory.state_sizes import ALIGNMENT, aligned
from baton.protocol.errors import ConfigError, InternalError
from baton.protocol.kv_spec import LayerSpec

# bytes copied back at once: larger scratch costs fresh pages every time
SLAB_BYTES: Final = 4 << 20

_TORCH_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


# (bytes, bytes of a page) -> uint8 on the pool's device, 64-byte aligned: first that many bytes of
# its own, zeroed, such as shared memory; behind them, if any, addresses where other pools' pages
# may appear, read-only. An address where none is must not be touched.
MakeMemory: TypeAlias = Callable[[int, int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class HostBlocks:
    """Copies of some blocks in host memory, scales included: [blocks, words]."""

    words: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.words.nbytes


class KVArena:
    """KV of `num_blocks` blocks of `block_size` tokens, zeroed, on one device.

    Zeroed because a masked score still multiplies the value behind it: 0 * NaN would poison a row.
    """

    def __init__(
        self,
        layers: tuple[LayerSpec, ...] | LayerGroups,
        num_blocks: int,
        block_size: int,
        dtype: str,
        device: str | torch.device = "cpu",
        memory: MakeMemory | None = None,
    ) -> None:
        """`layers`: grouped by their windows here, unless grouped already. `memory`: makes the one
        allocation, at least num_blocks * bytes_per_block() long; None = memory of its own, on
        `device`. Raises ConfigError for a dtype in which KV cannot be stored.
        """
        if dtype not in _TORCH_DTYPES:
            raise ConfigError(f"KV cannot be stored as {dtype!r}", field="dtype")
        self.groups = layers if isinstance(layers, LayerGroups) else group_layers(layers, dtype)
        self.layers = self.groups.layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self._slots, self._scale_slots, self.page_bytes = _places(self.groups, block_size, dtype)
        self.num_bytes = num_blocks * self.page_bytes
        if memory is None:
            place = _memory(self.num_bytes, torch.device(device))
        else:
            place = memory(self.num_bytes, self.page_bytes)
        if place.numel() < self.num_bytes or place.dtype != torch.uint8:
            raise InternalError(f"{num_blocks} KV blocks need {self.num_bytes} bytes of memory")
        self.device = place.device
        self.states: StateArena | None = None
        self.before_giving_back: Callable[[], object] | None = None  # set by who made `memory`
        count = place.numel() // self.page_bytes
        self._reach = place[: count * self.page_bytes].view(count, self.page_bytes)
        self._pages = self._reach[:num_blocks]

    @property
    def group_of(self) -> tuple[int, ...]:
        """The layer group of each layer: which of a sequence's block lists the layer reads."""
        return self.groups.group_of

    def keep_states(self, num_slots: int, num_checkpoints: int = 0) -> None:
        """Make `num_slots` slots for the recurrent states of the layers, and `num_checkpoints` rows
        for copies of them; 0 slots = none are kept.
        """
        if num_slots:
            self.states = StateArena(self.layers, num_slots, self.device, num_checkpoints)

    def block_bytes(self, layer: int) -> int:
        """Return the bytes of one block of one layer, K and V."""
        return self.block_size * self.layers[layer].token_bytes(self.dtype)

    def slot_offset(self, layer: int) -> int:
        """Return where `layer` begins within a block of its group, in bytes."""
        return self._slots[self.groups.places[layer][1]]

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views k, v, each [num_blocks, block_size, kv_heads, k_dim or v_dim].

        Both share the arena's memory, strided over blocks and contiguous within one. Only the
        blocks of the layer's own group hold its KV. The views are longer where the memory reaches
        beyond the own blocks; there, only blocks that are known to exist may be touched.
        """
        spec, start = self.layers[layer], self.slot_offset(layer)
        dtype = _TORCH_DTYPES[self.dtype]
        k_size = self.block_size * spec.kv_heads * spec.k_dim
        shape = (self.block_size, spec.kv_heads)
        slot = self._reach[:, start : start + self.block_bytes(layer)].view(dtype)
        k = slot[:, :k_size].unflatten(1, (*shape, spec.k_dim))
        if spec.v_dim == 0:
            return k, slot.new_empty((len(slot), *shape, 0))
        return k, slot[:, k_size:].unflatten(1, (*shape, spec.v_dim))

    def scales(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of int8 KV's scales, K's and V's, each [num_blocks, block_size, kv_heads]
        float32.

        They are as long as the views of `layer`. MLA has no V: its second view is that of K. Those
        of a layer without KV are empty. Raises InternalError for any other dtype.
        """
        spec = self.layers[layer]
        size = self.block_size * spec.scale_bytes(self.dtype)
        if self.dtype != "int8":
            raise InternalError(f"KV stored as {self.dtype} has no scales")
        start = self._scale_slots[self.groups.places[layer][1]]
        parts = 2 if spec.v_dim else 1
        slot = self._reach[:, start : start + size].view(torch.float32)
        scales = slot.unflatten(1, (parts, self.block_size, spec.kv_heads))
        return scales[:, 0], scales[:, -1]

    def buffer(self) -> memoryview:
        """Return all blocks' bytes, scales included, writable.

        Layer l of block b begins at b * page_bytes + slot_offset(l). Raises InternalError off the
        CPU.
        """
        if self.device.type != "cpu":
            raise InternalError("only a pool in host memory has a buffer; stage a device pool")
        return self._pages.view(-1).numpy().data

    def give_back(self) -> bool:
        """Free the pages' memory with its content, and keep the addresses. False: impossible here.

        Nobody may read or write until `take_again`.
        """
        if self.before_giving_back is not None:
            self.before_giving_back()
        return self.device.type == "cpu" and pages.give_back(self._pages)

    def take_again(self) -> None:
        """Take the memory of the pages again; they are zero. Raises Unavailable if there is
        none.
        """
        pages.take_again(self._pages)

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block's KV in all its layers, after BlockPool.copy_on_write().

        `source` may be a block of another pool.
        """
        _words(self._pages)[target] = _words(self._reach)[source]

    def clear_block(self, block: int) -> None:
        """Zero a block that will be written only in part: attention may read its rest, masked."""
        _words(self._pages)[block] = 0

    def read_blocks(self, blocks: Sequence[int]) -> HostBlocks:
        """Return copies in host memory of `blocks`, also of other pools. Finished when this
        returns.
        """
        index = torch.tensor(blocks, device=self.device)
        return HostBlocks(_words(self._reach).index_select(0, index).cpu())

    def write_blocks(self, host: HostBlocks, rows: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy rows of `host` back into `blocks`. Finished when this returns."""
        source, target = torch.tensor(rows), torch.tensor(blocks, device=self.device)
        mine = _words(self._pages)
        step = max(1, SLAB_BYTES // (8 * mine.shape[1]))
        for at in range(0, len(blocks), step):
            slab = host.words.index_select(0, source[at : at + step])
            mine.index_copy_(0, target[at : at + step], slab.to(self.device))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def bytes_per_block(
    layers: tuple[LayerSpec, ...] | LayerGroups, block_size: int, dtype: str
) -> int:
    """Return the bytes of one block of KVArena over its group's layers, scales included."""
    groups = layers if isinstance(layers, LayerGroups) else group_layers(layers, dtype)
    return _places(groups, block_size, dtype)[2]


def _memory(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return zeros, uint8 [num_bytes]."""
    if device.type == "cpu":
        return huge_pages.zeros(num_bytes, dtype=torch.uint8, alone=True)
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def _places(groups: LayerGroups, block_size: int, dtype: str) -> tuple[list[int], list[int], int]:
    """Return where each slot begins in a page, where its scales begin, and the bytes of a page."""
    slots, size = _offsets(groups.slot_bytes(block_size, dtype))
    scales, behind = _offsets(groups.slot_scale_bytes(block_size, dtype))
    # A page without KV (of layers that keep recurrent state only) has an address all the same.
    return slots, [size + start for start in scales], max(size + behind, ALIGNMENT)


def _words(pages: torch.Tensor) -> torch.Tensor:
    """View pages as rows of 8-byte words: torch copies rows of bytes one byte at a time
    (docs/log/).
    """
    return pages.view(torch.int64)


def _offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the starts of slots of these sizes, each on a boundary, and their size in all."""
    starts: list[int] = []
    total = 0
    for size in sizes:
        starts.append(total)
        total += aligned(size)
    return starts, total
