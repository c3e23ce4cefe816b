"""The compiled CPU kernels of int8 KV (attention_int8.h) as Python calls.

They are part of the library of library.py. The caller checks that a layer suits them
(attention/compiled.py).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.kernels.cpu.library import (
    CpuKernels,
    DecodeArgs,
    DecodeLayer,
    DecodeRows,
    decode_args,
    kernels_for,
)

_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_int64


class _Int8DecodeArgs(ctypes.Structure):
    """Int8DecodeArgs of attention_int8.h."""

    _fields_ = (
        ("base", DecodeArgs),
        *((name, _POINTER) for name in ("key_scales", "value_scales")),
        *((name, _SIZE) for name in ("key_scale_block", "key_scale_token")),
        *((name, _SIZE) for name in ("value_scale_block", "value_scale_token")),
    )


class _Int8StoreArgs(ctypes.Structure):
    """Int8StoreArgs of attention_int8.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("x", "pool", "scales", "slots")),
        *((name, _SIZE) for name in ("rows", "heads", "dim", "stride", "block_size")),
        *((name, _SIZE) for name in ("pool_block", "pool_token", "scale_block", "scale_token")),
    )


@dataclass(frozen=True, slots=True)
class Int8Layer:
    """One layer's pool and how it attends: a DecodeLayer of int8, and the scales of its numbers.

    Scales are [blocks, block_size, kv_heads] float32. The numbers of a token lie side by side.
    """

    plain: DecodeLayer
    key_scales: Tensor
    value_scales: Tensor


class Int8KVKernels:
    """The library's functions. Stateless; safe from any thread."""

    def __init__(self, kernels: CpuKernels) -> None:
        self._store = kernels.library.baton_store_int8
        self._decode = kernels.library.baton_decode_attention_int8
        for function in (self._store, self._decode):
            function.restype = None

    def write(self, k: Tensor, v: Tensor, layer: Int8Layer, slots: Tensor) -> None:
        """Round k and v into the layer's pool, at flat `slots` [T] int64.

        k and v are [T, heads, dim] bfloat16, with the numbers of a row side by side.
        """
        self._round(k, layer.plain.keys, layer.key_scales, slots)
        self._round(v, layer.plain.values, layer.value_scales, slots)

    def decode_attention(self, q: Tensor, out: Tensor, layer: Int8Layer, batch: DecodeRows) -> None:
        """Fill the rows of `batch` in out [T, query_heads, v_dim] from q [T, query_heads,
        k_dim].
        """
        args = _Int8DecodeArgs(
            decode_args(q, out, layer.plain, batch),
            layer.key_scales.data_ptr(), layer.value_scales.data_ptr(),
            *layer.key_scales.stride()[:2], *layer.value_scales.stride()[:2],
        )  # fmt: skip
        self._decode(ctypes.byref(args))

    def _round(self, x: Tensor, numbers: Tensor, scales: Tensor, slots: Tensor) -> None:
        args = _Int8StoreArgs(
            x.data_ptr(), numbers.data_ptr(), scales.data_ptr(), slots.data_ptr(),
            *x.shape, x.stride(0), numbers.shape[1],
            *numbers.stride()[:2], *scales.stride()[:2],
        )  # fmt: skip
        self._store(ctypes.byref(args))


def int8_kv_kernels_for(dtype: torch.dtype, device: torch.device) -> Int8KVKernels | None:
    """Return the kernels if they serve queries of this dtype and device, else None."""
    compiled = kernels_for(dtype, device)
    return None if compiled is None else Int8KVKernels(compiled)
