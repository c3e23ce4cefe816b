"""Memory maps against the pools they describe: any groups and range, and hostile text."""

from __future__ import annotations

import json
from typing import TypeAlias

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.engine.memory.kv_cache import KVArena, bytes_per_block
from baton.protocol.errors import ConfigError, KVCorrupt
from baton.protocol.kv_spec import HeldBlocks, LayerSpec
from kv_transfer.pool.layout import ArenaMemory
from kv_transfer.pool.memory_map import MemoryMap, Piece, map_of
from tests.block_lists import held
from tests.transfer.pools import LAYERS, fill_random

NUM_BLOCKS, BLOCK = 12, 4
MIXED = (*(LayerSpec(2, 8, 8),) * 2, *(LayerSpec(2, 8, 8, window=9, kind="sliding"),) * 4)
Mapped: TypeAlias = tuple[KVArena, torch.Tensor, MemoryMap]


def mapped(layers: tuple[LayerSpec, ...] = LAYERS, dtype: str = "bfloat16") -> Mapped:
    """A pool of random bytes, all of its memory, and its map."""
    memory = torch.zeros(bytes_per_block(layers, BLOCK, dtype) * NUM_BLOCKS, dtype=torch.uint8)
    arena = KVArena(layers, NUM_BLOCKS, BLOCK, dtype, memory=lambda *_: memory)
    fill_random(arena, 3)
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
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_pieces_are_what_the_pool_reads(
    blocks: list[int], ends: tuple[int, int], data: st.DataObject
) -> None:
    start, end = sorted(ends)
    layers = data.draw(st.sampled_from([LAYERS, MIXED]))
    layer = data.draw(st.integers(0, len(layers) - 1))
    heads = layers[layer].kv_heads
    first = data.draw(st.integers(0, heads - 1))
    some = range(first, data.draw(st.integers(first + 1, heads)))
    arena, memory, layer_map = mapped(layers)
    lists = tuple(HeldBlocks(blocks if g == arena.group_of[layer] else ()) for g in range(3))
    expected = b"".join(ArenaMemory(arena).read(layer, lists, start, end, some))
    assert taken(memory, layer_map.pieces(layer, blocks, (start, end), some)) == expected


def test_neighbouring_blocks_are_one_piece() -> None:
    _, _, latent = mapped((LayerSpec(1, 24, 0, kind="mla"),))
    assert latent.pieces(0, [2, 3, 4], (0, 12), range(1)) == [Piece(2 * 4 * 48, 12, 48, 48)]


def test_text_is_short_and_says_the_same() -> None:
    for layers in (LAYERS, MIXED):
        layer_map = mapped(layers)[2]
        assert MemoryMap.from_text(layer_map.to_text()) == layer_map
    deep, _, layer_map = mapped((LayerSpec(8, 128, 128),) * 28)
    assert len(layer_map.to_text()) < 120
    assert MemoryMap.from_text(layer_map.to_text()) == layer_map
    assert layer_map.fits(deep.layers, "bfloat16")
    assert not layer_map.fits(deep.layers[1:], "bfloat16")
    assert not layer_map.fits(deep.layers, "float32")


def test_int8_has_its_scales_behind_its_rows() -> None:
    arena, memory, layer_map = mapped(dtype="int8")
    for layer in range(len(LAYERS)):
        for scales in arena.scales(layer):
            scales.copy_(torch.rand(scales.shape))
    assert layer_map.fits(LAYERS, "int8")
    blocks = [5, 2, 7]
    for layer, spec in enumerate(LAYERS):
        expected = b"".join(ArenaMemory(arena).read(layer, held(blocks), 1, 11))
        heads = range(spec.kv_heads)
        assert taken(memory, layer_map.pieces(layer, blocks, (1, 11), heads)) == expected


def test_a_pool_elsewhere_has_no_map_here() -> None:
    arena, memory, _ = mapped()
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
        mapped()[2].pieces(0, blocks, tokens, heads)


@given(st.text(max_size=80) | st.recursive(
    st.integers(-3, 1 << 70) | st.floats() | st.booleans() | st.text(max_size=3) | st.none(),
    lambda children: st.lists(children, max_size=5), max_leaves=25,
).map(json.dumps))  # fmt: skip
@settings(max_examples=150)
@example("[0,1,1,[]]")  # a pool without layers
def test_any_other_text_is_corrupt(text: str) -> None:
    with pytest.raises(KVCorrupt):
        MemoryMap.from_text(text)


@given(st.data())
@settings(max_examples=100)
def test_one_number_changed_is_corrupt_or_within_bounds(data: st.DataObject) -> None:
    """Whatever a peer says, what it makes us read lies in the memory that it announced."""
    text = mapped(MIXED)[2].to_text()
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
