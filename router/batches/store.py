"""BatchStore: the files and batches of all API keys, in one directory. Its calls block; no network.

    OWNER/files/ID           the content of a file      OWNER: the digest of a key
    OWNER/files/ID.json      the FileObject of that file
    OWNER/batches/ID.json    the BatchObject; the process that runs the batch rewrites it
    OWNER/batches/ID.cancel  exists if the batch is to be cancelled
    OWNER/batches/ID.lock    locked (flock) by the process that runs the batch
    OWNER/batches/ID.out     the answers so far

Several processes on a machine may share the directory. A reader sees a .json file complete or not
at all. An id is checked before it becomes part of a path.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

import msgspec

from baton.protocol.errors import ConfigError, InvalidRequest, Overloaded, RequestNotFound, TooLarge
from router.batches.objects import BATCH_ID, ENDED, FILE_ID, BatchObject, FileObject

MOST_FILES: Final = 10_000  # of one key
KEPT_S: Final = 30 * 86400
MOST_OPEN: Final = 100  # batches of one key that have not ended
_OWNER: Final = re.compile(r"[0-9a-f]{64}")

T = TypeVar("T", FileObject, BatchObject)


@dataclass(frozen=True, slots=True)
class BatchPlace:
    """The files of one batch."""

    owner: str
    id: str
    folder: Path

    @property
    def record(self) -> Path:
        return self.folder / f"{self.id}.json"

    @property
    def cancel(self) -> Path:
        return self.folder / f"{self.id}.cancel"

    @property
    def answers(self) -> Path:
        return self.folder / f"{self.id}.out"

    @property
    def lock(self) -> Path:
        return self.folder / f"{self.id}.lock"

    def clear(self) -> None:
        """Delete all files but the record, after the batch has ended."""
        for path in (self.answers, self.cancel, self.lock):
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """Take the lock of the batch for the `with` block. Yield False if another process has it.
        The kernel releases the lock if the process dies."""
        with self.lock.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True


class BatchStore:
    """Files and batches by owner; may be called from any thread. Raises RequestNotFound for a file
    or batch that the owner does not have, even if another owner has it."""

    def __init__(self, root: Path, owner_bytes: int) -> None:
        """`owner_bytes`: the most bytes that one key may store.

        Raises ConfigError if the directory cannot be used."""
        self._root = root
        self._owner_bytes = owner_bytes
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not os.access(root, os.W_OK | os.X_OK):
                raise PermissionError("not writable")
        except OSError as error:
            raise ConfigError(f"--batch-dir {root}: {error}", field="batch_dir") from error

    # ---- files ----

    def upload(
        self, owner: str, content: BinaryIO, named: tuple[str, str], expires_s: int
    ) -> FileObject:
        """Store a copy of `content`. `named`: (file name, purpose).

        Raises TooLarge if the key has no room for it, Overloaded if it has too many files."""
        folder = self._folder(owner, "files")
        if sum(1 for _ in folder.glob("*.json")) >= MOST_FILES:
            raise Overloaded(f"a key has at most {MOST_FILES} files: delete some", field="file")
        partial = folder / f".{secrets.token_hex(12)}"
        try:
            with partial.open("xb") as file:
                shutil.copyfileobj(content, file, 1 << 20)
            if self.room(owner) < 0:
                message = f"file: this key may keep {self._owner_bytes} bytes: delete some files"
                raise TooLarge(message, field="file")
            return self.add_file(owner, partial, named, expires_s)
        finally:
            partial.unlink(missing_ok=True)

    def add_file(
        self, owner: str, content: Path, named: tuple[str, str], expires_s: int
    ) -> FileObject:
        """Move the file `content` into the store; no limit is checked. `named`: (name, purpose)."""
        folder, now = self._folder(owner, "files"), int(time.time())
        told = FileObject(
            id=f"file-{secrets.token_hex(12)}", bytes=content.stat().st_size, created_at=now,
            filename=named[0], purpose=named[1], expires_at=now + expires_s,
        )  # fmt: skip
        content.replace(folder / told.id)
        _write(folder / f"{told.id}.json", told)
        return told

    def file(self, owner: str, id_: str) -> FileObject:
        if not FILE_ID.fullmatch(id_):
            raise _unknown("file", id_)
        found = _read(self._folder(owner, "files") / f"{id_}.json", FileObject)
        if found is None or _expired(found):
            raise _unknown("file", id_)
        return found

    def content(self, owner: str, id_: str) -> Path:
        return self._folder(owner, "files") / self.file(owner, id_).id

    def files(self, owner: str) -> list[FileObject]:
        """Return the owner's files that have not expired, the newest first."""
        found = _all(self._folder(owner, "files"), FileObject)
        return [file for file in found if not _expired(file)]

    def delete(self, owner: str, id_: str) -> None:
        """Delete a file. Raises InvalidRequest if it is the input of a batch that still runs."""
        told = self.file(owner, id_)
        for batch in self.batches(owner):
            if batch.input_file_id == id_ and batch.status not in ENDED:
                message = f"{id_} is the input of {batch.id}, which has not ended"
                raise InvalidRequest(message, field="file_id")
        self._drop(owner, told)

    def room(self, owner: str) -> int:
        """Return how many more bytes the key may store; negative if it stores too many."""
        folders = [self._folder(owner, name) for name in ("files", "batches")]
        used = sum(_size(entry) for folder in folders for entry in os.scandir(folder))
        return self._owner_bytes - used

    # ---- batches ----

    def add_batch(self, owner: str, batch: BatchObject) -> None:
        """Store a new batch. Raises Overloaded if the key has too many batches."""
        known = self.batches(owner)
        if len(known) >= MOST_FILES:
            message = f"a key has at most {MOST_FILES} batches of the last 30 days"
            raise Overloaded(message)
        if sum(one.status not in ENDED for one in known) >= MOST_OPEN:
            raise Overloaded(f"a key has at most {MOST_OPEN} batches that have not ended")
        self.put(self.place(owner, batch.id), batch)

    def put(self, place: BatchPlace, batch: BatchObject) -> None:
        """Write the record of a batch. Only the holder of the batch's lock may call this, or the
        caller that has just made the batch."""
        _write(place.record, batch)

    def place(self, owner: str, id_: str) -> BatchPlace:
        if not BATCH_ID.fullmatch(id_):
            raise _unknown("batch", id_)
        return BatchPlace(owner, id_, self._folder(owner, "batches"))

    def batch(self, owner: str, id_: str) -> BatchObject:
        """Return a batch as clients see it: with status `cancelling` if its end was asked for."""
        place = self.place(owner, id_)
        found = _read(place.record, BatchObject)
        if found is None:
            raise _unknown("batch", id_)
        return _with_cancel(found, place)

    def batches(self, owner: str) -> list[BatchObject]:
        """Return the owner's batches as clients see them, the newest first."""
        found = _all(self._folder(owner, "batches"), BatchObject)
        return [_with_cancel(batch, self.place(owner, batch.id)) for batch in found]

    def open_batches(self) -> list[BatchPlace]:
        """Return the batches of all keys that have not ended, the oldest first."""
        found: list[tuple[int, BatchPlace]] = []
        for owner in self._owners():
            found += [
                (batch.created_at, self.place(owner, batch.id))
                for batch in _all(self._folder(owner, "batches"), BatchObject)
                if batch.status not in ENDED
            ]
        return [place for _, place in sorted(found, key=lambda each: (each[0], each[1].id))]

    def sweep(self) -> None:
        """Delete expired files, and records of ended batches that are older than KEPT_S."""
        for owner in self._owners():
            for batch in _all(self._folder(owner, "batches"), BatchObject):
                if batch.status in ENDED and batch.created_at < time.time() - KEPT_S:
                    self.place(owner, batch.id).record.unlink(missing_ok=True)
            for file in _all(self._folder(owner, "files"), FileObject):
                if _expired(file):
                    self._drop(owner, file)

    def _drop(self, owner: str, file: FileObject) -> None:
        folder = self._folder(owner, "files")
        (folder / f"{file.id}.json").unlink(missing_ok=True)
        (folder / file.id).unlink(missing_ok=True)

    def _owners(self) -> list[str]:
        return [entry.name for entry in os.scandir(self._root) if _OWNER.fullmatch(entry.name)]

    def _folder(self, owner: str, kind: str) -> Path:
        assert _OWNER.fullmatch(owner), "a digest"
        folder = self._root / owner / kind
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return folder


def _with_cancel(batch: BatchObject, place: BatchPlace) -> BatchObject:
    if batch.status in ENDED or not place.cancel.exists():
        return batch
    at = int(place.cancel.stat().st_mtime)
    return msgspec.structs.replace(batch, status="cancelling", cancelling_at=at)


def _expired(file: FileObject) -> bool:
    return file.expires_at <= time.time()


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except FileNotFoundError:  # deleted meanwhile
        return 0


def _all(folder: Path, kind: type[T]) -> list[T]:
    """Return the records in a folder, the newest first."""
    found = [_read(path, kind) for path in folder.glob("*.json")]
    return sorted((one for one in found if one), key=lambda one: (-one.created_at, one.id))


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None


def _write(path: Path, value: FileObject | BatchObject) -> None:
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    partial.write_bytes(msgspec.json.encode(value))
    partial.replace(path)


def _unknown(kind: str, id_: str) -> RequestNotFound:
    return RequestNotFound(f"there is no {kind} {id_[:100]!r}", field=f"{kind}_id")
