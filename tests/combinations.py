"""Which combinations of parameters every run takes; all others are `soak`."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def diagonal(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """As many combinations as the longest of `axes` has values: each value of each is in one."""
    longest = max(map(len, axes))
    return [tuple(axis[turn % len(axis)] for axis in axes) for turn in range(longest)]


def combined(
    *axes: Sequence[Any],
    always: Collection[tuple[Any, ...]] = (),
    marks: Sequence[pytest.MarkDecorator] = (),
) -> list[ParameterSet]:
    """The product of `axes`. `always`: these have no mark. Those on the diagonal have `marks`."""
    shown = diagonal(*axes)
    return [
        pytest.param(
            *each,
            marks=() if each in always else marks if each in shown else (*marks, pytest.mark.soak),
            id="-".join(map(str, each)),
        )
        for each in itertools.product(*axes)
    ]
