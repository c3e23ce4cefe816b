"""Behind the last layer's attention only rows are computed whose hidden states are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine.models.decoder import Decoder
from baton.engine.models.layers.layer import DecoderLayer
from baton.engine.models.layers.projection import Mlp, Projection
from baton.engine.parallel.messages import decode_step, encode_step
from baton.engine.running.runner import ModelRunner, rows_read
from baton.engine.state.attention import Attention
from baton.engine.state.batch import flatten
from baton.engine.state.interface import ChunkResult, SequenceChunk
from baton.protocol.sampling import SamplingParams
from tests.block_lists import held
from tests.engine.running import Driver, load
from tests.engine.test_models_lora import ALL, linear_layers, make_adapter
from tests.golden.random_models import save_random
from tests.tiny_models import make_tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
HYBRID = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
MODELS: dict[str, Callable[[Path], Path]] = {
    "qwen3": lambda path: make_tiny_model("qwen3", path),
    "windows": lambda path: save_random(path, "gemma3_text", sliding_window=6),
    "sinks": lambda path: save_random(
        path, "gpt_oss", num_local_experts=4, num_experts_per_tok=2, sliding_window=6
    ),
    "latents": lambda path: save_random(
        path, "deepseek_v3", n_routed_experts=4, n_group=2, topk_group=1, n_shared_experts=1,
        first_k_dense_replace=1, kv_lora_rank=32, q_lora_rank=24, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=16, num_key_value_heads=4, num_experts_per_tok=2,
        moe_intermediate_size=48,
    ),
    "gates": lambda path: save_random(path, "qwen3_next", **HYBRID, num_hidden_layers=4),
    "states": lambda path: save_random(path, "qwen3_next", **HYBRID, num_hidden_layers=3),
}  # fmt: skip


def chunks_of(*, sampling: bool = True) -> list[SequenceChunk]:
    """A prompt's last chunk, one of its first, a token, and drafts: 9 + 6 + 1 + 5 rows."""
    sample = GREEDY if sampling else None
    return [
        SequenceChunk("a", range(10, 19), 0, held([0, 1]), sample, state_slot=0),
        SequenceChunk("b", range(30, 36), 0, held([2]), state_slot=1),
        SequenceChunk("c", [50], 0, held([3]), sample, state_slot=2),
        SequenceChunk(
            "d", range(60, 65), 0, held([4]), sample, num_drafts=2 if sampling else 0, state_slot=3
        ),
    ]


def hidden_of(
    driver: Driver, chunks: Sequence[SequenceChunk], read: tuple[int, ...] | None
) -> Tensor:
    step = flatten(
        chunks, driver.attention, driver.arena.block_size, torch.device("cpu"), states=driver.states
    )
    with torch.inference_mode():
        return driver.loaded.forward(step.token_ids, step.positions, replace(step.batch, read=read))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_rows_that_are_read_are_those_of_a_whole_step(
    name: str, dtype: str, tmp_path: Path
) -> None:
    loaded = load(MODELS[name](tmp_path), dtype=dtype)
    assert isinstance(loaded.model, Decoder)
    whole, part = Driver(loaded), Driver(loaded)
    chunks = chunks_of()
    assert rows_read(chunks) == (1, 0, 1, 3)
    rows = [8, 15, 18, 19, 20]
    expected, found = hidden_of(whole, chunks, None), hidden_of(part, chunks, rows_read(chunks))
    tolerance = 1e-5 if dtype == "float32" else 3e-2
    assert found.shape == expected.shape
    torch.testing.assert_close(found[rows], expected[rows], rtol=tolerance, atol=tolerance)
    others = [row for row in range(21) if row not in rows]
    assert not found[others].any()
    for layer in range(len(loaded.info.layers)):
        for mine, its in zip(part.arena.layer(layer), whole.arena.layer(layer), strict=True):
            assert torch.equal(mine, its)
    assert torch.equal(part.states._rows, whole.states._rows)


