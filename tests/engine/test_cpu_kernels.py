"""The compiled CPU kernels against torch: every shape that a model may bring, and who gets them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from baton.engine.attention.compiled import CompiledAttention, known_layer
from baton.engine.attention.torch_cpu import TorchAttention
from baton.engine.kernels.cpu import build, library
from baton.engine.kernels.cpu.build import INSTRUCTION_SETS, CannotBuild, InstructionSet
from baton.engine.kernels.cpu.library import SWITCH, CpuKernels, HeadNorms
from baton.engine.kernels.rope import PairRotation, Rotation
from baton.engine.memory.kv_cache import KVArena
from baton.engine.memory.layer_groups import one_group
from baton.engine.models.elementwise import CompiledElementwise, TorchElementwise
from baton.engine.quantization.linear import PanelLinear, PlainLinear
from baton.engine.state.attention import AttentionLayer
from baton.engine.state.batch import Step, flatten
from baton.engine.state.interface import SequenceChunk
from baton.protocol.kv_spec import HeldBlocks, LayerSpec

ANY = InstructionSet("any", "any processor's", (), (), ())
LENGTHS = st.one_of(st.integers(0, 90), st.integers(91, 600))  # beyond 128 keys: several stretches


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def close(ours: Tensor, exact: Tensor) -> bool:
    """bfloat16 keeps 8 bits: each result within two roundings of the exact one."""
    return torch.allclose(ours.float(), exact, rtol=2e-2, atol=2e-2 * exact.abs().max().item())


@settings(max_examples=20)
@given(outputs=st.integers(1, 200), pairs=st.integers(1, 90), count=st.integers(0, 9))
def test_rows_of_panels_are_those_of_the_weight(
    cpu_kernels: CpuKernels, outputs: int, pairs: int, count: int
) -> None:
    weight = noise(1, outputs, 2 * pairs)
    table = PanelLinear(cpu_kernels, weight, None)
    ids = torch.randint(0, outputs, (count,), generator=torch.Generator().manual_seed(2))
    assert torch.equal(table.rows(ids), weight[ids])
    assert torch.equal(table.rows(ids), PlainLinear(weight, None).rows(ids))
    assert table.outputs == outputs
    assert table.place == (torch.bfloat16, weight.device)


@settings(max_examples=40)
@given(
    rows=st.integers(1, 20),
    inputs=st.one_of(
        st.integers(1, 90).map(lambda n: 2 * n),
        st.integers(1, 6).map(lambda n: 32 * n),  # which tiles take
    ),
    outputs=st.integers(1, 200),
    biased=st.booleans(),
)
def test_linear_is_torchs(
    cpu_kernels: CpuKernels, rows: int, inputs: int, outputs: int, biased: bool
) -> None:
    x, weight = noise(1, rows, inputs), noise(2, outputs, inputs)
    bias = noise(3, outputs) if biased else None
    panels = cpu_kernels.pack(weight)
    y = cpu_kernels.linear(x, panels, bias, outputs)
    assert torch.equal(unrounded(cpu_kernels, x, panels, bias, outputs).bfloat16(), y)
    exact = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    assert close(y, exact)


def unrounded(
    kernels: CpuKernels, x: Tensor, panels: Tensor, bias: Tensor | None, outputs: int
) -> Tensor:
    """In float32; nothing is written beside it."""
    around = torch.full((x.shape[0] + 2, outputs), 7.0)
    with mock.patch.object(torch, "empty", return_value=around[1:-1]):
        y = kernels.linear(x, panels, bias, outputs, torch.float32)
    assert y.data_ptr() == around[1:].data_ptr()
    assert (around[0] == 7.0).all()
    assert (around[-1] == 7.0).all()
    return y


def test_a_row_of_linear_depends_on_no_other(cpu_kernels: CpuKernels) -> None:
    x, weight = noise(4, 600, 384), noise(5, 130, 384)
    panels = cpu_kernels.pack(weight)
    whole = cpu_kernels.linear(x, panels, None, 130)
    for first, last in ((0, 1), (3, 10), (5, 18), (20, 35), (590, 600)):
        assert torch.equal(cpu_kernels.linear(x[first:last], panels, None, 130), whole[first:last])


def test_a_slice_of_a_wider_tensor_is_read_right(cpu_kernels: CpuKernels) -> None:
    wide, weight = noise(6, 3, 96), noise(7, 64, 32)
    part = wide[:, 32:64]
    y = cpu_kernels.linear(part, cpu_kernels.pack(weight), None, 64)
    assert close(y, part.float() @ weight.float().T)


@pytest.mark.parametrize("normed", [True, False])
def test_what_stands_between_products_is_torchs(cpu_kernels: CpuKernels, normed: bool) -> None:
    ours, plain = CompiledElementwise(cpu_kernels), TorchElementwise()
    residual, delta, weight = noise(8, 5, 96), noise(9, 5, 96), noise(10, 96)
    sums, normal = ours.add_norm(residual.clone(), delta, weight, 1e-6)
    exact = plain.add_norm(residual.float(), delta.float(), weight.float(), 1e-6)
    assert close(sums, exact[0])
    assert close(normal, exact[1])
    assert close(ours.add_norm(residual.clone(), None, weight, 1e-6)[1],
                 plain.add_norm(residual.float(), None, weight.float(), 1e-6)[1])  # fmt: skip
    gate_up = 30 * noise(11, 5, 128)  # far enough for the exponential's ends
    assert close(ours.gated(gate_up), plain.gated(gate_up.float()))
    qkv = noise(12, 5, 8, 64)
    rotation = Rotation.at(torch.tensor([0, 1, 7, 300, 4000]), torch.rand(32), torch.bfloat16)
    wide = Rotation(rotation.cos.float(), rotation.sin.float())
    norms = HeadNorms(noise(13, 64), noise(14, 64), 1e-6) if normed else None
    exact_norms = HeadNorms(norms.query.float(), norms.key.float(), 1e-6) if norms else None
    heads = ours.rotate(qkv.clone(), rotation, 4, norms)
    exact_heads = plain.rotate(qkv.float(), wide, 4, exact_norms)
    for got, want in zip(heads, exact_heads, strict=True):
        assert got.shape == want.shape
        assert close(got, want)


def test_what_other_families_have_between_products_is_torchs(cpu_kernels: CpuKernels) -> None:
    """Norms of 1 + weight, GELU, heads of which a part rotates, neighbours."""
    ours = CompiledElementwise(cpu_kernels, 1.0, "gelu_tanh")
    plain = TorchElementwise(1.0, "gelu_tanh")
    x, weight = noise(8, 5, 96), noise(10, 96)
    exact = plain.add_norm(x.float(), None, plain.norm_weight(weight), 1e-6)[1]
    assert close(ours.add_norm(x.clone(), None, ours.norm_weight(weight), 1e-6)[1], exact)
    halves = plain.add_norm(x, None, plain.norm_weight(weight), 1e-6)[1]
    assert halves.dtype == torch.bfloat16
    assert close(halves, exact)
    gate_up = 3 * noise(11, 5, 128)
    assert close(ours.gated(gate_up), plain.gated(gate_up.float()))
    far = 30 * gate_up  # the exponential's ends
    assert close(ours.gated(far), plain.gated(far.float()))
    qkv, positions = noise(12, 5, 8, 64), torch.tensor([0, 1, 7, 300, 4000])
    for pairs in (PairRotation.HALVES, PairRotation.NEIGHBOURS):
        for rotated in (32, 64):
            at = Rotation.at(positions, torch.rand(rotated // 2), torch.bfloat16)
            narrow = Rotation(at.cos, at.sin, pairs)
            wide = Rotation(at.cos.float(), at.sin.float(), pairs)
            norms = HeadNorms(noise(13, 64), noise(14, 64), 1e-6, 1.0)
            query, key = plain.norm_weight(norms.query), plain.norm_weight(norms.key)
            folded = HeadNorms(query, key, 1e-6)
            heads = ours.rotate(qkv.clone(), narrow, 4, norms)
            for got, want in zip(heads, plain.rotate(qkv.float(), wide, 4, folded), strict=True):
                assert close(got, want)


def step_of(
    attention: CompiledAttention | TorchAttention, starts: list[int], rows: list[int], size: int
) -> Step:
    """Sequences of `starts` tokens that compute `rows` more each, in blocks of their own."""
    chunks: list[SequenceChunk] = []
    block = 0
    for index, (start, count) in enumerate(zip(starts, rows, strict=True)):
        blocks = -(-(start + count) // size)
        # Backwards: a table is no range.
        ids = tuple(range(block, block + blocks))[::-1]
        block += blocks
        chunks.append(SequenceChunk(str(index), [0] * count, start, (HeldBlocks(ids),)))
    return flatten(chunks, attention, size, torch.device("cpu"))


@dataclass(frozen=True)
class Case:
    """Rows that hold `starts` tokens and compute one more, the last one `last` more."""

    starts: list[int]
    last: int
    query_heads: int
    kv_heads: int
    dim: int
    size: int
    window: int
    softcap: float | None
    sinks: bool
    grows: bool  # scores grow along the prompt: a row's highest so far is overtaken by far


@st.composite
def cases(draw: st.DrawFn) -> Case:
    query_heads, kv_heads = draw(st.sampled_from([(4, 4), (4, 2), (6, 2), (8, 1), (3, 1)]))
    return Case(
        starts=draw(st.lists(LENGTHS, min_size=1, max_size=5)),
        last=draw(st.sampled_from([1, 2, 9, 70, 200])),
        query_heads=query_heads,
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([32, 64, 96, 128])),
        size=draw(st.sampled_from([8, 16, 32])),
        window=draw(st.sampled_from([0, 0, 5, 40, 200])),
        softcap=draw(st.sampled_from([None, None, 20.0])),
        sinks=draw(st.booleans()),
        grows=draw(st.booleans()),
    )


def growing(keys: Tensor, grows: bool) -> Tensor:
    """keys [T, heads, dim], with `grows` up to 40 times as long towards the end."""
    return keys * torch.linspace(1, 40, len(keys)).bfloat16()[:, None, None] if grows else keys


@settings(max_examples=40)
@given(case=cases())
def test_attention_is_torchs(cpu_kernels: CpuKernels, case: Case) -> None:
    starts, size, dim = case.starts, case.size, case.dim
    rows = [1] * (len(starts) - 1) + [case.last]
    totals = [start + count for start, count in zip(starts, rows, strict=True)]
    blocks = sum(-(-total // size) for total in totals)
    layers = (LayerSpec(case.kv_heads, dim, dim),)
    arena = KVArena(one_group(layers), blocks, size, "bfloat16", torch.device("cpu"))
    drawn = noise(15, case.query_heads).float() if case.sinks else None
    spec = AttentionLayer(case.query_heads, dim**-0.5, case.window, case.softcap, drawn)
    ours, plain = CompiledAttention(arena, [spec], cpu_kernels), TorchAttention(arena, [spec])
    # What nobody wrote must not matter.
    keys, values = arena.layer(0)
    keys.fill_(torch.nan)
    values.fill_(torch.nan)
    history = step_of(ours, [0] * len(starts), totals, size)
    total = history.token_ids.shape[0]
    stored = (
        growing(noise(16, total, case.kv_heads, dim), case.grows),
        noise(17, total, case.kv_heads, dim),
    )
    ours.write(0, *stored, history.batch.tables[0].slots)
    q = noise(18, sum(rows), case.query_heads, dim)
    got = ours.attend(0, q, step_of(ours, starts, rows, size).batch)
    want = plain.attend(0, q, step_of(plain, starts, rows, size).batch)
    assert not got.isnan().any()
    assert close(got, want.float())


@pytest.mark.parametrize("window", [0, 300])
def test_a_row_is_the_same_whoever_attends_it(cpu_kernels: CpuKernels, window: int) -> None:
    """Alone it is split among the threads, beside many it is one thread's; 5,000 keys are more than
    32 stretches of 128."""
    starts = [5000, 0, 127, 128, 700] + [90] * 20
    totals = [start + 1 for start in starts]
    arena = KVArena(one_group((LayerSpec(2, 64, 64),)), 600, 16, "bfloat16", torch.device("cpu"))
    spec = AttentionLayer(6, 0.125, window, None, noise(31, 6).float())
    attention = CompiledAttention(arena, [spec], cpu_kernels)
    history = step_of(attention, [0] * len(starts), totals, 16)
    stored = noise(32, sum(totals), 2, 64), noise(33, sum(totals), 2, 64)
    attention.write(0, *stored, history.batch.tables[0].slots)
    q = noise(34, len(starts), 6, 64)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = attention.attend(0, q, step_of(attention, starts, [1] * len(starts), 16).batch)
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            for rows in (1, 2, 5, len(starts)):
                # The first sequences' blocks are the same in every step.
                few = step_of(attention, starts[:rows], [1] * rows, 16)
                assert torch.equal(attention.attend(0, q[:rows], few.batch), want[:rows])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("inputs", [48, 96, 402])  # tiles take 96; 402 go part by part
def test_every_count_of_rows_gives_what_each_row_gives_alone(
    cpu_kernels: CpuKernels, inputs: int
) -> None:
    # 96 outputs: a panel and a half, so that a group's second half has a neighbour to harm.
    x, weight = noise(21, 40, inputs), noise(22, 96, inputs)
    panels = cpu_kernels.pack(weight)
    alone = torch.cat([cpu_kernels.linear(row[None], panels, None, 96) for row in x])
    assert close(alone, x.float() @ weight.float().T)
    for rows in range(1, len(x) + 1):
        assert torch.equal(cpu_kernels.linear(x[:rows], panels, None, 96), alone[:rows])


@pytest.mark.parametrize(("heads", "k_dim", "latent"), [(16, 576, 512), (20, 96, 64)])
def test_latents_are_keys_and_values(
    heads: int, k_dim: int, latent: int, cpu_kernels: CpuKernels
) -> None:
    """MLA, DeepSeek's own sizes too: decode rows and a prompt's."""
    starts, rows = [40, 200, 0, 17], [1, 1, 30, 21]
    totals = [start + count for start, count in zip(starts, rows, strict=True)]
    layers = (LayerSpec(1, k_dim, 0, kind="mla"),)
    arena = KVArena(one_group(layers), 30, 16, "bfloat16", torch.device("cpu"))
    spec = AttentionLayer(heads, k_dim**-0.5, latent=latent)
    ours, plain = CompiledAttention(arena, [spec], cpu_kernels), TorchAttention(arena, [spec])
    assert known_layer(arena, 0, spec) is not None
    arena.layer(0)[0].fill_(torch.nan)
    history = step_of(ours, [0] * len(starts), totals, 16)
    stored = noise(41, sum(totals), 1, k_dim)
    ours.write(0, stored, stored[..., :0], history.batch.tables[0].slots)
    q = noise(42, sum(rows), heads, k_dim)
    got = ours.attend(0, q, step_of(ours, starts, rows, 16).batch)
    want = plain.attend(0, q, step_of(plain, starts, rows, 16).batch)
    assert got.shape == (sum(rows), heads, latent)
    assert close(got, want.float())


@pytest.mark.parametrize(("window", "grows"), [(0, False), (30, False), (0, True), (30, True)])
def test_a_prompts_rows_do_not_depend_on_its_chunks(
    cpu_kernels: CpuKernels, window: int, grows: bool
) -> None:
    layers = (LayerSpec(2, 64, 64),)
    arena = KVArena(one_group(layers), 10, 16, "bfloat16", torch.device("cpu"))
    attention = CompiledAttention(arena, [AttentionLayer(6, 0.125, window)], cpu_kernels)
    whole = step_of(attention, [0], [150], 16)
    keys, values = growing(noise(23, 150, 2, 64), grows), noise(24, 150, 2, 64)
    attention.write(0, keys, values, whole.batch.tables[0].slots)
    q = noise(25, 150, 6, 64)
    want = attention.attend(0, q, whole.batch)
    for start, until in ((0, 70), (70, 150), (5, 7)):
        # step_of counts blocks down from the last: each chunk's table must be the whole one's.
        blocks = HeldBlocks(tuple(range(10))[::-1])
        chunk = SequenceChunk("0", [0] * (until - start), start, (blocks,))
        part = flatten([chunk], attention, 16, torch.device("cpu"))
        assert torch.equal(attention.attend(0, q[start:until], part.batch), want[start:until])


def test_a_machine_without_a_compiler_is_served_by_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(CannotBuild, match="compiler"):
        build.library_path(ANY)
    asked = (
        "import torch; cpu = torch.device('cpu');"
        "from baton.engine.kernels.cpu.library import kernels;"
        "from baton.engine.quantization.linear import PanelLinear, choose_linear;"
        "assert kernels() is None;"
        "made = choose_linear(torch.bfloat16, cpu)(torch.ones(4, 4).bfloat16(), None);"
        "assert not isinstance(made, PanelLinear)"
    )
    subprocess.run([sys.executable, "-c", asked], check=True, env={SWITCH: "off"}, timeout=60)


@pytest.mark.parametrize(
    ("asked", "processor", "served", "reason"),
    [
        (None, ("old", "new"), "new", "compiled, New"),
        (None, ("old",), "old", "compiled, Old, because New: this processor has no new"),
        ("old", ("old", "new"), "old", "compiled, Old, because BATON_CPU_KERNELS is old"),
        ("new", ("old",), None, "BATON_CPU_KERNELS is new; New: this processor has no new"),
        ("sse", ("old",), None, "BATON_CPU_KERNELS is sse, which is none of rare, new, old, off"),
        ("off", ("old",), None, "BATON_CPU_KERNELS is off"),
        (None, (), None, "New: this processor has no new; Old: this processor has no old"),
        (None, ("old", "new", "slow"), "old", "compiled, Old, because New: slow on this processor"),
        ("new", ("old", "new", "slow"), "new", "compiled, New, because BATON_CPU_KERNELS is new"),
        (None, ("old", "slow"), "old", "compiled, Old, because New: this processor has no new"),
        (None, ("old", "rare"), "old", "Rare: only where BATON_CPU_KERNELS is rare"),
        ("rare", ("old", "rare"), "rare", "compiled, Rare, because BATON_CPU_KERNELS is rare"),
    ],
)
def test_the_best_instruction_set_serves_or_the_one_asked_for(
    asked: str | None,
    processor: tuple[str, ...],
    served: str | None,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[InstructionSet] = []

    def make(instructions: InstructionSet) -> SimpleNamespace:
        if lacking := build.missing(instructions.cpu_flags):
            raise CannotBuild(f"this processor has no {', '.join(lacking)}")
        made.append(instructions)
        return SimpleNamespace(instructions=instructions)

    sets = [
        InstructionSet("rare", "Rare", ("rare",), (), (), by_name=True),
        InstructionSet("new", "New", ("new",), (), (), slow_on=("slow",)),
        InstructionSet("old", "Old", ("old",), (), ()),
    ]
    monkeypatch.setattr(library, "INSTRUCTION_SETS", sets)
    monkeypatch.setattr(library, "CpuKernels", make)
    # The processor's flags and its vendor at once.
    monkeypatch.setattr(build, "processor_words", lambda field: frozenset(processor))
    found, told = library.choose(asked)
    assert [each.name for each in made] == ([served] if served else [])
    assert (found is None) == (served is None)
    assert reason in told
    assert found is not None or told.startswith("torch's own serve, because ")


@pytest.mark.long
def test_amx_s_kernels_compile_and_multiply_by_tiles(tmp_path: Path) -> None:
    """Also where the processor has none: what they compute is tested by emulated tiles."""
    amx = next(each for each in INSTRUCTION_SETS if each.name == "amx")
    if shutil.which("objdump") is None:
        pytest.skip("no objdump")
    # Not optimized, that takes a fifth of the time: the instructions are chosen all the same.
    unoptimized = replace(amx, compiler_flags=(*amx.compiler_flags, "-O0"))
    path = build.compiled(unoptimized, tmp_path)
    listing = subprocess.run(
        ["objdump", "-d", str(path)], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    for instruction in ("tdpbf16ps", "tdpbusd", "ldtilecfg", "tilerelease"):
        assert instruction in listing


def test_avx2_kernels_hold_no_larger_instruction() -> None:
    """The compiler's own word for it: no register of 512 bits."""
    avx2 = next(each for each in INSTRUCTION_SETS if each.name == "avx2")
    try:
        path = build.library_path(avx2)
    except CannotBuild as error:
        pytest.skip(str(error))
    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("no objdump")
    code = subprocess.run([objdump, "-d", path], capture_output=True, text=True, check=True).stdout
    assert "ymm" in code
    assert "zmm" not in code


def test_a_compiler_that_fails_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(CannotBuild, match="no such flag"):
        build.library_path(ANY)
    assert not list((tmp_path / "baton" / "kernels").iterdir())
