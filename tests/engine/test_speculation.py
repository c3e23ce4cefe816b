"""Speculation in the engine: accepted drafts, rejected drafts, budgets, blocks. Fake model, so a
draft's KV that is believed although it was rejected is a wrong token."""

from __future__ import annotations

import random

import pytest

from baton.engine.sampling.proposer import DraftAsk, NgramProposer
from baton.engine.state.interface import ChunkResult, Sampled, Task
from baton.protocol.errors import ConfigError, InternalError
from baton.protocol.request import FinishReason
from tests.engine.driving import PROMPT, assert_all_free, expected, run, tokens_of
from tests.engine.test_engine import find_seed
from tests.fakes import EOS_ID, FakeHooks, ScriptedProposer, fake_engine, request


def test_right_drafts_save_steps() -> None:
    engine, runner = fake_engine(num_speculative_tokens=3, proposer=ScriptedProposer())
    asked = request(prompt=PROMPT, max_tokens=13)
    engine.add(asked)
    (events,) = run(engine).values()
    assert tokens_of(events) == expected(asked)
    # Token 1 from the prefill, then 4 a step; the last token needs no successor.
    assert [len(event.token_ids) for event in events] == [1, 4, 4, 4]
    assert len(runner.batches) == 4
    assert (engine.stats.num_drafted_tokens, engine.stats.num_accepted_tokens) == (9, 9)
    assert engine.stats.acceptance_rate == 1.0
    assert events[-1].finish_reason is FinishReason.LENGTH
    assert_all_free(engine)


def test_wrong_drafts_cost_nothing_but_work() -> None:
    engine, runner = fake_engine(
        num_speculative_tokens=3, proposer=ScriptedProposer(lambda ask, index: True)
    )
    asked = request(prompt=PROMPT, max_tokens=13)
    engine.add(asked)
    (events,) = run(engine).values()
    assert tokens_of(events) == expected(asked)
    assert len(runner.batches) == 13
    assert engine.stats.num_accepted_tokens == 0
    assert_all_free(engine)


@pytest.mark.parametrize("seed", range(20))
def test_any_mix_of_drafts_gives_the_same_tokens(seed: int) -> None:
    draw = random.Random(seed)
    engine, _ = fake_engine(
        num_blocks=draw.randrange(14, 40),
        max_num_seqs=4,
        max_num_batched_tokens=draw.randrange(4, 20),
        num_speculative_tokens=draw.randrange(1, 9),
        preemption_mode=draw.choice(["swap", "recompute"]),
        enable_prefix_caching=draw.random() < 0.7,
        proposer=ScriptedProposer(lambda ask, index: draw.random() < 0.3),
    )
    asked = [
        request(
            f"r{i}", PROMPT[: draw.randrange(1, 15)], seed=draw.randrange(3), ignore_eos=i > 1,
            max_tokens=draw.randrange(1, 40),
        )
        for i in range(6)
    ]  # fmt: skip
    for each in asked:
        engine.add(each)
    events = run(engine)
    for each in asked:
        assert tokens_of(events[each.id]) == expected(each)
    assert engine.stats.num_accepted_tokens > 0
    assert_all_free(engine)


def test_an_end_among_accepted_drafts_cuts_what_follows() -> None:
    engine, _ = fake_engine(num_speculative_tokens=5, proposer=ScriptedProposer())
    seed = find_seed(PROMPT, EOS_ID, 3)
    engine.add(request(prompt=PROMPT, seed=seed, ignore_eos=False, sampling={"logprobs": 0}))
    (events,) = run(engine).values()
    assert [len(event.token_ids) for event in events] == [1, 3]
    assert [len(event.logprobs) for event in events] == [1, 3]
    assert events[-1].stop_token_id == EOS_ID
    assert_all_free(engine)


