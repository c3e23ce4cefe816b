"""The compiled CPU kernels as Python calls: tensors in, tensors out, every shape checked here.

`kernels()` returns this machine's library, and `state()` says which one, or why there is none. Each
call releases the GIL and uses torch's number of threads. The library shares torch's OpenMP runtime,
so torch is imported first.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from baton.engine.kernels.cpu.asking import choose_asking
from baton.engine.kernels.cpu.build import (
    INSTRUCTION_SETS,
    CannotBuild,
    InstructionSet,
    is_slow,
    library_path,
    missing,
)
from baton.engine.kernels.cpu.sampling import SamplingKernels
from baton.engine.kernels.rope import PairRotation, Rotation
from baton.engine.memory import huge_pages

logger = logging.getLogger(__name__)
VERSION: Final = 17  # of the structs below
SWITCH: Final = "BATON_CPU_KERNELS"  # an instruction set's name; "off": the torch twins serve

_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_int64


class _LinearArgs(ctypes.Structure):
    """LinearArgs of linear.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("x", "w", "bias", "y")),
        *((name, _SIZE) for name in ("rows", "inputs", "outputs")),
        ("wide", _POINTER),
        ("stride", _SIZE),
    )


class ScaleFields(ctypes.Structure):
    """PoolScales of attention.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("keys", "values")),
        *((name, _SIZE) for name in ("key_block", "key_token", "value_block", "value_token")),
    )


# The last fields of the attention structs, which describe a layer; `layer_values` fills them.
LAYER_FIELDS: Final = (
    *((n, _SIZE) for n in ("key_block", "key_token", "key_head")),
    *((n, _SIZE) for n in ("value_block", "value_token", "value_head")),
    *((n, _SIZE) for n in ("query_heads", "kv_heads", "k_dim", "v_dim", "block_size")),
    ("window", _SIZE),
    ("scale", ctypes.c_float),
    ("softcap", ctypes.c_float),
    ("scales", ScaleFields),
)


class DecodeArgs(ctypes.Structure):
    """DecodeArgs of attention.h."""

    _fields_ = (
        *((n, _POINTER) for n in ("q", "out", "keys", "values", "tables", "rows", "spans")),
        *((n, _POINTER) for n in ("tokens", "first", "sinks")),
        *((n, _SIZE) for n in ("count", "width", "q_stride", "out_row", "out_head")),
        *LAYER_FIELDS,
    )


class NormRule(ctypes.Structure):
    """elementwise.h's NormRule."""

    _fields_ = (("epsilon", ctypes.c_float), ("offset", ctypes.c_float))


class _RotateArgs(ctypes.Structure):
    """RotateArgs of elementwise.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("qkv", "cos", "sin", "query_norm", "key_norm")),
        *((name, _SIZE) for name in ("rows", "heads", "kv_heads", "dim", "rotated", "neighbours")),
        ("norms", NormRule),
    )


class _GateHeadsArgs(ctypes.Structure):
    """GateHeadsArgs of elementwise.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("x", "gates")),
        *((name, _SIZE) for name in ("rows", "heads", "dim", "gate_row", "gate_head")),
    )


class _StoreArgs(ctypes.Structure):
    """StoreArgs of elementwise.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("source", "target", "slots")),
        *((name, _SIZE) for name in ("rows", "num_bytes", "stride")),
        *((name, _SIZE) for name in ("block_bytes", "token_bytes", "block_size")),
    )


class _Int8StoreArgs(ctypes.Structure):
    """Int8StoreArgs of attention_int8.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("x", "pool", "scales", "slots")),
        *((name, _SIZE) for name in ("rows", "heads", "dim", "stride", "block_size")),
        *((name, _SIZE) for name in ("pool_block", "pool_token", "scale_block", "scale_token")),
    )


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights of the RMSNorms of query heads and key heads, each [dim] bfloat16. The compiled
    kernels add `offset` to each weight."""

    query: Tensor
    key: Tensor
    epsilon: float
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows of one new token each. All tensors are int64; all but `tables` have one number per row.

    `rows`: its row in q and out. `spans`: its row in `tables` [S, width], which lists block ids
    from block `first` on. `tokens`: the number of its keys, the new one included.
    """

    rows: Tensor
    spans: Tensor
    tokens: Tensor
    first: Tensor
    tables: Tensor


