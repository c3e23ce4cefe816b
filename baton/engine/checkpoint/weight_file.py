"""A file of packed weights, in memory or on a disk. One process writes it layer by layer, others
map it (shared_weights.py).

    tensors, each at a multiple of 64 bytes | index as JSON | its length | magic

The index says for each layer which class it has and where its tensors are. Only classes of SHARED
can be made from a file. A layer that cannot be written is `null` in the index, and every process
reads it from the checkpoint.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import torch
import xxhash
from torch import Tensor

from baton.engine.checkpoint.weight_folder import WeightFolder
from baton.engine.kernels.cpu.library import CpuKernels, product_kernels_for
from baton.engine.kernels.cpu.quantized import (
    IntegerKernels,
    PackedInt8,
    PackedIntegers,
    integer_kernels_for,
)
from baton.engine.memory.huge_pages import HUGE
from baton.engine.memory.shared_area import ALIGNMENT, SharedArea
from baton.engine.quantization import int8_rows, int_weight, integer, linear

log = logging.getLogger(__name__)

T = TypeVar("T")
VERSION: Final = 2
MAGIC: Final = b"baton-weights-\x00\x01"
CHUNK: Final = 64 << 20  # bytes of one digest
MOST_BYTES: Final = 1 << 42  # of address space, not of memory
SHARED: Final = {
    kind.__name__: kind
    for kind in (
        linear.PlainLinear, linear.PanelLinear, linear.SideBySide, linear.Int8Share,
        integer.Reordered, integer.IntegerPanels, integer.W8A8Panels, integer.WidenedLinear,
        int8_rows.W8A8Linear, int8_rows.W4A8Linear, integer.Int4Linear, integer.NibbleLinear,
        int_weight.IntWeight,
        PackedIntegers, PackedInt8,
    )
}  # fmt: skip
_DTYPES: Final = {
    str(kind).removeprefix("torch."): kind
    for kind in (
        torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32,
        torch.int64,
    )
}  # fmt: skip


class NotWritable(Exception):
    """A layer holds something that a file cannot; the text says what."""


class WritingFile:
    """A file that is being written. It has a shared lock from the beginning, and its final name
    from `seal` on. If the room for it runs out, all further layers stay private, and the file
    never gets its name."""

    def __init__(
        self,
        folder: WeightFolder,
        name: str,
        dtype: torch.dtype,
        exchange: linear.RankSums | None = None,
        copy_on_write: bool = False,
    ) -> None:
        """Make the file of `name`. `copy_on_write`: see SharedArea.seal. Raises OSError if that
        fails."""
        self.num_bytes = self.rounded_head_bytes = 0  # once sealed
        self._path = path = folder.path(name)
        self._unfinished = path.with_suffix(".unfinished")
        self._fd = _made(self._unfinished)
        try:
            self._area = SharedArea(self._fd, _room(self._fd), on_disk=folder.on_disk)
        except OSError:
            os.close(self._fd)
            self.close()
            raise
        self._area.when_gone(partial(folder.let_go, self._fd, path))
        self._kernels = _kernels(dtype, exchange)
        self._exchange = exchange
        self._copy_on_write = copy_on_write
        self._index: dict[str, Any] = {}
        self._places: dict[tuple[int, str, tuple[int, ...]], list[Any]] = {}
        self._end = 0
        self._filled = 0  # bytes that the file has, a multiple of HUGE
        self._full = False
        self._lock = threading.Lock()  # of all that `take` changes

    def take(self, name: str, make: Callable[[], T]) -> T:
        """Return what `make` returns, with its tensors in the file if they can be written. Any
        thread may call it; the order of the calls decides where tensors lie."""
        made = make()
        with self._lock:
            return self._taken(name, made)

    def _taken(self, name: str, made: T) -> T:
        if self._full:
            return made
        try:
            written = self._write(made)
        except NotWritable as error:
            log.info("weights: not shared: %s", error)
            self._index[name] = None
            return made
        except OSError as error:
            log.warning("weights are shared in part: no room in %s: %s", self._path.parent, error)
            self._full = True
            return made
        self._index[name] = written
        return cast("T", _read(written, self._area, self._kernels))

    def seal(self, num_bytes: int, rounded_head_bytes: int) -> None:
        """Finish the file, so that other processes can map it."""
        self.num_bytes, self.rounded_head_bytes = num_bytes, rounded_head_bytes
        self._area.seal(self._end, self._copy_on_write)
        if self._full:
            return
        index = {
            "version": VERSION,
            "num_bytes": num_bytes,
            "rounded_head_bytes": rounded_head_bytes,
            "layers": self._index,
            "digests": _digests(self._area, self._end),
        }
        text = json.dumps(index).encode()
        try:
            with os.fdopen(os.dup(self._fd), "wb") as file:
                file.seek(self._end)
                file.write(text + len(text).to_bytes(8, "little") + MAGIC)
                file.truncate()
            self._unfinished.rename(self._path)
        except OSError as error:
            log.warning("weights are not shared: %s", error)
            return
        log.info("weights: %.1f MB in %s, for all processes of this host",
                 self._end / 1e6, self._path)  # fmt: skip

    def close(self) -> None:
        """Remove the file's temporary name, which it still has if it was not sealed."""
        with suppress(FileNotFoundError):
            self._unfinished.unlink()

    def _write(self, value: Any) -> Any:
        """Write the tensors of `value`; return its description for the index. Raises NotWritable,
        and OSError if the room runs out."""
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Tensor):
            return {"tensor": self._place(value)}
        if isinstance(value, torch.dtype):
            return {"dtype": _name_of(value)}
        if isinstance(value, tuple):
            return {"tuple": [self._write(each) for each in cast("tuple[Any, ...]", value)]}
        if isinstance(value, CpuKernels | IntegerKernels):
            return {"kernels": type(value).__name__}
        if value is self._exchange:
            return {"kernels": linear.RankSums.__name__}
        if type(value).__name__ not in SHARED:
            raise NotWritable(f"a {type(value).__name__}")
        parts = {name: self._write(part) for name, part in _attributes(value).items()}
        return {"class": type(value).__name__, "parts": parts}

    def _place(self, tensor: Tensor) -> list[Any]:
        """Return where the tensor's numbers are in the file. They are written now, unless the same
        memory has been written before."""
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise NotWritable(f"a tensor of layout {tensor.layout} on {tensor.device}")
        name, shape = _name_of(tensor.dtype), tuple(tensor.shape)
        known = self._places.get((tensor.data_ptr(), name, shape))
        if known is not None:
            return known
        start = self._end + -self._end % ALIGNMENT
        size = tensor.nbytes
        if size:
            self._put(start, tensor.contiguous().view(-1).view(torch.uint8))
            copy = self._area.tensor(start, tensor.dtype, shape)
            self._end = start + size
            place = [start, name, list(shape)]
            # A later tensor may be this copy itself, as with tied embeddings.
            self._places[copy.data_ptr(), name, shape] = place
            return place
        return [0, name, list(shape)]

    def _put(self, start: int, numbers: Tensor) -> None:
        """Write uint8 [n] at `start`, which lies at most ALIGNMENT behind what is written.

        The file grows by whole large pages: a file system on a disk takes the size of a page from
        the first write to it. Raises OSError.
        """
        known = min(max(0, self._filled - start), len(numbers))
        whole = known + (len(numbers) - known) // HUGE * HUGE
        _write(self._fd, numbers[:known], start)
        _write(self._fd, numbers[known:whole], start + known)
        self._filled += whole - known
        if whole < len(numbers):
            page = torch.zeros(HUGE, dtype=torch.uint8)
            page[: len(numbers) - whole] = numbers[whole:]
            _write(self._fd, page, start + whole)
            self._filled += HUGE


