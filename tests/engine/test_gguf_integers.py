"""The integers of a GGUF file: each type against the gguf package's numbers, as a weight and as the
compiled kernel holds it; heads, mixed layers and whole decode steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.engine.checkpoint.gguf.blocks import integers_of, read_blocks, widen_blocks
from baton.engine.checkpoint.gguf.header import BLOCKS
from baton.engine.kernels.cpu.build import missing
from baton.engine.kernels.cpu.library import CpuKernels
from baton.engine.kernels.cpu.quantized import IntegerKernels
from baton.engine.quantization.int_weight import IntWeight
from baton.engine.quantization.integer import IntegerPanels, QuantizedFormat
from baton.engine.quantization.linear import SideBySide
from baton.engine.quantization.parts import of_inputs, of_outputs
from baton.engine.state.interface import SequenceChunk
from baton.llm import LLM
from baton.protocol.errors import ConfigError
from baton.sampling import SamplingParams
from tests.block_lists import held
from tests.engine.running import Driver, load, logits_of, relative_error
from tests.engine.test_gguf import PROMPT, WIDENED, make

gguf: Any = pytest.importorskip("gguf")
from tests.engine.gguf_models import kind_of  # noqa: E402

np: Any = pytest.importorskip("numpy")
KINDS = [kind for kind in BLOCKS if "Q" in kind]
EXACT = ("Q4_0", "Q5_0", "Q8_0")  # a float16 scale for each group, and no minimum
# Where the float16 numbers of a block lie; they are made ordinary ones.
HALFS = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
CPU = torch.device("cpu")


def random_blocks(kind: str, count: int, seed: int, spread: float = 3.0) -> Tensor:
    """uint8 [count, bytes]: all values of each byte; factors of `spread` powers of ten, both
    signs."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (count, BLOCKS[kind][1]), generator=generator).to(torch.uint8)
    for at in HALFS.get(kind, (0,)):
        sign = torch.randint(0, 2, (count,), generator=generator) * 2 - 1
        size = 10 ** (-spread * torch.rand(count, generator=generator))
        blocks[:, at : at + 2] = (sign * size).half().view(torch.uint8).view(-1, 2)
    return blocks


def weight_of(blocks: Tensor, kind: str, outputs: int) -> tuple[IntWeight, Tensor]:
    """(the integers, the package's numbers), both [outputs, in]."""
    numbers = gguf.quants.dequantize(blocks.numpy(), kind_of(kind))
    return (
        integers_of(read_blocks(blocks, kind), outputs),
        torch.from_numpy(np.array(numbers)).view(outputs, -1),
    )


def greatest(weight: IntWeight, numbers: Tensor) -> Tensor:
    """Of each group, the greatest of its numbers and its minimum, for each of its numbers."""
    size = weight.group_size
    most = numbers.abs().unflatten(1, (-1, size)).amax(2)
    if weight.zeros is not None:
        most = torch.maximum(most, (weight.zeros.abs() + 16) * weight.scales.abs())
    return most.repeat_interleave(size, 1)


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 1 << 30), spread=st.floats(0, 4))
def test_integers_times_scales_are_the_packages_numbers(
    kind: str, seed: int, spread: float
) -> None:
    weight, numbers = weight_of(random_blocks(kind, 24, seed, spread), kind, 8)
    assert weight.bits == (4 if "4" in kind else 8)
    assert weight.group_size == (16 if kind == "Q6_K" else 32)
    low = -8 if weight.bits == 4 else -128
    assert low <= int(weight.values.min())
    assert int(weight.values.max()) < -low
    found = weight.dequantized(torch.float32)
    if kind in EXACT:
        assert torch.equal(found, numbers)
    else:
        # A minimum of more steps than a float16 counts: the group is its minimum alone, off by
        # up to 31 of some 65,000 steps.
        groups = weight.values.unflatten(1, (-1, weight.group_size))
        alone = (groups == 0).all(2).repeat_interleave(weight.group_size, 1)
        most = torch.where(alone, 5e-4 * numbers.abs(), 4e-7 * greatest(weight, numbers))
        assert ((found - numbers).abs() <= most).all()


