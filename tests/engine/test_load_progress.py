"""A load that takes long says how far it is; a short one says nothing."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from baton.engine.checkpoint import tensors
from baton.engine.checkpoint.tensors import LOG_EVERY_S, LoadProgress, TensorReader
from tests.tiny_models import make_tiny_model


class Clock:
    def __init__(self) -> None:
        self.at = 100.0

    def now(self) -> float:
        return self.at


def test_a_long_load_says_how_far_it_is(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    progress = LoadProgress(8 * 10**9, clock.now)
    with caplog.at_level(logging.INFO, logger=tensors.__name__):
        for _ in range(8):
            clock.at += 0.75
            progress.add(10**9)
    assert caplog.messages == [
        "loading weights: 37 % of 8.0 GB, about 4 s more",
        "loading weights: 75 % of 8.0 GB, about 2 s more",
    ]


@pytest.mark.parametrize("lazy", [False, True])
def test_every_byte_of_the_files_counts(
    lazy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tensors, "LOG_EVERY_S", 0.0)
    files = make_tiny_model("llama", tmp_path).glob("*.safetensors")
    with caplog.at_level(logging.INFO, logger=tensors.__name__):
        reader = TensorReader(files, torch.float32, torch.device("cpu"))
        for name, tensor in reader.lazy().items():
            tensor[...].to("cpu") if lazy else reader.read(name)
    assert caplog.messages[-1].startswith("loading weights: 100 % of")
    assert len(caplog.messages) == len(reader.names)


def test_a_short_load_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    progress = LoadProgress(10, clock.now)
    clock.at += LOG_EVERY_S / 2
    with caplog.at_level(logging.INFO, logger=tensors.__name__):
        progress.add(10)
    assert not caplog.messages
