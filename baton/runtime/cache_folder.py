"""The cache folder: for kernels, measured limits, logs of `baton up` and other remakable files."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

# Other hosts cannot change files of these behind a mapping, and their time stamps can be trusted.
LOCAL: Final = frozenset({"bcachefs", "btrfs", "ext4", "f2fs", "overlay", "xfs"})
SETTLED_S: Final = 60.0  # a younger file may change without another time stamp (see `remembered`)
MOST_REMEMBERED: Final = 256  # files
PROC: Final = Path("/proc/self")
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")  # blanks and the like in a mount's path


def cache_folder(name: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Return Baton's folder `name` in the user's cache; the folder need not exist.

    Raises OSError if the user's home is unknown.
    """
    base = environ.get("XDG_CACHE_HOME")
    try:
        home = Path(base) if base else Path.home() / ".cache"
    except RuntimeError as error:
        raise OSError(str(error)) from error
    return home / "baton" / name


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`, which is made if it is missing: processes that start together
    measure one after the other. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield  # closing unlocks


def keep(path: Path, text: str) -> None:
    """Write a file that readers see whole or not at all. Raises OSError."""
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)


def remembered(file: Path, make: Callable[[Path], str], folder: Path) -> str:
    """Return what `make` says about the contents of `file`, such as their digest. It is called only
    if the file is not the one about which it was called last, by what the kernel says of it: place,
    inode, size, and times of the last change, which no program can set back.

    A file is not remembered on another host's disk, nor before it is SETTLED_S old: a program that
    has it mapped for writing may write again without a new time, until the kernel has written the
    page to the disk (half a minute). `folder` holds what is remembered. Raises what `make` does.
    """
    known = folder / "known.json"
    seen = _looks(file)
    if (found := _known(known).get(seen)) is not None:
        return found
    made = make(file)
    changed = max(file.stat().st_mtime, file.stat().st_ctime)
    if _looks(file) == seen and is_local(file) and time.time() - changed > SETTLED_S:
        with contextlib.suppress(OSError), alone(folder):
            others = _known(known)
            others.pop(seen, None)
            latest = list(others.items())[1 - MOST_REMEMBERED :]
            keep(known, json.dumps(dict([*latest, (seen, made)])))
    return made


def _known(path: Path) -> dict[str, str]:
    """Return what is remembered; {} if that cannot be read."""
    try:
        found: Any = json.loads(path.read_text())
        return {str(key): str(value) for key, value in found.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _looks(file: Path) -> str:
    """Return what the kernel says of a file: other contents have another text. Raises OSError."""
    found = file.stat()
    numbers = (
        found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns,
    )  # fmt: skip
    return json.dumps([str(file.resolve()), *numbers])


def is_local(path: Path, proc: Path = PROC) -> bool:
    """Whether the file or folder is on a disk of this machine, by the kernel's list of mounts."""
    found, kind = -1, ""
    try:
        real = path.resolve()
        lines = (proc / "mountinfo").read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        before, _, after = line.partition(" - ")
        mounted = Path(_ESCAPED.sub(lambda match: chr(int(match[1], 8)), before.split()[4]))
        # The last one of equal paths lies on top.
        if real.is_relative_to(mounted) and len(mounted.parts) >= found:
            found, kind = len(mounted.parts), after.split()[0]
    return kind in LOCAL
