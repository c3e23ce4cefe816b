"""The compiled CPU kernels of int8 KV (attention_int8.h) as Python calls.

They come with the library of library.py; what they need of a layer is checked by who asks
(attention/compiled_int8.py).
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from baton.engine.kernels.cpu.build import library_path
from baton.engine.kernels.cpu.library import DecodeArgs, DecodeRows, kernels_for

_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_int64


class _Int8DecodeArgs(ctypes.Structure):
    """attention_int8.h's Int8DecodeArgs."""

    _fields_ = (
        ("base", DecodeArgs),
        *((name, _POINTER) for name in ("key_scales", "value_scales")),
        *((name, _SIZE) for name in ("key_scale_block", "key_scale_token")),
        *((name, _SIZE) for name in ("value_scale_block", "value_scale_token")),
    )


class _Int8StoreArgs(ctypes.Structure):
    """attention_int8.h's Int8StoreArgs."""

    _fields_ = (
        *((name, _POINTER) for name in ("x", "pool", "scales", "slots")),
        *((name, _SIZE) for name in ("rows", "heads", "dim", "stride", "block_size")),
        *((name, _SIZE) for name in ("pool_block", "pool_token", "scale_block", "scale_token")),
    )


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """One layer's keys (or values) [blocks, block_size, kv_heads, dim] int8, a token's numbers side
    by side, and their scales [blocks, block_size, kv_heads] float32."""

    numbers: Tensor
    scales: Tensor


@dataclass(frozen=True, slots=True)
class Int8Layer:
    """One layer's pool and how it attends (attention/base.py)."""

    keys: Int8Rows
    values: Int8Rows
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None  # [query_heads] float32


class Int8KVKernels:
    """The library's functions. Stateless; safe from any thread."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._store = library.baton_store_int8
        self._decode = library.baton_decode_attention_int8
        for function in (self._store, self._decode):
            function.restype = None

    def store(self, x: Tensor, pool: Int8Rows, slots: Tensor) -> None:
        """Round x [T, heads, dim] bfloat16, a row's numbers side by side, into flat `slots` [T]
        int64 of the pool, which is mutated."""
        numbers, scales = pool.numbers, pool.scales
        args = _Int8StoreArgs(
            x.data_ptr(), numbers.data_ptr(), scales.data_ptr(), slots.data_ptr(),
            *x.shape, x.stride(0), numbers.shape[1],
            *numbers.stride()[:2], *scales.stride()[:2],
        )  # fmt: skip
        self._store(ctypes.byref(args))

    def decode_attention(self, q: Tensor, out: Tensor, layer: Int8Layer, batch: DecodeRows) -> None:
        """Fill `batch`'s rows of out [T, query_heads, v_dim] from q [T, query_heads, k_dim]."""
        keys, values = layer.keys.numbers, layer.values.numbers
        base = DecodeArgs(
            q.data_ptr(), out.data_ptr(), keys.data_ptr(), values.data_ptr(),
            batch.tables.data_ptr(), batch.rows.data_ptr(), batch.spans.data_ptr(),
            batch.tokens.data_ptr(), batch.first.data_ptr(),
            None if layer.sinks is None else layer.sinks.data_ptr(),
            batch.rows.shape[0], batch.tables.shape[1], q.stride(0),
            *keys.stride()[:3], *values.stride()[:3],
            q.shape[1], keys.shape[2], keys.shape[3], values.shape[3], keys.shape[1],
            layer.window, layer.scale, layer.softcap,
        )  # fmt: skip
        key_scales, value_scales = layer.keys.scales, layer.values.scales
        args = _Int8DecodeArgs(
            base, key_scales.data_ptr(), value_scales.data_ptr(),
            *key_scales.stride()[:2], *value_scales.stride()[:2],
        )  # fmt: skip
        self._decode(ctypes.byref(args))


def int8_kv_kernels_for(dtype: torch.dtype, device: torch.device) -> Int8KVKernels | None:
    """The kernels, where queries of this kind are what they take."""
    return None if kernels_for(dtype, device) is None else _int8_kv_kernels()


@functools.cache
def _int8_kv_kernels() -> Int8KVKernels:
    return Int8KVKernels(library_path())
