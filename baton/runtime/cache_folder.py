"""The cache folder: for kernels, measured limits, logs of `baton up` and other remakable files."""

from __future__ import annotations

import os
from collections.abc import Mapping
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
