"""--shared-weights-cache: files of weights outlive their processes, within a bound; where they
lie."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from baton.engine.checkpoint import checkpoint, shared_weights
from baton.engine.checkpoint.shared_weights import WeightsKey
from baton.engine.checkpoint.tensors import TensorReader
from baton.engine.checkpoint.weight_folder import WeightFolder, held_bytes
from baton.engine.config import EngineConfig
from baton.protocol.errors import ConfigError
from baton.runtime import cache_folder
from baton.runtime.config import AUTO
from tests.engine.running import load, logits_of
from tests.engine.test_shared_modules import universal
from tests.engine.test_shared_weights import PROMPT, files, same, without_checkpoint
from tests.golden.random_models import save_random
from tests.tiny_models import make_tiny_model

ENOUGH = "1GB"
SIZES = {"hidden_size": 64, "intermediate_size": 128}


@pytest.fixture(params=["memory", "disk"])
def place(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Both places of files in turn; what is kept does not depend on it."""
    if request.param == "disk":
        on_disk(monkeypatch)
    return folder


def on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on the disk serves as well as memory."""
    monkeypatch.setattr(shared_weights, "is_local", lambda _: True)
    monkeypatch.setattr(shared_weights, "maps_large", lambda _: True)


def model(path: Path, seed: int = 0) -> Path:
    return make_tiny_model("qwen3", path, seed=seed, **SIZES)


def started_and_ended(path: Path, cache: str | None = ENOUGH) -> None:
    loaded = load(path, shared_weights_cache=cache)
    assert loaded.weight_bytes
    del loaded
    gc.collect()


def test_the_next_start_maps_what_the_last_process_left(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model(tmp_path / "m")
    private = load(path, shared_weights=False)
    started_and_ended(path)
    (left,) = files(place)
    without_checkpoint(monkeypatch)
    again = load(path, shared_weights_cache=ENOUGH)
    assert files(place) == [left]
    assert same(again, private)


def test_so_it_does_on_the_universal_route(place: Path, tmp_path: Path) -> None:
    path = save_random(tmp_path / "m", "gpt2")
    first = universal(path, shared_weights_cache=ENOUGH)
    (left,) = files(place)
    inode = left.stat().st_ino
    del first
    gc.collect()
    assert [each.stat().st_ino for each in files(place)] == [inode]
    universal(path, shared_weights_cache="0")
    gc.collect()
    assert not files(place), "the last process removes it"


def test_the_last_used_ones_stay_within_the_bound(place: Path, tmp_path: Path) -> None:
    paths = [model(tmp_path / str(seed), seed) for seed in range(3)]
    started_and_ended(paths[0])
    (first,) = files(place)
    size = first.stat().st_blocks * 512
    started_and_ended(paths[1], str(2 * size + size // 2))
    assert len(files(place)) == 2
    started_and_ended(paths[0], str(2 * size + size // 2))  # used again
    started_and_ended(paths[2], str(2 * size + size // 2))
    kept = files(place)
    assert len(kept) == 2
    assert first in kept
    started_and_ended(paths[2], str(size // 2))
    assert not files(place), "it does not fit at all"


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


def test_a_process_that_ends_leaves_it(place: Path, tmp_path: Path) -> None:
    path, large = model(tmp_path / "m"), shared_weights.maps_large(tmp_path)
    program = f"""
from pathlib import Path
from baton.engine.checkpoint import shared_weights
from baton.engine.loading import loading
from tests.engine.running import load, logits_of
shared_weights.FOLDER, loading.LEAST_BYTES = Path({str(place)!r}), 0
shared_weights.cache_folder = lambda name: Path({str(place)!r}) / name
shared_weights.is_local = shared_weights.maps_large = lambda _: {large}
model = load(Path({str(path)!r}), shared_weights_cache="1GB")
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=Path.cwd(), check=False)
    assert ended.returncode == 0
    (left,) = files(place)
    inode = left.stat().st_ino
    again = load(path, shared_weights_cache=ENOUGH)
    assert [each.stat().st_ino for each in files(place)] == [inode]
    assert again.weight_bytes


