"""Asynchronous scheduling: steps that are planned while one runs say the same tokens, and whoever
ends, leaves or fails meanwhile costs nobody anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.engine.core.engine import Engine
from baton.engine.state.interface import Task
from baton.llm import LLM
from baton.protocol.request import FinishReason, Request
from baton.protocol.sampling import SamplingParams
from tests.engine.driving import assert_all_free, expected, run, tokens_of
from tests.fakes import EOS_ID, FakeRunner, fake_engine, request
from tests.tiny_models import make_tiny_model

LATE = pytest.mark.parametrize("late", [False, True], ids=["at once", "when asked"])


def ahead_engine(late: bool, **options: Any) -> tuple[Engine, FakeRunner]:
    engine, runner = fake_engine(async_scheduling=True, **options)
    runner.late = late
    return engine, runner


@LATE
def test_all_but_the_first_decode_step_are_planned_ahead(late: bool) -> None:
    engine, _ = ahead_engine(late)
    asked = [request(f"r{i}", seed=i, max_tokens=9) for i in range(3)]
    for each in asked:
        engine.add(each)
    events = run(engine)
    for each in asked:
        assert tokens_of(events[each.id]) == expected(each)
        assert events[each.id][-1].finish_reason is FinishReason.LENGTH
    # One prefill step, a decode step that is waited for, and the others: nothing beyond the last.
    assert (engine.stats.num_steps, engine.stats.num_steps_ahead) == (9, 7)
    assert_all_free(engine)


def ends_early(max_tokens: int = 30) -> Request:
    """One whose fifth token is the end of its text."""
    for seed in range(10_000):
        asked = request("early", seed=seed, max_tokens=max_tokens, ignore_eos=False)
        if len(expected(asked)) == 5 and expected(asked)[-1] == EOS_ID:
            return asked
    raise AssertionError("no seed ends there")


@LATE
def test_an_end_that_nobody_foresaw_wastes_one_row(late: bool) -> None:
    engine, runner = ahead_engine(late)
    early, other = ends_early(), request("other", (9, 8, 7), max_tokens=12)
    engine.add(early)
    engine.add(other)
    events = run(engine)
    assert tokens_of(events["early"]) == expected(early)
    assert tokens_of(events["other"]) == expected(other)
    rows = [chunk.request_id for batch in runner.batches for chunk in batch]
    assert rows.count("early") == len(expected(early)) + 1
    assert_all_free(engine)


@LATE
def test_blocks_of_a_wasted_row_are_free_only_after_it(late: bool) -> None:
    engine, _ = ahead_engine(late, num_blocks=16)
    engine.add(ends_early())
    while engine.step()[-1].finish_reason is None:
        pass
    assert engine.has_work  # the wasted step
    assert engine.pool.num_free < engine.pool.num_blocks
    engine.check()
    assert engine.step() == []
    assert_all_free(engine)


@LATE
@pytest.mark.parametrize("leave", ["abort", "hand on"])
def test_who_leaves_between_steps_leaves_the_step_under_way(late: bool, leave: str) -> None:
    engine, _ = ahead_engine(late)
    leaving, staying = request("leaving", max_tokens=20), request("staying", max_tokens=20)
    engine.add(leaving)
    engine.add(staying)
    told = [event for _ in range(5) for event in engine.step() if event.request_id == "leaving"]
    if leave == "abort":
        assert engine.abort("leaving")
    else:
        departure = engine.hand_on("leaving")
        assert departure is not None
        # What is known of it is what has been told: the step under way does not count.
        assert departure.num_tokens == len(leaving.prompt_ids) + len(tokens_of(told)) - 1
        assert [first.token_id for first in departure.first_tokens] == tokens_of(told)[-1:]
        engine.unpin(departure.blocks)
    engine.check()
    rest = run(engine)
    assert set(rest) == {"staying"}
    assert tokens_of(rest["staying"]) == expected(staying)[5:]
    assert_all_free(engine)


@LATE
def test_a_failing_step_fails_its_requests_and_nothing_is_under_way(late: bool) -> None:
    engine, runner = ahead_engine(late)
    engine.add(request("bad", max_tokens=20))
    for _ in range(4):
        engine.step()
    runner.fail_for = {"bad"}
    with pytest.raises(RuntimeError):
        run(engine)
    assert [failed.id for failed in engine.fail_step()] == ["bad"]
    assert_all_free(engine)
    good = request("good", max_tokens=6)
    engine.add(good)
    assert tokens_of(run(engine)["good"]) == expected(good)


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": {"repetition_penalty": 1.5}},
        {"sampling": {"bad_words": ((11,),)}},
        {"sampling": {"beam_width": 2}},
    ],
    ids=["penalties", "bad words", "beams"],
)
def test_draws_that_need_the_past_are_waited_for(changes: dict[str, Any]) -> None:
    engine, _ = ahead_engine(False)
    engine.add(request("r", max_tokens=6, **changes))
    run(engine)
    assert engine.stats.num_steps_ahead == 0
    assert_all_free(engine)


def test_exports_are_planned_by_themselves() -> None:
    engine, _ = ahead_engine(False)
    engine.add(request("local", max_tokens=12))
    engine.step()
    engine.step()
    planned = engine.stats.num_steps_ahead
    engine.add(request("export", (5, 6, 7)), Task.PREFILL)
    engine.step()
    engine.step()
    assert engine.stats.num_steps_ahead <= planned + 1  # that one was under way
    run(engine)
    assert_all_free(engine)


def test_a_full_pool_is_not_planned_into() -> None:
    """Whoever runs ahead never preempts: where room is short, the step is waited for."""
    engine, _ = ahead_engine(False, num_blocks=8, max_num_seqs=4)
    asked = [request(f"r{i}", (5 + i, 6, 7), seed=i, max_tokens=12) for i in range(4)]
    for each in asked:
        engine.add(each)
    events = run(engine)
    assert engine.stats.num_preemptions > 0
    for each in asked:
        assert tokens_of(events[each.id]) == expected(each)
    assert_all_free(engine)


# ---- a real model, and a real thread ----


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_real_model_says_the_same(tmp_path: Path, temperature: float) -> None:
    model = str(make_tiny_model("llama", tmp_path))
    prompts = [[7 + i, *range(20, 20 + 5 * i), 99] for i in range(1, 7)]
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=8 + 3 * i, logprobs=2)
        for i in range(len(prompts))
    ]
    options: dict[str, Any] = {"dtype": "float32", "block_size": 4, "num_kv_blocks": 96}
    plain = LLM(model, **options)
    ahead = LLM(model, **options, max_num_seqs=4, async_scheduling=True, check_invariants=True)
    wanted = [(out.token_ids, out.finish_reason) for out in plain.generate(prompts, params)]
    said = [(out.token_ids, out.finish_reason) for out in ahead.generate(prompts, params)]
    assert said == wanted
    stats = ahead.engine.stats
    assert stats.num_steps_ahead > stats.num_steps // 3
    assert_all_free(ahead.engine)