@pytest.mark.parametrize("kind", HALFS)
def test_groups_without_a_scale_are_their_minimum(kind: str) -> None:
    blocks = random_blocks(kind, 6, 3)
    at = HALFS[kind][0]
    blocks[:3, at : at + 2] = 0  # no scale at all
    blocks[3:, at : at + 2] = torch.tensor([1, 0], dtype=torch.uint8)  # 2 ** -24
    weight, numbers = weight_of(blocks, kind, 2)
    found = weight.dequantized(torch.float32)
    assert found.isfinite().all()
    if weight.zeros is not None:
        assert weight.zeros.half().isfinite().all()
    assert ((found - numbers).abs() <= 2**-11 * greatest(weight, numbers)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_compiled_kernel_holds(kind: str, cpu_kernels: CpuKernels) -> None:
    """A product by ones and zeros shows its weights: exact, or their scales and zeros rounded to 11
    bits."""
    if lacking := missing(cpu_kernels.instructions.integer_flags):
        pytest.skip(f"this processor has no {', '.join(lacking)}")
    outputs, inputs = 40, 512
    blocks = random_blocks(kind, outputs * inputs // BLOCKS[kind][0], 5)
    weight, numbers = weight_of(blocks, kind, outputs)
    layer = IntegerPanels(IntegerKernels(cpu_kernels), weight, None)
    found = layer.wide(torch.eye(inputs).bfloat16()).T
    error = (found - numbers).abs()
    bound = 2e-7 if kind in EXACT else 2**-10
    assert (error <= bound * greatest(weight, numbers) + 1e-7 * numbers.abs().amax()).all()


@pytest.mark.parametrize("kind", KINDS)
def test_parts_for_ranks(kind: str) -> None:
    blocks = random_blocks(kind, 8 * 1024 // BLOCKS[kind][0], 6)
    weight, _ = weight_of(blocks, kind, 8)
    whole = weight.dequantized(torch.float32)
    assert torch.equal(of_outputs(weight, slice(2, 5)).dequantized(torch.float32), whole[2:5])
    parts = [of_inputs(weight, slice(at, at + 256)) for at in range(0, 1024, 256)]
    assert torch.equal(torch.cat([part.dequantized(torch.float32) for part in parts], 1), whole)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])  # the first's head is tied
def test_the_head_and_the_table(kind: str, tmp_path: Path) -> None:
    """The head keeps its integers, also beside a table that is widened for look-ups."""
    file, twin = make(tmp_path, kind, "Q4_K_M")
    loaded, plain = load(file), load(twin)
    assert loaded.rounded_head_bytes > 0
    hidden = torch.randn(3, 256, generator=torch.Generator().manual_seed(4))
    assert relative_error(loaded.logits(hidden), plain.logits(hidden)) < 1e-5


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])  # the first has biases
def test_decode_steps_in_one_call(kind: str, tmp_path: Path) -> None:
    """Queries and keys of 4 bits beside values of 8: the whole step compiled, its numbers those of
    the layers one by one, near the plain twin's."""
    file, twin = make(tmp_path, kind, "Q4_K_M")
    loaded, plain = load(file, dtype="bfloat16"), load(twin, dtype="float32")
    model: Any = loaded.model
    if QuantizedFormat(torch.bfloat16, CPU)._compiled is None or model.step is None:
        pytest.skip("no compiled integer kernels here")
    qkv = model._layers[0].attention.qkv.linear
    assert isinstance(qkv, SideBySide)
    assert len(qkv.layers) == 2
    whole, each = Driver(loaded), Driver(loaded)
    row = [SequenceChunk("alone", PROMPT[:1], 0, held([0, 1]))]
    found = [whole.step(row)[0]]
    steps = model.step.num_steps
    step, model.step = model.step, None
    expected = [each.step(row)[0]]
    for at in range(1, 12):
        row = [SequenceChunk("alone", PROMPT[at : at + 1], at, held([0, 1]))]
        expected.append(each.step(row)[0])
    model.step = step
    for at in range(1, 12):
        row = [SequenceChunk("alone", PROMPT[at : at + 1], at, held([0, 1]))]
        found.append(whole.step(row)[0])
    assert model.step.num_steps >= steps + 11
    assert torch.equal(torch.cat(found), torch.cat(expected))
    assert relative_error(torch.cat(found), logits_of(plain, PROMPT[:12])) < 0.05


def test_the_names_of_both_ways(tmp_path: Path) -> None:
    """`gguf` is what the file is; `widened` and rounded weights are other ones."""
    file, _ = make(tmp_path, "qwen3", "Q4_0")
    options: dict[str, Any] = {
        "dtype": "bfloat16", "device": "cpu", "kv_cache_memory": "16MB", "max_model_len": 128,
    }  # fmt: skip
    digests = {
        name: LLM(str(file), quantization=name, **options).engine.info.digest
        for name in ("none", "gguf", "widened", "int8")
    }
    assert digests["none"] == digests["gguf"]
    assert len(set(digests.values())) == 3
    with pytest.raises(ConfigError, match=r"--quantization awq: .* is gguf"):
        LLM(str(file), quantization="awq", **options)
    universal = load(file, model_impl="transformers")
    assert universal.info.digest == load(file, **WIDENED).info.digest


def test_greedy_tokens_are_the_widened_models(tmp_path: Path) -> None:
    """Prompts together, in float32: rounding is far below what tokens differ by."""
    options: dict[str, Any] = {
        "dtype": "float32", "device": "cpu", "kv_cache_memory": "16MB", "max_model_len": 128,
    }  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    prompts = [PROMPT[:9], PROMPT[4:20], PROMPT]
    for mix in ("Q4_K_M", "Q5_K_M", "Q8_0"):
        folder = tmp_path / mix
        folder.mkdir()
        file, _ = make(folder, "llama", mix)
        kept, widened = (
            [
                o.outputs[0].token_ids
                for o in LLM(str(file), quantization=q, **options).generate(prompts, params)
            ]
            for q in ("none", "widened")
        )
        assert kept == widened


def test_damaged_scales_are_refused() -> None:
    for kind in KINDS:
        for at in HALFS.get(kind, (0,)):
            blocks = random_blocks(kind, 2, 7)
            blocks[1, at : at + 2] = torch.tensor([0, 0x7E], dtype=torch.uint8)
            assert not read_blocks(blocks, kind).is_finite()
            assert not widen_blocks(blocks, kind).isfinite().all()
