"""The gated delta rule over recurrent states: the call of the compiled kernel (delta_rule.h).

Not here: the algebra and the torch twin (kernels/delta_rule.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from baton.engine.kernels.cpu.library import CpuKernels
from baton.engine.kernels.delta_rule import DeltaSizes, DeltaWeights
from baton.engine.state.batch import Span

VECTOR = 16  # numbers in a vector; dims of heads must be whole vectors
_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_int64


class _DeltaArgs(ctypes.Structure):
    """DeltaArgs of delta_args.h."""

    _fields_ = (
        *((n, _POINTER) for n in ("x", "y", "conv", "matrices", "taps", "decay", "step_bias")),
        *((n, _POINTER) for n in ("norm", "rows", "sizes", "slots", "begins")),
        *((n, _SIZE) for n in ("count", "x_stride", "conv_stride", "matrix_stride")),
        *((n, _SIZE) for n in ("key_heads", "value_heads", "key_dim", "value_dim", "num_taps")),
        ("epsilon", ctypes.c_float),
    )


class CompiledDeltaRule:
    """Implements DeltaRule for bfloat16 rows on a CPU, and for sizes that `suits` allows.

    It rounds once, where its twin's dtype rounds; states are as exact as the twin's. `taps`
    [taps, channels], `decay`, `step_bias` [value_heads] and `norm` [value_dim] are float32.
    """

    def __init__(self, kernels: CpuKernels, sizes: DeltaSizes, weights: DeltaWeights) -> None:
        self.sizes, self.epsilon = sizes, weights.epsilon
        self.taps = weights.conv.float().t().contiguous()
        self.decay = weights.decay.float().contiguous()
        self.step_bias = weights.step_bias.float().contiguous()
        self.norm = weights.norm.float().contiguous()
        self._call = kernels.library.baton_delta_rule
        self._call.restype = None

    @staticmethod
    def suits(sizes: DeltaSizes) -> bool:
        """Whether each head is a whole number of vectors."""
        return not (sizes.key_dim % VECTOR or sizes.value_dim % VECTOR)

    def __call__(self, x: Tensor, conv: Tensor, matrices: Tensor, spans: Sequence[Span]) -> Tensor:
        """See DeltaRule."""
        x, sizes = x.contiguous(), self.sizes
        y = torch.empty(len(x), sizes.values, dtype=torch.bfloat16)
        # Of each span: its first row, its number of rows, its slot, whether it begins.
        numbers = torch.tensor(
            [(s.first_row, s.num_rows, s.state_slot, s.start == 0) for s in spans]
        ).t().contiguous()  # fmt: skip
        rows, lengths, slots, begins = numbers
        args = _DeltaArgs(
            x.data_ptr(), y.data_ptr(), conv.data_ptr(), matrices.data_ptr(),
            self.taps.data_ptr(), self.decay.data_ptr(), self.step_bias.data_ptr(),
            self.norm.data_ptr(), rows.data_ptr(), lengths.data_ptr(), slots.data_ptr(),
            begins.data_ptr(), len(spans), x.stride(0), conv.stride(0), matrices.stride(0),
            sizes.key_heads, sizes.value_heads, sizes.key_dim, sizes.value_dim, sizes.taps,
            self.epsilon,
        )  # fmt: skip
        self._call(ctypes.byref(args))
        return y
