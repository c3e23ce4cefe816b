"""Holds the weights of a model once per host: processes that load the same weights map one file, in
memory or on a disk.

    first process    reads the checkpoint, and copies each layer, packed for its kernel, into the
                     file; from then on it only reads the file
    other processes  map the file: they read no checkpoint, pack nothing, and hold no copy

A file's name depends on everything that its bytes depend on (`WeightsKey`). Where files lie, when
they are removed, and which are kept for the next start: weight_folder.py. Digests are checked when
a file is mapped. Layers whose memory is not torch's own (those packed by oneDNN) are not shared,
nor are those on a GPU. If no file can be made, each process holds its own weights. A file is one of
the whole model, of a part of it (`WeightsPart`), or of a rank's share.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Final, Protocol

import torch
from torch import Tensor

from baton.engine.checkpoint.weight_file import VERSION, ReadingFile, WritingFile
from baton.engine.checkpoint.weight_folder import (
    AUTO_SHARE,
    FOLDER,
    CannotShare,
    WeightCache,
    WeightFolder,
    held_bytes,
    wait_for,
)
from baton.engine.kernels.cpu.library import product_kernels_for
from baton.engine.kernels.cpu.quantized import integer_kernels_for
from baton.engine.memory.file_pages import maps_large
from baton.engine.quantization.linear import Linear, Linears, RankSums
from baton.runtime import heap
from baton.runtime.cache_folder import cache_folder, is_local

log = logging.getLogger(__name__)


NOTHING_KEPT: Final = WeightCache()


class WeightSource(Linears, Protocol):
    """What a decoder reads its weights from: `checkpoint/weights.py`, or `Shared` around it."""

    def tensor(self, *names: str) -> Tensor: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def rounded_head_bytes(self) -> int: ...


class WeightsPart(Enum):
    """Which tensors of a model a file has."""

    ALL = "all"
    DENSE = "all but routed experts"
    ROUTED = "routed experts"
    MODULES = "parameters of transformers' modules"


@dataclass(frozen=True, slots=True)
class WeightsKey:
    """Everything that the bytes of packed weights depend on, except for the machine.

    `digest`: of the checkpoint and of how it is rounded. `part`: which tensors of the model they
    are. `rank`, `num_ranks`: which share of these. `whole_experts`: how shares are cut
    (parallel/sharding.py).
    """

    digest: str
    dtype: torch.dtype
    rank: int = 0
    num_ranks: int = 1
    whole_experts: bool = False
    part: WeightsPart = WeightsPart.ALL

    @property
    def name(self) -> str:
        """The name of the file without its suffix, 64 hex digits."""
        kernels = product_kernels_for(self.dtype, torch.device("cpu"))
        integers = integer_kernels_for(self.dtype, torch.device("cpu"))
        parts = (
            VERSION, self.digest, self.dtype, self.rank, self.num_ranks, self.whole_experts,
            self.part.value, torch.__version__, kernels and kernels.identity, integers is not None,
            _layouts(),
        )  # fmt: skip
        return hashlib.sha256(repr(parts).encode()).hexdigest()


@cache
def _layouts() -> str:
    """Return a digest of the code that decides about the bytes of packed weights: a file may be
    older than an update."""
    engine = Path(__file__).parents[1]
    folders = ("checkpoint", "kernels/cpu", "models", "parallel", "quantization")
    paths = sorted(path for name in folders for path in (engine / name).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


@contextmanager
def shared_weights(
    source: WeightSource,
    key: WeightsKey,
    cache: WeightCache = NOTHING_KEPT,
    exchange: RankSums | None = None,
) -> Iterator[WeightSource]:
    """Yield the weights to build a model from: shared ones, or `source` itself if sharing is not
    possible. `exchange`: the rank's sums over ranks, which its layers call. For the rest see
    shared_file."""
    with shared_file(key, cache, exchange) as file:
        yield source if file is None else Shared(source, file)
        if isinstance(file, WritingFile):
            heap.trim()  # give back the memory of private copies that were packed
            file.seal(source.num_bytes, source.rounded_head_bytes)  # touches the whole file


@contextmanager
def shared_file(
    key: WeightsKey, cache: WeightCache = NOTHING_KEPT, exchange: RankSums | None = None
) -> Iterator[ReadingFile | WritingFile | None]:
    """Yield the file of `key`: to read if it is there, else to write and seal; None if sharing is
    not possible. Other processes of this user that need the same weights wait here until it is
    done."""
    try:
        folder = _disk_folder(cache, key.name) or _memory_folder(cache)
        lock = folder.open_lock()
    except (OSError, CannotShare) as error:
        log.info("weights are not shared: %s", error)
        yield None
        return
    try:
        wait_for(lock, int(key.name[:15], 16))  # so others can build other weights meanwhile
        with _opened(folder, key, exchange) as file:
            yield file
    finally:
        os.close(lock)


def _memory_folder(cache: WeightCache) -> WeightFolder:
    """Return the folder in memory. Raises CannotShare, OSError."""
    place = _own_folder(FOLDER / f"baton-weights-{os.geteuid()}")
    assert place is not None
    return WeightFolder(place, cache.num_bytes or 0)


@contextmanager
def _opened(
    folder: WeightFolder, key: WeightsKey, exchange: RankSums | None
) -> Iterator[ReadingFile | WritingFile | None]:
    """Yield the file of `key`: to read if it is there, else to write; None if it cannot be
    written. Modelling code that is not ours may write to its parameters."""
    own_copies = key.part == WeightsPart.MODULES
    name = key.name
    folder.clean(but=folder.path(name))
    reading = ReadingFile.attach(folder, name, key.dtype, exchange, own_copies)
    if reading is not None:
        log.info("weights: mapped, %.1f MB that this host holds once", reading.num_bytes / 1e6)
        yield reading
        return
    try:
        writing = WritingFile(folder, name, key.dtype, exchange, own_copies)
    except OSError as error:
        log.info("weights are not shared: %s", error)
        yield None
        return
    try:
        yield writing
    finally:
        writing.close()


def _disk_folder(cache: WeightCache, name: str) -> WeightFolder | None:
    """Return the folder on a disk for the file `name`; None if weights are to lie in memory: the
    file is not there yet, and nothing is to be kept, or the disk has no room or small pages."""
    if cache.num_bytes == 0 and not cache.asked:
        return None
    try:
        place = _own_folder(cache_folder("weights"), make=cache.num_bytes != 0)
        if place is None:
            return None
        room = shutil.disk_usage(place).free + held_bytes(place)
        keep = room // AUTO_SHARE if cache.num_bytes is None else cache.num_bytes
        folder = WeightFolder(place, keep, on_disk=True)
        if keep and folder.path(name).exists():
            return folder
        folder.clean()
        if not cache.stored_bytes <= min(keep, shutil.disk_usage(place).free):
            if keep:
                log.info("weights: no room on the disk, %s may take %d bytes", place, keep)
            return None
        if not is_local(place) or not maps_large(place):
            log.info("weights: in memory, as %s has no large pages", place)
            return None
    except (OSError, CannotShare) as error:
        log.warning("weights are not kept for the next start: %s", error)
        return None
    return folder


def _own_folder(place: Path, *, make: bool = True) -> Path | None:
    """Return a folder that only this user can read and write; if there is none, make it, or return
    None without `make`. Raises CannotShare, OSError."""
    if not make and not place.exists():
        return None
    place.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        place.mkdir(mode=0o700)
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise CannotShare(f"{place} is not a folder of this user's alone")
    return place


class Shared:
    """Implements WeightSource: reads layers from the file if they are there, else from `source`."""

    def __init__(self, source: WeightSource, file: ReadingFile | WritingFile) -> None:
        self._source = source
        self._file = file

    @property
    def writes(self) -> bool:
        """Whether the layers are written now. Then they may be read from several threads."""
        return isinstance(self._file, WritingFile)

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights, as they are kept."""
        return self._file.num_bytes or self._source.num_bytes

    @property
    def rounded_head_bytes(self) -> int:
        """The part of `num_bytes` that is a head of integers."""
        return self._file.rounded_head_bytes or self._source.rounded_head_bytes

    def tensor(self, *names: str) -> Tensor:
        """See Weights.tensor."""
        found = self._file.take(json.dumps(names), lambda: self._source.tensor(*names))
        assert isinstance(found, Tensor)
        return found

    def read(self, modules: Sequence[str], has_bias: bool) -> Linear:
        """See Linears.read."""
        name = json.dumps([*modules, has_bias])
        return self._file.take(name, lambda: self._source.read(modules, has_bias))

    def derived(self, name: str, make: Callable[[Tensor], Tensor]) -> Tensor:
        """See Linears.derived."""
        key = json.dumps([name, make.__name__])
        return self._file.take(key, lambda: self._source.derived(name, make))

    def head(self, tied: bool) -> Linear:
        """See Linears.head."""
        return self._file.take("head", lambda: self._source.head(tied))
