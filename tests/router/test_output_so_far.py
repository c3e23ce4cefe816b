"""OutputSoFar: however nodes repeat themselves, each token is shown once and the end, too."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.protocol.errors import InternalError
from baton.protocol.events import TokenEvent, TokenLogprob
from baton.protocol.request import FinishReason
from router.request.output_stream import OutputSoFar

LENGTH = FinishReason.LENGTH


def event(position: int, *ids: int, end: bool = False, sample: int = 0) -> TokenEvent:
    return TokenEvent("r", 1, position, ids, sample, LENGTH if end else None)


@given(
    length=st.integers(1, 12),
    steps=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), max_size=12),
    repeats_end=st.booleans(),
)
def test_any_repetition_of_a_stream_is_shown_once(
    length: int, steps: list[tuple[int, int]], repeats_end: bool
) -> None:
    truth = tuple(range(100, 100 + length))
    output = OutputSoFar(((),), 1)
    shown: list[int] = []
    ends = 0
    # Each event goes back some tokens from what is known, then forward; the last ones end it.
    spans = [(max(0, len(truth) - 1), len(truth), True)] * (1 + repeats_end)
    known = 0
    cuts: list[tuple[int, int, bool]] = []
    for back, forward in [*steps, (0, length)]:
        start = max(0, known - back)
        stop = min(len(truth) - 1, start + forward)
        if stop >= start:
            cuts.append((start, stop, False))
            known = max(known, stop)
    for start, stop, end in cuts + spans:
        fresh = output.take(event(start, *truth[start:stop], end=end))
        if fresh is not None:
            assert fresh.position == len(shown)
            shown += fresh.token_ids
            ends += fresh.finish_reason is not None
    assert tuple(shown) == truth
    assert ends == 1
    assert output.finished
    assert output.output_ids == (truth,)


def test_what_earlier_epochs_emitted_is_known() -> None:
    output = OutputSoFar(((1, 2),), 1)
    assert output.take(event(1, 2)) is None
    fresh = output.take(event(1, 2, 3))
    assert fresh is not None
    assert (fresh.position, fresh.token_ids) == (2, (3,))


def test_gaps_contradictions_and_late_tokens_are_refused() -> None:
    output = OutputSoFar(((),), 1)
    assert output.take(event(0, 1, 2)) is not None
    for wrong in (event(3, 4), event(1, 9), event(0, 1, 9, 3), event(0, 1, end=True)):
        with pytest.raises(InternalError):
            output.take(wrong)
    with pytest.raises(InternalError):
        output.take(event(0, 1, sample=1))
    assert output.take(event(2, end=True)) is not None  # an end without a token
    assert output.take(event(2, end=True)) is None
    with pytest.raises(InternalError):
        output.take(event(2, 3))


def test_samples_are_apart_and_end_together() -> None:
    output = OutputSoFar(((),), 2)
    assert output.take(event(0, 1, end=True)) is not None
    assert not output.finished
    assert output.take(event(0, 5, 6, sample=1, end=True)) is not None
    assert output.finished
    assert output.output_ids == ((1,), (5, 6))
    assert output.num_tokens == 3


def test_logprobs_are_cut_with_their_tokens() -> None:
    first, second = (TokenLogprob(1, -0.1, 1),), (TokenLogprob(2, -0.2, 1),)
    output = OutputSoFar(((1,),), 1)
    fresh = output.take(TokenEvent("r", 1, 0, (1, 2), logprobs=(first, second)))
    assert fresh is not None
    assert (fresh.token_ids, fresh.logprobs) == ((2,), (second,))
