"""An engine asleep: its weights and its KV's memory are gone, and what it says afterwards is what
it said before."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from baton.engine.config import EngineConfig
from baton.engine.core.assembly import build_engine
from baton.engine.core.engine import Engine
from baton.engine.core.sleeping import fall_asleep, reload, wake
from baton.protocol.errors import ConfigError, InternalError
from baton.protocol.events import BlockEventKind
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from tests.engine.test_models_lora import ALL, linear_layers, make_adapter
from tests.tiny_models import make_tiny_model

PROMPT = tuple(range(40, 80))
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def said(engine: Engine, **fields: object) -> list[int]:
    engine.add(Request("r", PROMPT, GREEDY, **fields))  # type: ignore[arg-type]
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token for event in engine.step() for token in event.token_ids]
    return tokens


def engine_of(path: Path, **options: object) -> Engine:
    config = {"dtype": "float32", "num_kv_blocks": 64, "block_size": 16, "measure_limits": False}
    return build_engine(EngineConfig(model=str(path), **{**config, **options}))  # type: ignore[arg-type]


@pytest.fixture(name="model", scope="module")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model"))


def test_it_says_the_same_after_its_sleep_and_nothing_in_it(model: Path) -> None:
    engine = engine_of(model)
    before = said(engine)
    engine.take_block_events()
    fall_asleep(engine)
    assert engine.model is None
    assert engine.pooler is None
    assert engine.pool.num_cached == 0
    assert [event.kind for event in engine.take_block_events()] == [BlockEventKind.CLEARED]
    engine.add(Request("in vain", PROMPT, GREEDY))
    with pytest.raises(InternalError, match="no model"):
        engine.step()
    engine.fail_step()
    wake(engine, reload(engine.config))
    assert said(engine) == before
    assert engine.pooler is not None


@pytest.mark.parametrize("impl", ["lean", "transformers"])
def test_adapters_come_back_with_the_model(model: Path, tmp_path: Path, impl: str) -> None:
    adapter = make_adapter(tmp_path / "a", linear_layers(model, ALL), seed=3)
    engine = engine_of(model, model_impl=impl, lora_modules=(f"poet={adapter}",))
    (poet,) = engine.info.adapters
    before = said(engine, adapter=poet)
    assert before != said(engine)
    fall_asleep(engine)
    wake(engine, reload(engine.config))
    assert said(engine, adapter=poet) == before


def test_a_draft_sleeps_too(model: Path) -> None:
    plain = said(engine_of(model))
    engine = engine_of(
        model, speculative_method="draft", speculative_model=str(model), num_speculative_tokens=3
    )
    assert said(engine) == plain
    fall_asleep(engine)
    wake(engine, reload(engine.config))
    assert said(engine) == plain


def test_nobody_sleeps_at_work(model: Path) -> None:
    engine = engine_of(model)
    engine.add(Request("r", PROMPT, GREEDY))
    engine.step()
    with pytest.raises(InternalError, match="with requests"):
        fall_asleep(engine)
    engine.abort("r")
    fall_asleep(engine)


def test_another_model_does_not_wake_in_its_place(model: Path, tmp_path: Path) -> None:
    engine = engine_of(model)
    fall_asleep(engine)
    other = make_tiny_model("llama", tmp_path / "other", seed=9)
    with pytest.raises(ConfigError, match="has changed"):
        wake(engine, reload(EngineConfig(model=str(other), dtype="float32")))
    wake(engine, reload(engine.config))
    assert said(engine)


MEASURE = """
import sys
from pathlib import Path
from baton.engine.config import EngineConfig
from baton.engine.core.assembly import build_engine
from baton.engine.core.sleeping import fall_asleep, reload, wake
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) / 1024

engine = build_engine(EngineConfig(
    model=sys.argv[1], dtype="float32", kv_cache_memory="96MiB", measure_limits=False,
    enable_prefix_caching=False,
))
engine.arena._pages.fill_(1)
engine.add(Request("r", tuple(range(9, 40)), SamplingParams(temperature=0, max_tokens=4)))
while engine.has_work:
    engine.step()
full = resident()
fall_asleep(engine)
asleep = resident()
wake(engine, reload(engine.config))
engine.arena._pages.fill_(1)
print(full, asleep, resident(), engine.model.weight_bytes / 2**20, engine.arena.num_bytes / 2**20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_given_back(tmp_path: Path) -> None:
    """Of a process of its own: what this one keeps would hide it."""
    big = make_tiny_model(
        "llama", tmp_path / "big", hidden_size=512, intermediate_size=2048, num_hidden_layers=8
    )
    gc.collect()
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(big)],
        capture_output=True, text=True, timeout=180, check=True,
    )  # fmt: skip
    full, asleep, again, weights, pool = map(float, done.stdout.split())
    assert weights > 60
    assert pool > 90
    assert full - asleep > 0.9 * (weights + pool), done.stdout
    assert again < full + 0.35 * weights, done.stdout
