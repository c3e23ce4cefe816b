"""What changes logits: equal to transformers' processors where it has them, to plain Python where
not; and rows that ask for nothing stay as they are, bit for bit."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from baton.engine.sampling import penalties
from baton.engine.sampling.sampler import Draw
from baton.engine.state.occurrences import Occurrences
from baton.protocol.sampling import SamplingParams

VOCAB = 40
EOS = (2, 3)
HISTORY = [5, 6, 7, 5, 9, 5, 6, 11, 6, 5]  # 4 of the prompt, 6 of the output
NUM_PROMPT = 4
TOKENS = st.integers(0, VOCAB - 1)


def draw(history: list[int] | None = None, num_prompt: int = NUM_PROMPT, **params: Any) -> Draw:
    """The draw after `history`; keyword arguments are sampling parameters."""
    history = HISTORY if history is None else history
    merged: dict[str, Any] = {"temperature": 0.0, "max_tokens": 100, **params}
    return Draw(SamplingParams(**merged), 0, len(history) - num_prompt, history, num_prompt)


def logits_of(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def ids_of(tokens: list[int]) -> Any:
    """transformers asks for a LongTensor, which torch.tensor is not by its types."""
    return torch.tensor([tokens])


def applied(logits: torch.Tensor, *draws: Draw) -> torch.Tensor:
    """A changed copy."""
    changed = logits.clone()
    penalties.apply(changed, draws, EOS)
    return changed


def plain(row: list[float], one: Draw) -> list[float]:
    """The definition, in Python floats."""
    out, p = list(row), one.params
    output = list(one.history[one.num_prompt :])
    for word in p.bad_words:
        head = list(word[:-1])
        if len(head) <= len(output) and output[len(output) - len(head) :] == head:
            out[word[-1]] = -math.inf
    if one.position < p.min_tokens:
        for token in (*EOS, *p.stop_token_ids):
            out[token] = -math.inf
    for token, bias in dict(p.logit_bias).items():
        out[token] += bias
    for token in set(one.history):
        x = out[token]
        out[token] = x / p.repetition_penalty if x > 0 else x * p.repetition_penalty
    for token, count in Counter(output).items():
        out[token] -= p.frequency_penalty * count
        out[token] -= p.presence_penalty
    return out


@pytest.mark.parametrize("penalty", [0.5, 1.2, 2.0])
def test_repetition_is_transformers_over_prompt_and_output(penalty: float) -> None:
    logits = logits_of()
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(ids_of(HISTORY), logits.clone())
    assert torch.equal(applied(logits, draw(repetition_penalty=penalty)), theirs)


@pytest.mark.parametrize(
    "words",
    [
        ((8,),),
        ((6, 5, 20), (5, 21), (5, 5), (11, 6, 5, 22)),
        ((9, 5, 6, 11, 6, 5, 23), (6, 12), (6, 5, 6, 5)),
    ],
)
def test_bad_words_are_transformers_over_the_output(words: tuple[tuple[int, ...], ...]) -> None:
    logits = logits_of()
    processor = NoBadWordsLogitsProcessor([list(word) for word in words])
    theirs = processor(ids_of(HISTORY[NUM_PROMPT:]), logits.clone())
    ours = applied(logits, draw(bad_words=words))
    assert torch.equal(ours, theirs)
    assert torch.isinf(ours).any()


def test_bad_words_do_not_look_at_the_prompt() -> None:
    words = ((7, 5, 30), (9, 31))  # both begin in the prompt: 5 6 7 5 | 9
    logits = logits_of()
    assert torch.equal(applied(logits, draw([5, 6, 7, 5], 4, bad_words=words)), logits)
    after = applied(logits, draw([5, 6, 7, 5, 9], 4, bad_words=words))
    assert torch.isinf(after).nonzero().tolist() == [[0, 31]]


@pytest.mark.parametrize("min_tokens", [5, 6, 7, 20])
def test_min_tokens_are_transformers(min_tokens: int) -> None:
    logits = logits_of()
    processor = MinNewTokensLengthLogitsProcessor(NUM_PROMPT, min_tokens, list(EOS))
    theirs = processor(ids_of(HISTORY), logits.clone())
    assert torch.equal(applied(logits, draw(min_tokens=min_tokens)), theirs)


def test_min_tokens_also_mask_stop_tokens_even_with_ignore_eos() -> None:
    changed = applied(logits_of(), draw(min_tokens=7, stop_token_ids=(8, 9), ignore_eos=True))
    assert torch.isinf(changed).nonzero()[:, 1].tolist() == [2, 3, 8, 9]


PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.7, 1.0, 1.3]),
        "frequency_penalty": st.sampled_from([-1.5, 0.0, 0.7]),
        "presence_penalty": st.sampled_from([-0.5, 0.0, 1.1]),
        "logit_bias": st.lists(st.tuples(TOKENS, st.sampled_from([-100.0, 2.5])), max_size=4).map(
            tuple
        ),
        "bad_words": st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=4).map(
            tuple
        ),
        "min_tokens": st.integers(0, 9),
        "stop_token_ids": st.lists(TOKENS, max_size=3).map(tuple),
    },
)


@settings(deadline=None, max_examples=80)
@given(st.lists(st.tuples(PARAMS, st.lists(st.integers(4, 9), max_size=12)), max_size=5), st.data())
def test_everything_together_is_the_plain_definition(
    rows: list[tuple[dict[str, Any], list[int]]], data: st.DataObject
) -> None:
    draws = [
        draw(history, data.draw(st.integers(0, len(history))), **params) for params, history in rows
    ]
    logits = logits_of(len(rows))
    changed = applied(logits, *draws)
    for row, one in enumerate(draws):
        expected = torch.tensor(plain(logits[row].tolist(), one))
        torch.testing.assert_close(changed[row], expected, rtol=1e-6, atol=1e-5)
        assert torch.equal(changed[row], applied(logits[row : row + 1], one)[0])
        if not one.altered:
            assert torch.equal(changed[row], logits[row])


@settings(deadline=None, max_examples=60)
@given(
    PARAMS,
    st.lists(st.integers(0, 12), min_size=1, max_size=9),
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 30), min_size=1, max_size=40),
            st.lists(st.integers(0, 30), max_size=4),
        ),
        max_size=6,
    ),
)
def test_counts_kept_from_step_to_step_change_nothing(
    params: dict[str, Any], prompt: list[int], steps: list[tuple[list[int], list[int]]]
) -> None:
    """Bit for bit what a fresh count of the whole text gives, with drafts ahead or without."""
    kept, history = Occurrences(), list(prompt)
    for tokens, ahead in [([], []), *steps]:
        history += tokens
        plain_draw = draw([*history, *ahead], len(prompt), **params)
        kept_draw = replace(plain_draw, history=history, ahead=ahead, occurrences=kept)
        logits = logits_of()
        assert torch.equal(applied(logits, kept_draw), applied(logits, plain_draw))


def test_what_is_counted_is_counted_once() -> None:
    """The text is read from where the last call ended; drafts are not kept."""
    reads: list[slice] = []

    class Watched(list[int]):
        def __getitem__(self, index: Any) -> Any:
            reads.append(index)
            return super().__getitem__(index)

    history, kept = Watched(range(500)), Occurrences()
    ids, counts = kept.count(history, 100, whole=False)
    assert sorted(ids.tolist()) == list(range(100, 500))
    history.extend([7, 450, 7])
    reads.clear()
    ids, counts = kept.count(history, 100, whole=False, ahead=[7, 9, 9])
    assert reads == [slice(500, None)]
    told = dict(zip(ids.tolist(), counts.tolist(), strict=True))
    assert (told[7], told[450], told[9], told[100]) == (3, 2, 2, 1)
    ids, counts = kept.count(history, 100, whole=False)
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {
        token: 1 + (token == 450) for token in range(100, 500)
    } | {7: 2}


@pytest.mark.parametrize("whole", [True, False])
def test_more_distinct_tokens_than_there_was_room_for(whole: bool) -> None:
    history, kept = [7, 8], Occurrences()
    for token in [*range(100, 400), *range(100, 250)]:
        history.append(token)
        kept.count(history, 2, whole)
    ids, counts = kept.count(history, 2, whole)
    told = dict(zip(ids.tolist(), counts.tolist(), strict=True))
    wanted = {token: 1 + (token < 250) for token in range(100, 400)}
    assert told == ({7: 0, 8: 0, **wanted} if whole else wanted)


def test_another_text_is_counted_from_its_start() -> None:
    kept = Occurrences()
    kept.count([1, 2, 3, 3], 1, whole=False)
    ids, counts = kept.count([1, 2], 1, whole=True)
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {1: 0, 2: 1}


def test_the_last_bias_of_a_token_counts_and_unknown_tokens_are_ignored() -> None:
    logits = logits_of()
    bias = ((1, 5.0), (1, 2.0), (VOCAB, 9.0), (-1, 9.0))
    changed = applied(logits, draw(logit_bias=bias, bad_words=((VOCAB + 3,), (-2,))))
    expected = logits.clone()
    expected[0, 1] += 2.0
    assert torch.equal(changed, expected)


def test_a_row_that_forbids_everything_harms_nobody() -> None:
    forbidden = tuple((token,) for token in range(VOCAB))
    logits = logits_of(2)
    changed = applied(logits, draw(bad_words=forbidden), draw(logit_bias=((3, 1.0),)))
    assert torch.equal(changed[0], logits[0])
    assert float(changed[1, 3]) == float(logits[1, 3] + 1.0)
