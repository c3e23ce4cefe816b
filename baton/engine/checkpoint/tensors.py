"""Reads tensors of safetensors files directly into their place.

A tensor is read from its file into the memory that the model keeps; several stacked tensors are
each read into their part of it. There is never a mapping of the file or a second copy, so loading
needs no more memory than the weights themselves. A cast or a copy to a device needs one buffer of a
megabyte. `LazyTensor` does the same for transformers, which chooses place and dtype itself.
Source: the format's specification, github.com/huggingface/safetensors.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.engine.checkpoint.stored import Readable, StoredTensor, WidenedTensor
from baton.engine.quantization.float8 import Float8Weight
from baton.engine.quantization.int_weight import IntWeight
from baton.protocol.errors import ModelRefused

log = logging.getLogger(__name__)
LOG_EVERY_S: Final = 2.0
_DTYPES: Final = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
Widen = Callable[[Mapping[str, StoredTensor]], Mapping[str, Readable]]


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor that is not read yet. transformers' loader calls `lazy[...].to(device, dtype)`.

    It replaces a slice of safetensors, of which the loader only ever takes the whole. `to` reads
    the tensor directly into the memory that it returns.
    """

    read: Callable[[torch.device | str | None, torch.dtype | None], Tensor]  # see `to`

    def __getitem__(self, index: EllipsisType) -> LazyTensor:
        """Return the whole tensor, which is not read yet."""
        return self

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Read the tensor into new memory on `device`, cast to `dtype`. Raises ModelRefused if its
        file ends too soon."""
        return self.read(device, dtype)


class LoadProgress:
    """Logs how far one reader of tensors has loaded the weights; a short load logs nothing. Any
    thread may call it."""

    def __init__(self, total_bytes: int, now: Callable[[], float] = time.monotonic) -> None:
        """`now`: seconds of any monotonic clock."""
        self._total = total_bytes
        self._now = now
        self._began = self._logged_at = now()
        self._done = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        """Count `num_bytes` more bytes of the files as read; log now and then."""
        with self._lock:
            self._done = done = min(self._total, self._done + num_bytes)
            now = self._now()
            if now - self._logged_at < LOG_EVERY_S:
                return
            self._logged_at = now
        left = (self._total - done) * (now - self._began) / done
        log.info(
            "loading weights: %d %% of %.1f GB, about %.0f s more",
            100 * done // self._total, self._total / 1e9, left,
        )  # fmt: skip


class TensorReader:
    """Reads tensors of a checkpoint's files by name, in the model's dtype and on its device."""

    def __init__(
        self,
        files: Iterable[Path],
        dtype: torch.dtype,
        device: torch.device,
        widen: Widen | None = None,
    ) -> None:
        """Read the headers of `files`. `widen`: turns the stored tensors into those of the model;
        None = they are the same.

        Raises ModelRefused for a broken file, and as `widen` does.
        """
        self._dtype = dtype
        self._device = device
        stored: dict[str, StoredTensor] = {}
        self._read: set[str] = set()
        for path in files:
            stored.update(_header(path))
        self._stored: Mapping[str, Readable] = stored if widen is None else widen(stored)
        self._progress = LoadProgress(sum(each.num_bytes for each in self._stored.values()))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that tensors are cast to."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """The device that tensors are read to."""
        return self._device

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._stored)

    @property
    def bytes_read(self) -> int:
        """Bytes of all tensors read so far, in the model's dtype; each tensor counts once."""
        numbers = sum(math.prod(self._stored[name].shape) for name in self._read)
        return numbers * self._dtype.itemsize

    def stored(self, name: str) -> Readable:
        """Return tensor `name`, not read yet. Raises ModelRefused if the checkpoint lacks it."""
        if name not in self._stored:
            raise ModelRefused(f"the checkpoint has no tensor {name!r}", field="model")
        return self._stored[name]

    def lazy(self) -> dict[str, LazyTensor]:
        """Return all tensors by name; none of them is read yet."""
        return {
            name: LazyTensor(functools.partial(self._read_placed, stored))
            for name, stored in self._stored.items()
        }

    def _read_placed(
        self, stored: Readable, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> Tensor:
        """See LazyTensor.to."""
        whole = torch.empty(stored.shape, dtype=dtype or stored.dtype, device=device)
        stored.fill(whole.view(-1))
        self._progress.add(stored.num_bytes)
        return whole

    def read(self, *names: str) -> Tensor:
        """Read one tensor, or several stacked along their first dimension, into new memory.

        The result has the model's dtype and is on its device. Raises ModelRefused for a name that
        the checkpoint lacks, for shapes that do not stack, and for a file that ends too soon.
        """
        return self._stack([self.stored(name) for name in names], names, self._dtype)

    def read_as_stored(self, name: str) -> Tensor:
        """Read one tensor in the dtype of its file (quantized weights). Raises as read() does."""
        stored = self.stored(name)
        return self._stack([stored], (name,), stored.dtype)

    def keeps(self, name: str) -> bool:
        """Whether `kept` returns a weight for tensor `name`."""
        stored = self._stored.get(name)
        return isinstance(stored, WidenedTensor) and stored.open_kept is not None

    def kept(self, name: str) -> IntWeight | Float8Weight | None:
        """Read the integers or 8-bit floats that tensor `name` [out, in] is stored as, on the
        model's device; None if it has none that a product keeps. Raises ModelRefused for damaged
        weights and scales, and for a file that ends too soon."""
        stored = self._stored.get(name)
        if not isinstance(stored, WidenedTensor) or stored.open_kept is None:
            return None
        weight = stored.open_kept()
        self._progress.add(stored.num_bytes)
        self._read.add(name)
        return weight.to(self._device)

    def _stack(self, parts: Sequence[Readable], names: Sequence[str], dtype: torch.dtype) -> Tensor:
        first = parts[0]
        if any(part.shape[1:] != first.shape[1:] for part in parts):
            raise ModelRefused(f"tensors {', '.join(names)} do not fit together", field="model")
        shape = first.shape
        if len(parts) > 1:
            shape = (sum(part.shape[0] for part in parts), *shape[1:])
        whole = torch.empty(shape, dtype=dtype, device=self._device)
        flat, at = whole.view(-1), 0
        for part in parts:
            count = math.prod(part.shape)
            part.fill(flat[at : at + count])
            self._progress.add(part.num_bytes)
            at += count
        self._read.update(names)
        return whole


def _header(path: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(path, framework="pt", device="cpu"):  # proves names, sizes and offsets
            pass
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelRefused(f"{path} is not a safetensors file: {error}", field="model") from error
    header.pop("__metadata__", None)
    found: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise ModelRefused(f"{path}: {name} is of dtype {entry['dtype']}", field="model")
        start = 8 + size + entry["data_offsets"][0]
        found[name] = StoredTensor(path, _DTYPES[entry["dtype"]], tuple(entry["shape"]), start)
    return found
