"""A slice of tests/transfer/fuzz.py; the whole of it is a command of its own."""

from __future__ import annotations

import pytest

from tests.transfer.fuzz import Fuzz, honest_frames, with_right_digest


@pytest.mark.parametrize("seed", range(4))
def test_nothing_but_values_and_refusals(seed: int) -> None:
    fuzz = Fuzz(seed)
    for _ in range(2500):
        fuzz.one()
    # Every depth has been reached: else the mutations would prove little.
    assert set(fuzz.results) == {"no frame", "no body", "refused", "accepted"}


def test_a_right_digest_is_a_right_one() -> None:
    for frame in honest_frames():
        assert with_right_digest(frame) == frame
