"""What a checkpoint holds of one tensor: numbers as they lie in a file, or smaller ones to widen.

    StoredTensor    read straight to its place, cast on the way
    WidenedTensor   computed from what is stored of it, a slab of its first dimension at a time

Both fill memory that the caller owns, so a model never lies in memory twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final, Protocol

import torch
from torch import Tensor

from baton.engine.quantization.integer import IntWeight
from baton.protocol.errors import ModelRefused

_BUFFER_BYTES: Final = 1 << 20  # transformers reads with many threads, each with one
SLAB_NUMBERS: Final = 1 << 20  # widened at once, in float32


class Readable(Protocol):
    """A tensor of a checkpoint, under the name that the model knows it by."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor that is read."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """One that holds what is read."""
        ...

    @property
    def num_bytes(self) -> int:
        """In the files."""
        ...

    def fill(self, target: Tensor) -> None:
        """Write it into flat `target`, cast to its dtype. Raises ModelRefused if a file ends."""
        ...


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: bytes [start, start + num_bytes) of `path`."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def fill(self, target: Tensor) -> None:
        """See Readable.fill."""
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start)
            if target.dtype == self.dtype and target.device.type == "cpu":
                _read_exactly(file, target, self.path)
                return
            step = _BUFFER_BYTES // self.dtype.itemsize
            buffer = torch.empty(min(step, target.numel()), dtype=self.dtype)
            for at in range(0, target.numel(), step):
                part = buffer[: min(step, target.numel() - at)]
                _read_exactly(file, part, self.path)
                target[at : at + part.numel()].copy_(part)

    def read(self) -> Tensor:
        """All of it, as stored, on the CPU; owned by the caller."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        self.fill(whole.view(-1))
        return whole


def _read_exactly(file: FileIO, target: Tensor, path: Path) -> None:
    """Fill contiguous `target` from the file's position. Raises ModelRefused at its end."""
    view = target.view(torch.uint8).numpy().data
    while view:
        count = file.readinto(view)
        if not count:
            raise ModelRefused(f"{path} has become shorter while it was read", field="model")
        view = view[count:]


Slab = Callable[[int, int], Tensor]  # (start, stop) of the first dimension -> those numbers, float


@dataclass(frozen=True, slots=True)
class WidenedTensor:
    """A tensor `name` that is computed from `parts`. `open_slabs` reads them; so does
    `open_integers`, where a product may keep the integers that they hold [out, in]."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[StoredTensor, ...]
    open_slabs: Callable[[], Slab]
    dtype: torch.dtype = torch.float32
    open_integers: Callable[[], IntWeight] | None = None

    @property
    def num_bytes(self) -> int:
        """See Readable."""
        return sum(part.num_bytes for part in self.parts)

    def fill(self, target: Tensor) -> None:
        """See Readable.fill. Raises ModelRefused for what is no number (a damaged scale)."""
        slab = self.open_slabs()
        whole = target.view(self.shape)
        step = max(1, SLAB_NUMBERS // max(1, math.prod(self.shape[1:])))
        for start in range(0, self.shape[0], step):
            numbers = slab(start, min(start + step, self.shape[0]))
            if not bool(torch.isfinite(numbers).all()):
                raise refused(self.name, "some of its weights are not finite")
            whole[start : start + step].copy_(numbers)


def refused(name: str, why: str) -> ModelRefused:
    """The refusal of a model for its tensor `name`."""
    return ModelRefused(f"{name}: {why}", field="model")
