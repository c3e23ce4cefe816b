"""EngineStats' rates are what a router places prompts by."""

from __future__ import annotations

import pytest

from baton.engine.state.stats import STEP_TOKENS, EngineStats


def test_short_prompts_do_not_make_a_node_look_slow() -> None:
    """Every step costs 10 ms and a token 1 ms: 8 tokens alone say 444 tokens/s, 1,000 say 990."""
    stats = EngineStats()
    for tokens in (1000, 8, 8, 8, 8, 0):
        stats.step_done(0.010 + tokens * 1e-3, tokens)
    assert stats.prefill_tokens_per_s > 900
    assert (stats.num_steps, stats.num_prompt_tokens) == (6, 1032)


def test_a_rate_follows_a_node_that_has_become_slower() -> None:
    stats = EngineStats()
    for _ in range(20):
        stats.step_done(0.1, 1000)
    assert stats.prefill_tokens_per_s == pytest.approx(10_000)
    for _ in range(10):
        stats.step_done(1.0, 1000)
    assert stats.prefill_tokens_per_s < 2000
    stats.step_done(1.0, 0)
    assert stats.prefill_tokens_per_s < 2000, "a step without a prompt says nothing"


def test_lent_cores_do_not_make_a_node_look_quick() -> None:
    stats = EngineStats()
    for seconds, share in ((0.1, 1.0), (0.05, 2.0), (0.1, 1.0), (0.05, 2.0)):
        stats.step_done(seconds, 1000, share)
    assert 10_000 < stats.prefill_tokens_per_s < 20_000
    assert stats.own_prefill_tokens_per_s == pytest.approx(10_000)


def test_steps_are_counted_by_how_many_tokens_they_computed() -> None:
    stats = EngineStats()
    for prompt, generated in ((5, 0), (0, 1), (8, 1), (20_000, 4)):
        stats.num_generated_tokens += generated
        stats.step_done(0.1, prompt)
    assert [count for count in stats.step_tokens if count] == [1, 1, 1, 1]
    assert stats.step_tokens[0] == 1, "of one token"
    assert stats.step_tokens[STEP_TOKENS.index(8)] == 1, "of 5"
    assert stats.step_tokens[STEP_TOKENS.index(16)] == 1, "of 9"
    assert stats.step_tokens[-1] == 1, "of 20,004"
    assert stats.num_counted_tokens == 20_019
    kept = stats.copy()
    stats.step_done(0.1, 1)
    assert sum(kept.step_tokens) == 4
