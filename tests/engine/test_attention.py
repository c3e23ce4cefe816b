"""The torch attention backend against its plain twin:
windows, chunks, softcap, sinks, GQA, unequal dims, tiles."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from baton.engine.attention import torch_cpu
from baton.engine.attention.reference import ReferenceAttention
from baton.engine.attention.torch_cpu import TorchAttention
from baton.engine.state.attention import AttentionLayer
from baton.engine.state.batch import Step, flatten
from baton.engine.state.interface import SequenceChunk
from tests.block_lists import held

BLOCK = 4
CPU = torch.device("cpu")
# (tokens already there, new tokens): decode rows of several sizes, prefills from zero and midway
SHAPES = [(0, 9), (13, 1), (0, 1), (30, 6), (3, 1), (62, 1), (200, 1)]


@dataclass
class Pool:
    """One layer's KV, filled with NaN where nobody wrote: only written slots may matter."""

    k: torch.Tensor
    v: torch.Tensor
    group_of: tuple[int, ...] = (0,)

    @classmethod
    def make(cls, kv_heads: int, k_dim: int, v_dim: int, dtype: torch.dtype) -> Pool:
        """An empty pool of 160 blocks, strided as the arena's views are."""
        memory = torch.full((160, BLOCK * kv_heads * (k_dim + v_dim)), torch.nan, dtype=dtype)
        split = BLOCK * kv_heads * k_dim
        return cls(
            memory[:, :split].unflatten(1, (BLOCK, kv_heads, k_dim)),
            memory[:, split:].unflatten(1, (BLOCK, kv_heads, v_dim)),
        )

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See KVViews."""
        assert layer == 0
        return self.k, self.v

    def scales(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See KVViews."""
        raise AssertionError("stored as computed")


