"""The compiled CPU kernels of int8 KV against torch: what is stored, and what decode rows read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.engine.attention.compiled import CompiledAttention
from baton.engine.attention.torch_cpu import TorchAttention
from baton.engine.kernels.cpu.library import CpuKernels, kernels
from baton.engine.memory.kv_cache import KVArena
from baton.engine.memory.layer_groups import one_group
from baton.engine.state.attention import AttentionLayer
from baton.engine.state.batch import Batch, flatten
from baton.engine.state.interface import SequenceChunk
from baton.protocol.kv_spec import HeldBlocks, LayerSpec
from tests.engine.running import Driver, load, relative_error
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.usefixtures("cpu_kernels")  # each instruction set's in turn
CPU = torch.device("cpu")


def serving() -> CpuKernels:
    found = kernels()
    assert found is not None
    return found


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Case:
    """Rows that hold `starts` tokens and compute one more (with `long`, the last one nine)."""

    starts: list[int]
    long: bool
    query_heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    size: int
    window: int
    softcap: float | None
    sinks: bool

    @property
    def rows(self) -> list[int]:
        """New tokens of each sequence."""
        return [*[1] * (len(self.starts) - 1), 9 if self.long else 1]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    query_heads, kv_heads = draw(st.sampled_from([(4, 4), (4, 2), (6, 2), (8, 1), (3, 1)]))
    k_dim, v_dim = draw(st.sampled_from([(32, 32), (64, 64), (128, 128), (96, 64)]))
    return Case(
        starts=draw(
            st.lists(st.one_of(st.integers(0, 90), st.integers(91, 400)), min_size=1, max_size=5)
        ),
        long=draw(st.booleans()),
        query_heads=query_heads,
        kv_heads=kv_heads,
        k_dim=k_dim,
        v_dim=v_dim,
        size=draw(st.sampled_from([8, 16, 32])),
        window=draw(st.sampled_from([0, 0, 5, 40])),
        softcap=draw(st.sampled_from([None, None, 20.0])),
        sinks=draw(st.booleans()),
    )


class Pools:
    """The same history in two pools of int8: one written and read by the kernels, one by torch."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._totals = [s + n for s, n in zip(case.starts, case.rows, strict=True)]
        blocks = sum(-(-total // case.size) for total in self._totals)
        groups = one_group((LayerSpec(case.kv_heads, case.k_dim, case.v_dim),))
        sinks = noise(1, case.query_heads).float() if case.sinks else None
        spec = AttentionLayer(case.query_heads, case.k_dim**-0.5, case.window, case.softcap, sinks)
        self.arenas = [KVArena(groups, blocks, case.size, "int8", CPU) for _ in range(2)]
        self.ours = CompiledAttention(self.arenas[0], [spec], serving())
        self.plain = TorchAttention(self.arenas[1], [spec])
        total = sum(self._totals)
        stored = (
            noise(2, total, case.kv_heads, case.k_dim),
            noise(3, total, case.kv_heads, case.v_dim),
        )
        for attention, arena in ((self.ours, self.arenas[0]), (self.plain, self.arenas[1])):
            for scales in arena.scales(0):
                scales.fill_(torch.nan)  # what nobody wrote must not matter
            history = self.batch(attention, [0] * len(case.starts), self._totals)
            attention.write(0, *stored, history.tables[0].slots)

    def batch(
        self,
        attention: CompiledAttention | TorchAttention,
        starts: list[int],
        rows: list[int],
        only: int | None = None,
    ) -> Batch:
        """A step in which sequences (all, or `only` one) of `starts` tokens compute `rows` more."""
        chunks: list[SequenceChunk] = []
        block = 0
        for index, (start, count) in enumerate(zip(starts, rows, strict=True)):
            needed = -(-self._totals[index] // self.case.size)
            ids = tuple(range(block, block + needed))[::-1]  # backwards: a table is no range
            block += needed
            if only in (None, index):
                chunks.append(SequenceChunk(str(index), [0] * count, start, (HeldBlocks(ids),)))
        return flatten(chunks, attention, self.case.size, CPU).batch


@settings(max_examples=40)
@given(case=cases())
def test_int8_decode_attention_is_torchs(case: Case) -> None:
    pools = Pools(case)
    for ours, plain in zip(
        (*pools.arenas[0].layer(0), *pools.arenas[0].scales(0)),
        (*pools.arenas[1].layer(0), *pools.arenas[1].scales(0)),
        strict=True,
    ):
        assert torch.equal(ours.nan_to_num(), plain.nan_to_num()), "the same numbers are stored"
    q = noise(4, sum(case.rows), case.query_heads, case.k_dim)
    got = pools.ours.attend(0, q, pools.batch(pools.ours, case.starts, case.rows))
    want = pools.plain.attend(0, q, pools.batch(pools.plain, case.starts, case.rows)).float()
    assert not got.isnan().any()
    # The twin rounds keys and values to bfloat16 once more.
    assert torch.allclose(got.float(), want, rtol=2e-2, atol=2e-2 * want.abs().max().item())


def test_a_decode_row_depends_on_its_own_keys_alone() -> None:
    case = Case([70, 330, 1, 90, 16, 7, 500, 64, 80], False, 4, 2, 64, 64, 16, 0, None, False)
    pools = Pools(case)
    q = noise(5, 9, 4, 64)
    whole = pools.ours.attend(0, q, pools.batch(pools.ours, case.starts, case.rows))
    for row in range(9):
        batch = pools.batch(pools.ours, case.starts, case.rows, only=row)
        assert torch.equal(pools.ours.attend(0, q[row : row + 1], batch)[0], whole[row])


def test_a_prompt_does_not_meet_another_s_scales(one_thread: None) -> None:
    case = Case([69, 4], True, 4, 2, 64, 64, 16, 0, None, False)
    pools = Pools(case)
    q = noise(6, 83, 4, 64)
    batch = pools.batch(pools.ours, [0, 0], [70, 13])
    sound = pools.ours.attend(0, q, batch)
    for scales in pools.arenas[0].scales(0):
        scales[:5] = torch.nan  # of the first prompt
    got = pools.ours.attend(0, q, batch)
    assert got[:70].isnan().any()
    assert torch.equal(got[70:], sound[70:])


def test_a_model_with_int8_kv_is_served_by_the_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = make_tiny_model("qwen3", tmp_path, head_dim=32)
    loaded = load(path, dtype="bfloat16", kv_cache_dtype="int8")
    driver = Driver(loaded)
    assert isinstance(driver.attention, CompiledAttention)
    ids = torch.randint(5, loaded.info.vocab_size, (30,), generator=torch.Generator()).tolist()
    ours = driver.logits(ids, range(4), [20, *[1] * 10])
    plain = Driver(loaded)
    plain.attention = TorchAttention(plain.arena, loaded.attention_layers)
    assert relative_error(ours, plain.logits(ids, range(4), [20, *[1] * 10])) < 0.03
