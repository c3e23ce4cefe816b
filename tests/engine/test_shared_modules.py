"""Weights once per host on the universal route: transformers' modules over mapped parameters."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.checkpoint.tensors import LazyTensor
from baton.engine.loading import causal_once
from baton.engine.loading.loading import LoadedModel
from baton.engine.models.causal import ModelPart
from baton.engine.models.universal import UniversalModel
from tests.engine.quantized_models import make_quantized
from tests.engine.running import load
from tests.engine.test_models_reading import FAMILIES, storages
from tests.engine.test_shared_weights import files, same
from tests.golden.random_models import save_random


def without_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on nothing is read of a checkpoint's tensors."""

    def read(*_: object) -> None:
        raise AssertionError("the checkpoint is read")

    monkeypatch.setattr(LazyTensor, "to", read)


def universal(path: Path, **options: Any) -> LoadedModel:
    return load(path, model_impl="transformers", **options)


def modules(loaded: LoadedModel) -> torch.nn.Module:
    assert isinstance(loaded.model, UniversalModel)
    return loaded.model._decoder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_mapped_is_what_is_read(
    folder: Path, tmp_path: Path, family: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merged experts, tied heads, biases in float32, buffers that no file holds."""
    path = save_random(tmp_path / family, family, **FAMILIES[family])
    private = universal(path, dtype=dtype, shared_weights=False)
    assert not files(folder)
    written = universal(path, dtype=dtype)
    (file,) = files(folder)
    assert file.suffix == ".weights"
    assert file.stat().st_size < 1.2 * private.weight_bytes + 65536, "a tied one lies there once"
    without_checkpoint(monkeypatch)
    mapped = universal(path, dtype=dtype)
    for other in (written, mapped):
        assert same(other, private)
        assert other.weight_bytes == private.weight_bytes
        assert storages(modules(other)) == storages(modules(private))
        found = dict(modules(other).named_buffers())
        for name, buffer in modules(private).named_buffers():
            assert torch.equal(found[name], buffer), name
    assert other_addresses(written, mapped)


def other_addresses(a: LoadedModel, b: LoadedModel) -> bool:
    """Whether no buffer of one is the other's."""
    held = {each.data_ptr() for each in modules(a).buffers() if each.numel()}
    return held.isdisjoint(each.data_ptr() for each in modules(b).buffers() if each.numel())


def test_widened_checkpoints(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = make_quantized("gptq", tmp_path / "m")
    private = universal(path, shared_weights=False)
    written = universal(path)
    without_checkpoint(monkeypatch)
    mapped = universal(path)
    assert same(written, private)
    assert same(mapped, private)
    assert len(files(folder)) == 1


def test_the_lean_route_has_another_file(folder: Path, tmp_path: Path) -> None:
    path = save_random(tmp_path / "m", "llama")
    kept = [universal(path), load(path), universal(path, dtype="bfloat16")]
    assert len(files(folder)) == len(kept)


def test_who_writes_to_a_parameter_changes_its_own(folder: Path, tmp_path: Path) -> None:
    """The writer, a reader, and a process that maps the file later."""
    path = save_random(tmp_path / "m", "llama")
    private = universal(path, shared_weights=False)
    first, second = universal(path), universal(path)
    for harmed, other in ((first, second), (second, None)):
        with torch.inference_mode():
            for parameter in modules(harmed).parameters():
                parameter.zero_()
        assert not same(harmed, private)
        if other is not None:
            assert same(other, private)
    third = universal(path)
    assert len(files(folder)) == 1
    assert same(third, private)


def test_a_model_that_transformers_makes_otherwise_is_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it is that differs, the process reads the checkpoint."""
    path = save_random(tmp_path / "m", "llama")
    private, first = universal(path, shared_weights=False), universal(path)
    read = causal_once.read_causal

    def copied(
        checkpoint: Any, dtype: torch.dtype, given: Any = None, part: Any = ModelPart.WHOLE
    ) -> Any:
        if given is not None:
            given = {name: tensor.clone() for name, tensor in given.items()}
        return read(checkpoint, dtype, given, part)

    def partly(
        checkpoint: Any, dtype: torch.dtype, given: Any = None, part: Any = ModelPart.WHOLE
    ) -> Any:
        kept = None if given is None else dict(list(given.items())[1:])
        return read(checkpoint, dtype, kept, part)

    for changed, told in ((copied, "transformers does not take"), (partly, "tensors missing")):
        caplog.clear()
        monkeypatch.setattr(causal_once, "read_causal", changed)
        with caplog.at_level("INFO"):
            second = universal(path)
        assert "weights are not shared: " in caplog.text
        assert told in caplog.text
        assert same(second, private)
    assert same(first, private)


def test_the_last_one_removes_it(folder: Path, tmp_path: Path) -> None:
    path = save_random(tmp_path / "m", "gpt2", n_embd=64, n_layer=2, n_head=4)
    first, second = universal(path), universal(path)
    del first
    gc.collect()
    assert len(files(folder)) == 1
    del second
    gc.collect()
    assert not files(folder)


def test_processes_hold_it_once(folder: Path, tmp_path: Path) -> None:
    """Proportional set sizes of the mapping: half of the file each."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024}
    path = save_random(tmp_path / "m", "llama", **sizes)
    program = f"""
import sys
from pathlib import Path
from baton.engine.checkpoint import shared_weights
from baton.engine.loading import loading
from tests.engine.running import load
shared_weights.FOLDER, loading.LEAST_BYTES = Path({str(folder)!r}), 0
model = load(Path({str(path)!r}), model_impl="transformers")
print("loaded", flush=True)
sys.stdin.read()
"""
    processes: list[subprocess.Popen[str]] = []
    try:
        for _ in range(2):
            process = subprocess.Popen(
                [sys.executable, "-c", program], text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
            processes.append(process)
            assert process.stdout is not None
            assert process.stdout.readline() == "loaded\n"
        (file,) = files(folder)
        total = sum(mapped_pss(process.pid, file) for process in processes)
        assert total <= 1.1 * file.stat().st_size + (2 << 20)
        assert total >= 0.9 * file.stat().st_size
    finally:
        for process in processes:
            process.communicate("")
    assert not files(folder)


def mapped_pss(pid: int, file: Path) -> int:
    """Bytes of `file` that process `pid` holds, its share of each page, and its own copies."""
    total, here = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        head = line.split()
        if not head[0].endswith(":"):
            here = head[-1] == str(file) or str(file.with_suffix(".unfinished")) in line
        elif here and head[0] == "Pss:":
            total += int(head[1]) << 10
    return total
