"""How keys and values get into a pool of int8: the call of the compiled kernel (attention_int8.h).

It is part of the library of library.py, whose attention reads such pools. The caller checks that a
layer suits it (attention/compiled.py).
"""

from __future__ import annotations

import ctypes

from torch import Tensor

from baton.engine.kernels.cpu.library import CpuKernels

_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_int64


class _Int8StoreArgs(ctypes.Structure):
    """Int8StoreArgs of attention_int8.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("x", "pool", "scales", "slots")),
        *((name, _SIZE) for name in ("rows", "heads", "dim", "stride", "block_size")),
        *((name, _SIZE) for name in ("pool_block", "pool_token", "scale_block", "scale_token")),
    )


class Int8Store:
    """The library's rounding into a pool. Stateless; safe from any thread."""

    def __init__(self, kernels: CpuKernels) -> None:
        self._call = kernels.library.baton_store_int8
        self._call.restype = None

    def __call__(self, x: Tensor, pool: Tensor, scales: Tensor, slots: Tensor) -> None:
        """Round x [T, heads, dim] bfloat16 to flat `slots` [T] int64 of pool [blocks, block_size,
        heads, dim] int8, with a scale for each head in scales [blocks, block_size, heads] float32.

        The numbers of a token lie side by side in all of them.
        """
        args = _Int8StoreArgs(
            x.data_ptr(), pool.data_ptr(), scales.data_ptr(), slots.data_ptr(),
            *x.shape, x.stride(0), pool.shape[1], *pool.stride()[:2], *scales.stride()[:2],
        )  # fmt: skip
        self._call(ctypes.byref(args))
