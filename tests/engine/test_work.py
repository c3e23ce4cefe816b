"""What steps need, and the share of the limits that they reach."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.config import EngineConfig
from baton.engine.core.assembly import assemble, build_engine, load_parts
from baton.engine.loading.loading import LoadedModel, load_model
from baton.engine.performance import roofline
from baton.engine.performance.meter import Meter, work_of
from baton.engine.performance.roofline import limits_again, limits_of, measure
from baton.engine.state.interface import SequenceChunk
from baton.engine.state.stats import EngineStats
from baton.engine.state.work import (
    LayerWork,
    Limits,
    ModelWork,
    ParameterCounts,
    Utilization,
    Work,
    seen,
)
from baton.protocol.errors import ConfigError
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from tests.block_lists import held
from tests.fakes import FakeClock, FakeRunner
from tests.tiny_models import make_tiny_model

CPU = torch.device("cpu")


def chunk(start: int, count: int, **options: object) -> SequenceChunk:
    plain = SequenceChunk("r", [1] * count, start, held([0]))
    return replace(plain, **options)


@given(st.integers(0, 40), st.integers(1, 30), st.integers(0, 20))
def test_what_a_window_sees(start: int, count: int, window: int) -> None:
    pairs, keys = 0, set[int]()
    for position in range(start, start + count):
        visible = range(max(0, position - window + 1) if window else 0, position + 1)
        pairs += len(visible)
        keys.update(visible)
    assert seen(start, count, window) == (len(keys), pairs)


def test_a_decode_step_reads_weights_once_and_each_sequence_s_kv() -> None:
    counts = ParameterCounts(dense=1000, head=200)
    layers = (LayerWork(0, 16, 8), LayerWork(4, 2, 1))
    work = ModelWork.of(counts, 2 * 1200, 2, layers)
    params = SamplingParams(max_tokens=1)
    step = work.step([chunk(9, 1, sample=params), chunk(1, 1, sample=params)])
    assert step.read_bytes == 2000 + 400 + 16 * (10 + 2) + 2 * (4 + 2)
    assert step.flops == 2 * (2 * 1000 + 2 * 200) + 8 * (10 + 2) + (4 + 2)
    assert step.intensity() == step.flops / step.read_bytes


@given(st.integers(0, 40), st.integers(1, 30), st.integers(0, 20))
def test_in_the_last_layer_rows_that_are_read_attend(start: int, count: int, window: int) -> None:
    def flops(chunk: SequenceChunk, last: int) -> float:
        layers = (LayerWork(window, 2, 5 + last, last),)
        work = ModelWork.of(ParameterCounts(dense=10, head=2), 2 * 12, 2, layers)
        return work.step([chunk]).flops

    sampled = chunk(start, count, sample=SamplingParams(max_tokens=1))
    newest = seen(start + count - 1, 1, window)[1]
    assert flops(sampled, 3) == flops(sampled, 0) + 3 * newest
    assert flops(chunk(start, count), 3) == flops(chunk(start, count), 0)  # nobody reads a row


def test_a_chunk_that_does_not_sample_spares_the_head() -> None:
    work = ModelWork.of(ParameterCounts(dense=1000, head=200, tied=False), 2 * 1400, 2, ())
    assert work.step([chunk(0, 5)]) == Work(2000, 10_000)
    drafted = chunk(0, 3, sample=SamplingParams(max_tokens=1), num_drafts=2)
    assert work.step([drafted]) == Work(2400, 2 * (3 * 1000 + 3 * 200))
    assert work.step([]) == Work()


def test_what_follows_the_last_attention_is_needed_for_rows_that_are_read() -> None:
    counts = ParameterCounts(
        dense=1000, head=0, experts=800, num_experts=8, experts_per_token=2, last=60,
        last_experts=200,
    )  # fmt: skip
    work = ModelWork.of(counts, 2 * 1800, 2, ())
    params = SamplingParams(max_tokens=1)
    whole = 2 * 5 * (1000 + 800 / 4)
    for unread, options in (
        (5, {}), (4, {"sample": params}), (2, {"sample": params, "num_drafts": 2}),
        (0, {"sample": params, "prompt_logprobs": 0}),
    ):  # fmt: skip
        step = work.step([chunk(0, 5, **options)])
        assert step.flops == whole - 2 * unread * (60 + 200 / 4)


@pytest.mark.parametrize("tied", [True, False])
def test_a_rounded_head_is_read_instead_of_the_table(tied: bool) -> None:
    counts = ParameterCounts(dense=1000, head=200, tied=tied)
    work = ModelWork.of(counts, 2 * 1200 + 210, 2, (), rounded_head_bytes=210)
    assert work.step([chunk(0, 1, sample=SamplingParams(max_tokens=1))]).read_bytes == 2000 + 210


def test_rows_meet_more_experts_but_each_its_share() -> None:
    counts = ParameterCounts(
        dense=100, head=0, experts=800, num_experts=8, experts_per_token=2
    )  # fmt: skip
    work = ModelWork.of(counts, 1800, 2, ())
    assert work.step([chunk(0, 1)]).read_bytes == pytest.approx(200 + 1600 * 0.25)
    many = work.step([chunk(0, 64)])
    assert many.flops == 64 * 2 * 300
    assert 1790 < many.read_bytes <= 1800


def test_shares_of_the_limits_fade_and_are_copied() -> None:
    stats = EngineStats()
    stats.utilization.ran(Work(50.0, 10.0))
    stats.step_done(1.0, 0)
    assert (stats.utilization.mbu, stats.utilization.mfu) == (0.0, 0.0)  # no limits
    stats.utilization.limits = Limits(100.0, 100.0)
    assert (stats.utilization.mbu, stats.utilization.mfu) == (0.5, 0.1)
    before = stats.copy()
    stats.step_done(1.0, 0)  # a step without work for the model
    assert stats.utilization.mbu == pytest.approx(45 / 1.9 / 100)
    assert before.utilization.mbu == 0.5
    assert stats.utilization.busy_seconds == 2.0
    assert stats.utilization.read_bytes == 50.0
    assert Utilization(limits=Limits(1.0, 1.0)).mbu == 0.0


def test_a_step_on_twice_the_cores_counts_twice() -> None:
    """The limits are those of the own cores."""
    found = Utilization(limits=Limits(100.0, 100.0))
    found.ran(Work(100.0, 50.0))
    found.step_done(1.0, share=2.0)
    assert (found.mbu, found.mfu, found.busy_seconds) == (0.5, 0.25, 1.0)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_parameters_are_counted_as_transformers_counts_them(kind: str, tmp_path: Path) -> None:
    path = make_tiny_model(kind, tmp_path)
    lean = load_model(EngineConfig(model=str(path), model_impl="lean"))
    universal = load_model(EngineConfig(model=str(path), model_impl="transformers"))
    counts = lean.model.parameter_counts  # of the last layer, the universal route computes all rows
    assert replace(counts, last=0) == universal.model.parameter_counts
    config = lean.model._config  # type: ignore[attr-defined]
    assert counts.last == 3 * config.hidden_size * config.intermediate_size
    ours, theirs = work_of(lean), work_of(universal)
    assert ours.layers == theirs.layers
    assert ours.dense_bytes == pytest.approx(theirs.dense_bytes, rel=0.01)


def test_an_engine_tells_its_work(tmp_path: Path) -> None:
    path = make_tiny_model("llama", tmp_path)
    config = EngineConfig(
        model=str(path), num_kv_blocks=16, block_size=4, memory_bandwidth=1.0, peak_flops=0.001
    )
    engine = build_engine(config)
    engine.add(Request("r", (5, 6, 7), SamplingParams(max_tokens=3, seed=1, ignore_eos=True)))
    while engine.has_work:
        engine.step()
    told = engine.stats.utilization
    work = work_of(load_model(config))
    params = SamplingParams(max_tokens=1)
    steps = [work.step([chunk(at, n, sample=params)]) for at, n in ((0, 3), (3, 1), (4, 1))]
    assert told.limits == Limits(1e9, 1e9)
    assert told.read_bytes == sum(step.read_bytes for step in steps)
    assert told.flops == sum(step.flops for step in steps)
    assert told.mbu > 0
    assert told.mfu > 0
    assert engine.stats.num_steps == 3
    engine.check()


def test_the_time_that_requests_wait_is_counted(tmp_path: Path) -> None:
    """One runs at a time, three steps each, and each step takes a second."""
    config = EngineConfig(
        model=str(make_tiny_model("llama", tmp_path)),
        num_kv_blocks=16,
        block_size=4,
        max_num_seqs=1,
        measure_limits=False,
        async_scheduling=False,
    )
    clock = FakeClock()
    engine = assemble(load_parts(config), clock=clock)
    for name in "abc":
        engine.add(Request(name, (5, 6, 7), SamplingParams(max_tokens=3, seed=1, ignore_eos=True)))
    while engine.has_work:
        engine.step()
        clock.advance(1.0)
    assert engine.stats.queue_seconds == 0 + 3 + 6
    clock.advance(100.0)
    engine.add(Request("d", (5, 6, 7), SamplingParams(max_tokens=1, seed=1)))
    engine.step()
    assert engine.stats.queue_seconds == 9, "nobody waited meanwhile"


def test_limits_given_are_not_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object) -> Limits:
        raise AssertionError("measured")

    monkeypatch.setattr(roofline, "measure", refuse)
    given = EngineConfig(model="m", memory_bandwidth=38.0, peak_flops=0.9)
    assert limits_of(given, CPU, torch.float32, tmp_path) == Limits(38e9, 0.9e12)
    silent = EngineConfig(model="m", memory_bandwidth=38.0, measure_limits=False)
    assert limits_of(silent, CPU, torch.float32, tmp_path) is None


def test_limits_are_measured_once_per_boot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[torch.dtype] = []

    def measured(_: torch.device, dtype: torch.dtype) -> Limits:
        calls.append(dtype)
        return Limits(1e9 + len(calls), 2e9)

    monkeypatch.setattr(roofline, "measure", measured)
    config = EngineConfig(model="m")
    folder = tmp_path / "limits"
    first = limits_of(config, CPU, torch.float32, folder)
    assert limits_of(config, CPU, torch.float32, folder) == first == Limits(1e9 + 1, 2e9)
    partly = replace(config, peak_flops=3.0)
    assert limits_of(partly, CPU, torch.float32, folder) == Limits(1e9 + 1, 3e12)
    assert calls == [torch.float32]
    limits_of(config, CPU, torch.bfloat16, folder)
    assert calls == [torch.float32, torch.bfloat16]
    for kept in folder.glob("*.json"):
        kept.write_text("[1")  # cut short: measured again
    limits_of(config, CPU, torch.float32, folder)
    assert len(calls) == 3
    monkeypatch.setattr(roofline, "_BOOT_ID", tmp_path / "absent")
    limits_of(config, CPU, torch.float32, folder)
    assert len(calls) == 4


def test_limits_measured_again_are_the_higher_ones_and_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = iter([Limits(10.0, 20.0), Limits(15.0, 12.0), Limits(99.0, 1.0)])
    monkeypatch.setattr(roofline, "measure", lambda *_: next(found))
    config = EngineConfig(model="m")
    low = limits_of(config, CPU, torch.float32, tmp_path)
    assert low is not None
    assert low == Limits(10.0, 20.0)
    assert limits_again(config, CPU, torch.float32, low, tmp_path) == Limits(15.0, 20.0)
    assert limits_of(config, CPU, torch.float32, tmp_path) == Limits(15.0, 20.0)  # the next start
    monkeypatch.setattr(roofline, "_BOOT_ID", tmp_path / "absent")  # nothing is kept
    assert limits_again(config, CPU, torch.float32, low, tmp_path) == Limits(99.0, 20.0)


def told_meter(loaded: LoadedModel, config: EngineConfig) -> tuple[Meter, EngineStats]:
    stats = EngineStats()
    return Meter(FakeRunner(4, 4), loaded, config, stats.utilization), stats


def test_a_share_above_one_is_measured_again_ever_more_seldom(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A model that the CPU's caches hold stays above 1 for good."""
    count = 0

    def measured(*_: object) -> Limits:
        nonlocal count
        count += 1
        return Limits(100.0, 1e12)

    monkeypatch.setattr(roofline, "measure", measured)
    monkeypatch.setattr(roofline, "_BOOT_ID", tmp_path / "absent")
    config = EngineConfig(model=str(make_tiny_model("llama", tmp_path)))
    loaded = load_model(config)
    meter, stats = told_meter(loaded, config)
    stats.utilization.ran(Work(90.0, 0.0))
    stats.utilization.step_done(1.0)
    meter.look_again()
    assert count == 1, "the limit holds"
    stats.utilization.ran(Work(900.0, 0.0))
    stats.utilization.step_done(1.0)
    counts: list[int] = []
    for _ in range(9):
        meter.look_again()
        counts.append(count - 1)
    assert counts == [1, 2, 2, 3, 3, 3, 3, 4, 4]
    meter, stats = told_meter(loaded, replace(config, memory_bandwidth=1e-9))
    stats.utilization.ran(Work(900.0, 0.0))
    stats.utilization.step_done(1.0)
    meter.look_again()
    assert count == 6, "what is stated is not measured again"


def test_a_folder_that_cannot_be_written_costs_the_measurement_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(roofline, "measure", lambda *_: Limits(1.0, 2.0))
    (tmp_path / "file").write_text("")
    found = limits_of(EngineConfig(model="m"), CPU, torch.float32, tmp_path / "file" / "below")
    assert found == Limits(1.0, 2.0)


def test_the_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "READ_BYTES", {"cpu": 1 << 16})
    monkeypatch.setattr(roofline, "SIZES", {"cpu": (16, 32)})
    found = measure(CPU, torch.float32, 0.0)
    assert found.read_bytes_per_s > 0
    assert found.flops_per_s > 0


@pytest.mark.parametrize("field", ["memory_bandwidth", "peak_flops"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_impossible_limits_are_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        EngineConfig(model="m", **{field: value})  # type: ignore[arg-type]
