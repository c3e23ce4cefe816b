"""A KV pool in a file that other processes of this host can map: own pages first, theirs behind.

    addresses:  | own file, writable | free | peer A's file, read-only | free | peer B's ... |
    a file:     | pool | to a whole system page | board: its owner's signals to readers |
    page ids:   0 ..                        foreign_base(A) ..           foreign_base(B) ..

Life: an arena is created, after files whose owner has died were swept away. memory() is given to
the KV pool; the owner calls take_rest soon. Peers' files are attached and detached as conversations
and adopted pages need them. close unlinks the file; processes that have it mapped keep its bytes,
so a peer that dies takes nothing away.

An owner holds an exclusive flock for as long as it lives. The kernel releases the lock with the
process, even after kill -9. A pid would mean nothing between containers, which share the directory
but not the process table.

Who owns which page is known to the engine's block pool; leases and fences are in exports.py.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import math
import os
import re
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.memory.address_range import PAGE_BYTES, AddressRange
from baton.protocol.errors import ConfigError, KVLost, KVRefused

log = logging.getLogger(__name__)

DEFAULT_DIRECTORY: Final = Path("/dev/shm")
RESERVED_BYTES: Final = 1 << 40  # addresses, not memory: room for peers
BOARD_BYTES: Final = PAGE_BYTES  # word 0 is not 0 while the owner wants its pages back
FIRST_BYTES: Final = 256 << 20  # memory that a new arena takes at once
PIECE_BYTES: Final = 32 << 20
_NAME: Final = re.compile(r"baton-[0-9a-f]{8,64}")
_NEW: Final = ".new"


@dataclass(frozen=True, slots=True)
class ArenaPlace:
    """What a peer must know to find a file.

    `name`: the file's name in the shared directory, never a path. `inode`: tells the file from
    another one of this name in another directory.
    """

    name: str
    inode: int
    num_bytes: int


@dataclass(slots=True, eq=False)
class Attached:
    """A peer's file mapped into our range. `offset` counts bytes from the start of the range."""

    place: ArenaPlace
    offset: int
    mapped_bytes: int
    descriptor: int
    board: npt.NDArray[np.uint64]
    num_users: int = 0


