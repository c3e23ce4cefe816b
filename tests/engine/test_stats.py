"""EngineStats' rates are what a router places prompts by."""

from __future__ import annotations

import pytest

from baton.engine.state.stats import EngineStats


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
