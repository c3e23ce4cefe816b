"""The cache folder: for kernels, measured limits, logs of `baton up` and other remakable files."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path


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
