"""Prompt lookup: the definition in plain Python, over histories that grow, restart and loop."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.sampling.proposer import DraftAsk, NgramProposer
from baton.protocol.errors import ConfigError
from baton.protocol.sampling import SamplingParams

PARAMS = SamplingParams(seed=1)


def ask(history: list[int], max_drafts: int = 4, name: str = "r", index: int = 0) -> DraftAsk:
    return DraftAsk(name, history, max_drafts, PARAMS, 0, index)


def plain(history: list[int], max_drafts: int, min_n: int, max_n: int) -> list[int]:
    """The definition: longest tail first, latest occurrence first, periodic beyond the end."""
    for n in range(min(max_n, len(history) - 1), min_n - 1, -1):
        for end in range(len(history) - 1, n - 1, -1):
            if history[end - n : end] == history[-n:]:
                text = list(history)
                while len(text) < end + max_drafts + 1:
                    text.append(text[end + len(text) - len(history)])
                return text[end : end + max_drafts]
    return []


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(0, 6),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_is_the_plain_definition(history: list[int], drafts: int, min_n: int, more: int) -> None:
    proposer = NgramProposer(min_n, min_n + more)
    for length in range(1, len(history) + 1, 3):
        known = history[:length]
        [guess] = proposer.propose([ask(known, drafts)])
        assert guess == plain(known, drafts, min_n, min_n + more)


def test_a_loop_is_guessed_as_long_as_asked() -> None:
    assert NgramProposer().propose([ask([5, 1, 2, 1, 2], 7)]) == [[1, 2, 1, 2, 1, 2, 1]]
    assert NgramProposer(min_n=1).propose([ask([8, 8], 3)]) == [[8, 8, 8]]


def test_samples_and_requests_are_apart_and_forgotten() -> None:
    proposer = NgramProposer(min_n=1)
    loop, other = [1, 2, 3, 1], [4, 4]
    asks = [ask(loop, 2), ask(other, 2, index=1), ask([9], 2, name="s")]
    assert proposer.propose(asks) == [[2, 3], [4, 4], []]
    proposer.forget("r")
    proposer.forget("r")
    # The same id with another text, and one that is not a continuation: found anew.
    assert proposer.propose([ask([7, 8, 7], 2)]) == [[8, 7]]
    assert proposer.propose([ask([6, 5, 1, 6], 2)]) == [[5, 1]]


def test_long_histories_grow() -> None:
    proposer = NgramProposer()
    history = list(range(1000))
    assert proposer.propose([ask(history)]) == [[]]
    history += [500, 501]
    assert proposer.propose([ask(history)]) == [[502, 503, 504, 505]]


@pytest.mark.parametrize(("min_n", "max_n"), [(0, 2), (3, 2)])
def test_nonsense_is_refused(min_n: int, max_n: int) -> None:
    with pytest.raises(ConfigError, match="min_n"):
        NgramProposer(min_n, max_n)
