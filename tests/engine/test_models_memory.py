"""Loading peaks at the weights: measured in a process of its own, on checkpoints of 100 and 200 MB,
read as they are and cast, by both routes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import make_tiny_model

# The high-water mark is reset after the imports, so that it counts what loading alone takes.
LOAD = """
import json, sys
from pathlib import Path
import torch
from baton.engine.config import EngineConfig
from baton.engine.loading.loading import load_model
if sys.argv[3] == "transformers":
    import baton.engine.models.universal

def resident(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024

before = resident("VmRSS:")
Path("/proc/self/clear_refs").write_text("5")
loaded = load_model(EngineConfig(sys.argv[1], dtype=sys.argv[2], model_impl=sys.argv[3]))
print(json.dumps([loaded.weight_bytes, resident("VmHWM:") - before]))
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Four layers of 13 million numbers, in both dtypes."""
    return {dtype: make_checkpoint(dtype, tmp_path_factory) for dtype in ("float32", "bfloat16")}


def make_checkpoint(dtype: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        "llama", tmp_path_factory.mktemp("large"), hidden_size=1024, intermediate_size=2816,
        num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8, head_dim=128,
        torch_dtype=dtype,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    ("stored", "dtype", "impl"),
    [  # each process costs seconds: both casts and both plain loads, each on one route and the cast
        # down, which has most to hold, on both
        ("float32", "bfloat16", "lean"),
        pytest.param("float32", "bfloat16", "transformers", marks=pytest.mark.long),
        pytest.param("bfloat16", "float32", "transformers", marks=pytest.mark.long),
        pytest.param("bfloat16", "bfloat16", "transformers", marks=pytest.mark.long),
        ("float32", "float32", "lean"),
    ],
)
def test_the_peak_of_loading_is_the_weights(
    checkpoints: dict[str, Path], stored: str, dtype: str, impl: str
) -> None:
    child = subprocess.run(
        [sys.executable, "-c", LOAD, str(checkpoints[stored]), dtype, impl],
        capture_output=True, text=True, timeout=120, check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    weights, peak = json.loads(child.stdout)
    assert weights > (200e6 if dtype == "float32" else 100e6)
    # Beyond the weights: a tensor on its way into its format, the casts' buffers, oneDNN itself. A
    # mapped file or a second copy would add the size of the weights at least.
    assert peak < 1.2 * weights + 80e6
