"""The compiled sampling kernels (sampling.h) as Python calls; every shape is checked here."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_int64


class _HighestArgs(ctypes.Structure):
    """HighestArgs of sampling.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("logits", "values", "ids")),
        *((name, _SIZE) for name in ("rows", "size", "stride")),
    )


class _RaceArgs(ctypes.Structure):
    """RaceArgs of sampling.h."""

    _fields_ = (
        *((n, _POINTER) for n in ("logits", "highest", "temperatures", "keys", "ids")),
        *((n, _SIZE) for n in ("rows", "size", "stride")),
    )


class _TopArgs(ctypes.Structure):
    """TopArgs of sampling.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("logits", "values", "ids")),
        *((name, _SIZE) for name in ("rows", "size", "stride", "count")),
    )


class SamplingKernels:
    """Three functions of the library. Stateless; safe from any thread."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._highest = library.baton_highest
        self._race = library.baton_race
        self._top = library.baton_top
        for function in (self._highest, self._race, self._top):
            function.restype = None

    def highest(self, logits: Tensor) -> tuple[list[float], list[int]]:
        """Return the maximum of each row of logits [N, vocab] float32, NaN if it holds one, and the
        lowest id that has it.
        """
        rows, size = _shape(logits)
        values, ids = (ctypes.c_float * rows)(), (_SIZE * rows)()
        args = _HighestArgs(
            logits.data_ptr(), ctypes.addressof(values), ctypes.addressof(ids), rows, size,
            logits.stride(0),
        )  # fmt: skip
        self._highest(ctypes.byref(args))
        return values[:], ids[:]

    def top(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the `count` highest values of each row of logits [N, vocab], and their ids.

        logits are float32 without NaN. Both results are [N, count], in no order. If fewer values of
        a row are above -inf, the rest is -inf with id 0. If only some of several equal lowest
        values fit, it is not defined which ones are taken.
        """
        rows, size = _shape(logits)
        if not 0 < count <= size:
            raise ValueError(f"no {count} highest of {size}")
        values = torch.empty(rows, count, dtype=torch.float32)
        ids = torch.empty(rows, count, dtype=torch.int64)
        args = _TopArgs(
            logits.data_ptr(),
            values.data_ptr(),
            ids.data_ptr(),
            rows,
            size,
            logits.stride(0),
            count,
        )
        self._top(ctypes.byref(args))
        return values, ids

    def race(
        self, logits: Tensor, highest: Tensor, temperatures: Sequence[float], keys: Sequence[int]
    ) -> list[int | None]:
        """Return the token that wins each row's keyed draw; None if it is too close to decide here.

        logits are [N, vocab] float32, `highest` [N] their maxima, all finite. There is one
        temperature and one unsigned 64-bit key per row.
        """
        rows, size = _shape(logits)
        degrees = np.array(temperatures, np.float32)
        numbers = np.array(keys, np.uint64)
        if not len(degrees) == len(numbers) == highest.shape[0] == rows:
            raise ValueError("one maximum, temperature and key per row")
        highest = highest.contiguous()
        ids = np.empty(rows, np.int64)
        args = _RaceArgs(
            logits.data_ptr(), highest.data_ptr(), degrees.ctypes.data, numbers.ctypes.data,
            ids.ctypes.data, rows, size, logits.stride(0),
        )  # fmt: skip
        self._race(ctypes.byref(args))
        return [None if token < 0 else token for token in ids.tolist()]


def _shape(logits: Tensor) -> tuple[int, int]:
    rows, size = logits.shape
    if logits.dtype != torch.float32 or logits.device.type != "cpu" or logits.stride(1) != 1:
        raise ValueError("logits must be float32 on the CPU, a row's side by side")
    return rows, size