class ReadingFile:
    """A file that another process has written, mapped into this process."""

    def __init__(self, area: SharedArea, index: dict[str, Any], kernels: dict[str, Any]) -> None:
        self.num_bytes = int(index["num_bytes"])
        self.rounded_head_bytes = int(index["rounded_head_bytes"])
        self._area = area
        self._layers: dict[str, Any] = index["layers"]
        self._kernels = kernels

    @staticmethod
    def attach(
        folder: WeightFolder,
        name: str,
        dtype: torch.dtype,
        exchange: linear.RankSums | None = None,
        copy_on_write: bool = False,
    ) -> ReadingFile | None:
        """Map the file of `name`. `copy_on_write`: see SharedArea.seal. Return None if there is no
        file, or if it is broken; a broken file is removed."""
        path = folder.path(name)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        fcntl.flock(fd, fcntl.LOCK_SH)
        try:
            found = _index(fd)
            if found is None or not os.fstat(fd).st_nlink:
                raise OSError("no whole file of weights")
            index, end = found
            area = SharedArea(fd, max(end, 1), on_disk=folder.on_disk)
            area.seal(end, copy_on_write)
            if _digests(area, end) != index["digests"]:
                raise OSError("its contents have changed")
        except (OSError, ValueError, KeyError) as error:
            os.close(fd)
            log.warning("%s is not used: %s", path, error)
            path.unlink(missing_ok=True)
            return None
        area.when_gone(partial(folder.let_go, fd, path))
        return ReadingFile(area, index, _kernels(dtype, exchange))

    def take(self, name: str, make: Callable[[], T]) -> T:
        """Return the layer `name` of the file; what `make` returns if the file does not have it."""
        written = self._layers.get(name)
        return make() if written is None else cast("T", _read(written, self._area, self._kernels))


