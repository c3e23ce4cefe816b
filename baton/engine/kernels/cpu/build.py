"""Compiles the CPU kernels once per machine and instruction set, and finds them again.

One source tree serves every instruction set: vectors.h is its vocabulary. A library's name contains
a digest of the sources and the flags. `baton kernels build` puts libraries into $BATON_KERNELS_DIR
(in images). A library that is not there is looked for in the user's cache, and compiled there when
it is first needed. Not here: what the kernels do (*.h), how they are called (library.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from baton.runtime.cache_folder import cache_folder

logger = logging.getLogger(__name__)
SOURCES: Final = Path(__file__).parent
BUILT: Final = "BATON_KERNELS_DIR"  # folder of libraries that were compiled ahead
COMPILE_S: Final = 600.0  # six seconds on two quiet cores
_AVX512: Final = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "fma")
_AVX512_COMPILER: Final = (*(f"-m{flag}" for flag in _AVX512), "-mprefer-vector-width=512")


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """What a library is compiled for."""

    name: str  # the value of BATON_CPU_KERNELS that selects it
    title: str
    cpu_flags: tuple[str, ...]  # needed by every kernel; names of /proc/cpuinfo
    integer_flags: tuple[str, ...]  # needed in addition by the kernels of integer weights
    compiler_flags: tuple[str, ...]
    slow_on: tuple[str, ...] = ()  # vendors whose processors are faster with the next set
    tiles: bool = False  # whether it multiplies with AMX tiles
    by_name: bool = False  # chosen only by name, because nobody has run it on such a processor


INSTRUCTION_SETS: Final = (  # the best first
    InstructionSet(
        "amx",
        "AMX",
        ("amx_tile", "amx_bf16", "amx_int8", *_AVX512),
        ("avx512_vnni",),
        (*_AVX512_COMPILER, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        tiles=True,
        by_name=True,
    ),
    InstructionSet(
        "avx512bf16",
        "AVX-512 with bfloat16 products",
        (*_AVX512, "avx512_bf16"),
        ("avx512_vnni", "avx512vbmi"),
        (*_AVX512_COMPILER, "-mavx512bf16", "-O2"),  # as fast as -O3 for this set alone
        # A product of pairs takes as long as four float32 products of half the size (docs/log/).
        slow_on=("GenuineIntel",),
    ),
    InstructionSet("avx512", "AVX-512", _AVX512, ("avx512_vnni",), _AVX512_COMPILER),
    InstructionSet(
        "avx2", "AVX2 with FMA", ("avx2", "fma", "f16c"), (), ("-mavx2", "-mfma", "-mf16c")
    ),
)  # fmt: skip
_FLAGS: Final = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno")
# Compiled as many at a time as there are cores, the longest first, then linked.
UNITS: Final = ("products.cpp", "steps.cpp", "rows.cpp")


class CannotBuild(Exception):
    """Says why there are no kernels here; then the plain torch twins serve."""


class CompilerFailed(CannotBuild):
    """A compiler was found, but the compilation failed."""


def library_path(instructions: InstructionSet) -> Path:
    """Return the library of an instruction set, compiled now if it is missing.

    Raises CannotBuild, and OSError where the user's cache is unknown.
    """
    if lacking := missing(instructions.cpu_flags):
        raise CannotBuild(f"this processor has no {', '.join(lacking)}")
    if ahead := os.environ.get(BUILT):
        path = Path(ahead) / library_name(instructions)
        if path.exists():
            return path
    return compiled(instructions, cache_folder("kernels"))


def compiled(instructions: InstructionSet, folder: Path) -> Path:
    """Return the library of an instruction set in `folder`, compiled now if it is missing.

    This processor need not support the set. Raises CannotBuild.
    """
    path = folder / library_name(instructions)
    if not path.exists():
        command = [*_compiler(), *_FLAGS, *instructions.compiler_flags]
        with _alone_in(folder):
            if not path.exists():  # else another process has just made it
                _compile(command, path)
    return path


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process compiles into `folder`: nodes that start together compile once.

    Where a folder cannot be locked, nobody waits.
    """
    descriptor: int | None = None
    try:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def library_name(instructions: InstructionSet) -> str:
    digest = hashlib.sha256("\0".join([*_FLAGS, *instructions.compiler_flags]).encode())
    for source in sorted(SOURCES.glob("*.[hc]*")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return f"baton-cpu-{instructions.name}-{digest.hexdigest()[:20]}.so"


def missing(flags: Sequence[str]) -> list[str]:
    """Return those of `flags` that this processor lacks."""
    return [flag for flag in flags if flag not in processor_words("flags")]


def is_slow(instructions: InstructionSet) -> bool:
    """Whether this processor supports the instruction set, but is faster without it."""
    slow = not processor_words("vendor_id").isdisjoint(instructions.slow_on)
    return slow and not missing(instructions.cpu_flags)


@functools.cache
def processor_words(field: str) -> frozenset[str]:
    """Return the words of a field of /proc/cpuinfo, first processor; empty without such a file."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    lines = (line for line in text.splitlines() if line.startswith(field))
    return frozenset(next(lines, "").partition(":")[2].split())


def _compiler() -> list[str]:
    """Return a C++ compiler that exists: $CXX, Python's own, g++ or clang++. Raises CannotBuild."""
    for stated in (os.environ.get("CXX"), sysconfig.get_config_var("CXX"), "g++", "clang++"):
        words = shlex.split(stated or "")
        if words and shutil.which(words[0]) is not None:
            return words[:1]
    raise CannotBuild("no C++ compiler")


def _compile(command: list[str], path: Path) -> None:
    """Compile into a new file and rename it when complete, so that concurrent processes do not
    clash.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            objects = [str(Path(folder) / f"{unit}.o") for unit in UNITS]
            units = [
                [*command, "-c", str(SOURCES / unit), "-o", made_of_it]
                for unit, made_of_it in zip(UNITS, objects, strict=True)
            ]
            with ThreadPoolExecutor(min(len(UNITS), len(os.sched_getaffinity(0)))) as pool:
                list(pool.map(_run, units))
            _run([*command, "-shared", *objects, "-o", str(made)])
            made.replace(path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilerFailed(f"{command[0]} failed: {error}") from error
    logger.info("compiled the CPU kernels: %s", path)


def _run(command: list[str]) -> None:
    """Run a compiler. Raises CompilerFailed with the beginning of what it says."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, check=False)
    if done.returncode != 0:
        raise CompilerFailed(f"{command[0]} failed: {done.stderr.strip()[:300]}")
