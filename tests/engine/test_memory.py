"""Sizing of the KV pool: the sums, the refusals, the measured forward, the kernel's word."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.config import EngineConfig
from baton.engine.core.assembly import build_engine
from baton.engine.loading.loading import LoadedModel, load_model
from baton.engine.memory.available_memory import available_memory
from baton.engine.memory.kv_cache import bytes_per_block
from baton.engine.running.sizing import (
    CPU_MEMORY_SHARE,
    Budget,
    HostMemory,
    device_budget,
    dummy_lengths,
    dummy_steps,
    host_budget,
    num_blocks,
    refuse_beyond,
    size_pool,
)
from baton.protocol.errors import ConfigError
from tests.tiny_models import make_tiny_model

BLOCK_SIZE = 8


@dataclass
class FakeDevice:
    """A GPU of `size` bytes that counts nothing itself; it does run what it is given."""

    size: int
    used: int
    peak: int | None
    runs: int = 0

    def total(self) -> int:
        return self.size

    def in_use(self) -> int:
        return self.used

    def peak_of(self, run: Callable[[], object]) -> int | None:
        run()
        self.runs += 1
        return self.peak


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = make_tiny_model("llama", tmp_path_factory.mktemp("llama"))
    return load_model(EngineConfig(model=str(path), dtype="float32"))


def config(**changes: object) -> EngineConfig:
    values: dict[str, object] = {
        "model": "m", "max_num_seqs": 4, "max_num_batched_tokens": 32, **changes
    }  # fmt: skip
    return EngineConfig(**values)  # type: ignore[arg-type]


# ---- a device ----


def test_kv_gets_utilization_x_total_less_in_use_less_the_measured_peak(model: LoadedModel) -> None:
    device = FakeDevice(size=10_000_000_000, used=3_000_000_000, peak=500_000_000)
    budget = device_budget(config(gpu_memory_utilization=0.8), device, model, BLOCK_SIZE)
    assert budget.num_bytes == 8_000_000_000 - 3_000_000_000 - 500_000_000
    assert device.runs == 1
    assert not budget.explicit


def test_nothing_left_is_refused_with_the_sums(model: LoadedModel) -> None:
    device = FakeDevice(size=10_000_000_000, used=8_200_000_000, peak=900_000_000)
    with pytest.raises(ConfigError) as error:
        device_budget(config(), device, model, BLOCK_SIZE)
    assert error.value.field == "gpu_memory_utilization"
    text = str(error.value)
    for part in (
        "0.9 x 10.00 GB = 9.00 GB", "of weights", "8.20 GB in use besides", "0.90 GB at the peak",
        "32 tokens", "is -0.10 GB",
    ):  # fmt: skip
        assert part in text


# ---- a draft model beside it ----


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = make_tiny_model("llama", tmp_path_factory.mktemp("draft"), num_hidden_layers=1)
    return load_model(EngineConfig(model=str(path), dtype="float32", served_model_name=("small",)))


def test_each_block_is_paid_for_twice(model: LoadedModel, draft: LoadedModel) -> None:
    own, drafts = (
        bytes_per_block(each.info.layers, BLOCK_SIZE, "float32") for each in (model, draft)
    )
    assert drafts == own // 3
    given = config(kv_cache_memory="1MB")
    blocks = size_pool(given, model, BLOCK_SIZE, 64, draft).num_blocks
    assert (
        blocks == 1_000_000 // (own + drafts) < size_pool(given, model, BLOCK_SIZE, 64).num_blocks
    )
    with pytest.raises(ConfigError) as error:
        size_pool(config(kv_cache_memory="10kB"), model, BLOCK_SIZE, 64, draft)
    assert f"{own + drafts:,} bytes" in str(error.value)
    assert f"{drafts:,} bytes are for the draft model small" in str(error.value)


def test_a_device_holds_both_weights_and_the_larger_peak(
    model: LoadedModel, draft: LoadedModel
) -> None:
    device = FakeDevice(size=10_000_000_000, used=3_000_000_000, peak=500_000_000)
    peaks = [500_000_000, 700_000_000]
    device.peak_of = lambda run: peaks.pop(0)  # type: ignore[method-assign]
    budget = device_budget(config(), device, model, BLOCK_SIZE, draft)
    assert budget.num_bytes == 9_000_000_000 - 3_000_000_000 - 700_000_000
    assert "are the draft model's" in budget.origin
    full = FakeDevice(size=10_000_000_000, used=8_900_000_000, peak=200_000_000)
    with pytest.raises(ConfigError, match=r"nothing is left .* draft model's\)") as error:
        device_budget(config(), full, model, BLOCK_SIZE, draft)
    assert full.runs == 2
    assert error.value.field == "gpu_memory_utilization"


def test_an_engine_with_a_draft_model_stays_within_its_budget(tmp_path: Path) -> None:
    target = make_tiny_model("llama", tmp_path / "target")
    small = make_tiny_model("llama", tmp_path / "small", seed=1, num_hidden_layers=1)
    budget = 400_000
    common: dict[str, Any] = {
        "model": str(target), "device": "cpu", "block_size": BLOCK_SIZE,
        "kv_cache_memory": str(budget),
    }  # fmt: skip
    alone = build_engine(EngineConfig(**common))
    engine = build_engine(
        EngineConfig(**common, speculative_method="draft", speculative_model=str(small))
    )
    layers = len(engine.info.layers)
    drafts = engine.arena.num_bytes // layers  # one layer of the same sizes
    assert engine.arena.num_bytes + drafts <= budget
    assert engine.pool.num_blocks == alone.pool.num_blocks * layers // (layers + 1)


# ---- blocks from a budget ----


def test_blocks_are_the_budget_over_the_bytes_of_a_block() -> None:
    assert num_blocks(Budget(1000, "x", "f"), 96, useful=99, block="b") == 10
    assert num_blocks(Budget(1000, "x", "f"), 96, useful=4, block="b") == 4
    assert num_blocks(Budget(1000, "x", "f", explicit=True), 96, useful=4, block="b") == 10
    assert num_blocks(Budget(1000, "x", "f"), 96, useful=1, block="b") == 2


def test_below_two_blocks_is_refused_with_the_sums() -> None:
    with pytest.raises(ConfigError, match="x is 191 bytes; one KV block of b takes 96") as error:
        num_blocks(Budget(191, "x", "f"), 96, useful=9, block="b")
    assert error.value.field == "f"
    assert "192 bytes" in str(error.value)


def test_a_pool_beyond_main_memory_is_refused(tmp_path: Path) -> None:
    memory = HostMemory(proc=tmp_path, cgroup=tmp_path)
    refuse_beyond(Budget(1 << 60, "x", "f"), memory)  # a kernel that tells nothing
    (tmp_path / "meminfo").write_text("MemAvailable: 1 kB\n")
    refuse_beyond(Budget(1024, "x", "f"), memory)
    with pytest.raises(ConfigError, match=r"1,025 bytes of KV, but only 1,024 bytes of memory"):
        refuse_beyond(Budget(1025, "x", "f"), memory)
    assert host_budget(1000).num_bytes == int(1000 * CPU_MEMORY_SHARE)


def test_the_pool_of_a_cpu_engine(model: LoadedModel) -> None:
    block_bytes = bytes_per_block(model.info.layers, BLOCK_SIZE, "float32")
    assert size_pool(config(num_kv_blocks=7), model, BLOCK_SIZE, 64).num_blocks == 7
    given = config(kv_cache_memory="1MB")
    assert size_pool(given, model, BLOCK_SIZE, 64).num_blocks == 1_000_000 // block_bytes
    assert (
        size_pool(config(), model, BLOCK_SIZE, 60).num_blocks == 4 * 8
    )  # what 4 requests of 60 can use
    with pytest.raises(ConfigError, match=r"kv_cache_memory of 1TB is .* available") as error:
        size_pool(config(kv_cache_memory="1TB"), model, BLOCK_SIZE, 64)
    assert error.value.field == "kv_cache_memory"
    with pytest.raises(ConfigError, match="num_kv_blocks 100000000 is"):
        size_pool(config(num_kv_blocks=100_000_000), model, BLOCK_SIZE, 64)


# ---- the measured forward ----


def test_dummy_prompts_fill_the_step_and_respect_the_longest_length() -> None:
    assert dummy_lengths(2048, 1, limit=512) == [512] * 4
    assert dummy_lengths(2048, 3, limit=4096) == [683, 683, 682]
    assert dummy_lengths(10, 64, limit=4096) == [1] * 10
    assert dummy_lengths(1000, 1, limit=300) == [250] * 4


def test_a_dummy_step_computes_as_many_tokens_as_a_full_one(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    forward = type(model.model).forward

    def counted(self: object, ids: torch.Tensor, *rest: object) -> torch.Tensor:
        rows.append(ids.shape[0])
        return forward(self, ids, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(type(model.model), "forward", counted)
    dummy_steps(config(max_num_batched_tokens=600), model, BLOCK_SIZE)()
    assert rows == [600, 600]


def test_the_peak_on_a_cpu_is_the_growth_of_the_resident_set() -> None:
    elements = 16_000_000

    def two_at_once() -> None:
        first = torch.ones(elements)
        second = first + 1
        del first
        assert second[-1] == 2

    peak = HostMemory().peak_of(two_at_once)
    assert peak is not None
    assert 0.7 * 2 * 4 * elements < peak < 1.2 * 2 * 4 * elements


def test_a_kernel_that_does_not_tell_the_peak(tmp_path: Path) -> None:
    assert HostMemory(proc=tmp_path).peak_of(lambda: None) is None


# ---- available memory ----


def test_available_memory(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9 kB\nMemAvailable:     2048 kB\n")
    assert available_memory(tmp_path, tmp_path) == 2 << 20
    meminfo.write_text("MemTotal:  9 kB\n")
    with pytest.raises(ConfigError, match="set kv_cache_memory"):
        available_memory(tmp_path, tmp_path)
    with pytest.raises(ConfigError, match="set kv_cache_memory"):
        available_memory(tmp_path / "none", tmp_path)


def test_a_container_may_have_less_than_the_machine(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable: 1000000 kB\n")
    memory = HostMemory(proc=tmp_path, cgroup=tmp_path)
    assert memory.available() == 1_024_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available() == 1_024_000_000
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("4000000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 300000\n")
    assert memory.available() == 1_300_000


def test_control_groups_of_version_1_limit_a_container_too(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable: 1000000 kB\n")
    memory = HostMemory(proc=tmp_path, cgroup=tmp_path)
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("4000000\n")
    (tmp_path / "memory" / "memory.stat").write_text(
        "inactive_file 1\ntotal_inactive_file 300000\n"
    )
    assert memory.available() == 1_024_000_000
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("5000000\n")
    assert memory.available() == 1_300_000
