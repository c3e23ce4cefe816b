"""BatchStore: the files and batches of all API keys, in one directory. Blocks; no network.

    OWNER/files/ID           content                    OWNER: the digest of a key
    OWNER/files/ID.json      its FileObject
    OWNER/batches/ID.json    the BatchObject, written by whoever runs it, anew each time
    OWNER/batches/ID.cancel  somebody wants it cancelled
    OWNER/batches/ID.lock    held (flock) by the process that runs it
    OWNER/batches/ID.out     answers so far

Several processes on a machine may share it. What is written is there whole or not at all. An id
that is not well-formed never meets the file system.
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
    """One batch's own files."""

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
        """It has ended: of all this the record alone stays."""
        for path in (self.answers, self.cancel, self.lock):
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """Whether nobody else runs it; while it lasts, nobody else does. Goes with the process."""
        with self.lock.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True


class BatchStore:
    """Any thread. Raises RequestNotFound for what a key does not have, whoever else has it."""

    def __init__(self, root: Path, owner_bytes: int) -> None:
        """`owner_bytes`: of all that a key has here. Raises ConfigError for a directory that cannot
        be used."""
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
        """Keep a copy; `named`: name, purpose. Raises TooLarge, Overloaded at the key's limits."""
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
        """Move it here, whatever its size."""
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
        """The newest first."""
        found = _all(self._folder(owner, "files"), FileObject)
        return [file for file in found if not _expired(file)]

    def delete(self, owner: str, id_: str) -> None:
        """Raises InvalidRequest while a batch still needs it."""
        told = self.file(owner, id_)
        for batch in self.batches(owner):
            if batch.input_file_id == id_ and batch.status not in ENDED:
                message = f"{id_} is the input of {batch.id}, which has not ended"
                raise InvalidRequest(message, field="file_id")
        self._drop(owner, told)

    def room(self, owner: str) -> int:
        """Bytes that the key may still keep; below 0 if there are too many."""
        folders = [self._folder(owner, name) for name in ("files", "batches")]
        used = sum(_size(entry) for folder in folders for entry in os.scandir(folder))
        return self._owner_bytes - used

    # ---- batches ----

    def add_batch(self, owner: str, batch: BatchObject) -> None:
        """Raises Overloaded."""
        known = self.batches(owner)
        if len(known) >= MOST_FILES:
            message = f"a key has at most {MOST_FILES} batches of the last 30 days"
            raise Overloaded(message)
        if sum(one.status not in ENDED for one in known) >= MOST_OPEN:
            raise Overloaded(f"a key has at most {MOST_OPEN} batches that have not ended")
        self.put(self.place(owner, batch.id), batch)

    def put(self, place: BatchPlace, batch: BatchObject) -> None:
        """By whoever holds the lock, or made it just now."""
        _write(place.record, batch)

    def place(self, owner: str, id_: str) -> BatchPlace:
        if not BATCH_ID.fullmatch(id_):
            raise _unknown("batch", id_)
        return BatchPlace(owner, id_, self._folder(owner, "batches"))

    def batch(self, owner: str, id_: str) -> BatchObject:
        """As it is to be told: one that is to be cancelled says so."""
        place = self.place(owner, id_)
        found = _read(place.record, BatchObject)
        if found is None:
            raise _unknown("batch", id_)
        return _with_cancel(found, place)

    def batches(self, owner: str) -> list[BatchObject]:
        """The newest first."""
        found = _all(self._folder(owner, "batches"), BatchObject)
        return [_with_cancel(batch, self.place(owner, batch.id)) for batch in found]

    def open_batches(self) -> list[BatchPlace]:
        """Of all keys, those that have not ended, the oldest first."""
        found: list[tuple[int, BatchPlace]] = []
        for owner in self._owners():
            found += [
                (batch.created_at, self.place(owner, batch.id))
                for batch in _all(self._folder(owner, "batches"), BatchObject)
                if batch.status not in ENDED
            ]
        return [place for _, place in sorted(found, key=lambda each: (each[0], each[1].id))]

    def sweep(self) -> None:
        """Delete files that have expired, and records of batches that nobody asks for any more."""
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
    """The newest first."""
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
