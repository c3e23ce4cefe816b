"""Clients in environments of their own, never the one that runs Baton: they must not decide its
versions. `python_with(requirements)` makes a virtual environment once and gives its interpreter.

They are kept in BATON_CLIENTS_CACHE, else in ~/.cache/baton/clients, by what they hold.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Final

INSTALL_S: Final = 900.0


class NotInstallable(Exception):
    """pip could not install it; the message is its own last line."""


def python_with(requirements: Sequence[str]) -> Path:
    """The interpreter of an environment with `requirements`. Raises NotInstallable."""
    folder = cache_folder() / _name(requirements)
    python = folder / "bin" / "python"
    stamp = folder / "installed"
    if stamp.is_file():
        return python
    venv.EnvBuilder(with_pip=True, clear=True).create(folder)
    command = [str(python), "-m", "pip", "install", "--no-input", "-q", *requirements]
    try:
        made = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise NotInstallable(f"pip took more than {INSTALL_S:.0f} s") from error
    if made.returncode != 0:
        raise NotInstallable(_reason(made.stderr))
    stamp.write_text("\n".join(requirements))
    return python


def cache_folder() -> Path:
    given = os.environ.get("BATON_CLIENTS_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "baton" / "clients"


def _name(requirements: Sequence[str]) -> str:
    parts = (*sorted(requirements), sys.version)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _reason(stderr: str) -> str:
    errors = [line for line in stderr.splitlines() if line.startswith("ERROR")]
    return (errors or stderr.splitlines() or ["pip failed"])[-1]
