"""Rows of one step: whatever batch mates ask for, a row yields what it yields alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.running.runner import Asked, choose, draws_of
from baton.engine.state.interface import Sampled, SequenceChunk
from baton.protocol.sampling import SamplingParams
from tests.block_lists import held

VOCAB = 48
EOS = (2,)
TOKENS = st.integers(0, VOCAB - 1)
PARAMS: Any = st.fixed_dictionaries(
    {"seed": st.integers(0, 2**64 - 1), "max_tokens": st.just(50)},
    optional={
        "temperature": st.sampled_from([0.0, 0.4, 1.0, 1.6]),
        "top_k": st.sampled_from([0, 1, 3, 30]),
        "top_p": st.sampled_from([0.2, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1, 1.0]),
        "repetition_penalty": st.sampled_from([0.8, 1.4]),
        "frequency_penalty": st.sampled_from([-1.0, 0.5]),
        "presence_penalty": st.sampled_from([-1.0, 0.5]),
        "logit_bias": st.lists(st.tuples(TOKENS, st.floats(-5, 5)), max_size=3).map(tuple),
        "bad_words": st.lists(st.lists(TOKENS, min_size=1, max_size=2).map(tuple)).map(tuple),
        "min_tokens": st.integers(0, 12),
        "stop_token_ids": st.lists(TOKENS, max_size=2).map(tuple),
        "allowed_token_ids": st.lists(TOKENS, max_size=40).map(tuple),
        "logprobs": st.sampled_from([None, 0, 1, 5]),
    },
)


@st.composite
def chunks(draw: st.DrawFn) -> SequenceChunk:
    """A chunk that samples: plain, with drafts, or for a beam."""
    prompt = draw(st.lists(TOKENS, min_size=1, max_size=6))
    output = draw(st.lists(TOKENS, max_size=8))
    drafts = draw(st.lists(st.integers(0, 5), max_size=3))
    candidates = draw(st.sampled_from([0, 0, 0, 4])) if not drafts else 0
    history = [*prompt, *output]
    params: dict[str, Any] = draw(PARAMS)
    return SequenceChunk(
        "r", [*history[-1:], *drafts], len(history) - 1, held([0]),
        sample=SamplingParams(**params), position=len(output),
        sample_index=draw(st.integers(0, 2)), history=history, num_prompt=len(prompt),
        num_drafts=len(drafts), num_candidates=candidates,
    )  # fmt: skip


def logits_of(chunk: SequenceChunk) -> torch.Tensor:
    """A model: logits depend on the seed only; rounded, so that there are ties."""
    assert chunk.sample is not None
    generator = torch.Generator().manual_seed((chunk.sample.seed or 0) % 2**31)
    return (torch.randn(chunk.num_drafts + 1, VOCAB, generator=generator) * 2).round(decimals=1)


def together(batch: list[SequenceChunk]) -> list[Sampled]:
    asked: list[Asked] = []
    row = 0
    for chunk in batch:
        draws = draws_of(chunk)
        asked.append(Asked(chunk, row, draws))
        row += len(draws)
    return choose(torch.cat([logits_of(chunk) for chunk in batch]), asked, EOS)


@settings(deadline=None, max_examples=60)
@given(st.lists(chunks(), min_size=1, max_size=6))
def test_batch_mates_change_nothing(batch: list[SequenceChunk]) -> None:
    outcomes = together(batch)
    assert outcomes == [together([chunk])[0] for chunk in batch]
    assert outcomes[::-1] == together(batch[::-1])
    for chunk, outcome in zip(batch, outcomes, strict=True):
        assert_whole(chunk, outcome)


def assert_whole(chunk: SequenceChunk, outcome: Sampled) -> None:
    """Every field is there exactly where it is asked for."""
    assert chunk.sample is not None
    if chunk.num_candidates:
        assert (outcome.token_ids, outcome.logprobs) == ((), ())
        assert 1 <= len(outcome.candidates) <= chunk.num_candidates
        return
    assert outcome.candidates == ()
    assert 1 <= len(outcome.token_ids) <= chunk.num_drafts + 1
    drafts = tuple(chunk.token_ids)[len(chunk.token_ids) - chunk.num_drafts :]
    accepted = len(outcome.token_ids) - 1
    assert outcome.token_ids[:accepted] == drafts[:accepted]
    if accepted < chunk.num_drafts:
        assert outcome.token_ids[accepted] != drafts[accepted]
    if chunk.sample.logprobs is None:
        assert outcome.logprobs == ()
    else:
        assert [told[0].token_id for told in outcome.logprobs] == list(outcome.token_ids)


@settings(deadline=None, max_examples=50)
@given(chunks())
def test_drafts_yield_what_one_by_one_yields(chunk: SequenceChunk) -> None:
    """Each accepted token is the plain draw after the ones before it."""
    if chunk.num_candidates:
        chunk = replace(chunk, num_candidates=0)
    [outcome] = together([chunk])
    logits = logits_of(chunk)
    known: list[int] = list(chunk.history)
    for i, token in enumerate(outcome.token_ids):
        one: dict[str, Any] = {"position": chunk.position + i, "history": known, "num_drafts": 0}
        plain = replace(chunk, token_ids=known[-1:], **one)
        [expected] = choose(logits[i : i + 1].clone(), [Asked(plain, 0, draws_of(plain))], EOS)
        assert expected.token_ids == (token,)
        assert expected.logprobs == outcome.logprobs[i : i + 1]
        known = [*known, token]
