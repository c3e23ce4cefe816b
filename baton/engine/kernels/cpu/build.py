"""Compile the CPU kernels once per machine, and find them again.

The library lies in the user's cache, named by a digest of what it was made of: the sources, the
flags, the compiler. Not here: what the kernels do (*.h), how they are called (library.py).
"""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)
SOURCES: Final = Path(__file__).parent
COMPILE_S: Final = 600.0  # ten seconds on a quiet machine
# What every kernel needs of the processor; /proc/cpuinfo's names.
CPU_FLAGS: Final = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "fma")
_FLAGS: Final = (
    "-std=c++17", "-O3", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno", "-mavx512f",
    "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma", "-mprefer-vector-width=512",
)  # fmt: skip


class CannotBuild(Exception):
    """Why there are no kernels here; the plain torch twins serve."""


def library_path() -> Path:
    """The compiled library, made now if it is not there yet. Raises CannotBuild."""
    compiler = _compiler()
    digest = hashlib.sha256("\0".join([*compiler, *_FLAGS]).encode())
    for source in sorted(SOURCES.glob("*.[hc]*")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    path = _cache() / f"baton-cpu-{digest.hexdigest()[:20]}.so"
    if not path.exists():
        _compile(compiler, path)
    return path


def _compiler() -> list[str]:
    """A C++ compiler that exists: $CXX, Python's own, g++, clang++. Raises CannotBuild."""
    for stated in (os.environ.get("CXX"), sysconfig.get_config_var("CXX"), "g++", "clang++"):
        words = shlex.split(stated or "")
        if words and shutil.which(words[0]) is not None:
            return words[:1]
    raise CannotBuild("no C++ compiler")


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "baton" / "kernels"


def _compile(compiler: list[str], path: Path) -> None:
    """Into a file of its own, renamed when whole: processes that start together do not meet."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            command = [*compiler, *_FLAGS, str(SOURCES / "kernels.cpp"), "-o", str(made)]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=COMPILE_S, check=False
            )
            if done.returncode != 0:
                raise CannotBuild(f"{compiler[0]} failed: {done.stderr.strip()[:300]}")
            made.replace(path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuild(f"{compiler[0]} failed: {error}") from error
    logger.info("compiled the CPU kernels: %s", path)
