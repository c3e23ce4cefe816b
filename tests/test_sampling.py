"""baton/protocol/sampling.py: every bound of every number, and what is refused until it is
served."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from baton.protocol.errors import InvalidRequest
from baton.protocol.sampling import (
    BOUNDS,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    GuidedDecoding,
    SamplingParams,
)

ROOMY = SamplingParams(max_tokens=2**31 - 1)  # any min_tokens fits


def refused(**changes: Any) -> str | None:
    """The field that a refusal of these values names."""
    with pytest.raises(InvalidRequest) as caught:
        replace(ROOMY, **changes)
    return caught.value.field


@pytest.mark.parametrize(("name", "bounds"), BOUNDS.items())
def test_a_number_up_to_its_bounds_is_taken_and_beyond_them_refused_by_name(
    name: str, bounds: tuple[float, float]
) -> None:
    low, high = bounds
    taken = (high,) if name == "top_p" else (low, high)
    for value in taken:
        changes = {name: value, "min_tokens": 0} if name == "max_tokens" else {name: value}
        assert getattr(replace(ROOMY, **changes), name) == value
    below, above = math.nextafter(low, -math.inf), math.nextafter(high, math.inf)
    for value in (below, above, math.nan, math.inf, -math.inf):
        assert refused(**{name: value}) == name


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("value", [True, "1", [1]])
def test_what_is_no_number_is_refused_by_name(name: str, value: object) -> None:
    assert refused(**{name: value}) == name


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"top_p": 0.0}, "top_p"),
        ({"stop_token_ids": (1,) * (MAX_STOP_TOKEN_IDS + 1)}, "stop_token_ids"),
        ({"logit_bias": ((1, 0.5),) * (MAX_LOGIT_BIAS + 1)}, "logit_bias"),
        ({"logit_bias": ((1, 100.5),)}, "logit_bias"),
        ({"logit_bias": ((1, math.nan),)}, "logit_bias"),
        ({"allowed_token_ids": (1,) * (MAX_ALLOWED_TOKEN_IDS + 1)}, "allowed_token_ids"),
        (
            {"allowed_token_ids": (1,), "guided": GuidedDecoding("regex", "a")},
            "allowed_token_ids",
        ),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
    ],
)
def test_refusals_beyond_single_numbers(changes: dict[str, Any], field: str) -> None:
    assert refused(**changes) == field


def test_the_longest_lists_and_equal_limits_are_taken() -> None:
    params = SamplingParams(
        stop_token_ids=(1,) * MAX_STOP_TOKEN_IDS,
        logit_bias=((1, 0.5),) * MAX_LOGIT_BIAS,
        allowed_token_ids=(1,) * MAX_ALLOWED_TOKEN_IDS,
        min_tokens=5,
        max_tokens=5,
    )
    assert len(params.logit_bias) == MAX_LOGIT_BIAS


def test_greedy_is_temperature_zero() -> None:
    assert SamplingParams(temperature=0.0).greedy
    assert not SamplingParams(temperature=1e-9).greedy