@dataclass(frozen=True, slots=True)
class PoolScales:
    """The scales of keys and values in int8, each [blocks, block_size, kv_heads] float32, with the
    heads side by side."""

    keys: Tensor
    values: Tensor

    @property
    def fields(self) -> ScaleFields:
        """As the compiled kernels take them."""
        return ScaleFields(
            self.keys.data_ptr(), self.values.data_ptr(),
            *self.keys.stride()[:2], *self.values.stride()[:2],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DecodeLayer:
    """One layer's pool, and how the layer attends (state/attention.py).

    Keys and values are [blocks, block_size, kv_heads, dim] bfloat16, or int8 with `scales`, with
    the dims of a head side by side.
    """

    keys: Tensor
    values: Tensor
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None  # [query_heads] float32
    scales: PoolScales | None = None

    @property
    def scale_fields(self) -> ScaleFields:
        """As the compiled kernels take them: null in bfloat16."""
        return ScaleFields() if self.scales is None else self.scales.fields


class CpuKernels:
    """The library's functions. Stateless; safe from any thread."""

    def __init__(self, instructions: InstructionSet) -> None:
        """Load the library, compiled now if it is missing. Raises CannotBuild."""
        path = library_path(instructions)
        library = ctypes.CDLL(str(path))
        if library.baton_kernels_version() != VERSION:
            raise CannotBuild(f"{path} is of another version")
        if refused := library.baton_permit():
            raise CannotBuild(f"the kernel does not let processes use it: {os.strerror(refused)}")
        self.instructions = instructions
        self.identity = path.name  # names the sources and the instruction set
        self.library = library  # for modules that declare their functions themselves (step.py)
        self.sampling = SamplingKernels(library)
        self._panel = library.baton_panel()  # number of outputs that are packed together
        self._pack = library.baton_pack
        self._pack.argtypes = (_POINTER, _POINTER, _SIZE, _SIZE)
        self._add_norm = library.baton_add_norm
        self._add_norm.argtypes = (*[_POINTER] * 4, _SIZE, _SIZE, ctypes.c_float, ctypes.c_float)
        self._gated = library.baton_gated
        self._gated.argtypes = (_POINTER, _POINTER, _SIZE, _SIZE, _SIZE)
        self._gate_heads = library.baton_gate_heads
        self._linear = library.baton_linear
        self._ask_every = library.baton_ask_every
        self._ask_keys_near = library.baton_ask_keys_near
        self._ask_every.argtypes = self._ask_keys_near.argtypes = (_SIZE,)
        self._rotate = library.baton_rotate
        self._store = library.baton_store_rows
        self._store_int8 = library.baton_store_int8
        self._decode = library.baton_decode_attention
        for function in (
            self._pack, self._add_norm, self._gated, self._linear, self._rotate, self._store,
            self._decode, self._gate_heads, self._ask_every, self._ask_keys_near, self._store_int8,
        ):  # fmt: skip
            function.restype = None

    def place_team(self, own: Sequence[int], spare: Sequence[int]) -> list[int]:
        """Bind the calling thread's OpenMP team, which then has a thread for each core: those
        behind the first len(own) to a core of `spare` each, the others to `own`. Return Linux'
        ids of the threads on `spare`.

        Raises OSError if the kernel refuses a core.
        """
        many, few = ctypes.c_int32 * len(own), ctypes.c_int32 * len(spare)
        threads = few()
        refused = self.library.baton_place_team(
            many(*own), _SIZE(len(own)), few(*spare), _SIZE(len(spare)), threads
        )
        if refused:
            raise OSError(refused, os.strerror(refused))
        return list(threads)

    def pack(self, weight: Tensor) -> Tensor:
        """Pack weight [.., outputs, inputs] bfloat16, with an even number of inputs, into panels
        for `linear`: each matrix into its own.
        """
        weight = weight.contiguous()
        *several, outputs, inputs = weight.shape
        shape = (*several, -(-outputs // self._panel), inputs // 2, self._panel, 2)
        panels = huge_pages.zeros(*shape, dtype=torch.bfloat16)
        matrices, to = weight.view(-1, outputs, inputs), panels.view(-1, *shape[-4:])
        for matrix, packed in zip(matrices, to, strict=True):
            self._pack(matrix.data_ptr(), packed.data_ptr(), outputs, inputs)
        return panels

    def ask_every(self, lines: int) -> None:
        """Set how often products of few rows ask memory for the next panel: for each `lines`-th
        cache line. Of the whole library; results do not depend on it."""
        self._ask_every(lines)

    def ask_keys_near(self, near: bool) -> None:
        """Set whether decode attention asks for keys and values into a core's first cache, not its
        second. Of the whole library; results do not depend on it."""
        self._ask_keys_near(near)

    def linear(
        self,
        x: Tensor,
        panels: Tensor,
        bias: Tensor | None,
        outputs: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Tensor:
        """Multiply x [T, inputs] bfloat16; return [T, outputs] as bfloat16, or unrounded as
        float32.

        See linear.h.
        """
        x = x.contiguous()
        rows, inputs = x.shape
        y = torch.empty(rows, outputs, dtype=dtype)
        args = _LinearArgs(
            x.data_ptr(), panels.data_ptr(), None if bias is None else bias.data_ptr(),
            y.data_ptr(), rows, inputs, outputs, wide_pointer(y),
        )  # fmt: skip
        self._linear(ctypes.byref(args))
        return y

    def add_norm(
        self,
        residual: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        epsilon: float,
        offset: float = 0.0,
    ) -> Tensor:
        """Add `delta` to `residual` in place, and return the RMSNorm of the sum by weight + offset.

        All are [T, H] bfloat16; H is a multiple of 16.
        """
        if delta is not None:
            delta = delta.contiguous()
        y = torch.empty_like(residual)
        self._add_norm(
            residual.data_ptr(), None if delta is None else delta.data_ptr(), weight.data_ptr(),
            y.data_ptr(), residual.shape[0], residual.shape[1], epsilon, offset,
        )  # fmt: skip
        return y

    def rotate(
        self, qkv: Tensor, rotation: Rotation, num_heads: int, norms: HeadNorms | None
    ) -> None:
        """Normalize and rotate the query and key heads of qkv [T, heads + 2 * kv_heads, dim] in
        place.

        The rotation is in bfloat16. dim is a multiple of 32, and so are the dims that rotate.
        """
        rows, total, dim = qkv.shape
        rule = NormRule() if norms is None else NormRule(norms.epsilon, norms.offset)
        args = _RotateArgs(
            qkv.data_ptr(), rotation.cos.data_ptr(), rotation.sin.data_ptr(),
            None if norms is None else norms.query.data_ptr(),
            None if norms is None else norms.key.data_ptr(),
            rows, num_heads, (total - num_heads) // 2, dim, rotation.rotated,
            rotation.pairs is PairRotation.NEIGHBOURS, rule,
        )  # fmt: skip
        self._rotate(ctypes.byref(args))

    def gated(self, gate_up: Tensor, gelu: bool = False) -> Tensor:
        """Return silu(gate) * up [T, I] for gate_up [T, 2 * I] bfloat16; I is a multiple of 16.

        With `gelu`, the tanh form of GELU takes the place of silu.
        """
        gate_up = gate_up.contiguous()
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        y = torch.empty(rows, size, dtype=torch.bfloat16)
        self._gated(gate_up.data_ptr(), y.data_ptr(), rows, size, gelu)
        return y

    def gate_heads(self, x: Tensor, gates: Tensor) -> None:
        """Multiply x [T, heads, dim] in place by the sigmoid of gates [T, heads, dim], both
        bfloat16; dim is a multiple of 16. The numbers of x lie side by side, as do those of a
        gate.
        """
        rows, heads, dim = x.shape
        args = _GateHeadsArgs(
            x.data_ptr(), gates.data_ptr(), rows, heads, dim, gates.stride(0), gates.stride(1)
        )
        self._gate_heads(ctypes.byref(args))

    def store(self, x: Tensor, pool: Tensor, slots: Tensor) -> None:
        """Copy x [T, heads, dim] to flat `slots` [T] int64 of pool [blocks, block_size, heads,
        dim].

        Both have the same dtype, and the numbers of a token lie side by side in both.
        """
        size = pool.element_size()
        args = _StoreArgs(
            x.data_ptr(), pool.data_ptr(), slots.data_ptr(),
            x.shape[0], x.shape[1] * x.shape[2] * size, x.stride(0) * size,
            pool.stride(0) * size, pool.stride(1) * size, pool.shape[1],
        )  # fmt: skip
        self._store(ctypes.byref(args))

    def store_int8(self, x: Tensor, pool: Tensor, scales: Tensor, slots: Tensor) -> None:
        """Round x [T, heads, dim] bfloat16 to flat `slots` [T] int64 of pool [blocks, block_size,
        heads, dim] int8, with a scale for each head in scales [blocks, block_size, heads] float32.

        The numbers of a token lie side by side in all of them.
        """
        args = _Int8StoreArgs(
            x.data_ptr(), pool.data_ptr(), scales.data_ptr(), slots.data_ptr(),
            *x.shape, x.stride(0), pool.shape[1], *pool.stride()[:2], *scales.stride()[:2],
        )  # fmt: skip
        self._store_int8(ctypes.byref(args))

    def decode_attention(
        self, q: Tensor, out: Tensor, layer: DecodeLayer, batch: DecodeRows
    ) -> None:
        """Fill the rows of `batch` in out [T, query_heads, v_dim] from q [T, query_heads,
        k_dim].
        """
        self._decode(ctypes.byref(decode_args(q, out, layer, batch)))


def wide_pointer(y: Tensor) -> int | None:
    """Return the address of y for the field `wide` if y is float32, else None."""
    return y.data_ptr() if y.dtype == torch.float32 else None


def decode_args(q: Tensor, out: Tensor, layer: DecodeLayer, batch: DecodeRows) -> DecodeArgs:
    """Return attention.h's DecodeArgs of a step's decode rows."""
    return DecodeArgs(
        q.data_ptr(), out.data_ptr(), layer.keys.data_ptr(), layer.values.data_ptr(),
        batch.tables.data_ptr(), batch.rows.data_ptr(), batch.spans.data_ptr(),
        batch.tokens.data_ptr(), batch.first.data_ptr(),
        None if layer.sinks is None else layer.sinks.data_ptr(),
        batch.rows.shape[0], batch.tables.shape[1], q.stride(0), *out.stride()[:2],
        *layer_values(q, layer),
    )  # fmt: skip


def layer_values(q: Tensor, layer: DecodeLayer) -> tuple[float | ScaleFields, ...]:
    """Return the values of LAYER_FIELDS of a layer, for q [T, query_heads, k_dim]."""
    keys, values = layer.keys, layer.values
    return (
        *keys.stride()[:3], *values.stride()[:3],
        q.shape[1], keys.shape[2], keys.shape[3], values.shape[3], keys.shape[1],
        layer.window, layer.scale, layer.softcap, layer.scale_fields,
    )  # fmt: skip


def kernels() -> CpuKernels | None:
    """Return this machine's kernels, compiled at the first call; None, logged once, without
    them.
    """
    return _found()[0]


def kernels_for(dtype: torch.dtype, device: torch.device) -> CpuKernels | None:
    """Return the kernels if they serve tensors of this dtype and device, else None.

    The first call may take a measurement (asking_state).
    """
    if device.type != "cpu" or dtype != torch.bfloat16:
        return None
    asking_state()
    return kernels()


def product_kernels_for(dtype: torch.dtype, device: torch.device) -> CpuKernels | None:
    """Return the kernels if they are the fastest for products with weights, else None.

    On a processor with AMX, oneDNN is faster than kernels without tiles.
    """
    found = kernels_for(dtype, device)
    if found is None or (torch.cpu._is_amx_tile_supported() and not found.instructions.tiles):
        return None
    return found


def state() -> str:
    """Return a text for people: which kernels serve on this machine, and why."""
    return _found()[1]


@functools.cache
def asking_state() -> str:
    """Choose how the kernels ask memory, and say it: when they are first needed, since it may take
    a measurement."""
    found = kernels()
    told = "" if found is None else choose_asking(found)
    logger.info("CPU kernels: %s", told)
    return told


@functools.cache
def _found() -> tuple[CpuKernels | None, str]:
    found, state = choose(os.environ.get(SWITCH))
    logger.info("CPU kernels: %s", state)
    return found, state


def choose(asked: str | None) -> tuple[CpuKernels | None, str]:
    """Return the kernels of the instruction set `asked`, or with None those of the best possible
    set.

    The second result tells people which kernels they are, and why not better ones.
    """
    candidates = [each for each in INSTRUCTION_SETS if not is_slow(each) and not each.by_name]
    reasons = [
        f"{each.title}: slow on this processor" for each in INSTRUCTION_SETS if is_slow(each)
    ]
    reasons += [
        f"{each.title}: only where {SWITCH} is {each.name}"
        for each in INSTRUCTION_SETS
        if each.by_name and not missing(each.cpu_flags)
    ]
    if asked is not None:
        candidates = [each for each in INSTRUCTION_SETS if each.name == asked]
        reasons = [f"{SWITCH} is {asked}"]
        if not candidates and asked != "off":
            names = ", ".join(each.name for each in INSTRUCTION_SETS)
            reasons = [f"{SWITCH} is {asked}, which is none of {names}, off"]
            logger.warning("%s: torch's own serve, which are several times slower", reasons[0])
    for instructions in candidates:
        try:
            return CpuKernels(instructions), _described(f"compiled, {instructions.title}", reasons)
        except (CannotBuild, OSError) as error:
            reasons.append(f"{instructions.title}: {error}")
    return None, _described("torch's own serve", reasons)


def _described(what: str, reasons: Sequence[str]) -> str:
    return f"{what}, because {'; '.join(reasons)}" if reasons else what
