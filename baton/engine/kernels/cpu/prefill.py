"""Paged prefill attention: the call of the compiled kernel (prefill.h).

Not here: which spans of a step use it (attention/compiled.py).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from torch import Tensor

from baton.engine.kernels.cpu.library import LAYER_FIELDS, CpuKernels, DecodeLayer, layer_values

_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_int64


class _PrefillArgs(ctypes.Structure):
    """PrefillArgs of prefill.h."""

    _fields_ = (
        *((n, _POINTER) for n in ("q", "out", "keys", "values", "tables", "spans", "rows")),
        *((n, _POINTER) for n in ("sizes", "starts", "first", "sinks")),
        *((n, _SIZE) for n in ("count", "width", "q_stride")),
        *LAYER_FIELDS,
    )


@dataclass(frozen=True, slots=True)
class PrefillSpans:
    """Spans of several new tokens each. All tensors are int64; all but `tables` have one number per
    span.

    `rows`: its first row in q and out. `sizes`: its number of rows. `starts`: the position of its
    first row. `spans`: its row in `tables` [S, width], which lists block ids from block `first` on.
    """

    spans: Tensor
    rows: Tensor
    sizes: Tensor
    starts: Tensor
    first: Tensor
    tables: Tensor


class PrefillKernel:
    """The library's prefill attention. Stateless; safe from any thread."""

    def __init__(self, kernels: CpuKernels) -> None:
        self._call = kernels.library.baton_prefill_attention
        self._call.restype = None

    def __call__(self, q: Tensor, out: Tensor, layer: DecodeLayer, spans: PrefillSpans) -> None:
        """Fill the spans' rows of out [T, query_heads, v_dim] from q [T, query_heads, k_dim]."""
        sinks = None if layer.sinks is None else layer.sinks.data_ptr()
        args = _PrefillArgs(
            q.data_ptr(), out.data_ptr(), layer.keys.data_ptr(), layer.values.data_ptr(),
            spans.tables.data_ptr(), spans.spans.data_ptr(), spans.rows.data_ptr(),
            spans.sizes.data_ptr(), spans.starts.data_ptr(), spans.first.data_ptr(), sinks,
            spans.rows.shape[0], spans.tables.shape[1], q.stride(0), *layer_values(q, layer),
        )  # fmt: skip
        self._call(ctypes.byref(args))
