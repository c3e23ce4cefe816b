"""Latent attention's queries, keys and values in compiled calls (latent.h).

Not here: the algebra (models/mla.py), and which layers use them (models/layers/latent.py).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from baton.engine.kernels.cpu.library import CpuKernels
from baton.engine.kernels.cpu.step_linears import StepLinear, StepLinears
from baton.engine.kernels.rope import PairRotation, Rotation

_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_int64
_PAIRS: Final = (PairRotation.HALVES, PairRotation.NEIGHBOURS, PairRotation.REGROUPED)


class LatentFields(ctypes.Structure):
    """LatentSizes of latent.h."""

    _fields_ = tuple(
        (name, _SIZE) for name in ("heads", "nope", "rope", "rank", "value_dim", "pairs")
    )


class LatentWeights(ctypes.Structure):
    """LatentWeights of latent.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("norm", "keys", "values")),
        ("epsilon", ctypes.c_float),
    )


class _LatentRows(ctypes.Structure):
    """LatentRows of latent.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("q", "latent", "cos", "sin")),
        *((name, _SIZE) for name in ("rows", "q_stride", "latent_stride")),
    )


class _QueriesArgs(ctypes.Structure):
    """LatentQueriesArgs of latent.h."""

    _fields_ = (
        ("sizes", LatentFields),
        ("by", LatentWeights),
        ("rows", _LatentRows),
        *((name, _POINTER) for name in ("parts", "queries", "keys")),
    )


class _ValuesArgs(ctypes.Structure):
    """LatentValuesArgs of latent.h."""

    _fields_ = (
        ("sizes", LatentFields),
        ("by", LatentWeights),
        *((name, _POINTER) for name in ("attended", "y")),
        ("rows", _SIZE),
    )


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Sizes of latent attention: of a head's query without and with rotation, of a latent, of a
    head's value; and which dims rotate together."""

    heads: int
    nope: int
    rope: int
    rank: int
    value_dim: int
    pairs: PairRotation

    @property
    def queries(self) -> int:
        """Numbers of a row's queries before they meet latents."""
        return self.heads * (self.nope + self.rope)

    @property
    def key(self) -> int:
        """Numbers of a key."""
        return self.rank + self.rope

    @property
    def outputs(self) -> int:
        """Numbers of a row's values."""
        return self.heads * self.value_dim

    @property
    def scratch(self) -> int:
        """Numbers of a row between its queries and its values."""
        return self.heads * (self.nope + self.key + self.rank)

    @property
    def fields(self) -> LatentFields:
        """The sizes as the kernels take them."""
        pairs = _PAIRS.index(self.pairs)
        return LatentFields(self.heads, self.nope, self.rope, self.rank, self.value_dim, pairs)


NO_LATENTS: Final = LatentSizes(0, 0, 0, 0, 0, PairRotation.HALVES)


class CompiledLatents:
    """Implements Latents (models/layers/latent.py) for bfloat16 rows on a CPU, and for sizes that
    `suits` allows. It rounds once, where its twin rounds after each operation."""

    def __init__(
        self,
        kernels: CpuKernels,
        sizes: LatentSizes,
        norm: Tensor,
        key: Tensor,
        value: Tensor,
        epsilon: float,
    ) -> None:
        """Take the weight `norm` [rank] of latents, and the panels of W_uk^T, `key`, and W_uv,
        `value`, of each head, all bfloat16. `epsilon`: the norm's."""
        self.sizes = sizes
        self._norm = norm
        self._keys = StepLinears([StepLinear(panels, None) for panels in key])
        self._values = StepLinears([StepLinear(panels, None) for panels in value])
        self.weights = LatentWeights(
            norm.data_ptr(), self._keys.address, self._values.address, epsilon
        )
        self._before = kernels.library.baton_latent_queries
        self._after = kernels.library.baton_latent_values
        self._before.restype = self._after.restype = None

    @staticmethod
    def suits(sizes: LatentSizes) -> bool:
        """Whether latents and what rotates are whole vectors, and products have pairs of inputs."""
        return not (sizes.rope % 32 or sizes.rank % 16 or sizes.nope % 2)

    def queries(self, q: Tensor, latent: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """See Latents."""
        sizes, rows = self.sizes, q.shape[0]
        parts = q.new_empty(sizes.heads, rows, sizes.nope)
        queries = q.new_empty(rows, sizes.heads, sizes.key)
        keys = q.new_empty(rows, 1, sizes.key)
        args = _QueriesArgs(
            sizes.fields, self.weights,
            _LatentRows(
                q.data_ptr(), latent.data_ptr(), rotation.cos.data_ptr(), rotation.sin.data_ptr(),
                rows, q.stride(0), latent.stride(0),
            ),
            parts.data_ptr(), queries.data_ptr(), keys.data_ptr(),
        )  # fmt: skip
        self._before(ctypes.byref(args))
        return queries, keys

    def values(self, attended: Tensor) -> Tensor:
        """See Latents."""
        by_head = attended.transpose(0, 1).contiguous()
        y = attended.new_empty(attended.shape[0], self.sizes.outputs)
        args = _ValuesArgs(
            self.sizes.fields, self.weights, by_head.data_ptr(), y.data_ptr(), len(y)
        )
        self._after(ctypes.byref(args))
        return y
