"""Precisions of KV payloads: what each conversion promises, and that int8 keeps its bound."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.attention.kv_store import Fp8Rows, Int8Rows
from baton.protocol.errors import KVCorrupt
from baton.protocol.kv_spec import DTYPE_BYTES, LayerSpec
from kv_transfer.pool.codec import TORCH_DTYPES, Rows, converted, pack, quantise, unpack
from kv_transfer.protocol.base import Payload
from kv_transfer.protocol.shares import rows_bytes

SPECS = (LayerSpec(3, 8, 4), LayerSpec(1, 24, 0, kind="mla"))
DTYPES = tuple(DTYPE_BYTES)
FLOATS = st.floats(-(2.0**126), 2.0**126, width=32)


def random_rows(spec: LayerSpec, heads: int, num_tokens: int, dtype: str) -> list[Rows]:
    generator = torch.Generator().manual_seed(num_tokens)
    dims = [dim for dim in (spec.k_dim, spec.v_dim) if dim]
    exact = [torch.randn(num_tokens, heads, dim, generator=generator) * 3 for dim in dims]
    return [Rows(rows).to(dtype) for rows in exact]


def payload_of(spec: LayerSpec, heads: range, rows: list[Rows], dtype: str) -> Payload:
    return Payload(memoryview(b"".join(pack(rows))), dtype, heads)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_what_is_packed_is_unpacked(spec: LayerSpec, dtype: str, num_tokens: int) -> None:
    heads = range(spec.kv_heads)
    rows = random_rows(spec, len(heads), num_tokens, dtype)
    payload = payload_of(spec, heads, rows, dtype)
    assert len(payload.data) == num_tokens * rows_bytes(spec, len(heads), dtype)
    for before, after in zip(rows, unpack(spec, payload), strict=True):
        assert after.values.dtype == TORCH_DTYPES[dtype]
        assert torch.equal(before.values.view(torch.uint8), after.values.view(torch.uint8))
        assert (before.scales is None) == (after.scales is None)
        if before.scales is not None and after.scales is not None:
            assert torch.equal(before.scales, after.scales)


def test_a_length_that_does_not_fit() -> None:
    with pytest.raises(KVCorrupt, match="13 bytes"):
        unpack(SPECS[0], Payload(memoryview(bytes(13)), "bfloat16", range(3)))


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_every_pair_of_precisions(source: str, target: str) -> None:
    """Within half a unit in the last place of the coarser of the two."""
    spec, heads = SPECS[0], range(3)
    rows = random_rows(spec, 3, 6, source)
    payload = payload_of(spec, heads, rows, source)
    out = unpack(spec, Payload(_joined(converted(spec, payload, target)), target, heads))
    relative = {"float32": 2**-24, "bfloat16": 2**-8, "float16": 2**-11, "fp8": 2**-3}
    for before, after in zip(rows, out, strict=True):
        exact = before.exact()
        if source == target:
            assert torch.equal(exact, after.exact())
        elif target == "int8":
            assert ((exact - after.exact()).abs() <= bound(exact)).all()
        else:
            error = (exact - after.exact()).abs()
            assert (error <= exact.abs() * relative[target] + 2**-9).all()


def _joined(fragments: list[memoryview]) -> memoryview:
    return memoryview(b"".join(fragments))


def bound(exact: torch.Tensor) -> torch.Tensor:
    """docs/kv_wire_format.md: max|row| / 254, and float32's own rounding."""
    largest = exact.abs().amax(-1, keepdim=True)
    return largest / 254 * (1 + 2**-20) + 1e-14


@given(st.lists(st.lists(FLOATS, min_size=4, max_size=4), min_size=1, max_size=6))
@settings(deadline=None)
def test_int8_keeps_its_bound_for_every_row(rows: list[list[float]]) -> None:
    exact = torch.tensor(rows)[:, None, :]
    assert ((quantise(exact).exact() - exact).abs() <= bound(exact)).all()


def test_int8_on_the_wire_is_what_an_int8_pool_stores() -> None:
    exact = torch.randn(7, 3, 8)
    arena, scales = torch.zeros(1, 7, 3, 8, dtype=torch.int8), torch.zeros(1, 7, 3)
    Int8Rows(arena, scales).write(exact, torch.zeros(7, dtype=torch.long), torch.arange(7))
    rows = quantise(exact)
    assert torch.equal(rows.values, arena[0])
    assert rows.scales is not None
    assert torch.equal(rows.scales, scales[0])


def test_fp8_is_what_an_fp8_pool_stores() -> None:
    exact = torch.randn(7, 3, 8) * 400
    arena = torch.zeros(1, 7, 3, 8, dtype=torch.uint8)
    Fp8Rows(arena).write(exact, torch.zeros(7, dtype=torch.long), torch.arange(7))
    assert torch.equal(Rows(exact).to("fp8").values.view(torch.uint8), arena[0])


@pytest.mark.parametrize(("dtype", "largest"), [("float16", 65504.0), ("fp8", 448.0)])
def test_narrowing_saturates(dtype: str, largest: float) -> None:
    rows = Rows(torch.tensor([[[1e30, -1e30, 1.0]]])).to(dtype)
    assert rows.exact().flatten().tolist() == [largest, -largest, 1.0]


@pytest.mark.parametrize("damage", [math.nan, math.inf])
def test_what_was_never_a_number_stays_visible(damage: float) -> None:
    exact = torch.tensor([[[1.0, damage]], [[1.0, 2.0]]])
    back = quantise(exact).exact()
    assert back[0].isnan().any()
    assert not back[1].isnan().any()
