"""Where the blocks of a KV pool lie in its memory, as plain numbers that can be sent.

A lane that reads a peer's memory (`shm`, `nixl`) needs this map. It is derived from the pool's own
tensors and holds offsets and strides only, so it fits any arrangement: layers outermost or blocks
outermost, scales beside the rows or behind them.

Within one part (K, V, K's scales, V's scales) of a block, rows are token-major and dense:
`[block_size, heads, head_bytes]`; block b of the part begins at `offset + b * stride`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from baton.protocol.errors import ConfigError, KVCorrupt
from baton.protocol.kv_spec import DTYPE_BYTES, SCALE_BYTES, LayerSpec
from kv_transfer.pool.layout import Arena

MAX_LAYERS: Final = 4096
MAX_TEXT: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class Part:
    offset: int
    stride: int
    head_bytes: int


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """`heads`: how many of the model's KV heads lie here; `parts`: in Payload's order."""

    heads: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """`rows` runs of `row_bytes` bytes each. The first begins at `offset`, each next one
    `row_stride` later.
    """

    offset: int
    rows: int
    row_bytes: int
    row_stride: int

    @property
    def num_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def dense(self) -> bool:
        return self.rows == 1 or self.row_bytes == self.row_stride


@dataclass(frozen=True, slots=True)
class MemoryMap:
    """A pool of `num_blocks` blocks of `block_size` tokens in a memory of `num_bytes`."""

    num_bytes: int
    num_blocks: int
    block_size: int
    layers: tuple[LayerPlace, ...]

    def __post_init__(self) -> None:
        """Raises ValueError unless every block lies within the memory."""
        if min(self.num_blocks, self.block_size) < 1 or not 0 < len(self.layers) <= MAX_LAYERS:
            raise ValueError("no such pool")
        for place in self.layers:
            for part in place.parts:
                if min(place.heads, part.head_bytes) < 1 or min(part.offset, part.stride) < 0:
                    raise ValueError("no such part")
                rows = self.block_size * place.heads * part.head_bytes
                if part.offset + (self.num_blocks - 1) * part.stride + rows > self.num_bytes:
                    raise ValueError("a block beyond the end of the memory")

    def fits(self, layers: Sequence[LayerSpec], dtype: str) -> bool:
        """Whether these are layers of such a model, stored as `dtype`.

        The number of heads, which depends on the rank, is not compared.
        """
        return [[part.head_bytes for part in place.parts] for place in self.layers] == [
            _head_bytes(spec, dtype) for spec in layers
        ]

    def pieces(
        self, layer: int, blocks: Sequence[int], tokens: tuple[int, int], heads: range
    ) -> list[Piece]:
        """Return where tokens [start, end) of `heads` (counted from this pool's first) lie.

        The pieces are in Payload's order; neighbours are merged. Raises KVCorrupt for tokens, heads
        or blocks that the pool does not have.
        """
        start, end = tokens
        size, place = self.block_size, self.layers[layer]
        if not 0 <= start <= end <= len(blocks) * size:
            raise KVCorrupt(f"tokens [{start}, {end}) in {len(blocks)} blocks of {size}")
        if heads.start < 0 or heads.stop > place.heads:
            raise KVCorrupt(f"heads {heads} of {place.heads}")
        used = blocks[start // size : -(-end // size)]
        if used and not 0 <= min(used) <= max(used) < self.num_blocks:
            raise KVCorrupt(f"a block outside a pool of {self.num_blocks}")
        pieces: list[Piece] = []
        for part in place.parts:
            row_stride = place.heads * part.head_bytes
            row_bytes = len(heads) * part.head_bytes
            first_head = heads.start * part.head_bytes
            for index in range(start // size, -(-end // size)):
                first = max(start - index * size, 0)
                rows = min(end - index * size, size) - first
                at = part.offset + blocks[index] * part.stride + first * row_stride + first_head
                _append(pieces, Piece(at, rows, row_bytes, row_stride))
        return pieces

    # ---- as text -------------------------------------------------------------------------------
    def to_text(self) -> str:
        """Return the map as JSON; equal layers at equal distances are one entry."""
        runs = [
            [len(run), run[0].heads, _entries(run[0], run[1] if len(run) > 1 else run[0])]
            for run in _runs(self.layers)
        ]
        return json.dumps(
            [self.num_bytes, self.num_blocks, self.block_size, runs], separators=(",", ":")
        )

    @staticmethod
    def from_text(text: str) -> MemoryMap:
        """Parse the text of `to_text`. Raises KVCorrupt if it is no valid map."""
        try:
            if len(text) > MAX_TEXT:
                raise ValueError("too long")
            num_bytes, num_blocks, block_size, runs = json.loads(text)
            layers: list[LayerPlace] = []
            for count, heads, entries in runs:
                if not 0 < _whole(count) <= MAX_LAYERS - len(layers):
                    raise ValueError("too many layers")
                layers += [_place(_whole(heads), entries, index) for index in range(count)]
            return MemoryMap(
                _whole(num_bytes), _whole(num_blocks), _whole(block_size), tuple(layers)
            )
        except (ValueError, TypeError, RecursionError) as error:
            raise KVCorrupt(f"bad memory map: {error}") from error


def map_of(arena: Arena, address: int, num_bytes: int, num_blocks: int | None = None) -> MemoryMap:
    """Return the map of `arena`, whose tensors lie in the `num_bytes` at `address` of this process.

    `num_blocks`: how many blocks are its own; None = all that its tensors show. Raises ConfigError
    if the tensors do not lie there, or if their blocks are not dense.
    """
    layers: list[LayerPlace] = []
    shown = 0
    for index, spec in enumerate(arena.layers):
        tensors = [tensor for tensor in arena.layer(index) if tensor.numel()]
        if arena.dtype == "int8" and tensors:
            tensors += arena.scales(index)[: len(tensors)]
        parts: list[Part] = []
        for tensor in tensors:
            item = tensor.element_size()
            head_bytes = item * tensor[0, 0, 0].numel()
            shown = tensor.shape[0]
            dense = tensor[0].is_contiguous()
            parts.append(Part(tensor.data_ptr() - address, tensor.stride(0) * item, head_bytes))
            if not dense:
                raise ConfigError("the KV pool's blocks are not dense")
        layers.append(LayerPlace(spec.kv_heads, tuple(parts)))
    try:
        count = shown if num_blocks is None else num_blocks
        return MemoryMap(num_bytes, count, arena.block_size, tuple(layers))
    except ValueError as error:
        raise ConfigError(f"the KV pool does not lie in the given memory: {error}") from error


def _head_bytes(spec: LayerSpec, dtype: str) -> list[int]:
    dims = [dim for dim in (spec.k_dim, spec.v_dim) if dim]
    scales = [SCALE_BYTES] * len(dims) if dtype == "int8" else []
    return [dim * DTYPE_BYTES[dtype] for dim in dims] + scales


def _append(pieces: list[Piece], piece: Piece) -> None:
    last = pieces[-1] if pieces else None
    if (
        last is not None
        and (last.row_bytes, last.row_stride) == (piece.row_bytes, piece.row_stride)
        and last.offset + last.rows * last.row_stride == piece.offset
    ):
        pieces[-1] = Piece(last.offset, last.rows + piece.rows, last.row_bytes, last.row_stride)
    else:
        pieces.append(piece)


def _shift(place: LayerPlace, other: LayerPlace) -> list[int] | None:
    """Return the distance between the parts of two alike layers; None if they are not alike."""
    same = place.heads == other.heads and [(p.stride, p.head_bytes) for p in place.parts] == [
        (p.stride, p.head_bytes) for p in other.parts
    ]
    pairs = zip(place.parts, other.parts, strict=False)
    return [b.offset - a.offset for a, b in pairs] if same else None


def _runs(layers: Sequence[LayerPlace]) -> list[list[LayerPlace]]:
    runs: list[list[LayerPlace]] = []
    for place in layers:
        run = runs[-1] if runs else []
        step = _shift(run[-1], place) if run else None
        if step is not None and (len(run) == 1 or step == _shift(run[-2], run[-1])):
            run.append(place)
        else:
            runs.append([place])
    return runs


def _entries(first: LayerPlace, second: LayerPlace) -> list[list[int]]:
    """Return [offset, distance to the next layer's, stride, head bytes] of each part."""
    return [
        [a.offset, b.offset - a.offset, a.stride, a.head_bytes]
        for a, b in itertools.zip_longest(first.parts, second.parts)
    ]


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r:.40} is no whole number")
    return value


def _place(heads: int, entries: Any, index: int) -> LayerPlace:
    parts: list[Part] = []
    for offset, step, stride, head_bytes in entries:
        at = _whole(offset) + index * _whole(step)
        parts.append(Part(at, _whole(stride), _whole(head_bytes)))
    return LayerPlace(heads, tuple(parts))