class ShmArena:
    """A pool of `num_bytes` in a file in `directory`; a page id counts units of `page_bytes`."""

    def __init__(
        self,
        boot_id: str,
        num_bytes: int,
        page_bytes: int,
        directory: Path = DEFAULT_DIRECTORY,
        reserved_bytes: int = RESERVED_BYTES,
    ) -> None:
        """Raises ConfigError if the directory cannot hold the file, or addresses are too few."""
        self.directory = directory
        self.page_bytes = page_bytes
        sweep(directory)
        self._descriptor, self.place = _create(directory, f"baton-{boot_id}", num_bytes)
        # Page ids start at whole pages, and so does a mapping of the system.
        self._unit = math.lcm(page_bytes, PAGE_BYTES)
        own = _up(num_bytes, PAGE_BYTES) + BOARD_BYTES
        total = _up(own + reserved_bytes, self._unit)
        try:
            self._range = AddressRange(total)
            self._range.map_file(self._descriptor, 0, own, writable=True)
        except OSError as error:
            os.close(self._descriptor)
            os.unlink(directory / self.place.name)
            raise ConfigError(
                f"no addresses for the KV pools of peers ({error.strerror}): ulimit -v counts them,"
                " though they take no memory"
            ) from error
        self._all = self._range.tensor()
        self._board = self._board_at(own)
        self._lock = threading.Lock()
        self._attached: dict[ArenaPlace, Attached] = {}
        self._own_bytes = own

    @property
    def address(self) -> int:
        """The address of the first own byte in this process."""
        return self._range.address

    @property
    def num_attached(self) -> int:
        return len(self._attached)

    def memory(self) -> torch.Tensor:
        """Return uint8 [num_bytes]: the own pages, zeroed and shared."""
        return self._all[: self.place.num_bytes]

    def take_rest(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Take the memory behind FIRST_BYTES, from the first page to the last, until `stop`. Any
        thread, while others use the arena. Raises ConfigError if there is no room.

        A page that is touched earlier is taken then. Should the directory be full by that time, the
        process dies; so a node calls this soon after its start, when it can use few pages only.
        """
        for start in range(FIRST_BYTES, self._own_bytes, PIECE_BYTES):
            if stop():
                return
            try:
                with self._lock:
                    if self._descriptor < 0:
                        return
                    fd = os.dup(self._descriptor)
                try:
                    os.posix_fallocate(fd, start, min(PIECE_BYTES, self._own_bytes - start))
                finally:
                    os.close(fd)
            except OSError as error:
                raise _no_room(self.directory, self.place.num_bytes, error) from error

    def pages(self) -> torch.Tensor:
        """Return uint8 [pages of the whole range, page_bytes]: own and foreign pages by their ids.

        A page to which nothing is mapped must not be touched, and a foreign page must not be
        written.
        """
        count = len(self._all) // self.page_bytes
        return self._all[: count * self.page_bytes].view(count, self.page_bytes)

    def reach(self) -> torch.Tensor:
        """Return uint8 [bytes of the whole range]: `memory`, and behind it where peers' pages
        appear.
        """
        return self._all

    def orphaned(self, peer: Attached) -> bool:
        """Whether the peer's owner has died or closed its pool: then its lock is gone.

        The mapped bytes stay as they are. Only while attached.
        """
        try:
            fcntl.flock(peer.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        fcntl.flock(peer.descriptor, fcntl.LOCK_UN)  # a process that sweeps needs the lock
        return True

    def want_back(self, wanted: bool) -> None:
        """Tell all processes that have this pool attached whether its owner is short of pages."""
        self._board[0] = wanted

    def wanted(self, peer: Attached) -> bool:
        """Whether the peer's owner is short of pages. Only while attached."""
        return bool(peer.board[0])

    def foreign_bytes(self, peer: Attached) -> torch.Tensor:
        """Return uint8 [num_bytes of the peer]: its whole file, read-only. Only while attached."""
        return self._all[peer.offset : peer.offset + peer.place.num_bytes]

    def foreign_base(self, peer: Attached) -> int:
        """Return the id of the peer's page 0 among `pages`."""
        return peer.offset // self.page_bytes

    def reaches(self, place: ArenaPlace) -> bool:
        """Whether the peer's file is in our directory and may be mapped."""
        try:
            os.close(self._open(place))
        except (KVLost, KVRefused):
            return False
        return True

    def attach(self, place: ArenaPlace) -> Attached:
        """Map a peer's file, or count one more user of it.

        Raises KVLost if the file is not there (any more), KVRefused if it must not be mapped.
        """
        with self._lock:
            peer = self._attached.get(place)
            if peer is None:
                self._prune(place.name)
                peer = self._attached[place] = self._map(place)
            peer.num_users += 1
            return peer

    def detach(self, peer: Attached) -> None:
        """Count one user less. An unused file stays mapped, for the next user, while its owner
        lives.
        """
        with self._lock:
            peer.num_users -= 1

    def let_go(self) -> int:
        """Unmap the files of dead owners that nobody uses; return their number.

        Until then their memory counts against the processes that replace the owners.
        """
        with self._lock:
            unused = [peer for peer in self._attached.values() if peer.num_users == 0]
            dead = [peer for peer in unused if self.orphaned(peer)]
            for peer in dead:
                self._unmap(peer)
        return len(dead)

    def close(self) -> None:
        """Unlink and close the file; the memory stays while tensors use it. Idempotent."""
        with self._lock:
            if self._descriptor >= 0:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.directory / self.place.name)
                os.close(self._descriptor)
                self._descriptor = -1
                for place, peer in list(self._attached.items()):
                    if peer.num_users == 0:
                        os.close(peer.descriptor)
                        del self._attached[place]

    def _open(self, place: ArenaPlace) -> int:
        """Return a descriptor of a peer's file, checked against its announced name, inode
        and size.
        """
        if not _NAME.fullmatch(place.name):
            raise KVRefused("not the name of an arena")
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            descriptor = os.open(self.directory / place.name, flags)
        except OSError as error:
            raise KVLost(f"no arena {place.name} here: {error.strerror}") from error
        why = _refuse(os.fstat(descriptor), place)
        if why is not None:
            os.close(descriptor)
            raise KVRefused(f"arena {place.name}: {why}")
        return descriptor

    def _board_at(self, end: int) -> npt.NDArray[np.uint64]:
        return self._all[end - BOARD_BYTES : end].numpy().view(np.uint64)

    def _map(self, place: ArenaPlace) -> Attached:
        descriptor = self._open(place)
        try:
            size = _up(place.num_bytes, PAGE_BYTES) + BOARD_BYTES
            offset = self._gap(size)
            self._range.map_file(descriptor, offset, size, writable=False)
        except OSError as error:
            os.close(descriptor)
            raise KVRefused(f"arena {place.name} cannot be mapped: {error}") from error
        except KVRefused:
            os.close(descriptor)
            raise
        return Attached(place, offset, size, descriptor, self._board_at(offset + size))

    def _gap(self, size: int) -> int:
        """Return the first offset where `size` bytes are free. Raises KVRefused if there is
        none.
        """
        start = _up(self._own_bytes, self._unit)
        for peer in sorted(self._attached.values(), key=lambda peer: peer.offset):
            if start + size <= peer.offset:
                break
            start = _up(peer.offset + peer.mapped_bytes, self._unit)
        if start + size > self._range.num_bytes:
            raise KVRefused("no addresses left for another arena")
        return start

    def _prune(self, name: str) -> None:
        """Unmap the unused files that nobody can attach again, and unused older files of `name`.

        So a peer that announces another size each time takes no more room than others.
        """
        for place, peer in list(self._attached.items()):
            if peer.num_users == 0 and (place.name == name or not self.reaches(place)):
                self._unmap(peer)

    def _unmap(self, peer: Attached) -> None:
        self._range.unmap(peer.offset, peer.mapped_bytes)
        os.close(peer.descriptor)
        del self._attached[peer.place]


