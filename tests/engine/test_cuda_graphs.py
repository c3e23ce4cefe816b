"""Recorded decode steps without a GPU: sizes, padding, what is refused, and the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton has no build for this platform")

from baton.engine.attention.torch_cpu import TorchAttention
from baton.engine.attention.triton_backend import TritonAttention, plan_key
from baton.engine.memory.kv_cache import KVArena
from baton.engine.running.cuda_graphs import (
    DecodeGraphs,
    buffers_for,
    choose_graphs,
    size_for,
    sizes_up_to,
)
from baton.engine.state.attention import AttentionLayer
from baton.engine.state.batch import Step, flatten
from baton.engine.state.interface import SequenceChunk
from baton.protocol.kv_spec import HeldBlocks, LayerSpec
from tests.engine.running import load
from tests.tiny_models import make_tiny_model

CPU = torch.device("cpu")
BLOCK = 4


class Repeater:
    """A Recorder that runs the work again into the same tensor: a graph's contract, on a CPU."""

    def __init__(self) -> None:
        self.records = 0
        self.replays = 0

    def record(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """See Recorder.record."""
        self.records += 1
        result = work()

        def replay() -> None:
            self.replays += 1
            result.copy_(work())

        return result, replay


class Unable:
    """A Recorder on a machine that records nothing."""

    def record(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """See Recorder.record."""
        raise RuntimeError("operation not permitted when stream is capturing")


def decode_chunks(starts: list[int]) -> list[SequenceChunk]:
    """One new token for sequences that hold so many; 8 blocks each."""
    return [
        SequenceChunk(str(i), [7 + i], start, (HeldBlocks(tuple(range(8 * i, 8 * i + 8))),))
        for i, start in enumerate(starts)
    ]


def tiny_graphs(recorder: Repeater | Unable) -> tuple[DecodeGraphs, TritonAttention]:
    """Graphs of a `model` that only tells what it was given: [rows, 1]."""
    arena = KVArena((LayerSpec(1, 16, 16),), 64, BLOCK, "float32")
    attention = TritonAttention(arena, [AttentionLayer(1, 0.25)])

    def forward(token_ids: Tensor, positions: Tensor, batch: object) -> Tensor:
        return (token_ids * 1000 + positions).float()[:, None]

    return DecodeGraphs(forward, attention, 8, recorder, sizes_up_to(8)), attention


def step_of(attention: TritonAttention, starts: list[int]) -> Step:
    return flatten(decode_chunks(starts), attention, BLOCK, CPU)


def test_sizes_hold_every_count_with_little_padding() -> None:
    sizes = sizes_up_to(64)
    assert sizes == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    for count in range(1, 65):
        size = size_for(count, sizes)
        assert size is not None
        assert count <= size < count + 8
    assert size_for(65, sizes) is None
    assert sizes_up_to(3) == (1, 2)


def test_a_step_is_replayed_by_the_record_of_its_size() -> None:
    recorder = Repeater()
    graphs, attention = tiny_graphs(recorder)
    found = graphs.forward(step_of(attention, [3, 9, 20]))
    assert found is not None
    assert found.flatten().tolist() == [7003, 8009, 9020]
    assert (recorder.records, recorder.replays) == (1, 1)
    again = graphs.forward(step_of(attention, [4, 10, 21, 5]))
    assert again is not None
    assert again.flatten().tolist() == [7004, 8010, 9021, 10005]
    assert (recorder.records, recorder.replays, graphs.num_recorded) == (1, 2, 1)
    # The first answer was the caller's own: a replay did not touch it.
    assert found.flatten().tolist() == [7003, 8009, 9020]


def test_rows_beyond_the_step_are_padding() -> None:
    _, attention = tiny_graphs(Repeater())
    buffers = buffers_for(4, 8, step_of(attention, [0]), attention)
    buffers.fill(step_of(attention, [3, 9, 20, 6]))
    buffers.fill(step_of(attention, [4, 10]))  # a smaller step after a larger one
    (table,) = buffers.step.batch.tables
    assert table.slots.tolist() == [4, 42, -1, -1]
    assert table.blocks[:2].tolist() == [list(range(8)), list(range(8, 16))]
    assert buffers.numbers[0].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [5, 11, 0, 0], [0] * 4]
    plan = buffers.step.batch.plans[plan_key(0)]
    assert plan.decode.numbers is buffers.numbers[0]
    assert plan.decode.tables is table.blocks


def test_what_no_record_holds_is_left_alone() -> None:
    recorder = Repeater()
    graphs, attention = tiny_graphs(recorder)
    (chunk,) = decode_chunks([3])

    def answer(*chunks: SequenceChunk, watched: bool = False) -> Tensor | None:
        on_layer = (lambda layer: None) if watched else None
        return graphs.forward(flatten(chunks, attention, BLOCK, CPU, on_layer))

    assert answer(replace(chunk, token_ids=[1, 2])) is None  # prefill
    assert answer(replace(chunk, adapter="french")) is None
    assert answer(chunk, watched=True) is None
    assert answer(replace(chunk, blocks=(HeldBlocks(tuple(range(9))),))) is None  # too long
    assert answer(*decode_chunks([0] * 8), chunk) is None  # more rows than the largest size
    assert recorder.records == 0
    assert answer(chunk) is not None


def test_a_machine_that_cannot_record_is_asked_once() -> None:
    graphs, attention = tiny_graphs(Unable())
    assert graphs.forward(step_of(attention, [3])) is None
    assert graphs.forward(step_of(attention, [3])) is None
    assert graphs.num_recorded == 0


def test_a_recorded_step_of_a_model_is_the_models_own(tmp_path: Path) -> None:
    """All layers, KV writes included, padding beside the real rows."""
    loaded = load(make_tiny_model("qwen3", tmp_path))
    layers, starts = loaded.info.layers, [2, 7, 5]
    arenas = [KVArena(layers, 24, BLOCK, "float32") for _ in range(2)]
    ours = TritonAttention(arenas[0], loaded.attention_layers, splits=1)
    plain = TorchAttention(arenas[1], loaded.attention_layers)
    assert choose_graphs(loaded, ours, BLOCK) is None  # no GPU here
    answers: list[Tensor] = []
    with torch.inference_mode():
        for arena, attention in zip(arenas, (ours, plain), strict=True):
            chunks = [
                replace(chunk, token_ids=list(range(5, 5 + start)), start=0)
                for chunk, start in zip(decode_chunks(starts), starts, strict=True)
            ]
            filled = flatten(chunks, TorchAttention(arena, loaded.attention_layers), BLOCK, CPU)
            loaded.forward(filled.token_ids, filled.positions, filled.batch)
            step = flatten(decode_chunks(starts), attention, BLOCK, CPU)
            if attention is ours:
                graphs = DecodeGraphs(loaded.forward, ours, 8, Repeater(), (4,))
                found = graphs.forward(step)
                assert found is not None
                answers.append(found)
            else:
                answers.append(loaded.forward(step.token_ids, step.positions, step.batch))
    torch.testing.assert_close(answers[0], answers[1], atol=2e-5, rtol=1e-4)
    for layer in range(len(layers)):
        for mine, want in zip(arenas[0].layer(layer), arenas[1].layer(layer), strict=True):
            torch.testing.assert_close(mine, want, atol=2e-5, rtol=1e-4)
