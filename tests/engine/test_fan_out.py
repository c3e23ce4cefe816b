"""Several samples, and searches, whose prompt another engine computed: forks on arrival.

What the prefill engine offers is written into the decoding engine as a transfer would write it; the
oracle is one engine that does it all (tests/fakes.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from baton.engine.core.engine import Engine
from baton.engine.state.interface import Reservation, Task
from baton.protocol.errors import InvalidRequest
from baton.protocol.events import FirstToken, TokenEvent
from baton.protocol.request import FinishReason, Request
from prefill_node.role import first_tokens
from tests.engine.driving import PROMPT, assert_all_free, run_samples, tokens_of
from tests.fakes import (
    EOS_ID,
    FakeHooks,
    FakeRunner,
    expected_beams,
    expected_output,
    fake_engine,
    request,
    token_logprob,
)

Events = dict[tuple[str, int], list[TokenEvent]]


@dataclass
class Offer:
    """What a prefill engine made of a request."""

    events: list[TokenEvent]
    first: tuple[FirstToken, ...]
    num_tokens: int


def prefill(asked: Request, **options: object) -> Offer:
    hooks = FakeHooks()
    engine, _ = fake_engine(hooks=hooks, **options)  # type: ignore[arg-type]
    engine.add(asked, Task.PREFILL)
    events = [event for each in run_samples(engine).values() for event in each]
    ((_, blocks, num_tokens),) = hooks.admissions
    engine.unpin(blocks)
    assert_all_free(engine)
    assert engine.stats.num_forks == 0, "one sequence computes the prompt"
    return Offer(events, first_tokens(events), num_tokens)


def reserve(
    engine: Engine, runner: FakeRunner, asked: Request, offer: Offer, block_size: int = 4
) -> Reservation:
    reservation = engine.reserve(asked, offer.num_tokens)
    assert reservation is not None
    held = sum(len(blocks.ids) for blocks in reservation.blocks)
    assert held == -(-offer.num_tokens // block_size), "blocks of one prompt"
    runner.write(reservation.blocks, 0, asked.known_ids[: offer.num_tokens])
    return reservation


def arrive(engine: Engine, runner: FakeRunner, asked: Request, offer: Offer) -> None:
    engine.add(asked, Task.LOCAL, reserve(engine, runner, asked, offer), offer.first)


def check(events: Events, asked: Request) -> None:
    for sample in range(asked.params.num_samples):
        mine = events[asked.id, sample]
        assert mine[0].position == len(asked.emitted(sample))
        wanted = expected_output(asked.prompt_ids, asked.params, sample=sample)
        assert [*asked.emitted(sample), *tokens_of(mine)] == wanted
        assert mine[-1].finish_reason is not None


@pytest.mark.parametrize("size", [1, 3, 4, 5, 8, 19])
@pytest.mark.parametrize("sampling", [{"n": 2}, {"n": 8}, {"n": 2, "best_of": 5}])
def test_samples_are_those_of_one_engine(size: int, sampling: dict[str, int]) -> None:
    asked = request(prompt=PROMPT[:size], sampling=sampling, ignore_eos=False)
    count = asked.params.num_samples
    offer = prefill(asked, max_num_seqs=1, max_num_batched_tokens=6)
    assert [event.sample for event in offer.events] == list(range(count))
    for event in offer.events:
        wanted = expected_output(asked.prompt_ids, asked.params, sample=event.sample)
        assert (event.position, event.token_ids) == (0, (wanted[0],))
        assert event.finish_reason is (FinishReason.STOP if wanted[0] == EOS_ID else None)
    engine, runner = fake_engine(num_blocks=80)
    arrive(engine, runner, asked, offer)
    events = run_samples(engine)
    check(events, asked)
    assert engine.stats.num_prompt_tokens == 0
    assert engine.stats.num_prefill_chunks == 0, "D recomputes nothing"
    assert all(chunk.start >= size for batch in runner.batches for chunk in batch)
    alive = sum(event.finish_reason is None for event in offer.events)
    assert engine.stats.num_forks == max(0, alive - 1)
    assert_all_free(engine)


def test_the_prompt_is_held_once() -> None:
    asked = request(prompt=PROMPT, sampling={"n": 8})
    engine, runner = fake_engine()
    arrive(engine, runner, asked, prefill(asked))
    usage = engine.kv_usage()
    assert (usage.allocated_blocks, usage.table_blocks, usage.shared_blocks) == (5, 40, 5)
    engine.step()
    usage = engine.kv_usage()
    assert usage.allocated_blocks == 4 + 8, "whole blocks are shared, the last one is copied"
    assert engine.stats.num_copied_blocks == 7
    for (_, sample), mine in run_samples(engine).items():
        wanted = expected_output(PROMPT, asked.params, sample=sample)
        assert tokens_of(mine) == wanted[mine[0].position :]
    assert_all_free(engine)


def test_best_of_tells_the_logprob_of_token_one_too() -> None:
    asked = request(prompt=PROMPT, sampling={"n": 1, "best_of": 3})
    engine, runner = fake_engine()
    arrive(engine, runner, asked, prefill(asked))
    events = run_samples(engine)
    for sample in range(3):
        tokens = list(PROMPT)
        for event in events["r", sample]:
            for token, told in zip(event.token_ids, event.logprobs, strict=True):
                assert told == (token_logprob(tokens, token),)
                tokens.append(token)
        assert len(tokens) == len(PROMPT) + 8


@pytest.mark.parametrize("lengths", [(0, 0, 0), (3, 3, 3), (1, 0, 4), (5, 2, 0)], ids=str)
@pytest.mark.parametrize("how", ["refetched", "prefilled again"])
def test_a_retry_goes_on_with_each_sample_where_it_was(lengths: tuple[int, ...], how: str) -> None:
    asked = request(prompt=PROMPT, sampling={"n": 3})
    outputs = [expected_output(PROMPT, asked.params, sample=s) for s in range(3)]
    known = tuple(tuple(ids[:count]) for ids, count in zip(outputs, lengths, strict=True))
    retried = asked.retried(known)
    offer = prefill(asked if how == "refetched" else retried)
    assert offer.num_tokens == len(PROMPT)
    engine, runner = fake_engine()
    arrive(engine, runner, retried, offer)
    events = run_samples(engine)
    for sample in range(3):
        told = [t for e in events["r", sample] for t in e.token_ids]
        assert [*known[sample], *told] == outputs[sample]
    assert_all_free(engine)


def test_a_retried_prefill_computes_what_the_samples_share() -> None:
    greedy = request(prompt=PROMPT, sampling={"n": 2}).retried(((7, 8, 9), (7, 8)))
    offer = prefill(greedy)
    assert offer.num_tokens == len(PROMPT) + 2
    assert [(e.sample, e.position) for e in offer.events] == [(1, 2)], "sample 0 has that one"
    diverged = greedy.retried(((7, 8, 9), (6, 8)))
    offer = prefill(diverged)
    assert offer.num_tokens == len(PROMPT)
    (event,) = offer.events
    assert (event.token_ids, event.finish_reason) == ((), None), "it says that all is computed"


def test_samples_that_ended_are_not_run_again() -> None:
    asked = request(prompt=PROMPT, sampling={"n": 4})
    ended = replace(asked, ended=(0, 2), output_ids=((5, 5), (), (6,), ()))
    offer = prefill(ended)
    assert [event.sample for event in offer.events] == [1, 3]
    engine, runner = fake_engine()
    arrive(engine, runner, ended, offer)
    events = run_samples(engine)
    assert {sample for _, sample in events} == {1, 3}
    for sample in (1, 3):
        assert tokens_of(events["r", sample]) == expected_output(
            PROMPT, asked.params, sample=sample
        )
    with pytest.raises(InvalidRequest, match="all samples have ended"):
        engine.add(replace(asked, ended=(0, 1, 2, 3)))
    assert_all_free(engine)


def test_a_prefix_hit_takes_the_place_of_the_transfer() -> None:
    asked = request(prompt=PROMPT, sampling={"n": 3})
    offer = prefill(asked)
    engine, runner = fake_engine()
    engine.add(request("before", PROMPT))
    run_samples(engine)
    reservation = engine.reserve(asked, len(PROMPT))
    assert reservation is not None
    assert reservation.start_token == 16
    runner.write(reservation.blocks, 16, PROMPT[16:])
    engine.add(asked, Task.LOCAL, reservation, offer.first)
    check(run_samples(engine), asked)
    assert_all_free(engine)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_forks_of_an_arrival_are_preempted_together(mode: str) -> None:
    engine, runner = fake_engine(num_blocks=30, max_num_seqs=16, preemption_mode=mode)
    asked = [
        request(f"r{i}", PROMPT[i : 10 + i], seed=i, max_tokens=14, sampling={"n": 3})
        for i in range(4)
    ]
    for each in asked:
        arrive(engine, runner, each, prefill(each))
    events = run_samples(engine)
    for each in asked:
        check(events, each)
    assert engine.stats.num_preemptions > 0
    assert_all_free(engine)


# ---- a sample is stopped ----


def test_a_stopped_sample_takes_no_further_step() -> None:
    asked = request(prompt=PROMPT, max_tokens=20, sampling={"n": 4})
    engine, runner = fake_engine()
    arrive(engine, runner, asked, prefill(asked))
    engine.step()
    engine.stop_sample("r", 1, 0)  # the one that the others were forked from
    engine.stop_sample("r", 1, 2)
    runner.batches.clear()
    events = run_samples(engine)
    assert {sample for _, sample in events} == {1, 3}
    assert {chunk.sample_index for batch in runner.batches for chunk in batch} == {1, 3}
    assert_all_free(engine)


def test_a_stop_of_an_older_epoch_or_of_the_last_sample_changes_nothing() -> None:
    asked = replace(request(prompt=PROMPT, sampling={"n": 2}), epoch=2)
    engine, runner = fake_engine()
    arrive(engine, runner, asked, prefill(asked))
    engine.stop_sample("r", 1, 0)
    engine.stop_sample("gone", 9, 0)
    check(run_samples(engine), asked)
    single = request("s", PROMPT)
    engine.add(single)
    engine.stop_sample("s", 1, 0)
    check(run_samples(engine), single)
    assert_all_free(engine)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_stop_at_any_time_frees_the_sample(mode: str, step: int) -> None:
    """Also while it waits, is swapped out, or others wait to fork from it."""
    engine, _ = fake_engine(num_blocks=26, max_num_seqs=16, preemption_mode=mode)
    asked = [
        request(f"r{i}", PROMPT[i : 10 + i], seed=i, max_tokens=14, sampling={"n": 3})
        for i in range(4)
    ]
    for each in asked:
        engine.add(each)
    told: list[TokenEvent] = []
    for _ in range(step):
        told += engine.step()
    for each in asked:
        engine.stop_sample(each.id, 1, 0)
    while engine.has_work:
        told += engine.step()
    for each in asked:
        for sample in (1, 2):
            mine = [e for e in told if (e.request_id, e.sample) == (each.id, sample)]
            assert tokens_of(mine) == expected_output(each.prompt_ids, each.params, sample=sample)
        first = [e for e in told if (e.request_id, e.sample) == (each.id, 0)]
        assert len(tokens_of(first)) < 14
        assert all(event.finish_reason is None for event in first)
    assert_all_free(engine)


# ---- searches ----


def test_a_search_goes_on_from_its_first_candidates() -> None:
    sampling = {"beam_width": 4, "n": 4}
    asked = request(prompt=PROMPT, max_tokens=9, ignore_eos=False, sampling=sampling)
    offer = prefill(asked, max_num_seqs=1)
    (event,) = offer.events
    assert (event.token_ids, event.finish_reason) == ((), None)
    assert len(offer.first) == 4 + 1, "the width, and one that may stop beside them"
    engine, runner = fake_engine()
    arrive(engine, runner, asked, offer)
    events = run_samples(engine)
    assert events["r", 0].pop(0).token_ids == (), "its KV arrived"
    assert [events["r", sample][0].token_ids for sample in range(4)] == expected_beams(
        PROMPT, asked.params
    )
    assert all(chunk.start >= 19 for batch in runner.batches for chunk in batch)
    assert_all_free(engine)


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
@pytest.mark.parametrize("told", [True, False])
def test_a_search_without_candidates_computes_them(max_tokens: int, told: bool) -> None:
    sampling = {"beam_width": 3, "n": 2, "logprobs": 2}
    asked = request(prompt=PROMPT, max_tokens=max_tokens, ignore_eos=False, sampling=sampling)
    offer = prefill(asked)
    engine, runner = fake_engine()
    arrive(engine, runner, asked, offer if told else replace(offer, first=()))
    local, _ = fake_engine()
    local.add(asked)
    events = run_samples(engine)
    assert events["r", 0].pop(0).token_ids == (), "its KV arrived"
    assert events == run_samples(local)
    assert engine.stats.num_finished == 1
    assert_all_free(engine)
