"""Weights once per host: what is mapped equals what is read; files come and go as they should."""

from __future__ import annotations

import fcntl
import gc
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.checkpoint import weight_file
from baton.engine.checkpoint.tensors import TensorReader
from baton.engine.checkpoint.weight_folder import WeightFolder
from baton.engine.config import EngineConfig
from baton.engine.loading import loading
from baton.engine.loading.loading import LoadedModel, load_model
from baton.engine.parallel.group import RankGroup
from tests.engine.quantized_models import MIXTURE, SHAPE, make_quantized
from tests.engine.running import load, logits_of
from tests.engine.tensor_parallel_ranks import CHUNKS, NEXT, by_threads, config_of
from tests.engine.tensor_parallel_ranks import logits_of as rank_logits
from tests.engine.test_data_parallel import MODELS as DATA_PARALLEL
from tests.engine.test_data_parallel import by_ranks
from tests.engine.test_data_parallel import logits_of as data_logits
from tests.engine.test_latent_models import WIDE
from tests.golden.latent_models import save_latent
from tests.golden.random_models import save_random
from tests.tiny_models import VOCAB_SIZE, make_tiny_model

PROMPT = torch.randint(5, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(3)).tolist()
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {}, "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "w8a8": {"dtype": "bfloat16", "quantization": "w8a8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "w4a8": {"dtype": "bfloat16", "quantization": "w4a8"},
    "w4a8 in float32": {"quantization": "w4a8"},
    "int4 in float32": {"quantization": "int4"}, "int8 in float32": {"quantization": "int8"},
    "a rounded head": {"lm_head_quantization": "w8a8"},
}  # fmt: skip
DEEPSEEK = "deepseek_v3: latents, a dense layer"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model("qwen3", tmp_path / "model", hidden_size=64, intermediate_size=128)


