"""One tensor of a checkpoint: stored as it is, or in a format of fewer bits that is widened.

    StoredTensor    is read directly into its place, and cast if the dtypes differ
    WidenedTensor   is computed from its stored parts, a slab of its first dimension at a time

Both fill memory that the caller owns, so a model is never in memory twice.
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

from baton.engine.quantization.float8 import Float8Weight
from baton.engine.quantization.int_weight import IntWeight
from baton.protocol.errors import ModelRefused

_BUFFER_BYTES: Final = 1 << 20  # one buffer per thread; transformers reads with many threads
SLAB_NUMBERS: Final = 1 << 20  # how many numbers are widened at once, in float32


class Readable(Protocol):
    """A tensor of a checkpoint, under the name that the model knows it by."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor as it is read, after widening."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """A dtype that holds the tensor's numbers as they are read."""
        ...

    @property
    def num_bytes(self) -> int:
        """How many bytes the tensor takes in the files."""
        ...

    def fill(self, target: Tensor) -> None:
        """Write the tensor into flat `target`, cast to target's dtype. Raises ModelRefused if a
        file ends too soon."""
        ...


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a file stores it: bytes [start, start + num_bytes) of `path`."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        """The tensor's size in the file."""
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
        """Read the whole tensor in its stored dtype into new memory on the CPU."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        self.fill(whole.view(-1))
        return whole


def _read_exactly(file: FileIO, target: Tensor, path: Path) -> None:
    """Fill contiguous `target` from the file's position on. Raises ModelRefused if the file ends
    before."""
    view = target.view(torch.uint8).numpy().data
    while view:
        count = file.readinto(view)
        if not count:
            raise ModelRefused(f"{path} has become shorter while it was read", field="model")
        view = view[count:]


Slab = Callable[[int, int], Tensor]  # (start, stop) of the first dimension -> that part, float


@dataclass(frozen=True, slots=True)
class WidenedTensor:
    """A tensor `name` that is computed from `parts`. `open_slabs` reads the parts for widening.
    `open_kept` reads them as a product keeps them, [out, in]; None = a product cannot keep them."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[StoredTensor, ...]
    open_slabs: Callable[[], Slab]
    dtype: torch.dtype = torch.float32
    open_kept: Callable[[], IntWeight | Float8Weight] | None = None

    @property
    def num_bytes(self) -> int:
        """See Readable."""
        return sum(part.num_bytes for part in self.parts)

    def fill(self, target: Tensor) -> None:
        """See Readable.fill. Raises ModelRefused if a number is not finite (a damaged scale)."""
        slab = self.open_slabs()
        whole = target.view(self.shape)
        step = max(1, SLAB_NUMBERS // max(1, math.prod(self.shape[1:])))
        for start in range(0, self.shape[0], step):
            numbers = slab(start, min(start + step, self.shape[0]))
            if not bool(torch.isfinite(numbers).all()):
                raise refused(self.name, "some of its weights are not finite")
            whole[start : start + step].copy_(numbers)


def refused(name: str, why: str) -> ModelRefused:
    """Return the refusal of a model because of its tensor `name`."""
    return ModelRefused(f"{name}: {why}", field="model")
