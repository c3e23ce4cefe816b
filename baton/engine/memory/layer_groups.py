"""Which layers share a page of the pool: those with equal windows, so that a window frees pages.

A page (a pool block) holds block_size tokens of ONE group's layers, one slot per layer. All pages
have equal bytes: one pool, one id space, and a page freed by one group serves any other. A model
whose layers all see equally far is one group, and a page is simply a block of all its layers.

    Gemma 3, 22 sliding + 4 full:   page of 4 slots; group 0 = the full layers,
                                    groups 1 .. 6 = the sliding ones (two slots stay empty)

Pure: layer specs in, places out. Source: vLLM's hybrid KV cache groups (v1/core/kv_cache_utils.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from baton.protocol.kv_spec import LayerSpec

log = logging.getLogger(__name__)

MIN_BLOCKS: Final = 2  # blocks of each group in a pool that can serve
MAX_GROUPS: Final = 16  # each group costs a block table per sequence and step
MAX_PADDING: Final = 0.1  # share of empty slots that is accepted for larger pages


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Where each layer's KV lies: `places[layer]` = (group, slot of the group's pages).

    `windows[group]`: the most tokens that its layers see, 0 = all. Group 0 sees farthest.
    """

    layers: tuple[LayerSpec, ...]
    windows: tuple[int, ...]
    places: tuple[tuple[int, int], ...]

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    @property
    def num_slots(self) -> int:
        """The number of layers that a page holds."""
        return max((slot for _, slot in self.places), default=-1) + 1

    @property
    def group_of(self) -> tuple[int, ...]:
        """The group of each layer."""
        return tuple(group for group, _ in self.places)

    def slot_bytes(self, block_size: int, dtype: str) -> list[int]:
        """Return the bytes of each slot of a page, without scales."""
        sizes = [0] * self.num_slots
        for layer, (_, slot) in zip(self.layers, self.places, strict=True):
            sizes[slot] = max(sizes[slot], block_size * layer.token_bytes(dtype))
        return sizes

    def page_bytes(self, block_size: int, dtype: str) -> int:
        """Return the bytes of a page, scales included, before alignment."""
        kv, scales = self.slot_bytes(block_size, dtype), self.slot_scale_bytes(block_size, dtype)
        return sum(kv) + sum(scales)

    def blocks_held(self, num_tokens: int, block_size: int) -> int:
        """Return the most pages, over all groups, of a sequence that decodes at `num_tokens`
        tokens.
        """
        count = -(-num_tokens // block_size)
        return sum(
            min(count, -(-window // block_size) + 1) if window else count for window in self.windows
        )

    def slot_scale_bytes(self, block_size: int, dtype: str) -> list[int]:
        """Return the bytes of each slot's scales: 0 unless the KV is int8."""
        sizes = [0] * self.num_slots
        for layer, (_, slot) in zip(self.layers, self.places, strict=True):
            sizes[slot] = max(sizes[slot], block_size * layer.scale_bytes(dtype))
        return sizes


def one_group(layers: Sequence[LayerSpec]) -> LayerGroups:
    """Return one group, whose pages hold all layers.

    A page is freed once its tokens are outside the largest window; if a layer sees all tokens, it
    is kept until the sequence ends.
    """
    windows = [layer.window for layer in layers]
    window = max(windows) if windows and all(windows) else 0
    return LayerGroups(tuple(layers), (window,), tuple((0, slot) for slot in range(len(layers))))


def group_layers(layers: Sequence[LayerSpec], dtype: str) -> LayerGroups:
    """Return a group for each window, or several groups if many layers have it.

    One group for all layers if they need unequal bytes per token, or have more than MAX_GROUPS
    windows.
    """
    classes: dict[int, list[int]] = {}
    for index, layer in enumerate(layers):
        classes.setdefault(layer.window, []).append(index)
    if len(classes) < 2:
        return one_group(layers)
    sizes = {(layer.token_bytes(dtype), layer.scale_bytes(dtype)) for layer in layers}
    if len(sizes) > 1 or len(classes) > MAX_GROUPS:
        log.info("layers of %d windows differ in KV bytes: they share their blocks", len(classes))
        return one_group(layers)
    # 0 = all tokens, so it comes first
    ordered = sorted(classes, key=lambda window: (window > 0, -window))
    size = _slots([len(members) for members in classes.values()])
    places: dict[int, tuple[int, int]] = {}
    windows: list[int] = []
    for window in ordered:
        members = classes[window]
        for at in range(0, len(members), size):
            for slot, layer in enumerate(members[at : at + size]):
                places[layer] = (len(windows), slot)
            windows.append(window)
    ordered_places = tuple(places[index] for index in range(len(layers)))
    return LayerGroups(tuple(layers), tuple(windows), ordered_places)


def _slots(counts: Sequence[int]) -> int:
    """Return how many layers a page has room for, if `counts[i]` layers have window i.

    More slots make fewer groups; the result is the most slots of which few stay empty.
    """

    def groups(size: int) -> int:
        return sum(-(-count // size) for count in counts)

    few = [size for size in range(1, max(counts) + 1) if groups(size) <= MAX_GROUPS]
    allowed = (1 + MAX_PADDING) * sum(counts)
    tight = [size for size in few if size * groups(size) <= allowed]
    return max(tight) if tight else min(few, key=lambda size: (size * groups(size), -size))