@pytest.mark.parametrize("with_adapter", [(0,), (1, 3), (0, 1, 2, 3)])
def test_adapters_reach_the_rows_that_are_read(
    with_adapter: tuple[int, ...], tmp_path: Path
) -> None:
    base = make_tiny_model("qwen2", tmp_path / "base")
    adapter = make_adapter(tmp_path / "adapter", linear_layers(base, ALL), seed=1)
    loaded = load(base, lora_modules=(f"x={adapter}",))
    (id_,) = loaded.info.adapters
    chunks = [
        replace(chunk, adapter=id_ if index in with_adapter else "")
        for index, chunk in enumerate(chunks_of())
    ]
    expected = hidden_of(Driver(loaded), chunks, None)
    found = hidden_of(Driver(loaded), chunks, rows_read(chunks))
    rows = [8, 15, 18, 19, 20]
    torch.testing.assert_close(found[rows], expected[rows], rtol=1e-5, atol=1e-5)
    assert not found[:8].any()


def test_a_step_that_nobody_reads_writes_its_kv(tmp_path: Path) -> None:
    loaded = load(make_tiny_model("qwen3", tmp_path))
    whole, part = Driver(loaded), Driver(loaded)
    chunks = chunks_of(sampling=False)
    assert rows_read(chunks) == (0, 0, 0, 0)
    hidden_of(whole, chunks, None)
    found = hidden_of(part, chunks, (0, 0, 0, 0))
    assert not found[:20].any()  # at least one row is computed: ranks sum their parts of it
    for layer in range(len(loaded.info.layers)):
        for mine, its in zip(part.arena.layer(layer), whole.arena.layer(layer), strict=True):
            assert torch.equal(mine, its)


def test_other_rows_do_not_reach_the_last_mlp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(make_tiny_model("qwen3", tmp_path))
    driver, rows = Driver(loaded), list[int]()
    summed = Mlp.summed

    def counting(self: Mlp, hidden: Tensor, *rest: Any) -> Tensor:
        rows.append(len(hidden))
        return summed(self, hidden, *rest)

    monkeypatch.setattr(Mlp, "summed", counting)
    layers: list[DecoderLayer] = loaded.model._layers  # type: ignore[attr-defined]
    outputs = list[int]()
    call = Projection.summed

    def outgoing(self: Projection, x: Tensor, *rest: Any) -> Tensor:
        if self is layers[-1].attention.output:
            outputs.append(len(x))
        return call(self, x, *rest)

    monkeypatch.setattr(Projection, "summed", outgoing)
    runner = ModelRunner(loaded, driver.arena)
    found = runner.run(chunks_of())
    assert rows == [21] * (len(layers) - 1) + [5]
    assert outputs == [5]
    rows.clear()
    tell = [replace(chunk, prompt_logprobs=0, history=[1] * 20, num_prompt=20)
            for chunk in chunks_of()]  # fmt: skip
    assert rows_read(tell) is None
    told = ModelRunner(loaded, Driver(loaded).arena).run(tell)
    assert rows == [21] * len(layers)
    assert tokens(found) == tokens(told)


def tokens(results: Sequence[ChunkResult]) -> list[tuple[int, ...]]:
    return [() if each.sampled is None else each.sampled.token_ids for each in results]


def test_what_is_read_reaches_other_ranks() -> None:
    class Nowhere:
        group_of = (0,)

    attention: Attention = Nowhere()  # type: ignore[assignment]
    chunks = chunks_of()
    step = flatten(chunks, attention, 8, torch.device("cpu"))
    for read in (rows_read(chunks), (0, 0, 0, 0), None):
        batch = replace(step.batch, read=read)
        body = encode_step(step.token_ids, step.positions, batch)
        assert decode_step(body, attention, torch.device("cpu")).batch.read == read


def test_samples_that_fan_out_read_one_row() -> None:
    chunk = chunks_of()[0]
    assert replace(chunk, fan_out=(0, 1, 2)).rows_read == 1
    assert replace(chunk, num_drafts=4).rows_read == 5
    assert replace(chunk, sample=None).rows_read == 0
    assert replace(chunk, sample=None, prompt_logprobs=1).rows_read == 9
