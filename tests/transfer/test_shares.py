"""Who sends what: every needed head comes from exactly one rank, and is what that rank holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.protocol.kv_spec import LayerSpec, PoolFormat
from kv_transfer.protocol.shares import (
    fetching_ranks,
    first_sent,
    first_visible,
    heads_of,
    meets,
    rows_bytes,
    share,
    tokens_per_frame,
)


def ranks(size: int) -> list[PoolFormat]:
    return [PoolFormat(8, "float32", size, rank) for rank in range(size)]


@given(st.sampled_from([1, 2, 3, 4, 6, 8, 16]), st.integers(1, 16), st.integers(1, 16))
def test_every_head_once(kv_heads: int, p_size: int, d_size: int) -> None:
    spec = LayerSpec(kv_heads, 4, 4)
    for d in ranks(d_size):
        got = [head for p in ranks(p_size) for head in share(spec, p, d)]
        assert sorted(got) == list(heads_of(kv_heads, d))
        for p in ranks(p_size):
            part = share(spec, p, d)
            assert set(part) <= set(heads_of(kv_heads, p))
            assert meets([spec], p, d) == (len(part) > 0)
            assert (d.tp_rank in fetching_ranks([spec], p, d)) == (len(part) > 0)


@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 16))
def test_a_group_holds_every_head(kv_heads: int, size: int) -> None:
    held = [heads_of(kv_heads, rank) for rank in ranks(size)]
    assert {head for heads in held for head in heads} == set(range(kv_heads))
    assert all(len(heads) for heads in held)


def test_replicas_share_the_work() -> None:
    """A latent that lies on 4 ranks: each of 4 fetching ranks takes another's."""
    latent = LayerSpec(1, 8, 0, kind="mla")
    sources = [[p.tp_rank for p in ranks(4) if share(latent, p, d)] for d in ranks(4)]
    assert sources == [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    ("window", "num_tokens", "expected"), [(0, 100, 0), (16, 100, 84), (16, 16, 0), (16, 3, 0)]
)
def test_what_a_window_still_sees(window: int, num_tokens: int, expected: int) -> None:
    assert first_visible(window, num_tokens) == expected
    spec = LayerSpec(1, 4, 4, window=window)
    assert first_sent(spec, 2, num_tokens, windowed=True) == max(2, expected)
    assert first_sent(spec, 2, num_tokens, windowed=False) == 2


def test_bytes_of_rows() -> None:
    spec = LayerSpec(8, 128, 64)
    assert rows_bytes(spec, 8, "bfloat16") == 8 * 192 * 2
    assert rows_bytes(spec, 2, "bfloat16") == 2 * 192 * 2
    assert rows_bytes(spec, 2, "int8") == 2 * (192 + 2 * 4)
    assert rows_bytes(replace(spec, v_dim=0), 2, "int8") == 2 * (128 + 4)
    assert tokens_per_frame(spec, 8, "bfloat16") == (1 << 20) // (8 * 192 * 2)