def chunks_of(shapes: list[tuple[int, int]]) -> list[SequenceChunk]:
    """One chunk per shape, with shuffled blocks."""
    order = torch.randperm(160, generator=torch.Generator().manual_seed(1)).tolist()
    chunks: list[SequenceChunk] = []
    for index, (start, count) in enumerate(shapes):
        needed = -(-(start + count) // BLOCK)
        blocks, order = order[:needed], order[needed:]
        chunks.append(SequenceChunk(str(index), [0] * count, start, held(blocks)))
    return chunks


def fill_past(pool: Pool, chunks: list[SequenceChunk], seed: int = 2) -> None:
    """Random KV for each chunk's tokens [0, start)."""
    for chunk in chunks:
        generator = torch.Generator().manual_seed(seed + int(chunk.request_id))
        for position in range(chunk.start):
            block, offset = chunk.blocks[0].ids[position // BLOCK], position % BLOCK
            pool.k[block, offset] = torch.randn(pool.k.shape[2:], generator=generator).to(pool.k)
            pool.v[block, offset] = torch.randn(pool.v.shape[2:], generator=generator).to(pool.v)


def random_rows(step: Step, heads: int, dim: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """[T, heads, dim]."""
    shape = (step.token_ids.shape[0], heads, dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


LAYERS = {
    "plain": AttentionLayer(4, 0.25),
    "window": AttentionLayer(4, 0.25, window=6),
    "window-of-one": AttentionLayer(4, 0.25, window=1),
    "chunks": AttentionLayer(4, 0.25, window=6, chunked=True),
    "softcap": AttentionLayer(4, 0.25, softcap=2.0),
    "sinks": AttentionLayer(4, 0.25, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "all": AttentionLayer(4, 0.25, 10, 3.0, torch.tensor([0.5, -1.0, 2.0, 0.0])),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tile_rows", [4, 256])
def test_equals_reference(
    name: str, kv_heads: int, tile_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_cpu, "TILE_ROWS", tile_rows)
    spec, chunks = LAYERS[name], chunks_of(SHAPES)
    results: list[torch.Tensor] = []
    pools: list[Pool] = []
    for backend in (ReferenceAttention, TorchAttention):
        pool = Pool.make(kv_heads, 16, 12, torch.float32)
        fill_past(pool, chunks)
        step = flatten(chunks, backend(pool, [spec]), BLOCK, CPU)
        q = random_rows(step, 4, 16, 3, torch.float32)
        k = random_rows(step, kv_heads, 16, 4, torch.float32)
        v = random_rows(step, kv_heads, 12, 5, torch.float32)
        results.append(step.batch.attend(0, q, k, v))
        pools.append(pool)
    torch.testing.assert_close(results[1], results[0], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(pools[1].k, pools[0].k, equal_nan=True, atol=0, rtol=0)
    torch.testing.assert_close(pools[1].v, pools[0].v, equal_nan=True, atol=0, rtol=0)


def test_one_latent_is_key_and_value() -> None:
    """MLA: the pool holds one head and no V; a value is the first dims of its key."""
    spec, chunks = AttentionLayer(4, 0.25, latent=12), chunks_of(SHAPES)
    results: list[torch.Tensor] = []
    pools: list[Pool] = []
    for backend in (ReferenceAttention, TorchAttention):
        pool = Pool.make(1, 16, 0, torch.float32)
        fill_past(pool, chunks)
        step = flatten(chunks, backend(pool, [spec]), BLOCK, CPU)
        q = random_rows(step, 4, 16, 3, torch.float32)
        latents = random_rows(step, 1, 16, 4, torch.float32)
        results.append(step.batch.attend(0, q, latents, latents[..., :0]))
        pools.append(pool)
    assert results[0].shape == (step.token_ids.shape[0], 4, 12)
    torch.testing.assert_close(results[1], results[0], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(pools[1].k, pools[0].k, equal_nan=True, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close(dtype: torch.dtype) -> None:
    chunks, results = chunks_of(SHAPES), []
    for backend in (ReferenceAttention, TorchAttention):
        pool = Pool.make(2, 16, 16, dtype)
        fill_past(pool, chunks)
        step = flatten(chunks, backend(pool, [LAYERS["plain"]]), BLOCK, CPU)
        q, k, v = (random_rows(step, h, 16, s, dtype) for h, s in ((4, 3), (2, 4), (2, 5)))
        results.append(step.batch.attend(0, q, k, v).float())
    torch.testing.assert_close(results[1], results[0], atol=0.03, rtol=0.03)


@pytest.mark.parametrize("name", ["plain", "window", "sinks"])
def test_a_row_does_not_depend_on_its_batch_mates(name: str) -> None:
    spec = LAYERS[name]
    chunks = chunks_of(SHAPES)
    pool = Pool.make(2, 16, 16, torch.float32)
    fill_past(pool, chunks)
    attention = TorchAttention(pool, [spec])
    together = flatten(chunks, attention, BLOCK, CPU)
    q, k, v = (random_rows(together, h, 16, s, torch.float32) for h, s in ((4, 3), (2, 4), (2, 5)))
    all_rows = together.batch.attend(0, q, k, v)
    for chunk, span in zip(chunks, together.batch.spans, strict=True):
        alone = flatten([chunk], attention, BLOCK, CPU)
        rows = slice(span.first_row, span.first_row + span.num_rows)
        result = alone.batch.attend(0, q[rows], k[rows], v[rows])
        assert torch.equal(result, all_rows[rows])


def test_gathers_are_cut_into_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = chunks_of([(60, 1)] * 5)
    pool = Pool.make(2, 16, 16, torch.float32)
    fill_past(pool, chunks)
    results: list[torch.Tensor] = []
    plans: list[int] = []
    for gather_bytes in (1, torch_cpu.GATHER_BYTES):
        monkeypatch.setattr(torch_cpu, "GATHER_BYTES", gather_bytes)
        step = flatten(chunks, TorchAttention(pool, [LAYERS["plain"]]), BLOCK, CPU)
        q, k, v = (random_rows(step, h, 16, s, torch.float32) for h, s in ((4, 3), (2, 4), (2, 5)))
        results.append(step.batch.attend(0, q, k, v))
        (plan,) = step.batch.plans.values()
        plans.append(len(plan.decode))
    assert plans == [5, 1]
    assert torch.equal(results[0], results[1])


def test_on_layer_fires_after_the_write() -> None:
    chunks = chunks_of([(0, 3)])
    pool = Pool.make(2, 16, 16, torch.float32)
    seen: list[tuple[int, bool]] = []
    block = chunks[0].blocks[0].ids[0]

    def on_layer(layer: int) -> None:
        seen.append((layer, bool(torch.isfinite(pool.k[block, :3]).all())))

    step = flatten(chunks, TorchAttention(pool, [LAYERS["plain"]]), BLOCK, CPU, on_layer)
    q, k, v = (random_rows(step, h, 16, s, torch.float32) for h, s in ((4, 3), (2, 4), (2, 5)))
    step.batch.attend(0, q, k, v)
    assert seen == [(0, True)]


def test_flatten_lays_out_rows_slots_and_tables() -> None:
    chunks = [
        replace(SequenceChunk("a", [7, 8, 9], 3, held([5, 2])), sample=None),
        SequenceChunk("b", [6], 0, held([9])),
    ]
    step = flatten(chunks, TorchAttention(Pool.make(1, 2, 2, torch.float32), []), BLOCK, CPU)
    assert step.token_ids.tolist() == [7, 8, 9, 6]
    assert step.positions.tolist() == [3, 4, 5, 0]
    (table,) = step.batch.tables
    assert table.slots.tolist() == [5 * BLOCK + 3, 2 * BLOCK, 2 * BLOCK + 1, 9 * BLOCK]
    assert table.blocks.tolist() == [[5, 2], [9, 9]]
    assert table.first == (0, 0)
    assert [(s.first_row, s.num_rows, s.num_tokens) for s in step.batch.spans] == [
        (0, 3, 6),
        (3, 1, 1),
    ]
