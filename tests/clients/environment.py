"""Clients in environments of their own, never the one that runs Baton: they must not decide its
versions. `python_with(requirements)` makes a virtual environment once and gives its interpreter,
`node_program(package, name)` installs one from npm.

They are kept in BATON_CLIENTS_CACHE, else in ~/.cache/baton/clients, by what they hold.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Final

INSTALL_S: Final = 900.0
STAMP: Final = "installed"  # a file that is there once all else is


class NotInstallable(Exception):
    """pip or npm could not install it; the message is its own last line."""


def python_with(requirements: Sequence[str]) -> Path:
    """The interpreter of an environment with `requirements`. Raises NotInstallable."""
    folder = cache_folder() / _name((*sorted(requirements), sys.version))
    python = folder / "bin" / "python"
    if not (folder / STAMP).is_file():
        venv.EnvBuilder(with_pip=True, clear=True).create(folder)
        command = [str(python), "-m", "pip", "install", "--no-input", "-q", *requirements]
        _install(command, folder, "\n".join(requirements))
    return python


def node_program(package: str, name: str) -> Path:
    """The program `name` of a package. Raises NotInstallable."""
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        raise NotInstallable("npm and node are not here")
    folder = cache_folder() / _name((package, node))
    if not (folder / STAMP).is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        quiet = ("--no-audit", "--no-fund", "--no-update-notifier", "--loglevel", "error")
        _install([npm, "install", "--prefix", str(folder), *quiet, package], folder, package)
    return folder / "node_modules" / ".bin" / name


def cache_folder() -> Path:
    given = os.environ.get("BATON_CLIENTS_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "baton" / "clients"


def _install(command: Sequence[str], folder: Path, what: str) -> None:
    try:
        made = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise NotInstallable(f"it took more than {INSTALL_S:.0f} s") from error
    if made.returncode != 0:
        raise NotInstallable(_reason(made.stderr))
    (folder / STAMP).write_text(what)


def _name(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _reason(stderr: str) -> str:
    errors = [line for line in stderr.splitlines() if line.startswith(("ERROR", "npm error"))]
    return (errors or stderr.splitlines() or ["it failed"])[-1]
