"""Memory maps against the pools they describe: both layouts, any range, and hostile text."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.kv_cache import KVArena
from baton.errors import ConfigError, KVCorrupt
from baton.kv_spec import LayerSpec
from kv_transfer.layout import ArenaMemory
from kv_transfer.memory_map import MemoryMap, Piece, map_of
from tests.transfer.pools import LAYERS, fill_random

NUM_BLOCKS, BLOCK = 12, 4


@dataclass
class PageMajor:
    """layout.Arena with blocks outermost: a page holds its tokens of every layer, then scales."""

    layers: tuple[LayerSpec, ...]
    block_size: int
    dtype: str
    pages: torch.Tensor  # uint8 [pages, page_bytes]

    device = torch.device("cpu")

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        at = sum(self.block_size * spec.token_bytes(self.dtype) for spec in self.layers[:layer])
        spec = self.layers[layer]
        parts = []
        for dim in (spec.k_dim, spec.v_dim):
            size = self.block_size * spec.kv_heads * dim * 2
            shape = (self.block_size, spec.kv_heads, dim)
            part = self.pages[:, at : at + size].view(torch.bfloat16)
            parts.append(part.unflatten(1, shape) if dim else part.new_empty((0, *shape)))
            at += size
        return parts[0], parts[1]

    def scales(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("bfloat16 has none")

    def layer_buffer(self, layer: int) -> memoryview:
        raise AssertionError("not a layer after the other")


def page_major() -> tuple[PageMajor, MemoryMap]:
    page_bytes = sum(BLOCK * spec.token_bytes("bfloat16") for spec in LAYERS)
    pages = torch.randint(0, 256, (NUM_BLOCKS, page_bytes), dtype=torch.uint8)
    arena = PageMajor(LAYERS, BLOCK, "bfloat16", pages)
    return arena, map_of(arena, pages.data_ptr(), pages.nbytes)


def layer_major() -> tuple[KVArena, torch.Tensor, MemoryMap]:
    arena = KVArena(LAYERS, NUM_BLOCKS, BLOCK, "bfloat16")
    fill_random(arena, 3)
    memory = arena._memory
    return arena, memory, map_of(arena, memory.data_ptr(), memory.nbytes)


def taken(memory: torch.Tensor, pieces: list[Piece]) -> bytes:
    data = memory.flatten().numpy().tobytes()
    return b"".join(
        data[piece.offset + row * piece.row_stride :][: piece.row_bytes]
        for piece in pieces
        for row in range(piece.rows)
    )


@given(
    blocks=st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=6, max_size=6, unique=True),
    ends=st.tuples(st.integers(0, 6 * BLOCK), st.integers(0, 6 * BLOCK)),
    layer=st.integers(0, len(LAYERS) - 1),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_pieces_are_what_the_pool_reads(
    blocks: list[int], ends: tuple[int, int], layer: int, data: st.DataObject
) -> None:
    start, end = sorted(ends)
    heads = LAYERS[layer].kv_heads
    first = data.draw(st.integers(0, heads - 1))
    some = range(first, data.draw(st.integers(first + 1, heads)))
    arena, memory, layer_map = layer_major()
    expected = b"".join(ArenaMemory(arena).read(layer, blocks, start, end, some))
    assert taken(memory, layer_map.pieces(layer, blocks, (start, end), some)) == expected
    paged, page_map = page_major()
    rows = [
        torch.cat([part[b] for b in blocks])[start:end, some.start : some.stop]
        for part in paged.layer(layer)
        if part.numel()
    ]
    expected = b"".join(r.contiguous().view(torch.uint8).numpy().tobytes() for r in rows)
    assert taken(paged.pages, page_map.pieces(layer, blocks, (start, end), some)) == expected


def test_neighbouring_blocks_are_one_piece() -> None:
    arena = KVArena((LayerSpec(1, 24, 0, kind="mla"),), 8, 4, "bfloat16")
    latent = map_of(arena, arena._memory.data_ptr(), arena._memory.nbytes)
    assert latent.pieces(0, [2, 3, 4], (0, 12), range(1)) == [Piece(2 * 4 * 48, 12, 48, 48)]


def test_text_is_short_and_says_the_same() -> None:
    for layer_map in (layer_major()[2], page_major()[1]):
        assert MemoryMap.from_text(layer_map.to_text()) == layer_map
    deep = KVArena((LayerSpec(8, 128, 128),) * 28, 4, 16, "bfloat16")
    layer_map = map_of(deep, deep._memory.data_ptr(), deep._memory.nbytes)
    assert len(layer_map.to_text()) < 120
    assert MemoryMap.from_text(layer_map.to_text()) == layer_map
    assert layer_map.fits(deep.layers, "bfloat16")
    assert not layer_map.fits(deep.layers[1:], "bfloat16")
    assert not layer_map.fits(deep.layers, "float32")


def test_int8_has_its_scales_behind_its_rows() -> None:
    arena = KVArena(LAYERS, NUM_BLOCKS, BLOCK, "int8")
    fill_random(arena, 5)
    memory = arena._memory
    for layer in range(len(LAYERS)):
        for scales in arena.scales(layer):
            scales.copy_(torch.rand(scales.shape))
    layer_map = map_of(arena, memory.data_ptr(), memory.nbytes)
    assert layer_map.fits(LAYERS, "int8")
    blocks = [5, 2, 7]
    for layer, spec in enumerate(LAYERS):
        expected = b"".join(ArenaMemory(arena).read(layer, blocks, 1, 11))
        heads = range(spec.kv_heads)
        assert taken(memory, layer_map.pieces(layer, blocks, (1, 11), heads)) == expected


def test_a_pool_elsewhere_has_no_map_here() -> None:
    arena = KVArena(LAYERS, 4, 4, "bfloat16")
    memory = arena._memory
    with pytest.raises(ConfigError, match="given memory"):
        map_of(arena, memory.data_ptr(), memory.nbytes // 2)
    with pytest.raises(ConfigError, match="given memory"):
        map_of(arena, memory.data_ptr() + 64, memory.nbytes)


@pytest.mark.parametrize(
    ("blocks", "tokens", "heads"),
    [
        ([0, NUM_BLOCKS], (0, 8), range(2)),
        ([0, -1], (0, 8), range(2)),
        ([0], (0, 5), range(2)),
        ([0], (-1, 2), range(2)),
        ([0, 1], (5, 2), range(2)),
        ([0], (0, 4), range(3)),
        ([0], (0, 4), range(-1, 1)),
    ],
)
def test_what_is_not_in_the_pool_is_refused(
    blocks: list[int], tokens: tuple[int, int], heads: range
) -> None:
    with pytest.raises(KVCorrupt):
        layer_major()[2].pieces(0, blocks, tokens, heads)


@given(st.text(max_size=80) | st.recursive(
    st.integers(-3, 1 << 70) | st.floats() | st.booleans() | st.text(max_size=3) | st.none(),
    lambda children: st.lists(children, max_size=5), max_leaves=25,
).map(json.dumps))  # fmt: skip
@settings(max_examples=400)
def test_any_other_text_is_corrupt(text: str) -> None:
    with pytest.raises(KVCorrupt):
        MemoryMap.from_text(text)


@given(st.data())
@settings(max_examples=200)
def test_one_number_changed_is_corrupt_or_within_bounds(data: st.DataObject) -> None:
    """Whatever a peer says, what it makes us read lies in the memory that it announced."""
    text = page_major()[1].to_text()
    numbers = [i for i, c in enumerate(text) if c.isdigit()]
    at = data.draw(st.sampled_from(numbers))
    changed = text[:at] + data.draw(st.sampled_from("0123456789")) + text[at + 1 :]
    try:
        other = MemoryMap.from_text(changed)
    except KVCorrupt:
        return
    last = other.num_blocks - 1
    for layer, place in enumerate(other.layers):
        for piece in other.pieces(layer, [last], (0, other.block_size), range(place.heads)):
            assert piece.offset + piece.num_bytes <= other.num_bytes