def test_drafts_leave_half_of_the_budget_to_prompts() -> None:
    engine, runner = fake_engine(
        max_num_seqs=2,
        max_num_batched_tokens=9,
        num_speculative_tokens=8,
        proposer=ScriptedProposer(),
    )
    engine.add(request("a", PROMPT[:3], max_tokens=30))
    engine.step()
    engine.add(request("b", PROMPT))
    engine.step()
    assert {c.request_id: len(c.token_ids) for c in runner.batches[-1]} == {"a": 5, "b": 4}
    run(engine)
    assert_all_free(engine)


def test_nobody_is_preempted_for_drafts() -> None:
    engine, _ = fake_engine(num_blocks=7, num_speculative_tokens=8, proposer=ScriptedProposer())
    asked = [request(f"r{i}", PROMPT[:4], seed=i, max_tokens=8) for i in range(2)]
    for each in asked:
        engine.add(each)
    events = run(engine)
    for each in asked:
        assert tokens_of(events[each.id]) == expected(each)
    assert engine.stats.num_preemptions == 0
    assert_all_free(engine)


def test_rejected_drafts_are_neither_findable_nor_kept() -> None:
    engine, _ = fake_engine(
        num_speculative_tokens=8, proposer=ScriptedProposer(lambda ask, index: True)
    )
    engine.add(request(prompt=PROMPT, max_tokens=30))
    engine.step()
    engine.step()
    assert engine.pool.num_used == engine.pool.blocks_for(19 + 2)
    assert engine.pool.num_cached == 5
    engine.abort("r")
    assert_all_free(engine)


def test_prefills_and_beams_do_not_speculate() -> None:
    proposer = ScriptedProposer()
    engine, _ = fake_engine(hooks=FakeHooks(), proposer=proposer)
    engine.add(request("p", PROMPT[:1]), Task.PREFILL)
    engine.add(request("b", PROMPT, sampling={"beam_width": 2}))
    while engine.has_work:
        engine.step()
    assert proposer.asks == []


def test_the_proposer_is_told_of_every_end() -> None:
    proposer = ScriptedProposer()
    engine, runner = fake_engine(proposer=proposer)
    for name in ("done", "aborted", "failed"):
        engine.add(request(name, PROMPT, max_tokens=30))
    engine.step()
    engine.step()
    assert proposer.known == {"done", "aborted", "failed"}
    engine.abort("aborted")
    engine.step()
    runner.fail_for = {"failed"}
    with pytest.raises(RuntimeError):
        engine.step()
    engine.fail_step()
    assert proposer.known == set()


def test_prompt_lookup_drafts_for_real() -> None:
    engine, _ = fake_engine(proposer=NgramProposer(1, 3))
    asked = request(prompt=(*PROMPT, *PROMPT), max_tokens=40)
    engine.add(asked)
    (events,) = run(engine).values()
    assert tokens_of(events) == expected(asked)
    assert engine.stats.num_drafted_tokens > 0
    assert_all_free(engine)


@pytest.mark.parametrize("drawn", [(), (7, 7, 7), (1, 2, 3, 4)])
def test_a_runner_that_invents_tokens_is_stopped(drawn: tuple[int, ...]) -> None:
    engine, runner = fake_engine(num_speculative_tokens=2, proposer=ScriptedProposer())
    engine.add(request(prompt=PROMPT))
    engine.step()
    runner.run = lambda chunks, on_layer=None: [ChunkResult(Sampled(drawn))]  # type: ignore[method-assign]
    with pytest.raises(InternalError, match="over drafts"):
        engine.step()


def test_options() -> None:
    with pytest.raises(ConfigError, match="come together"):
        fake_engine(speculative_method="draft")
    with pytest.raises(ConfigError, match="come together"):
        fake_engine(speculative_method="ngram", speculative_model="m")


def test_an_ask_says_where_it_stands() -> None:
    proposer = ScriptedProposer()
    engine, _ = fake_engine(num_speculative_tokens=3, proposer=proposer)
    asked = request(prompt=PROMPT, max_tokens=4)
    engine.add(asked)
    run(engine)
    (ask,) = proposer.asks
    assert isinstance(ask, DraftAsk)
    assert (ask.request_id, ask.max_drafts, ask.position, ask.sample_index) == ("r", 2, 1, 0)
    assert ask.params == asked.params
