"""Recorded traces as workloads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from baton.protocol.errors import ConfigError
from bench.recorded import Scaling, TraceRequest, bundled, plan_trace, read_trace

SCALING = Scaling(
    rate=10.0, duration_s=40.0, input_mean=192, output_mean=32, max_tokens=900,
    vocabulary=(300, 4000),
)  # fmt: skip


@pytest.mark.parametrize("name", ["azure_conversation", "mooncake_conversation"])
def test_a_bundled_trace_is_scaled_in_length_and_time(name: str) -> None:
    planned = plan_trace(read_trace(bundled()[name]), SCALING, seed=0)
    assert len(planned) == 400
    lengths = [len(request.prompt) for request in planned]
    outputs = [request.max_tokens for request in planned]
    assert 0.7 * 192 < sum(lengths) / 400 <= 1.05 * 192  # the longest ones are cut
    assert 0.9 * 32 < sum(outputs) / 400 < 1.1 * 32
    assert max(a + b for a, b in zip(lengths, outputs, strict=True)) <= 900
    assert min(lengths) >= 1
    assert min(outputs) >= 1
    times = [request.at_s for request in planned]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(39.9)
    assert all(300 <= int(token) < 4000 for request in planned for token in request.prompt)


def test_the_same_seed_is_the_same_workload() -> None:
    trace = read_trace(bundled()["azure_conversation"])
    assert plan_trace(trace, SCALING, 3) == plan_trace(trace, SCALING, 3)
    first, second = (plan_trace(trace, SCALING, seed)[0].prompt for seed in (3, 4))
    assert first != second


def test_equal_prefix_blocks_are_equal_text() -> None:
    trace = [
        TraceRequest(0, 1536, 10, (7, 8, 9)),
        TraceRequest(10, 1536, 10, (7, 8, 5)),
        TraceRequest(20, 1536, 10, (6, 8, 9)),
    ]
    small = replace(SCALING, input_mean=96, rate=3, duration_s=1)  # 32 tokens a block
    a, b, c = (request.prompt for request in plan_trace(trace, small, seed=0))
    assert a[:64] == b[:64]
    assert a[64:] != b[64:]
    assert a[:32] != c[:32]


def test_prompts_without_blocks_share_nothing() -> None:
    trace = [TraceRequest(at, 100, 10) for at in range(4)]
    planned = plan_trace(trace, replace(SCALING, rate=4, duration_s=1), seed=0)
    assert len({request.prompt[:8] for request in planned}) == 4


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "ms,input_tokens,output_tokens\n0,x,2\n"])
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ConfigError):
        read_trace(path)
    with pytest.raises(ConfigError):
        read_trace(tmp_path / "none.csv")