def files(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*/*") if path.name != "lock"]


def without_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on nothing is read of a checkpoint's tensors."""

    def read(*_: object) -> None:
        raise AssertionError("the checkpoint is read")

    monkeypatch.setattr(TensorReader, "_stack", read)


def same(a: LoadedModel, b: LoadedModel) -> bool:
    return torch.equal(logits_of(a, PROMPT), logits_of(b, PROMPT))


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_mapped_is_what_is_read(
    folder: Path, model: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = FORMATS[name]
    private = load(model, **options, shared_weights=False)
    assert not files(folder)
    written = load(model, **options)
    (path,) = files(folder)
    assert path.suffix == ".weights"
    without_checkpoint(monkeypatch)
    mapped = load(model, **options)
    assert same(written, private)
    assert same(mapped, private)
    assert mapped.weight_bytes == written.weight_bytes == private.weight_bytes
    assert mapped.rounded_head_bytes == written.rounded_head_bytes == private.rounded_head_bytes
    assert path.stat().st_size < 1.5 * private.weight_bytes + 65536


@pytest.mark.parametrize("kind", ["mixtral", "qwen2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mixtures_and_ties(
    folder: Path, tmp_path: Path, kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "mixtral":
        path = save_random(tmp_path / kind, "mixtral", num_local_experts=4, head_dim=32)
    else:
        path = make_tiny_model(kind, tmp_path / kind)  # its head is its embedding
    private = load(path, dtype=dtype, shared_weights=False)
    written = load(path, dtype=dtype)
    (file,) = files(folder)
    assert file.stat().st_size < 1.5 * private.weight_bytes + 65536, "a tied one lies there once"
    without_checkpoint(monkeypatch)
    assert same(load(path, dtype=dtype), private)
    assert same(written, private)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tied_embedding_is_held_once(folder: Path, tmp_path: Path, dtype: str) -> None:
    """Panels of the head serve as the embedding's table, too."""
    path = make_tiny_model("qwen2", tmp_path / "m", vocab_size=8192)
    loaded = load(path, dtype=dtype)
    (file,) = files(folder)
    assert loaded.weight_bytes > 8192 * 64 * getattr(torch, dtype).itemsize
    assert file.stat().st_size < 1.25 * loaded.weight_bytes, "most of them are the embedding"


@pytest.mark.parametrize("name", ["w8a8", "w4a16-asymmetric", "gptq", "awq"])
def test_quantized_checkpoints(
    folder: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = make_quantized(name, tmp_path / name, ignored=("k_proj",))
    private = load(path, shared_weights=False)
    written = load(path)
    mapped = load(path)
    assert same(written, private)
    assert same(mapped, private)
    assert len(files(folder)) == 1


def test_what_is_made_of_a_tensor_is_mapped(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The panels of latent attention, which are packed in another way than products' are."""
    path = save_latent(tmp_path, "v3", **WIDE)
    private = load(path, dtype="bfloat16", shared_weights=False)
    written = load(path, dtype="bfloat16")
    without_checkpoint(monkeypatch)
    mapped = load(path, dtype="bfloat16")
    assert len(files(folder)) == 1
    assert same(written, private)
    assert same(mapped, private)


@pytest.mark.parametrize("name", ["bfloat16", "w8a8", "int4 in float32"])
@torch.inference_mode()
def test_each_rank_maps_its_share(
    folder: Path, model: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the layers of w8a8 that speak with other ranks: by this process's own group."""
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", **FORMATS[name]}
    config = EngineConfig(str(model), tensor_parallel_size=2, **options)

    def logits(group: RankGroup) -> tuple[LoadedModel, torch.Tensor]:
        loaded = load_model(config, group)
        return loaded, rank_logits(loaded, 2)

    written = by_threads(2, logits)
    assert len(files(folder)) == 2
    without_checkpoint(monkeypatch)
    mapped = by_threads(2, logits)
    for (first, found), (second, again) in zip(written, mapped, strict=True):
        assert torch.equal(found, again)
        assert first.weight_bytes == second.weight_bytes
        assert first.rounded_head_bytes == second.rounded_head_bytes


@torch.inference_mode()
def test_shares_of_experts_and_whole_ones_are_other_weights(folder: Path, tmp_path: Path) -> None:
    path = save_random(tmp_path / "m", "qwen3_moe", **SHAPE, **MIXTURE)
    held: list[LoadedModel] = []
    for whole_experts in (False, True, True):
        config = EngineConfig(
            str(path), tensor_parallel_size=2, enable_expert_parallel=whole_experts,
            dtype="float32", device="cpu",
        )  # fmt: skip

        def loaded(group: RankGroup) -> LoadedModel:
            return load_model(config, group)  # noqa: B023 - runs within this turn

        held += by_threads(2, loaded)
    assert len(files(folder)) == 4


@pytest.mark.parametrize("name", ["qwen3_moe", DEEPSEEK, "w8a8", "int4 on load"])
def test_data_parallel_ranks_share_all_but_their_experts(
    folder: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file of what all ranks have, one of each rank's experts; bit for bit the same logits."""
    if name == "int4 on load":
        path = save_random(tmp_path / "m", "qwen3_moe", **SHAPE, **MIXTURE)
    else:
        path = DATA_PARALLEL[name](tmp_path / "m")
    options: dict[str, Any] = {"quantization": "int4"} if name == "int4 on load" else {}
    config = config_of(path, data_parallel_size=2, **options)

    def ranks(config: EngineConfig) -> list[tuple[LoadedModel, list[torch.Tensor]]]:
        return by_ranks(config, tmp_path, lambda loaded: data_logits(loaded, (CHUNKS, NEXT)))

    private = ranks(replace(config, shared_weights=False))
    assert not files(folder)
    written = ranks(config)
    assert len(files(folder)) == 3
    without_checkpoint(monkeypatch)
    mapped = ranks(config)
    assert len(files(folder)) == 3
    for first, second, third in zip(private, written, mapped, strict=True):
        assert all(map(torch.equal, first[1], second[1]))
        assert all(map(torch.equal, first[1], third[1]))
        assert first[0].weight_bytes == second[0].weight_bytes == third[0].weight_bytes
        assert first[0].rounded_head_bytes == third[0].rounded_head_bytes


def test_the_last_one_removes_it(folder: Path, model: Path) -> None:
    first, second = load(model), load(model)
    del first
    gc.collect()
    assert len(files(folder)) == 1
    del second
    gc.collect()
    assert not files(folder)


def test_another_model_another_file(folder: Path, model: Path, tmp_path: Path) -> None:
    other = make_tiny_model("qwen3", tmp_path / "other", seed=1)
    kept = [load(model), load(model, dtype="bfloat16"), load(other)]
    assert len(files(folder)) == len(kept)


def test_what_a_killed_process_leaves(folder: Path, model: Path, tmp_path: Path) -> None:
    """The next one with the same key maps it; the next one with another removes it."""
    program = f"""
import os, sys
from pathlib import Path
from baton.engine.checkpoint import shared_weights
from baton.engine.loading import loading
from tests.engine.running import load
shared_weights.FOLDER, loading.LEAST_BYTES = Path({str(folder)!r}), 0
model = load(Path({str(model)!r}))
os.kill(os.getpid(), 9)
"""
    died = subprocess.run([sys.executable, "-c", program], cwd=Path.cwd(), check=False)
    assert died.returncode == -9
    (left,) = files(folder)
    inode = left.stat().st_ino
    again = load(model)
    assert [path.stat().st_ino for path in files(folder)] == [inode]
    del again
    gc.collect()
    died = subprocess.run([sys.executable, "-c", program], cwd=Path.cwd(), check=False)
    (left,) = files(folder)
    other = load(make_tiny_model("qwen3", tmp_path / "other", seed=1))
    assert not left.exists()
    assert other.weight_bytes
    assert len(files(folder)) == 1


def test_a_file_that_is_removed_before_its_lock_is_made_again(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another process does that needs other weights at the same time."""
    lock, removed = fcntl.flock, list[Path]()

    def late(fd: int, operation: int) -> None:
        if operation == fcntl.LOCK_SH and not removed:
            (unfinished,) = folder.glob("*/*.unfinished")
            WeightFolder(unfinished.parent).clean()
            assert not unfinished.exists()
            removed.append(unfinished)
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    written = load(model)
    assert removed
    assert [path.suffix for path in files(folder)] == [".weights"]
    monkeypatch.setattr(fcntl, "flock", lock)
    assert same(written, load(model, shared_weights=False))


@pytest.mark.parametrize("harm", ["flipped", "cut", "empty", "no index"])
def test_a_broken_file_is_made_anew(
    folder: Path, model: Path, harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = load(model, shared_weights=False)
    first = load(model)
    (path,) = files(folder)
    whole = path.read_bytes()
    del first
    gc.collect()
    broken = {
        "flipped": whole[:100] + bytes([whole[100] ^ 1]) + whole[101:],
        "cut": whole[:-1],
        "empty": b"",
        "no index": bytes(len(whole) - len(weight_file.MAGIC)) + weight_file.MAGIC,
    }[harm]
    path.write_bytes(broken)
    path.chmod(0o600)
    second = load(model)
    assert same(second, private)
    without_checkpoint(monkeypatch)
    assert same(load(model), private)


def test_no_room(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fits is in the file, which gets no name; all is right."""
    private = load(model, shared_weights=False)
    write, calls = os.pwrite, list[int]()

    def full(fd: int, numbers: memoryview, start: int) -> int:
        calls.append(len(numbers))
        if len(calls) > 3:
            raise OSError(28, "no space left")
        return write(fd, numbers, start)

    monkeypatch.setattr(os, "pwrite", full)
    partly = load(model)
    assert len(calls) == 4
    assert same(partly, private)
    assert not files(folder)


def test_a_write_that_is_cut_short_goes_on(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, write = load(model, shared_weights=False), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, numbers, start: write(fd, numbers[:777], start))
    written = load(model)
    monkeypatch.undo()
    assert same(written, private)
    (path,) = files(folder)
    assert path.stat().st_size < 1.5 * private.weight_bytes + 65536


def test_a_folder_of_others_is_not_used(folder: Path, model: Path) -> None:
    private = load(model, shared_weights=False)
    place = folder / f"baton-weights-{os.geteuid()}"
    place.mkdir(mode=0o700)
    place.chmod(0o770)
    loaded = load(model)
    assert not files(folder)
    assert same(loaded, private)


def test_small_models_stay_private(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "LEAST_BYTES", 64 << 20)
    assert load(model).weight_bytes
    assert not list(folder.iterdir())


def test_a_process_that_ends_removes_it(folder: Path, model: Path) -> None:
    """With its weights still in use: the mapping is not taken from under a thread."""
    program = f"""
from pathlib import Path
from baton.engine.checkpoint import shared_weights
from baton.engine.loading import loading
from tests.engine.running import load
shared_weights.FOLDER, loading.LEAST_BYTES = Path({str(folder)!r}), 0
model = load(Path({str(model)!r}))
assert len(list(Path({str(folder)!r}).glob("*/*.weights"))) == 1
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=Path.cwd(), check=False)
    assert ended.returncode == 0
    assert not files(folder)


def test_a_write_is_a_fault(folder: Path, model: Path) -> None:
    """Nobody can change what others read."""
    program = f"""
from pathlib import Path
from baton.engine.checkpoint import shared_weights
from baton.engine.loading import loading
from tests.engine.running import load
shared_weights.FOLDER, loading.LEAST_BYTES = Path({str(folder)!r}), 0
model = load(Path({str(model)!r}))
model.model._table.weight.zero_()
"""
    died = subprocess.run([sys.executable, "-c", program], cwd=Path.cwd(), check=False)
    assert died.returncode == -11
