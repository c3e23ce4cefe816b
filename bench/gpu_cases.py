"""Every Triton kernel beside its torch twin, as calls, in one list for three uses.

Tests run small sizes under the interpreter on a CPU. `bench.gpu` runs real sizes on a GPU.
`tools.gpu_kernels` only compiles real sizes. Each case computes from its own inputs, which are made
once and never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.attention.kv_store import layer_store
from baton.engine.attention.torch_cpu import TorchAttention
from baton.engine.attention.triton_backend import TritonAttention
from baton.engine.kernels.cpu.library import HeadNorms
from baton.engine.kernels.gpu import int_linear, kv_write, norm, rope, sampling, swiglu
from baton.engine.kernels.gpu.pages import LayerPages, layer_pages
from baton.engine.kernels.rope import Rotation
from baton.engine.memory.kv_cache import KVArena
from baton.engine.models.config import ClampedGate
from baton.engine.models.elementwise import TorchElementwise
from baton.engine.models.experts import Expert, Experts
from baton.engine.models.experts_gpu import stacked
from baton.engine.models.layers.gates import SoftmaxGate
from baton.engine.quantization.int_weight import IntWeight
from baton.engine.quantization.integer import quantize
from baton.engine.quantization.linear import PlainLinear
from baton.engine.sampling.sampler import Draw, sample
from baton.engine.state.attention import AttentionLayer
from baton.engine.state.batch import Step, flatten
from baton.engine.state.interface import SequenceChunk
from baton.protocol.kv_spec import HeldBlocks, LayerSpec
from baton.protocol.sampling import SamplingParams
from bench.gpu_case import NAMES, TOLERANCE, CaseShape, KernelCase, noise
from bench.gpu_delta_cases import delta_cases
from bench.gpu_float8_cases import float8_cases


def cases_of(
    shape: CaseShape, dtypes: Sequence[torch.dtype], families: Sequence[str]
) -> Iterator[KernelCase]:
    """Yield every kernel of these families in these dtypes, over every rule and storage it
    knows.
    """
    for family in families:
        for dtype in dtypes if family != "sampling" else dtypes[:1]:
            yield from FAMILIES[family](shape, dtype)


# ---- attention ----


@dataclass(frozen=True, slots=True)
class KernelRule:
    """One way to attend and to store KV."""

    name: str
    window: bool = False
    softcap: float | None = None
    sinks: bool = False
    storage: str = ""  # "" = the model's dtype


RULES: Final = (
    KernelRule("plain"), KernelRule("window", window=True), KernelRule("softcap", softcap=5.0),
    KernelRule("sinks", sinks=True), KernelRule("all", True, 5.0, True),
    KernelRule("int8", storage="int8"), KernelRule("fp8", storage="fp8"),
    KernelRule("int8 all", True, 5.0, True, "int8"),
)  # fmt: skip


def attention_cases(
    shape: CaseShape, dtype: torch.dtype, rules: Sequence[KernelRule] = RULES
) -> Iterator[KernelCase]:
    """Yield cases of decode rows and prefill spans, for each of the rules."""
    decode = [(context, 1) for context in shape.contexts]
    for rule in rules:
        storage = rule.storage or NAMES[dtype]
        for kind, spans in (("decode", decode), ("prefill", list(shape.prefills))):
            if not spans:
                continue
            made = _Attention.make(shape, dtype, rule, storage, spans)
            name = f"{kind} attention, {rule.name}, {NAMES[dtype]}"
            flops, num_bytes = made.work(spans, storage)
            yield KernelCase(name, made.ours, made.twin, TOLERANCE[dtype], num_bytes, flops)


@dataclass(frozen=True, slots=True)
class _Attention:
    """A filled pool, a step over it, and both backends."""

    triton: TritonAttention
    torch: TorchAttention
    step: Step
    q: Tensor
    shape: CaseShape
    window: int

    @classmethod
    def make(
        cls,
        shape: CaseShape,
        dtype: torch.dtype,
        rule: KernelRule,
        storage: str,
        spans: Sequence[tuple[int, int]],
    ) -> _Attention:
        """Make the pool and the step. Unwritten slots are NaN, so that reading one shows."""
        chunks = _chunks(spans, shape.block_size)
        total = sum(start + count for start, count in spans)
        spec = LayerSpec(shape.kv_heads, shape.dim, shape.value_dim)
        blocks = sum(len(chunk.blocks[0].ids) for chunk in chunks)
        arena = KVArena((spec,), blocks, shape.block_size, storage, shape.device)
        if storage == "int8":
            for scales in arena.scales(0):
                scales.fill_(torch.nan)
        elif storage != "fp8":
            for part in arena.layer(0):
                part.fill_(torch.nan)
        window = shape.window if rule.window else 0
        sinks = noise(shape, 3, shape.heads) if rule.sinks else None
        layer = AttentionLayer(shape.heads, shape.dim**-0.5, window, rule.softcap, sinks)
        plain = TorchAttention(arena, [layer])
        whole = [(0, start + count) for start, count in spans]
        history = flatten(_chunks(whole, shape.block_size), plain, shape.block_size, shape.device)
        k = noise(shape, 4, total, shape.kv_heads, shape.dim).to(dtype)
        v = noise(shape, 5, total, shape.kv_heads, shape.value_dim).to(dtype)
        plain.write(0, k, v, history.batch.tables[0].slots)
        ours = TritonAttention(arena, [layer], shape.tiles, shape.splits)
        step = flatten(chunks, ours, shape.block_size, shape.device)
        q = noise(shape, 6, step.token_ids.shape[0], shape.heads, shape.dim).to(dtype)
        return cls(ours, plain, step, q, shape, window)

    def ours(self) -> list[Tensor]:
        return [self.triton.attend(0, self.q, self.step.batch)]

    def twin(self) -> list[Tensor]:
        return [self.torch.attend(0, self.q, replace(self.step.batch, plans={}))]

    def work(self, spans: Sequence[tuple[int, int]], storage: str) -> tuple[int, int]:
        """Return the FLOPs, and the bytes of the keys and values that are seen, once each."""
        shape, spec = (
            self.shape,
            LayerSpec(self.shape.kv_heads, self.shape.dim, self.shape.value_dim),
        )
        reach = self.window or 1 << 40
        pairs = sum(min(start + i + 1, reach) for start, count in spans for i in range(count))
        seen = sum(min(start + count, reach + count - 1) for start, count in spans)
        flops = 2 * pairs * shape.heads * (shape.dim + shape.value_dim)
        return flops, seen * (spec.token_bytes(storage) + spec.scale_bytes(storage))


def _chunks(spans: Sequence[tuple[int, int]], block_size: int) -> list[SequenceChunk]:
    """Return a chunk per span, in its own blocks; they go backwards, so that no table is a
    range.
    """
    chunks: list[SequenceChunk] = []
    block = 0
    for index, (start, count) in enumerate(spans):
        blocks = -(-(start + count) // block_size)
        ids = tuple(range(block, block + blocks))[::-1]
        block += blocks
        chunks.append(SequenceChunk(str(index), [0] * count, start, (HeldBlocks(ids),)))
    return chunks


def write_cases(shape: CaseShape, dtype: torch.dtype) -> Iterator[KernelCase]:
    """Yield writes of keys and values into the pool, alone and fused with the rotation.

    They must be equal bit for bit.
    """
    for storage in (NAMES[dtype], "int8", "fp8"):
        written = _WrittenCase.make(shape, dtype, storage)
        name = f"{storage} of {NAMES[dtype]}"
        yield KernelCase(f"KV write, {name}", written.alone, written.twin, 0.0)
        yield KernelCase(f"RoPE and KV write, {name}", written.fused, written.twin, 0.0)


@dataclass(frozen=True, slots=True)
class _WrittenCase:
    """Rows to rotate and store at `slots`; one row is padding."""

    shape: CaseShape
    storage: str
    qkv: Tensor
    rotation: Rotation
    norms: HeadNorms
    slots: Tensor

    @classmethod
    def make(cls, shape: CaseShape, dtype: torch.dtype, storage: str) -> _WrittenCase:
        qkv = noise(shape, 7, shape.rows, shape.heads + 2 * shape.kv_heads, shape.dim).to(dtype)
        slots = torch.arange(shape.rows, device=shape.device).flip(0) * 2
        slots[1] = -1
        return cls(shape, storage, qkv, _rotation(shape, dtype), _head_norms(shape, dtype), slots)

    def fused(self) -> list[Tensor]:
        arena, whole = self._pool(), self.qkv.clone()
        pages = self._pages(arena)
        rope.rotate_and_store(whole, self.rotation, self.shape.heads, self.norms, pages, self.slots)
        return _contents(arena)

    def alone(self) -> list[Tensor]:
        arena = self._pool()
        kv_write.store(*self._rotated(), self._pages(arena), self.slots)
        return _contents(arena)

    def twin(self) -> list[Tensor]:
        arena, kept = self._pool(), self.slots >= 0
        k, v = self._rotated()
        layer_store(arena, 0).write(k[kept], v[kept], self.slots[kept])
        return _contents(arena)

    def _pool(self) -> KVArena:
        shape = self.shape
        spec = LayerSpec(shape.kv_heads, shape.dim, shape.dim)
        blocks = -(-shape.rows * 2 // shape.block_size)
        return KVArena((spec,), blocks, shape.block_size, self.storage, shape.device)

    def _pages(self, arena: KVArena) -> LayerPages:
        return layer_pages(arena, 0, AttentionLayer(self.shape.heads, 1.0))

    def _rotated(self) -> tuple[Tensor, Tensor]:
        whole, shape = self.qkv.clone(), self.shape
        rope.rotate(whole, self.rotation, shape.heads, self.norms)
        _, k, v = whole.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
        return k, v


def _contents(arena: KVArena) -> list[Tensor]:
    """Return the pool's numbers as integers, to compare bits."""
    size = {"float32": torch.int32, "int8": torch.int8, "fp8": torch.int8}
    found = [part.view(size.get(arena.dtype, torch.int16)) for part in arena.layer(0)]
    if arena.dtype == "int8":
        found += list(arena.scales(0))
    return found


