"""Tensors in pages of 2 MiB: aligned, zeroed, of any size, and given back."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from baton.engine.memory.huge_pages import HUGE, zeros


@pytest.mark.parametrize("numbers", [0, 5, HUGE // 2 - 1, HUGE // 2, HUGE + 7])
def test_any_size_is_zeroed_and_writable(numbers: int) -> None:
    x = zeros(1, numbers, dtype=torch.bfloat16)
    assert x.shape == (1, numbers)
    assert x.dtype == torch.bfloat16
    assert x.untyped_storage().nbytes() == 2 * numbers
    assert not x.any()
    x.fill_(1)
    assert bool((x == 1).all())
    if 2 * numbers >= HUGE:
        assert x.data_ptr() % HUGE == 0


def test_views_keep_the_memory_and_the_last_gives_it_back() -> None:
    x = zeros(2, HUGE, dtype=torch.uint8)
    x[1, -1] = 7
    view, storage = x[1], weakref.ref(x.untyped_storage())
    del x
    gc.collect()
    assert int(view[-1]) == 7
    del view
    gc.collect()
    assert storage() is None