def test_what_is_kept_lies_on_the_disk(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` keeps a part of the disk's free space, and nothing in memory."""
    path = model(tmp_path / "m")
    started_and_ended(path, AUTO)
    assert not files(folder), "of memory nothing is kept unasked"
    on_disk(monkeypatch)
    started_and_ended(path, AUTO)
    (left,) = files(folder)
    assert left.parent == folder / "weights"
    assert left.parent.stat().st_mode & 0o077 == 0
    without_checkpoint(monkeypatch)
    again = load(path, shared_weights_cache=AUTO)
    assert again.weight_bytes


def test_another_start_leaves_what_lies_on_the_disk_and_zero_removes_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk(monkeypatch)
    started_and_ended(model(tmp_path / "a"), AUTO)
    (left,) = files(folder)
    started_and_ended(model(tmp_path / "b", 1), None)
    assert files(folder) == [left]
    started_and_ended(model(tmp_path / "b", 1), "0")
    assert not files(folder)


def test_a_changed_checkpoint_is_read_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place, with the same size and the same time of its last write."""
    on_disk(monkeypatch)
    monkeypatch.setattr(checkpoint, "cache_folder", lambda name: folder / name)
    monkeypatch.setattr(cache_folder, "SETTLED_S", -60.0)
    monkeypatch.setattr(cache_folder, "is_local", lambda _: True)
    path, other = model(tmp_path / "m"), model(tmp_path / "other", 1)
    started_and_ended(path, AUTO)
    assert (folder / "digests" / "known.json").exists()
    weights = path / "model.safetensors"
    before = weights.stat()
    while weights.stat().st_ctime_ns == before.st_ctime_ns:  # clocks of old kernels tick
        weights.write_bytes((other / "model.safetensors").read_bytes())
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights.stat().st_size == before.st_size
    again = load(path, shared_weights_cache=AUTO)
    assert same(again, load(other, shared_weights=False))
    assert not same(again, load(model(tmp_path / "old"), shared_weights=False))


@pytest.mark.parametrize("harm", ["flipped", "cut", "empty"])
def test_a_kept_file_that_is_broken_is_made_anew(
    folder: Path, tmp_path: Path, harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk(monkeypatch)
    path = model(tmp_path / "m")
    private = load(path, shared_weights=False)
    started_and_ended(path, AUTO)
    (left,) = files(folder)
    whole = left.read_bytes()
    broken = {"flipped": bytes([whole[0] ^ 1]) + whole[1:], "cut": whole[: len(whole) // 2]}
    left.write_bytes(broken.get(harm, b""))
    again = load(path, shared_weights_cache=AUTO)
    assert same(again, private)
    monkeypatch.setattr(TensorReader, "_stack", None)  # nothing is read of the checkpoint
    assert same(load(path, shared_weights_cache=AUTO), private)


def test_a_cache_that_cannot_be_written_costs_one_warning(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on_disk(monkeypatch)
    (folder / "weights").write_text("a file where the folder should be")
    path = model(tmp_path / "m")
    with caplog.at_level(logging.WARNING, logger=shared_weights.__name__):
        loaded = load(path, shared_weights_cache=AUTO)
    assert ["not kept" in each.message for each in caplog.records] == [True]
    assert files(folder), "in memory"
    assert same(loaded, load(path, shared_weights=False))


def test_what_a_killed_process_left_unfinished_is_counted(tmp_path: Path) -> None:
    assert held_bytes(tmp_path / "none") == 0
    for name in ("a.weights", "b.unfinished"):
        with (tmp_path / name).open("wb") as file:
            file.write(bytes(100_000))
            file.flush()
            os.fsync(file.fileno())  # some file systems give blocks only then
    (tmp_path / "lock").touch()
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    held = sum((tmp_path / name).stat().st_blocks for name in ("a.weights", "b.unfinished")) * 512
    assert held_bytes(tmp_path) == held >= 200_000


def test_a_full_disk_is_not_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Room(NamedTuple):
        free: int

    on_disk(monkeypatch)
    monkeypatch.setattr(shared_weights.shutil, "disk_usage", lambda _: Room(1000))
    loaded = load(model(tmp_path / "m"), shared_weights_cache=AUTO)
    (file,) = files(folder)
    assert file.parent != folder / "weights"
    assert loaded.weight_bytes


def test_two_starts_at_once_make_one_file(folder: Path, tmp_path: Path) -> None:
    path = model(tmp_path / "m")
    program = f"""
import sys
from pathlib import Path
from baton.engine.checkpoint import shared_weights
from baton.engine.loading import loading
from tests.engine.running import load, logits_of
from tests.engine.test_shared_weights import PROMPT, logits_of
shared_weights.FOLDER, loading.LEAST_BYTES = Path({str(folder)!r}), 0
shared_weights.cache_folder = lambda name: Path({str(folder)!r}) / name
shared_weights.is_local = shared_weights.maps_large = lambda _: True
print("ready", flush=True)
sys.stdin.readline()
model = load(Path({str(path)!r}), shared_weights_cache="auto")
print(logits_of(model, PROMPT).double().sum().item(), flush=True)
sys.stdin.readline()
"""
    command = [sys.executable, "-c", program]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for line in range(2):  # "ready", then the sum
        for each in started:
            assert each.stdout is not None
            assert each.stdin is not None
            said = each.stdout.readline()
            assert said
            if line == 0:
                assert said == "ready\n"
                each.stdin.write("\n")
                each.stdin.flush()
            else:
                expected = logits_of(load(path, shared_weights=False), PROMPT).double().sum().item()
                assert float(said) == expected
    assert len(files(folder)) == 1
    for each in started:
        each.communicate("\n")
        assert each.returncode == 0
    assert len(files(folder)) == 1


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