# ---- between products ----


def elementwise_cases(shape: CaseShape, dtype: torch.dtype) -> Iterator[KernelCase]:
    """Yield cases of norms, rotation and gates."""
    name, plain = NAMES[dtype], TorchElementwise()
    residual, delta = (noise(shape, seed, shape.rows, shape.hidden).to(dtype) for seed in (8, 9))
    weight = noise(shape, 10, shape.hidden).to(dtype)
    moved = residual.nbytes

    def added(given: Tensor | None) -> list[Tensor]:
        sums = residual.clone()
        normal = norm.add_norm(sums, given, weight, 1e-6)
        return [sums, normal]

    for label, given, count in (("with residual", delta, 4), ("alone", None, 2)):
        yield KernelCase(
            f"RMSNorm {label}, {name}", lambda given=given: added(given),
            lambda given=given: plain.add_norm(residual, given, weight, 1e-6),
            TOLERANCE[dtype], count * moved,
        )  # fmt: skip
    gate_up = 3 * noise(shape, 11, shape.rows, 2 * shape.intermediate).to(dtype)
    tanh = TorchElementwise(activation="gelu_tanh")
    for label, gate in (("SwiGLU", plain), ("GELU's gate", tanh)):
        yield KernelCase(
            f"{label}, {name}", lambda gate=gate: [swiglu.gated(gate_up, gate is tanh)],
            lambda gate=gate: [gate.gated(gate_up)], TOLERANCE[dtype], gate_up.nbytes * 3 // 2,
        )  # fmt: skip
    qkv = noise(shape, 12, shape.rows, shape.heads + 2 * shape.kv_heads, shape.dim).to(dtype)
    rotation = _rotation(shape, dtype)

    def rotated(norms: HeadNorms | None) -> list[Tensor]:
        whole = qkv.clone()
        rope.rotate(whole, rotation, shape.heads, norms)
        return [whole]

    for label, norms in (("RoPE", None), ("head norms and RoPE", _head_norms(shape, dtype))):
        yield KernelCase(
            f"{label}, {name}", lambda norms=norms: rotated(norms),
            lambda norms=norms: [torch.cat(plain.rotate(qkv, rotation, shape.heads, norms), 1)],
            TOLERANCE[dtype], 2 * qkv.nbytes,
        )  # fmt: skip


