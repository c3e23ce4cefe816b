"""A decode step of a dense decoder in one compiled call (step.h): its constants, and the call.

`StepModel` holds pointers into a model's weights, `StepPools` into a pool. Each is made once and
keeps alive what it points to. Not here: which steps may use it (models/compiled_step.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.kernels.cpu.library import CpuKernels, DecodeLayer, HeadNorms
from baton.engine.kernels.cpu.quantized import PackedInt8, PackedIntegers

_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_int64


class _StepLinear(ctypes.Structure):
    """StepLinear of step_integers.h."""

    _fields_ = tuple((name, _POINTER) for name in ("panels", "bias", "integers"))


class _StepLayer(ctypes.Structure):
    """StepLayer of step.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("input_norm", "mlp_norm", "query_norm", "key_norm")),
        ("linears", _StepLinear * 4),  # qkv, output, gate_up, down
    )


class _StepIntegers(ctypes.Structure):
    """StepIntegers of step_integers.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("panels", "scales", "extra")),
        *((name, _SIZE) for name in ("groups", "bits", "has_zeros")),
    )


class _StepPool(ctypes.Structure):
    """StepPool of step.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("keys", "values", "sinks")),
        *((name, _SIZE) for name in ("key_block", "key_token", "key_head")),
        *((name, _SIZE) for name in ("value_block", "value_token", "value_head")),
        *((name, _SIZE) for name in ("window", "group")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


class _StepTable(ctypes.Structure):
    """StepTable of step.h."""

    _fields_ = (*((name, _POINTER) for name in ("slots", "blocks", "first")), ("width", _SIZE))


class _StepArgs(ctypes.Structure):
    """StepArgs of step.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("layers", "pools", "tables", "final_norm", "cos", "sin")),
        *((name, _POINTER) for name in ("positions", "residual", "out", "scratch")),
        *((name, _SIZE) for name in ("num_layers", "rows", "hidden", "inner")),
        *((name, _SIZE) for name in ("heads", "kv_heads", "dim", "block_size")),
        ("epsilon", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class StepLinear:
    """The weights of a product, in bfloat16 (CpuKernels.pack) or integers, and its bias.

    The bias is [outputs] bfloat16, or None.
    """

    weights: Tensor | PackedIntegers | PackedInt8
    bias: Tensor | None


class StepLinears:
    """The weights of several products as C structs, one StepLinear after the other at `address`."""

    def __init__(self, linears: Sequence[StepLinear]) -> None:
        self._kept = tuple(linears)
        self._integers = [_integers(each.weights) for each in linears]
        self.array = (_StepLinear * len(linears))(*map(self._pointers, linears, self._integers))
        self.address = ctypes.addressof(self.array)

    @staticmethod
    def _pointers(linear: StepLinear, integers: _StepIntegers | None) -> _StepLinear:
        weights, bias = linear.weights, linear.bias
        return _StepLinear(
            weights.data_ptr() if isinstance(weights, Tensor) else None,
            None if bias is None else bias.data_ptr(),
            None if integers is None else ctypes.addressof(integers),
        )


@dataclass(frozen=True, slots=True)
class StepLayer:
    """The weights of a layer. Norms are [hidden] bfloat16."""

    input_norm: Tensor
    qkv: StepLinear
    head_norms: HeadNorms | None
    output: StepLinear
    mlp_norm: Tensor
    gate_up: StepLinear
    down: StepLinear


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Sizes of a decoder: `hidden` and `inner` (of the gate) are multiples of 16, `dim` of 32."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    epsilon: float

    @property
    def scratch(self) -> int:
        """Return how many numbers of scratch space a row needs."""
        attended = self.heads * self.dim
        wide = max(attended + 2 * self.kv_heads * self.dim, 2 * self.inner)
        return wide + max(attended, self.inner) + self.hidden


@dataclass(frozen=True, slots=True)
class StepTable:
    """Where a layer group's KV of a step lies, all int64: slots [T], blocks [T, W], first [T]."""

    slots: Tensor
    blocks: Tensor
    first: Tensor


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step of T rows, one new token each.

    residual [T, hidden] bfloat16 is overwritten. cos and sin are [T, 1, dim / 2] bfloat16,
    positions [T] int64. `tables` has one per layer group.
    """

    residual: Tensor
    cos: Tensor
    sin: Tensor
    positions: Tensor
    tables: Sequence[StepTable]


class StepPools:
    """The pool as the compiled step uses it: pointers to each layer's keys and values."""

    def __init__(self, layers: Sequence[DecodeLayer], group_of: Sequence[int]) -> None:
        """Take the layers, all of one shape, and in `group_of` the layer group of each."""
        _, self.block_size, self.kv_heads, self.dim = layers[0].keys.shape
        self._kept = tuple(layers)
        pools = [
            _StepPool(
                layer.keys.data_ptr(), layer.values.data_ptr(),
                None if layer.sinks is None else layer.sinks.data_ptr(),
                *layer.keys.stride()[:3], *layer.values.stride()[:3],
                layer.window, group, layer.scale, layer.softcap,
            )
            for layer, group in zip(layers, group_of, strict=True)
        ]  # fmt: skip
        self.pointers = (_StepPool * len(pools))(*pools)

    @staticmethod
    def suit(layers: Sequence[DecodeLayer | None]) -> bool:
        """Whether all layers are bfloat16 and of one shape, with keys as long as values."""
        shapes = {(x.keys.shape[1:], x.values.shape[1:]) for x in layers if x is not None}
        plain = all(x is not None and x.keys.dtype == torch.bfloat16 for x in layers)
        return plain and len(shapes) == 1 and all(keys == values for keys, values in shapes)


class StepModel:
    """A decoder's layers, ready for one call per step."""

    def __init__(
        self,
        kernels: CpuKernels,
        layers: Sequence[StepLayer],
        final_norm: Tensor,
        sizes: StepSizes,
    ) -> None:
        self.sizes = sizes
        self._kept = (tuple(layers), final_norm)
        self._final_norm = final_norm.data_ptr()
        self._linears = [
            StepLinears((layer.qkv, layer.output, layer.gate_up, layer.down)) for layer in layers
        ]
        self._layers = (_StepLayer * len(layers))(*map(self._pointers, layers, self._linears))
        self._call = kernels.library.baton_decode_step
        self._call.restype = None

    def run(self, inputs: StepInputs, pools: StepPools) -> Tensor:
        """Return the hidden states [T, hidden] after the final norm, and write the step's KV to the
        pool.
        """
        sizes, residual = self.sizes, inputs.residual
        rows = residual.shape[0]
        assert (pools.kv_heads, pools.dim) == (sizes.kv_heads, sizes.dim)
        filled = [
            _StepTable(
                table.slots.data_ptr(),
                table.blocks.data_ptr(),
                table.first.data_ptr(),
                table.blocks.shape[1],
            )
            for table in inputs.tables
        ]
        tables = (_StepTable * len(filled))(*filled)
        out = torch.empty_like(residual)
        scratch = torch.empty(rows * sizes.scratch, dtype=torch.bfloat16)
        args = _StepArgs(
            ctypes.addressof(self._layers), ctypes.addressof(pools.pointers),
            ctypes.addressof(tables), self._final_norm,
            inputs.cos.data_ptr(), inputs.sin.data_ptr(), inputs.positions.data_ptr(),
            residual.data_ptr(), out.data_ptr(), scratch.data_ptr(),
            len(self._layers), rows, sizes.hidden, sizes.inner,
            sizes.heads, sizes.kv_heads, sizes.dim, pools.block_size, sizes.epsilon,
        )  # fmt: skip
        self._call(ctypes.byref(args))
        return out

    @staticmethod
    def _pointers(layer: StepLayer, linears: StepLinears) -> _StepLayer:
        norms = layer.head_norms
        return _StepLayer(
            layer.input_norm.data_ptr(),
            layer.mlp_norm.data_ptr(),
            None if norms is None else norms.query.data_ptr(),
            None if norms is None else norms.key.data_ptr(),
            linears.array,
        )


def _integers(weights: Tensor | PackedIntegers | PackedInt8) -> _StepIntegers | None:
    if isinstance(weights, Tensor):
        return None
    panels = weights.panels.data_ptr()
    if isinstance(weights, PackedInt8):
        return _StepIntegers(panels, weights.scales.data_ptr(), weights.extra.data_ptr(), 1, 8, 0)
    return _StepIntegers(
        panels, weights.peaks.data_ptr(), None, weights.groups, weights.bits, weights.has_zeros
    )
