"""Every Triton kernel against its torch twin: interpreted on a CPU, compiled where a GPU is.

The cases are bench/gpu_cases.py's, in small sizes; `bench.gpu` runs them in real ones. Here too:
the attention backend behind the seam, and that the kernels compile for a GPU that is not here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton has no build for this platform")

from triton import knobs

from baton.engine.attention.torch_cpu import TorchAttention
from baton.engine.attention.triton_backend import TritonAttention
from baton.engine.kernels.delta_rule import DeltaSizes, TorchDeltaRule
from baton.engine.kernels.gpu import experts, int_linear, pages
from baton.engine.kernels.gpu.decode_attention import key_tile, splits_for
from baton.engine.kernels.gpu.delta_rule import TritonDeltaRule
from baton.engine.kernels.gpu.float8_linear import TritonFloat8Linear
from baton.engine.kernels.gpu.prefill_attention import TileSizes, lay_tiles, tile_sizes
from baton.engine.kernels.gpu.support import state, triton_serves
from baton.engine.memory.kv_cache import KVArena
from baton.engine.models.config import ClampedGate
from baton.engine.models.experts import Expert, Experts
from baton.engine.models.experts_gpu import stacked
from baton.engine.models.layers.gates import SoftmaxGate
from baton.engine.quantization.float8 import Float8Linear, Float8Weight, InputRounding
from baton.engine.quantization.int_weight import IntWeight
from baton.engine.quantization.integer import quantize
from baton.engine.quantization.linear import PlainLinear
from baton.engine.state.attention import AttentionLayer
from baton.engine.state.batch import flatten
from baton.protocol.errors import InternalError
from baton.protocol.kv_spec import LayerSpec
from bench import gpu_cases
from bench.gpu_case import NAMES, KernelCase, small
from bench.gpu_cases import RULES
from bench.gpu_delta_cases import delta_cases
from bench.gpu_float8_cases import float8_cases
from tests.engine.test_attention import BLOCK, CPU, Pool, chunks_of, fill_past, random_rows
from tests.engine.test_delta_rule import Run, spans_of
from tests.engine.test_delta_rule import noise as delta_noise
from tests.engine.test_delta_rule import weights_of as delta_weights

INTERPRETED = bool(knobs.runtime.interpret)
DEVICE = CPU if INTERPRETED else torch.device("cuda")
SHAPE = small(DEVICE)
FLOAT, HALF = torch.float32, torch.bfloat16
KERNELS = {
    "attention": {"_decode_kernel", "_combine_kernel", "_prefill_kernel"},
    "writes": {"_store_kernel", "_rotate_kernel"},
    "elementwise": {"_norm_kernel", "_gated_kernel", "_rotate_kernel"},
    "products": {"_int_kernel", "_grouped_kernel"},
    "8-bit floats": {"_round_kernel", "_float8_kernel", "_grouped_kernel"},
    "linear attention": {"_mix_kernel", "_keep_kernel", "_rule_kernel", "_gate_kernel"},
    "sampling": {"_greatest_kernel", "_keyed_kernel", "_best_kernel"},
}
# One dtype of each storage and every feature once; `long` runs all of them in both.
QUICK = {("plain", HALF), ("all", FLOAT), ("int8 all", HALF), ("fp8", FLOAT)}


def check(cases: Iterator[KernelCase]) -> int:
    """All agree with their twins; how many there were."""
    count = 0
    for case in cases:
        assert case.error() <= case.tolerance, case.name
        count += 1
    return count


@pytest.mark.parametrize(
    ("rule", "dtype"),
    [
        pytest.param(
            rule,
            dtype,
            id=f"{rule.name}-{NAMES[dtype]}",
            marks=() if (rule.name, dtype) in QUICK else pytest.mark.long,
        )
        for rule in RULES
        for dtype in (FLOAT, HALF)
    ],
)
def test_attention_is_torchs(rule: gpu_cases.KernelRule, dtype: torch.dtype) -> None:
    assert check(gpu_cases.attention_cases(SHAPE, dtype, [rule])) == 2


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_what_is_written_is_torchs_to_the_bit(dtype: torch.dtype) -> None:
    assert check(gpu_cases.write_cases(SHAPE, dtype)) == 6


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_what_stands_between_products_is_torchs(dtype: torch.dtype) -> None:
    assert check(gpu_cases.elementwise_cases(SHAPE, dtype)) == 6


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_products_are_torchs(dtype: torch.dtype) -> None:
    assert check(gpu_cases.product_cases(SHAPE, dtype)) == 5


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_products_of_8_bit_floats_are_torchs(dtype: torch.dtype) -> None:
    assert check(float8_cases(SHAPE, dtype)) == 16


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_the_delta_rule_is_torchs(dtype: torch.dtype) -> None:
    assert check(delta_cases(SHAPE, dtype)) == 2


@pytest.mark.parametrize(
    ("seed", "sizes"),
    [(0, DeltaSizes(1, 2, 16, 40, 4)), (1, DeltaSizes(2, 2, 20, 8, 2))],
)
def test_states_advance_over_steps_as_torchs(seed: int, sizes: DeltaSizes) -> None:
    """Prompts in chunks beside single tokens, in any slots; the others stay."""
    weights = delta_weights(sizes)
    ours, twin = (
        Run.of(rule(sizes, weights), sizes, FLOAT) for rule in (TritonDeltaRule, TorchDeltaRule)
    )
    for number, spans in enumerate(spans_of(seed, 4, 5)):
        x = delta_noise(number, sum(span.num_rows for span in spans), sizes.inputs)
        for found, wanted in (
            (ours.step(x, spans), twin.step(x, spans)),
            (ours.conv, twin.conv),
            (ours.matrices, twin.matrices),
        ):
            torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-5)


def test_wide_heads_are_left_to_torch() -> None:
    assert TritonDeltaRule.suits(DeltaSizes(16, 32, 128, 256, 4))
    assert not TritonDeltaRule.suits(DeltaSizes(16, 32, 512, 128, 4))


def test_tokens_are_the_samplers() -> None:
    assert check(gpu_cases.sampling_cases(SHAPE)) == 2


def test_a_step_of_both_kinds_and_two_layer_groups() -> None:
    """Prefill spans beside decode rows, through write and attend as a model calls them."""
    spec = AttentionLayer(4, 0.25, window=6)
    chunks = chunks_of([(0, 3), (13, 1), (30, 6)])
    results: list[torch.Tensor] = []
    pools: list[Pool] = []
    for ours in (True, False):
        pool = Pool.make(2, 16, 12, FLOAT)
        fill_past(pool, chunks)
        pool.k, pool.v = pool.k.to(DEVICE), pool.v.to(DEVICE)
        attention = (
            TritonAttention(pool, [spec], TileSizes(16, 16), 2)
            if ours
            else TorchAttention(pool, [spec])
        )
        step = flatten(chunks, attention, BLOCK, DEVICE)
        q, k, v = (
            random_rows(step, heads, dim, seed, FLOAT).to(DEVICE)
            for heads, dim, seed in ((4, 16, 3), (2, 16, 4), (2, 12, 5))
        )
        results.append(step.batch.attend(0, q, k, v))
        pools.append(pool)
    torch.testing.assert_close(results[0], results[1], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(pools[0].k, pools[1].k, equal_nan=True, atol=0, rtol=0)
    torch.testing.assert_close(pools[0].v, pools[1].v, equal_nan=True, atol=0, rtol=0)


def test_latent_kv_is_left_to_torch() -> None:
    spec = AttentionLayer(2, 0.25, latent=12)
    arena = KVArena((LayerSpec(1, 16, 0, kind="mla"),), 2, 4, "float32", DEVICE)
    with pytest.raises(InternalError, match="latent"):
        pages.layer_pages(arena, 0, spec)
    attention = TritonAttention(arena, [spec])
    assert not attention.knows_all
    latents = torch.randn(1, 1, 16, device=DEVICE)
    slots = torch.tensor([1], device=DEVICE)
    attention.write(0, latents, latents[..., :0], slots)
    assert torch.equal(arena.layer(0)[0][0, 1], latents[0])


def test_tiles_of_a_step_lie_within_their_spans() -> None:
    chunks = chunks_of([(5, 20), (3, 1), (0, 16)])
    attention = TorchAttention(Pool.make(1, 2, 2, FLOAT), [])
    batch = flatten(chunks, attention, BLOCK, CPU).batch
    tiles = lay_tiles(batch.spans, batch.tables[0], TileSizes(16, 16))
    assert tiles is not None
    # first row of q, rows, first position, table row, first held block; the last tiles first
    assert tiles.numbers.T.tolist() == [[21, 16, 0, 2, 0], [16, 4, 21, 0, 0], [0, 16, 5, 0, 0]]
    alone = flatten(chunks[1:2], attention, BLOCK, CPU).batch
    assert lay_tiles(alone.spans, alone.tables[0], TileSizes(16, 16)) is None


def test_an_experts_layout_holds_every_choice_once() -> None:
    chosen = torch.tensor([[4, 0], [4, 2], [4, 0], [2, 4]])
    layout = experts.lay_out(chosen, 6)
    rows = [
        (int(layout.expert[tile]), row)
        for tile in range(len(layout.expert))
        if int(layout.expert[tile]) < 6
        for row in range(
            int(layout.first[tile]), min(int(layout.first[tile]) + layout.rows,
                                         int(layout.end[tile]))
        )
    ]  # fmt: skip
    flat = chosen.flatten()
    assert [row for _, row in rows] == list(range(8))
    assert [expert for expert, _ in rows] == [int(flat[layout.order[row]]) for _, row in rows]


def test_stacked_experts_say_what_they_said() -> None:
    generator = torch.Generator().manual_seed(4)

    def plain(*size: int) -> PlainLinear:
        return PlainLinear(torch.randn(*size, generator=generator).to(DEVICE) / 4, None)

    def biased_too(*size: int) -> PlainLinear:
        return PlainLinear(plain(*size).weight, plain(size[0]).weight)

    each = tuple(Expert(plain(16, 24), plain(24, 8)) for _ in range(3))
    clamped = tuple(
        Expert(biased_too(16, 24), biased_too(24, 8), ClampedGate(0.4, 1.702)) for _ in range(3)
    )
    gate = SoftmaxGate(plain(3, 24).weight, 2, True)
    hidden = torch.randn(5, 24, generator=generator).to(DEVICE)
    for experts_ in (each, clamped):
        layer = Experts(gate, experts_, None)
        together = stacked(layer)
        assert together.together is not None
        torch.testing.assert_close(together(hidden, ()), layer(hidden, ()), atol=1e-5, rtol=1e-4)
        for one, view in zip(layer.experts, together.experts, strict=True):
            assert torch.equal(one(hidden), view(hidden))
    biased = (*each[:2], Expert(each[2].gate_up, PlainLinear(plain(24, 8).weight, hidden[0])))
    assert stacked(Experts(gate, biased, None)).together is None
    first = stacked(Experts(gate, each[:1], None, elsewhere=True))
    rest = stacked(Experts(gate, each[1:], None, first=1, elsewhere=True))
    parts = first(hidden, ()) + rest(hidden, ())
    whole = Experts(gate, each, None)(hidden, ())
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-4)


def test_stacked_experts_of_8_bit_floats_share_a_static_scale() -> None:
    """The greatest one; each expert becomes a view. Beside a plain expert none is stacked."""

    def floats(outputs: int, inputs: int, static: float) -> Float8Linear:
        values = torch.randn(outputs, inputs, generator=generator).to(DEVICE, torch.float8_e4m3fn)
        scales = torch.rand(1, outputs, generator=generator).to(DEVICE) / 4
        return Float8Linear(Float8Weight(values, scales, InputRounding(inputs, static)), None)

    generator = torch.Generator().manual_seed(4)
    each = tuple(Expert(floats(32, 24, 0.01 * i), floats(24, 16, 0.1)) for i in (1, 3, 2))
    gate = SoftmaxGate(torch.randn(3, 24, generator=generator).to(DEVICE), 2, True)
    hidden = torch.randn(5, 24, generator=generator).to(DEVICE)
    together = stacked(Experts(gate, each, None))
    assert together.together is not None
    views = replace(together, together=None)
    for expert in together.experts:
        assert isinstance(expert.gate_up, TritonFloat8Linear)
        assert expert.gate_up.weight.rounding.static == 0.03
    torch.testing.assert_close(together(hidden, ()), views(hidden, ()), atol=1e-4, rtol=1e-3)
    plain = Expert(PlainLinear(hidden.new_ones(32, 24), None), each[0].down)
    assert stacked(Experts(gate, (*each[:2], plain), None)).together is None


def test_integer_weights_that_make_no_tiles_are_refused() -> None:
    suits = int_linear.TritonIntLinear.suits
    assert suits(quantize(torch.randn(4, 96), "int4"))
    values = torch.zeros(4, 40, dtype=torch.int8)
    assert not suits(IntWeight(4, values, torch.ones(4, 5), None))  # groups of 8
    assert suits(IntWeight(8, values, torch.ones(4, 1), None))
    assert not suits(IntWeight(8, values, torch.ones(4, 1), None, order=torch.arange(40)))


def test_sizes_of_launches() -> None:
    assert splits_for(1, 8) == 32  # never more than a combination holds
    assert splits_for(32, 8) == 2
    assert splits_for(256, 8) == 1
    assert key_tile(HALF, 128) == 64
    assert key_tile(HALF, 256) == 32
    assert tile_sizes(HALF, 128).rows == 128
    assert tile_sizes(FLOAT, 64).rows == 16


def test_a_cpu_is_not_served() -> None:
    assert not triton_serves(CPU)
    assert state().startswith("none") is not torch.cuda.is_available()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_all_kernels_compile_for_an_absent_gpu_and_spill_no_registers(tmp_path: Path) -> None:
    """What `tools.gpu_kernels` says, in a process without the interpreter."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tools.gpu_kernels", "--json", "--dtype", "bfloat16"],
        cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True,
        timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for family, kernels in KERNELS.items():
        assert {each["kernel"] for each in found if each["family"] == family} == kernels
    assert all(each["registers"] for each in found)
    assert not [each for each in found if each["stack_bytes"]]


def test_every_family_is_compiled() -> None:
    assert set(KERNELS) == set(gpu_cases.FAMILIES)
