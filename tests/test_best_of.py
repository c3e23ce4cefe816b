"""Which of several samples are the best: by log probability per token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.protocol.best_of import best_samples


def test_the_mean_counts_not_the_sum() -> None:
    short, long, worst = [-1.0], [-0.5] * 10, [-3.0, -3.0]
    assert best_samples([worst, short, long], 2) == [2, 1]


def test_ties_keep_their_order_and_nothing_comes_last() -> None:
    assert best_samples([[], [-1.0, -1.0], [-1.0]], 3) == [1, 2, 0]


@given(st.lists(st.lists(st.floats(-50, 0), min_size=1, max_size=5), min_size=1, max_size=6))
def test_no_sample_left_out_is_better(told: list[list[float]]) -> None:
    best = best_samples(told, 2)
    means = [sum(each) / len(each) for each in told]
    left = [mean for sample, mean in enumerate(means) if sample not in best]
    assert len(best) == min(2, len(told)) == len(set(best))
    assert not left or min(means[sample] for sample in best) >= max(left) - 1e-9
