"""Layers that two threads build while their weights are written to a file."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import cast

import pytest
import torch

from baton.engine.checkpoint.shared_weights import Shared, WeightSource
from baton.engine.checkpoint.tensors import TensorReader
from baton.engine.config import EngineConfig
from baton.engine.loading.loading import layer_builder
from baton.engine.models.layers.building import in_turn
from baton.engine.models.layers.layer import DecoderLayer
from baton.protocol.errors import ModelRefused
from tests.engine.running import load, logits_of
from tests.tiny_models import make_tiny_model

PROMPT = list(range(5, 45))
WAIT_S = 60.0


class Writing(Shared):
    """Weights that are being written."""

    def __init__(self) -> None:
        pass

    @property
    def writes(self) -> bool:
        return True


def config_of(own: set[int], spare: str | None, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    """Return the options of a process on cores `own`, to which others lend `spare`."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: own)
    board = None if spare is None else "board"
    return EngineConfig("m", core_board=board, spare_cores=spare)


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """Return the cores of each thread that has begun."""
    found: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: found.append(cores))
    return found


def test_two_layers_are_built_at_once(
    cores: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the own and on the spare core; results come in the layers' order."""
    build = layer_builder(config_of({3}, "5", monkeypatch), Writing())
    meet, before = threading.Barrier(2), torch.get_num_threads()
    threads: list[int] = []

    def make(index: int) -> DecoderLayer:
        meet.wait(WAIT_S)
        threads.append(torch.get_num_threads())
        return cast("DecoderLayer", index)

    assert build(make, 6) == list(range(6))
    assert threads == [1] * 6
    assert cores == [{3, 5}] * 2
    assert torch.get_num_threads() == before


def test_a_layer_that_is_refused(cores: list[set[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    build = layer_builder(config_of({3, 4}, None, monkeypatch), Writing())
    before = torch.get_num_threads()

    def make(index: int) -> DecoderLayer:
        raise ModelRefused(f"layer {index}", field="model")

    with pytest.raises(ModelRefused, match="layer 0"):
        build(make, 6)
    assert torch.get_num_threads() == before


def test_one_core_or_private_weights_build_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    private = cast("WeightSource", object())
    assert layer_builder(config_of({3}, None, monkeypatch), Writing()) is in_turn
    assert layer_builder(config_of({3}, "5", monkeypatch), private) is in_turn


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_weights_of_many_layers(
    folder: Path,
    tmp_path: Path,
    cores: list[set[int]],
    quantization: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the order in which threads write: what is written and mapped is what is read."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 12}
    path = make_tiny_model("qwen3", tmp_path / "model", **shape)
    options = {"dtype": "bfloat16", "quantization": quantization}
    private = load(path, **options, shared_weights=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        written = load(path, **options)
    finally:
        sys.setswitchinterval(before)
    assert len(cores) == 2, "two threads have written"
    monkeypatch.setattr(TensorReader, "_stack", None)
    mapped = load(path, **options)
    expected = logits_of(private, PROMPT)
    assert torch.equal(logits_of(written, PROMPT), expected)
    assert torch.equal(logits_of(mapped, PROMPT), expected)
    assert mapped.weight_bytes == written.weight_bytes == private.weight_bytes
