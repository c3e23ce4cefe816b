"""The two ways of looking at nodes, in simulated time: each wins where docs/admission.md says."""

from __future__ import annotations

import pytest

from bench.node_choice import Case, waits
from router.nodes.policy import PolicySettings


def mean(case: Case, *, two: bool) -> float:
    found = waits(case, PolicySettings(two_choices=two), requests=2500, seed=1)
    return sum(found) / len(found)


@pytest.mark.parametrize(
    ("case", "two_is_better"),
    [
        (Case(nodes=16, routers=1, report=1.0), False),
        (Case(nodes=16, routers=8, report=0.05), False),
        (Case(nodes=16, routers=8, report=1.0), True),
    ],
)
def test_what_the_router_knows_decides(case: Case, two_is_better: bool) -> None:
    assert (mean(case, two=True) < mean(case, two=False)) is two_is_better
