"""Converts KV payloads from one precision to another, by torch on the host; the layout stays.

int8 is symmetric, per token and head: scale = max|row| / 127, x^ = scale * round(x / scale), so |x
- x^| <= scale / 2 = max|row| / 254 before x^ is rounded to the pool's dtype. It is bit for bit what
an int8 pool stores of the same row (baton/engine/attention/kv_store.py). Narrowing casts saturate:
what float16 or fp8 cannot hold becomes their largest number, never infinity. A row with an infinity
or NaN becomes NaN under int8: damaged, and visibly so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from baton.protocol.errors import KVCorrupt
from baton.protocol.kv_spec import DTYPE_BYTES, SCALE_BYTES, LayerSpec
from kv_transfer.protocol.base import Payload
from kv_transfer.protocol.shares import rows_bytes

TORCH_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
_TINY: Final = 1e-12  # least maximum of a row: a row of zeros must not divide by zero


@dataclass(frozen=True, slots=True)
class Rows:
    """K or V of some tokens: `values` [tokens, heads, dim]; int8: `scales` [tokens, heads]."""

    values: torch.Tensor
    scales: torch.Tensor | None = None

    def to(self, dtype: str) -> Rows:
        """Return these rows in another precision; saturation and int8 as the module's docstring
        says.
        """
        target = TORCH_DTYPES[dtype]
        if self.values.dtype == target:
            return self
        if dtype == "int8":
            return quantise(self.exact())
        exact = self.exact()
        if target in (torch.float16, torch.float8_e4m3fn):
            limit = torch.finfo(target).max
            exact = exact.clamp(-limit, limit)
        return Rows(exact.to(target))

    def exact(self) -> torch.Tensor:
        """Return the values as float32 [tokens, heads, dim]."""
        values = self.values.float()
        return values if self.scales is None else values * self.scales[..., None]


def quantise(values: torch.Tensor) -> Rows:
    """Quantise float32 [tokens, heads, dim] to int8 with a scale per token and head."""
    scales = values.abs().amax(-1).clamp_(min=_TINY) / 127
    return Rows((values / scales[..., None]).round_().to(torch.int8), scales)


def unpack(spec: LayerSpec, payload: Payload) -> list[Rows]:
    """Return copies of the K and (unless MLA) V of a payload.

    Raises KVCorrupt for a length that does not fit. `payload.heads` must be given: the bytes do not
    say how many heads they hold.
    """
    heads = payload.heads
    assert heads is not None
    row = rows_bytes(spec, len(heads), payload.dtype)
    num_tokens, rest = divmod(len(payload.data), row)
    if rest:
        raise KVCorrupt(f"payload of {len(payload.data)} bytes, {row} a token")
    dims = [dim for dim in (spec.k_dim, spec.v_dim) if dim]
    num_rows = num_tokens * len(heads)
    taken = 0
    values: list[torch.Tensor] = []
    for dim in dims:
        length = num_rows * dim * DTYPE_BYTES[payload.dtype]
        raw = _tensor(payload.data[taken : taken + length], TORCH_DTYPES[payload.dtype])
        values.append(raw.view(num_tokens, len(heads), dim))
        taken += length
    if payload.dtype != "int8":
        return [Rows(rows) for rows in values]
    found: list[Rows] = []
    for rows in values:
        length = num_rows * SCALE_BYTES
        scales = _tensor(payload.data[taken : taken + length], torch.float32)
        found.append(Rows(rows, scales.view(num_tokens, len(heads))))
        taken += length
    return found


def pack(rows: list[Rows]) -> list[memoryview]:
    """Return the payload's fragments in order: K, V, K's scales, V's scales."""
    tensors = [part.values for part in rows]
    tensors += [part.scales for part in rows if part.scales is not None]
    return [bytes_of(tensor) for tensor in tensors]


def converted(spec: LayerSpec, payload: Payload, dtype: str) -> list[memoryview]:
    """Return the fragments of the payload in another precision."""
    return pack([rows.to(dtype) for rows in unpack(spec, payload)])


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a host tensor in row order: a view if it is contiguous, else a copy."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def _tensor(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    if len(data) == 0:
        return torch.empty(0, dtype=dtype)
    # bytearray: torch wants writable and aligned memory, and a frame is neither
    return torch.frombuffer(bytearray(data), dtype=dtype)
