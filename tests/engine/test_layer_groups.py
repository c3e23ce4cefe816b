"""Which layers share a page: the models that are served, and any mix of windows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.memory.kv_cache import bytes_per_block
from baton.engine.memory.layer_groups import MAX_GROUPS, group_layers, one_group
from baton.protocol.kv_spec import LayerSpec, first_visible

FULL = LayerSpec(4, 64, 64)
SLIDING = replace(FULL, window=512, kind="sliding")
SHORT = replace(FULL, window=128, kind="sliding")


@pytest.mark.parametrize(
    ("layers", "windows", "slots"),
    [
        ((FULL,) * 32, (0,), 32),
        ((SLIDING,) * 32, (512,), 32),
        ((SLIDING, FULL) * 13, (0, 512), 13),  # Gemma 2
        ((SHORT, FULL) * 12, (0, 128), 12),  # GPT-OSS
        (((SLIDING,) * 5 + (FULL,)) * 4 + (SLIDING,) * 2, (0, *[512] * 6), 4),  # Gemma 3 1B
        ((SLIDING,) * 5 + (FULL,), (0, *[512] * 5), 1),
        ((SHORT, SLIDING) * 2, (512, 128), 2),
        ((FULL,) + (SLIDING,) * 60, (0, *[512] * 10), 6),  # not 61 groups of one layer
    ],
)
def test_models(layers: tuple[LayerSpec, ...], windows: tuple[int, ...], slots: int) -> None:
    groups = group_layers(layers, "bfloat16")
    assert groups.windows == windows
    assert groups.num_slots == slots
    assert bytes_per_block(layers, 16, "bfloat16") == slots * 16 * 2 * 4 * 64 * 2


def test_pages_of_unequal_bytes_are_one_group() -> None:
    wide = replace(SLIDING, kv_heads=8)
    assert group_layers((FULL, wide), "bfloat16") == one_group((FULL, wide))
    # Equal bytes of KV, but not of int8's scales.
    flat = LayerSpec(2, 128, 128, window=512)
    assert group_layers((FULL, flat), "bfloat16").num_groups == 2
    assert group_layers((FULL, flat), "int8").num_groups == 1
    assert group_layers((FULL, flat), "int8").windows == (0,)
    assert one_group((SHORT, SLIDING)).windows == (512,)


@given(st.lists(st.sampled_from((0, 0, 4, 4, 4, 9)), min_size=1, max_size=70))
def test_every_layer_has_a_place_among_its_like(windows: list[int]) -> None:
    layers = tuple(replace(FULL, window=window) for window in windows)
    groups = group_layers(layers, "float16")
    assert len(set(groups.places)) == len(layers), "two layers in one place"
    assert all(slot < groups.num_slots for _, slot in groups.places)
    assert groups.num_groups <= MAX_GROUPS
    assert [groups.windows[group] for group in groups.group_of] == windows
    reach = [window or 1000 for window in groups.windows]
    assert reach == sorted(reach, reverse=True), "the first group sees farthest"
    held = groups.blocks_held(100, 16)
    assert held == sum(7 if not w else min(7, -(-w // 16) + 1) for w in groups.windows)


@given(st.integers(0, 50), st.integers(1, 200))
def test_first_visible_is_what_the_last_known_token_sees(window: int, num_tokens: int) -> None:
    last = num_tokens - 1
    seen = [p for p in range(num_tokens) if not window or p > last - window]
    assert first_visible(window, num_tokens) == seen[0]
