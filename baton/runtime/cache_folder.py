"""Where Baton keeps what it can make again: kernels, measured limits, runs of `baton up`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_folder(name: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The folder `name` of Baton's in the user's cache, which need not exist. Raises OSError where
    nobody knows the user's home."""
    base = environ.get("XDG_CACHE_HOME")
    try:
        home = Path(base) if base else Path.home() / ".cache"
    except RuntimeError as error:
        raise OSError(str(error)) from error
    return home / "baton" / name