def sweep(directory: Path) -> int:
    """Unlink the arenas of this user whose owner is dead; return their number."""
    count = 0
    try:
        names = os.listdir(directory)
    except OSError as error:
        raise ConfigError(f"cannot read {directory}: {error.strerror}") from error
    for name in names:
        if _NAME.fullmatch(name) and _orphaned(directory / name):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(directory / name)
                count += 1
    if count:
        log.info("removed %d arenas of dead processes from %s", count, directory)
    return count


def _orphaned(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False  # gone meanwhile, or another user's
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False  # its owner lives
    finally:
        os.close(descriptor)
    return True


def _create(directory: Path, name: str, num_bytes: int) -> tuple[int, ArenaPlace]:
    """Create the file; return its descriptor and place.

    It stays empty until it is locked and has the name that sweepers look for: a process that dies
    in between leaves no memory behind.
    """
    if not _NAME.fullmatch(name) or num_bytes < 1:
        raise ConfigError(f"no arena can be called {name} and hold {num_bytes} bytes")
    path, new = directory / name, directory / (name + _NEW)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(new, flags, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot create {new}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(new, path)
        # Allocated, not only at the first write: a full tmpfs would kill the process in the middle
        # of a step. The kernel needs a second for a few gigabytes: hence take_rest.
        size = _up(num_bytes, PAGE_BYTES) + BOARD_BYTES
        room = os.fstatvfs(descriptor)
        if room.f_bavail * room.f_frsize < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(descriptor, size)
        os.posix_fallocate(descriptor, 0, min(size, FIRST_BYTES))
    except OSError as error:
        os.close(descriptor)
        for left in (new, path):
            left.unlink(missing_ok=True)
        raise _no_room(directory, num_bytes, error) from error
    return descriptor, ArenaPlace(name, os.fstat(descriptor).st_ino, num_bytes)


def _no_room(directory: Path, num_bytes: int, error: OSError) -> ConfigError:
    hint = "; containers need shm_size or ipc" if error.errno == errno.ENOSPC else ""
    return ConfigError(
        f"{directory} cannot hold a KV pool of {num_bytes} bytes: {error.strerror}{hint}"
    )


def _refuse(status: os.stat_result, place: ArenaPlace) -> str | None:
    """Return why a file must not be mapped; None if it may."""
    if not stat.S_ISREG(status.st_mode):
        return "not a regular file"
    if status.st_uid != os.geteuid():
        return "of another user"
    if stat.S_IMODE(status.st_mode) & 0o077:
        return "open to other users"
    if status.st_ino != place.inode:
        return "another file of the same name"
    if status.st_size < _up(place.num_bytes, PAGE_BYTES) + BOARD_BYTES:
        return "shorter than announced"
    return None


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