def _rotation(shape: CaseShape, dtype: torch.dtype) -> Rotation:
    positions = torch.arange(shape.rows, device=shape.device) * 37
    frequencies = 10_000 ** -torch.linspace(0, 1, shape.dim // 2, device=shape.device)
    return Rotation.at(positions, frequencies, dtype)


def _head_norms(shape: CaseShape, dtype: torch.dtype) -> HeadNorms:
    query, key = (noise(shape, seed, shape.dim).to(dtype) for seed in (13, 14))
    return HeadNorms(query, key, 1e-6)


# ---- products ----


def product_cases(shape: CaseShape, dtype: torch.dtype) -> Iterator[KernelCase]:
    """Yield cases of integer weights and of a mixture's experts."""
    name = NAMES[dtype]
    x = noise(shape, 15, shape.rows, shape.hidden * 2).to(dtype)
    plain = noise(shape, 16, shape.intermediate, shape.hidden * 2)
    bias = noise(shape, 17, shape.intermediate).to(dtype)
    four = quantize(plain, "int4")
    by_group = IntWeight(8, four.values, four.scales, four.zeros)
    flops = 2 * shape.rows * plain.numel()
    for label, weight in (
        ("int8", quantize(plain, "int8")), ("int4", four), ("int8 by group", by_group)
    ):  # fmt: skip
        layer = int_linear.TritonIntLinear(weight, bias)
        wide = weight.dequantized(dtype)
        yield KernelCase(
            f"{label} linear, {name}", lambda layer=layer: [layer(x)],
            lambda wide=wide: [functional.linear(x, wide, bias)],
            TOLERANCE[dtype], weight.num_bytes, flops,
        )  # fmt: skip
    size, count = shape.intermediate // 2, shape.experts
    scale = shape.hidden**-0.5
    gate_up = (scale * noise(shape, 18, count, 2 * size, shape.hidden)).to(dtype)
    down = (scale * noise(shape, 19, count, shape.hidden, size)).to(dtype)
    hidden = noise(shape, 20, shape.rows, shape.hidden).to(dtype)
    router = noise(shape, 22, count, shape.hidden).to(dtype)
    biases = [
        noise(shape, 24 + i, *part.shape[:2]).to(dtype) for i, part in enumerate((gate_up, down))
    ]
    for label, clamped in (("", None), ("biased, clamped ", ClampedGate(1.0, 1.702))):
        up_bias, down_bias = [[None] * count] * 2 if clamped is None else biases
        each = tuple(
            Expert(PlainLinear(gate_up[e], up_bias[e]), PlainLinear(down[e], down_bias[e]), clamped)
            for e in range(count)
        )
        layer = Experts(SoftmaxGate(router, 2, True), each, None)
        together = stacked(layer)
        yield KernelCase(
            f"grouped {label}experts, {name}",
            lambda together=together: [together(hidden, ())],
            lambda layer=layer: [layer(hidden, ())],
            TOLERANCE[dtype], gate_up.nbytes + down.nbytes,
            4 * shape.rows * (gate_up[0].numel() + down[0].numel()),
        )  # fmt: skip


# ---- sampling ----


def sampling_cases(shape: CaseShape, dtype: torch.dtype = torch.float32) -> Iterator[KernelCase]:
    """Yield cases of sampling: tokens are equal or wrong; logits are float32 in every model."""
    del dtype
    logits = 3 * noise(shape, 23, shape.rows, shape.vocab)
    logits[0, 11] = logits[0, shape.vocab - 7] = 40.0  # a tie
    moved = logits.nbytes

    def greedy() -> list[Tensor]:
        return list(sampling.greatest(logits))

    def lowest() -> list[Tensor]:
        rows = logits.cpu()
        ids = torch.from_numpy(rows.numpy().argmax(-1))
        return [rows.amax(-1).to(shape.device), ids.to(shape.device)]

    yield KernelCase("greedy sampling", greedy, lowest, 0.0, moved)
    temperatures = [1.0, 0.7, 2.0, 1.3]
    draws = [
        Draw(SamplingParams(temperature=temperatures[i % 4], seed=i), i % 3, i)
        for i in range(shape.rows)
    ]
    # Two's complement, because torch hardly supports unsigned 64-bit integers.
    signed = [draw.key - (1 << 64) if draw.key >> 63 else draw.key for draw in draws]
    keys = torch.tensor(signed, device=shape.device)
    heat = torch.tensor([draw.params.temperature for draw in draws], device=shape.device)
    yield KernelCase(
        "keyed sampling", lambda: [sampling.keyed(logits, heat, keys)],
        lambda: [torch.tensor(sample(logits.cpu(), draws), device=shape.device)], 0.0, 2 * moved,
    )  # fmt: skip


FAMILIES: Final[dict[str, Callable[[CaseShape, torch.dtype], Iterator[KernelCase]]]] = {
    "attention": attention_cases,
    "writes": write_cases,
    "elementwise": elementwise_cases,
    "products": product_cases,
    "8-bit floats": float8_cases,
    "linear attention": delta_cases,
    "sampling": sampling_cases,
}
