"""--shared-weights-cache: files of weights outlive their processes, within a bound."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from baton.engine.checkpoint import shared_weights
from baton.engine.checkpoint.shared_weights import WeightsKey
from baton.engine.checkpoint.weight_folder import WeightFolder
from baton.engine.config import EngineConfig
from baton.protocol.errors import ConfigError
from tests.engine.running import load
from tests.engine.test_shared_modules import universal
from tests.engine.test_shared_weights import files, same, without_checkpoint
from tests.golden.random_models import save_random
from tests.tiny_models import make_tiny_model

ENOUGH = "1GB"
SIZES = {"hidden_size": 64, "intermediate_size": 128}


def model(path: Path, seed: int = 0) -> Path:
    return make_tiny_model("qwen3", path, seed=seed, **SIZES)


def started_and_ended(path: Path, cache: str | None = ENOUGH) -> None:
    loaded = load(path, shared_weights_cache=cache)
    assert loaded.weight_bytes
    del loaded
    gc.collect()


def test_the_next_start_maps_what_the_last_process_left(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model(tmp_path / "m")
    private = load(path, shared_weights=False)
    started_and_ended(path)
    (left,) = files(folder)
    without_checkpoint(monkeypatch)
    again = load(path, shared_weights_cache=ENOUGH)
    assert files(folder) == [left]
    assert same(again, private)


def test_so_it_does_on_the_universal_route(folder: Path, tmp_path: Path) -> None:
    path = save_random(tmp_path / "m", "gpt2")
    first = universal(path, shared_weights_cache=ENOUGH)
    (left,) = files(folder)
    inode = left.stat().st_ino
    del first
    gc.collect()
    assert [each.stat().st_ino for each in files(folder)] == [inode]
    universal(path)
    gc.collect()
    assert not files(folder), "without the option the last process removes it"


def test_the_last_used_ones_stay_within_the_bound(folder: Path, tmp_path: Path) -> None:
    paths = [model(tmp_path / str(seed), seed) for seed in range(3)]
    started_and_ended(paths[0])
    (first,) = files(folder)
    size = first.stat().st_blocks * 512
    started_and_ended(paths[1], str(2 * size + size // 2))
    assert len(files(folder)) == 2
    started_and_ended(paths[0], str(2 * size + size // 2))  # used again
    started_and_ended(paths[2], str(2 * size + size // 2))
    kept = files(folder)
    assert len(kept) == 2
    assert first in kept
    started_and_ended(paths[2], str(size // 2))
    assert not files(folder), "it does not fit at all"


def test_what_is_mapped_is_not_counted_and_stays(folder: Path, tmp_path: Path) -> None:
    held = load(model(tmp_path / "held"), shared_weights_cache="1")
    (mapped,) = files(folder)
    started_and_ended(model(tmp_path / "other", 1))
    assert mapped in files(folder)
    assert len(files(folder)) == 2
    WeightFolder(mapped.parent, 1).clean()
    assert files(folder) == [mapped]
    assert held.weight_bytes


def test_a_start_without_the_option_clears_what_others_left(folder: Path, tmp_path: Path) -> None:
    started_and_ended(model(tmp_path / "a"))
    assert len(files(folder)) == 1
    started_and_ended(model(tmp_path / "b", 1), None)
    assert not files(folder)


def test_a_process_that_ends_leaves_it(folder: Path, tmp_path: Path) -> None:
    path = model(tmp_path / "m")
    program = f"""
from pathlib import Path
from baton.engine.checkpoint import shared_weights
from baton.engine.loading import loading
from tests.engine.running import load
shared_weights.FOLDER, loading.LEAST_BYTES = Path({str(folder)!r}), 0
model = load(Path({str(path)!r}), shared_weights_cache="1GB")
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=Path.cwd(), check=False)
    assert ended.returncode == 0
    (left,) = files(folder)
    inode = left.stat().st_ino
    again = load(path, shared_weights_cache=ENOUGH)
    assert [each.stat().st_ino for each in files(folder)] == [inode]
    assert again.weight_bytes


def test_other_code_makes_other_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is kept may be older than an update."""
    import torch

    key = WeightsKey("digest", torch.float32)
    before = key.name
    assert key.name == before
    monkeypatch.setattr(shared_weights, "_layouts", lambda: "of another version")
    assert key.name != before


def test_a_bad_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not a size") as refused:
        EngineConfig("m", shared_weights_cache="plenty")
    assert refused.value.field == "shared_weights_cache"