def _write(fd: int, numbers: Tensor, start: int) -> None:
    """Write uint8 [n] at `start`. Raises OSError, also if the room runs out."""
    left = numbers.numpy().data
    while left:
        written = os.pwrite(fd, left, start)  # at most 2 GiB
        left, start = left[written:], start + written


def _made(path: Path) -> int:
    """Return a descriptor of a new, empty file at `path`, with a shared lock on it.

    Until it has the lock, a process that needs other weights takes the file for one that a killed
    process has left, and removes it (weight_folder.py). Then it is made again.
    """
    while True:
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_SH)
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)


def _read(written: Any, area: SharedArea, kernels: dict[str, Any]) -> Any:
    """Make the value that `WritingFile._write` described, its tensors in `area`."""
    if not isinstance(written, dict):
        return written
    match cast("dict[str, Any]", written):
        case {"tensor": [offset, dtype, shape]}:
            return area.tensor(offset, _DTYPES[dtype], tuple(shape))
        case {"dtype": name}:
            return _DTYPES[name]
        case {"tuple": parts}:
            return tuple(_read(part, area, kernels) for part in parts)
        case {"kernels": name}:
            return kernels[name]
        case {"class": name, "parts": parts}:
            made = object.__new__(SHARED[name])
            for part, value in parts.items():
                object.__setattr__(made, part, _read(value, area, kernels))
            return made
        case _:
            raise ValueError(f"not a layer: {written}")


def _attributes(value: Any) -> dict[str, Any]:
    if is_dataclass(value):
        return {spec.name: getattr(value, spec.name) for spec in fields(value)}
    return dict(vars(value))


def _kernels(dtype: torch.dtype, exchange: linear.RankSums | None) -> dict[str, Any]:
    """Return this process's own objects that layers call, by their names in files."""
    cpu = torch.device("cpu")
    return {
        CpuKernels.__name__: product_kernels_for(dtype, cpu),
        IntegerKernels.__name__: integer_kernels_for(dtype, cpu),
        linear.RankSums.__name__: exchange,
    }


def _index(fd: int) -> tuple[dict[str, Any], int] | None:
    """Return the index and the position where the tensors end; None if the file is no complete file
    of weights."""
    size, tail = os.fstat(fd).st_size, 8 + len(MAGIC)
    end = os.pread(fd, tail, max(0, size - tail))
    length = int.from_bytes(end[:8], "little")
    if end[8:] != MAGIC or length + tail > size:
        return None
    index = json.loads(os.pread(fd, length, size - tail - length))
    return (index, size - tail - length) if index["version"] == VERSION else None


def _digests(area: SharedArea, end: int) -> list[str]:
    """Return the digest of each CHUNK of the tensors, computed by one thread per core."""

    def digest(start: int) -> str:
        chunk = area.tensor(start, torch.uint8, (min(CHUNK, end - start),))
        return xxhash.xxh3_128(chunk.numpy().data).hexdigest()

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(digest, range(0, end, CHUNK)))


def _name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype in a file. Raises NotWritable for a dtype that has none."""
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise NotWritable(f"numbers of {name}")
    return name


def _room(fd: int) -> int:
    """Return how many bytes the file may grow to."""
    found = os.fstatvfs(fd)
    return min(MOST_BYTES, math.prod((found.f_bavail, found.f_frsize)))
