"""Several sequences of one request: samples, best_of, beams; blocks shared and copied on write.

On FakeRunner a table that is wrong, a copy that is missing or late, is a wrong token.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from baton.engine.core.engine import Engine
from baton.protocol.events import TokenEvent, TokenLogprob
from baton.protocol.request import FinishReason, Request
from tests.engine.driving import PROMPT, assert_all_free, run_samples, tokens_of
from tests.fakes import (
    EOS_ID,
    ScriptedProposer,
    candidates,
    expected_beams,
    expected_output,
    fake_engine,
    request,
    token_logprob,
)


def check_samples(events: dict[tuple[str, int], list[TokenEvent]], asked: Request) -> None:
    params = asked.params
    for sample in range(max(params.n, params.best_of or 1)):
        mine = events[asked.id, sample]
        assert tokens_of(mine) == expected_output(asked.prompt_ids, params, sample=sample)
        assert mine[-1].finish_reason is not None


@pytest.mark.parametrize("size", [1, 3, 4, 5, 8, 19])
@pytest.mark.parametrize("budget", [6, 70])
@pytest.mark.parametrize("caching", [True, False])
def test_samples_are_those_of_requests_of_their_own(size: int, budget: int, caching: bool) -> None:
    engine, _ = fake_engine(
        max_num_seqs=6, max_num_batched_tokens=budget, enable_prefix_caching=caching
    )
    asked = request(prompt=PROMPT[:size], sampling={"n": 4}, ignore_eos=False)
    engine.add(asked)
    engine.add(request("other", PROMPT[:7], seed=5))
    check_samples(run_samples(engine), asked)
    assert engine.stats.num_finished == 2
    assert engine.stats.num_forks == 3
    assert_all_free(engine)


def test_the_prompt_is_computed_once_and_its_blocks_are_shared() -> None:
    engine, runner = fake_engine()
    engine.add(request(prompt=PROMPT, sampling={"n": 4}))
    engine.step()
    usage = engine.kv_usage()
    assert (usage.allocated_blocks, usage.table_blocks, usage.shared_blocks) == (5, 20, 5)
    engine.step()
    usage = engine.kv_usage()
    # Four whole blocks are shared, the fifth is copied for all but one.
    assert (usage.allocated_blocks, usage.table_blocks, usage.shared_blocks) == (8, 20, 4)
    assert engine.stats.num_copied_blocks == 3
    assert usage.saved == 1 - 8 / 20
    assert usage.allocated_slots == 32
    # Sample 0 is one ahead: it wrote its token 1, the others the prompt's last token again.
    assert usage.used_slots == 16 + 4 + 3 * 3
    assert sum(len(c.token_ids) for batch in runner.batches for c in batch) == 19 + 4
    run_samples(engine)
    assert_all_free(engine)


def test_a_sample_that_ends_gives_its_blocks_back_and_the_others_go_on() -> None:
    engine, _ = fake_engine(num_blocks=150)
    prompt, params = PROMPT[:5], {"n": 8}
    asked = request(prompt=prompt, sampling=params, ignore_eos=False, max_tokens=60)
    engine.add(asked)
    events = run_samples(engine)
    check_samples(events, asked)
    lengths = [len(tokens_of(events["r", sample])) for sample in range(8)]
    assert len(set(lengths)) > 2
    reasons = {events["r", sample][-1].finish_reason for sample in range(8)}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    assert_all_free(engine)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_samples_are_preempted_together_and_keep_their_tokens(mode: str) -> None:
    engine, _ = fake_engine(num_blocks=30, max_num_seqs=16, preemption_mode=mode)
    asked = [
        request(f"r{i}", PROMPT[i : 10 + i], seed=i, max_tokens=14, sampling={"n": 3})
        for i in range(4)
    ]
    for each in asked:
        engine.add(each)
    events = run_samples(engine)
    for each in asked:
        check_samples(events, each)
    assert engine.stats.num_preemptions > 0
    assert (engine.stats.num_swap_outs > 0) == (mode == "swap")
    assert_all_free(engine)


def test_a_retry_goes_on_with_each_sample_where_it_was() -> None:
    engine, _ = fake_engine()
    asked = request(prompt=PROMPT, sampling={"n": 3})
    outputs = [expected_output(PROMPT, asked.params, sample=s) for s in range(3)]
    engine.add(asked.retried((tuple(outputs[0][:3]), tuple(outputs[1]), ())))
    events = run_samples(engine)
    assert tokens_of(events["r", 0]) == outputs[0][3:]
    assert [(e.position, e.token_ids) for e in events["r", 1]] == [(8, ())]
    assert tokens_of(events["r", 2]) == outputs[2]
    assert_all_free(engine)


def test_best_of_tells_each_tokens_logprob() -> None:
    engine, _ = fake_engine()
    asked = request(prompt=PROMPT, sampling={"n": 1, "best_of": 3})
    engine.add(asked)
    events = run_samples(engine)
    check_samples(events, asked)
    for sample in range(3):
        tokens = list(PROMPT)
        for event in events["r", sample]:
            for token, told in zip(event.token_ids, event.logprobs, strict=True):
                assert told == (token_logprob(tokens, token),)
                tokens.append(token)


@pytest.mark.parametrize("budget", [5, 70])
def test_prompt_logprobs_come_with_the_first_event_whole_and_once(budget: int) -> None:
    engine, _ = fake_engine(max_num_seqs=4, max_num_batched_tokens=budget)
    engine.add(request("before", PROMPT))
    run_samples(engine)
    engine.add(request(prompt=PROMPT, sampling={"prompt_logprobs": 0, "n": 2}))
    events = run_samples(engine)
    first, *later = events["r", 0] + events["r", 1]
    wanted = [(token_logprob(PROMPT[:i], PROMPT[i]),) for i in range(1, len(PROMPT))]
    assert list(first.prompt_logprobs) == wanted, "a prefix hit must not hide any"
    assert not any(event.prompt_logprobs for event in later)


# ---- beams ----


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("early_stopping", ["false", "true", "never"])
@pytest.mark.parametrize("ignore_eos", [True, False])
def test_beams_are_those_of_a_search_without_blocks(
    width: int, early_stopping: str, ignore_eos: bool
) -> None:
    engine, _ = fake_engine(num_blocks=80)
    asked = [
        request(
            f"r{size}",
            PROMPT[:size],
            max_tokens=11,
            ignore_eos=ignore_eos,
            sampling={"beam_width": width, "n": width, "early_stopping": early_stopping},
        )
        for size in (1, 4, 19)
    ]
    for each in asked:
        engine.add(each)
    check_beams(run_samples(engine), asked)
    assert engine.stats.num_forks > 0 or width == 1
    assert_all_free(engine)


def check_beams(events: dict[tuple[str, int], list[TokenEvent]], asked: Sequence[Request]) -> None:
    for each in asked:
        wanted = expected_beams(each.prompt_ids, each.params)
        assert len(wanted) == each.params.n
        for sample, tokens in enumerate(wanted):
            (event,) = events[each.id, sample]
            assert (event.position, event.token_ids) == (0, tokens)
            stopped = not each.params.ignore_eos and tokens[-1] == EOS_ID
            assert event.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_beams_survive_preemption(mode: str) -> None:
    engine, _ = fake_engine(num_blocks=34, max_num_seqs=16, preemption_mode=mode)
    asked = [
        request(
            f"r{i}",
            PROMPT[i : 9 + i],
            max_tokens=16,
            sampling={"beam_width": 4, "n": 2},
        )
        for i in range(4)
    ]
    for each in asked:
        engine.add(each)
    check_beams(run_samples(engine), asked)
    assert engine.stats.num_preemptions > 0
    assert (engine.stats.num_swap_outs > 0) == (mode == "swap")
    assert_all_free(engine)


def test_dropped_beams_free_their_blocks_at_once() -> None:
    engine, _ = fake_engine(num_blocks=80)
    engine.add(request(prompt=PROMPT[:8], max_tokens=24, sampling={"beam_width": 4}))
    engine.step()
    while engine.has_work:
        usage = engine.kv_usage()
        assert usage.table_blocks <= 4 * -(-(8 + 24) // 4)
        assert usage.allocated_blocks == engine.pool.num_used
        engine.step()
    assert_all_free(engine)


def test_beams_tell_logprobs_when_asked() -> None:
    engine, _ = fake_engine()
    engine.add(request(prompt=PROMPT, max_tokens=3, sampling={"beam_width": 2, "logprobs": 3}))
    ((event,),) = run_samples(engine).values()
    tokens = list(PROMPT)
    for token, told in zip(event.token_ids, event.logprobs, strict=True):
        assert told[0].token_id == token
        assert told[1:] == tuple(c for c in candidates(tokens, 3) if c.token_id != token)
        tokens.append(token)


def test_results_that_do_not_exist_end_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but one continuation is ruled out: there is but one hypothesis."""

    def narrow(history: Sequence[int], count: int) -> tuple[TokenLogprob, ...]:
        return candidates(history, count)[:1]

    monkeypatch.setattr("tests.fakes.candidates", narrow)
    engine, _ = fake_engine()
    engine.add(request(prompt=PROMPT, max_tokens=3, sampling={"beam_width": 3, "n": 3}))
    events = run_samples(engine)
    assert [len(tokens_of(events["r", sample])) for sample in range(3)] == [3, 0, 0]
    assert all(mine[-1].finish_reason is FinishReason.LENGTH for mine in events.values())
    assert_all_free(engine)


# ---- together with the rest ----


def test_abort_ends_all_samples() -> None:
    engine, _ = fake_engine()
    engine.add(request(prompt=PROMPT, sampling={"n": 4}))
    engine.add(request("b", PROMPT, sampling={"beam_width": 4}))
    for _ in range(3):
        engine.step()
    assert engine.abort("r")
    assert engine.abort("b")
    assert not engine.has_work
    assert_all_free(engine)


def drain(engine: Engine, asked: Sequence[Request]) -> dict[tuple[str, int], list[TokenEvent]]:
    for each in asked:
        engine.add(each)
    return run_samples(engine)


def test_samples_speculate_too() -> None:
    proposer = ScriptedProposer(lambda ask, index: (ask.position + index) % 5 == 0)
    engine, _ = fake_engine(num_speculative_tokens=3, proposer=proposer)
    asked = request(prompt=PROMPT, sampling={"n": 3}, max_tokens=15)
    check_samples(drain(engine, [asked]), asked)
    assert {ask.sample_index for ask in proposer.asks} == {0, 1, 2}
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_drafted_tokens
    assert proposer.known == set()
    assert_all_free(engine)
