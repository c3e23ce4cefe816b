"""A step in one call between two layers' attention: bit for bit its operations one by one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.engine.kernels.cpu.quantized import integer_kernels_for
from baton.engine.models.config import DecoderConfig
from baton.engine.models.decoder import Decoder
from baton.engine.quantization.integer import SCHEMES, Scheme
from tests.engine.test_compiled_step import (
    CPU,
    Pool,
    answers_of,
    config_of,
    decoder_of,
    hidden_of,
    like,
    same_answers,
)

pytestmark = pytest.mark.usefixtures("cpu_kernels")  # each instruction set's in turn


def parts_of(decoder: Decoder) -> int:
    assert decoder.step is not None
    assert decoder.step.num_steps == 0
    return decoder.step.num_parted


@dataclass(frozen=True, slots=True)
class Sizes:
    """Rows of a prompt; a head and the MLP, which are whole pieces of products or not."""

    rows: int
    head: int
    inner: int


SIZES = st.builds(
    Sizes,
    st.sampled_from([2, 9, 70, 150]), st.sampled_from([32, 64, 128]), st.sampled_from([160, 512]),
)  # fmt: skip


@settings(max_examples=8)
@given(
    starts=st.lists(st.one_of(st.integers(0, 70), st.integers(120, 300)), min_size=1, max_size=5),
    sizes=SIZES,
    scheme=st.sampled_from([None, *SCHEMES]),
    kv_dtype=st.sampled_from(["bfloat16", "int8"]),
    reads=st.sampled_from([None, 0, 1, 3]),
)
@pytest.mark.parametrize("kind", ["", "biased", "gemma 3", "phi 3", "glm 4"])
def test_a_step_in_parts_is_its_operations_one_by_one(
    kind: str,
    starts: list[int],
    sizes: Sizes,
    scheme: Scheme | None,
    kv_dtype: str,
    reads: int | None,
) -> None:
    """Prompts beside rows of other sequences; rows that nobody reads; whoever waits for a layer
    finds its keys and values."""
    if scheme is not None and integer_kernels_for(torch.bfloat16, CPU) is None:
        return
    config = config_of(biased=kind == "biased", window=20)
    config = replace(config, head_dim=sizes.head, intermediate_size=sizes.inner)
    config, rows = like(kind, config), sizes.rows
    decoder = decoder_of(config, scheme=scheme)
    pools = [Pool(config, starts, kv_dtype, rows) for _ in range(2)]
    steps = [pool.step(rows) for pool in pools]
    if reads is not None:
        counts = (*[1] * (len(starts) - 1), reads)
        steps = [replace(step, batch=replace(step.batch, read=counts)) for step in steps]
    before = pools[0].kept()
    written: list[list[Tensor]] = []
    batch = replace(steps[0].batch, on_layer=lambda _: written.append(pools[0].kept()))
    got = hidden_of(decoder, replace(steps[0], batch=batch))
    assert parts_of(decoder) == 1
    want = hidden_of(decoder, steps[1], by_layer=True)
    assert parts_of(decoder) == 1
    assert not want.isnan().any()
    assert torch.equal(got, want)
    after = pools[1].kept()
    for layer, seen in enumerate(written):
        of = [part_of(config, kept, layer) for kept in (before, seen, after)]
        assert torch.equal(of[1], of[2])
        assert not torch.equal(of[0], of[1])
    assert len(written) == config.num_layers
    assert all(map(torch.equal, pools[0].kept(), after))


def part_of(config: DecoderConfig, kept: list[Tensor], layer: int) -> Tensor:
    """A layer's keys and values of those that Pool.kept returns."""
    assert len(kept) in (config.num_layers, 3 * config.num_layers)
    return kept[layer]


@pytest.mark.parametrize("scheme", [None, *SCHEMES])
@pytest.mark.parametrize("inner", [160, 512])
def test_many_rows_whose_gates_are_made_with_their_products(
    inner: int, scheme: Scheme | None
) -> None:
    if scheme is not None and integer_kernels_for(torch.bfloat16, CPU) is None:
        return
    config = replace(config_of(), vocab_size=100, intermediate_size=inner)
    decoder = decoder_of(config, scheme=scheme)
    got = answers_of(decoder, Pool(config, [3] * 70).step())
    assert decoder.step is not None
    assert decoder.step.num_steps == 1
    assert same_answers(got, answers_of(decoder, Pool(config, [3] * 70).step(), by_layer=True))


@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_rows_of_several_slabs(scheme: Scheme | None) -> None:
    """Wide rows: fewer than the prompt has stay in a core's cache."""
    if scheme is not None and integer_kernels_for(torch.bfloat16, CPU) is None:
        return
    config = replace(config_of(), hidden_size=2048, head_dim=64, intermediate_size=512)
    config = replace(config, num_layers=1, windows=(0,))
    decoder = decoder_of(config, scheme=scheme)
    steps = [Pool(config, [3, 20], rows=400).step(400) for _ in range(2)]
    assert torch.equal(hidden_of(decoder, steps[0]), hidden_of(decoder, steps[1], by_layer=True))
    assert parts_of(decoder) == 1


def test_threads_do_not_change_parts() -> None:
    config = config_of(window=20)
    decoder = decoder_of(config)
    threads, found = torch.get_num_threads(), list[Tensor]()
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            for _ in range(3):
                found.append(hidden_of(decoder, Pool(config, [3, 17], rows=100).step(100)))
    finally:
        torch.set_num_threads(threads)
    assert parts_of(decoder) == len(found)
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("kind", ["qwen 3.5", "mixtures", "latents, halves"])
def test_other_layers_go_operation_by_operation(kind: str) -> None:
    """Gated and linear attention, mixtures, latents."""
    config = like(kind, replace(config_of(), head_dim=64))
    decoder = decoder_of(config)
    hidden_of(decoder, Pool(config, [3, 17], rows=4).step(4))
    assert parts_of(decoder) == 0


def test_tokens_that_see_later_ones_go_operation_by_operation() -> None:
    config = config_of()
    decoder, step = decoder_of(config), Pool(config, [3, 17], rows=4).step(4)
    first, last = step.batch.spans
    spans = first, replace(last, mutual=((17, 21),))
    want = hidden_of(decoder, replace(step, batch=replace(step.batch, spans=spans)), by_layer=True)
    step = Pool(config, [3, 17], rows=4).step(4)
    got = hidden_of(decoder, replace(step, batch=replace(step.batch, spans=spans)))
    assert parts_of(decoder) == 0
    assert torch.equal(got, want)
