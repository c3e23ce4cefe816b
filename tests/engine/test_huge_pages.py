"""Tensors in pages of 2 MiB: zeroed, of any size, side by side or alone, and given back."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from pathlib import Path

import pytest
import torch

from baton.engine.memory import huge_pages
from baton.engine.memory.huge_pages import HUGE, SHARED, SMALLEST, SharedMapping, zeros
from baton.engine.memory.state_sizes import ALIGNMENT


@pytest.fixture(autouse=True)
def nothing_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of another test lies in the mapping."""
    monkeypatch.setattr(huge_pages, "shared_mapping", SharedMapping())


@pytest.mark.parametrize("numbers", [0, 5, HUGE // 2 - 1, HUGE // 2, HUGE + 7])
def test_any_size_is_zeroed_and_writable(numbers: int) -> None:
    x = zeros(1, numbers, dtype=torch.bfloat16)
    assert x.shape == (1, numbers)
    assert x.dtype == torch.bfloat16
    assert x.untyped_storage().nbytes() == 2 * numbers
    assert not x.any()
    x.fill_(1)
    assert bool((x == 1).all())
    assert x.data_ptr() % ALIGNMENT == 0


def test_one_that_lies_alone_begins_a_page() -> None:
    assert zeros(SHARED, dtype=torch.uint8).data_ptr() % HUGE == 0
    ours = zeros(HUGE, dtype=torch.uint8, alone=True)
    assert ours.data_ptr() % HUGE == 0
    beside = [zeros(SMALLEST, dtype=torch.uint8) for _ in range(2)]
    assert not any(ours.data_ptr() <= x.data_ptr() < ours.data_ptr() + HUGE for x in beside)


def test_small_ones_lie_side_by_side_and_touch_nothing_of_each_other() -> None:
    sizes = (SMALLEST, SMALLEST + 1, HUGE, SMALLEST)
    many = [zeros(size, dtype=torch.uint8) for size in sizes]
    for index, x in enumerate(many):
        assert not x.any()
        x.fill_(index + 1)
    assert [x.unique().tolist() for x in many] == [[1], [2], [3], [4]]
    starts = [x.data_ptr() for x in many]
    assert [b - a for a, b in itertools.pairwise(starts)] == [
        -(-x.nbytes // ALIGNMENT) * ALIGNMENT for x in many[:-1]
    ]


def test_what_has_no_room_left_begins_a_mapping_of_its_own() -> None:
    third = SHARED // 3
    many = [zeros(third, dtype=torch.uint8) for _ in range(4)]
    for index, x in enumerate(many):
        assert not x.any()
        x.fill_(index + 1)
    assert [x.unique().tolist() for x in many] == [[1], [2], [3], [4]]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_mapping_is_gone_with_its_last_tensor() -> None:
    first = zeros(SHARED // 2 - ALIGNMENT, dtype=torch.uint8)
    at, second = first.data_ptr(), zeros(SMALLEST, dtype=torch.uint8)
    del first
    gc.collect()
    assert _mapped(at), "the second one lies beside it"
    del second
    gc.collect()
    assert not _mapped(at)


def _mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = (line.split(" ", 1)[0].split("-") for line in lines)
    return any(int(start, 16) <= address < int(end, 16) for start, end in spans)


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
