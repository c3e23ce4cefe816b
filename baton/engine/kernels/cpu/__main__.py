"""`baton kernels build`: compiles the CPU kernels of every instruction set in advance.

It serves images and machines without a compiler. It makes the library of each instruction set, even
of those that this processor lacks; build.py finds them where they run. With `--here` it makes the
one that nodes on this machine take; `./run` does so while it installs packages. It needs a C++
compiler, but no package of PyPI.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from baton.engine.kernels.cpu.build import (
    BUILT,
    INSTRUCTION_SETS,
    CannotBuild,
    InstructionSet,
    compiled,
    is_slow,
    library_name,
    missing,
)
from baton.runtime.cache_folder import cache_folder

MACHINES = ("x86_64", "AMD64")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 1 if a library cannot be built, else 0."""
    parser = argparse.ArgumentParser(
        prog="baton kernels", description="The CPU kernels of every instruction set."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    build = commands.add_parser("build", help="compile those that are not there yet")
    text = f"folder of the libraries (default: ${BUILT}, else the user's cache)"
    build.add_argument("--dir", default=os.environ.get(BUILT), help=text)
    build.add_argument("--here", action="store_true", help="only what this processor's nodes take")
    given = parser.parse_args(arguments)
    folder = Path(given.dir) if given.dir else cache_folder("kernels")
    wanted = here() if given.here else INSTRUCTION_SETS
    if platform.machine() not in MACHINES:
        sys.stdout.write(f"there are none for {platform.machine()}: torch's own serve\n")
        return 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = list(pool.map(lambda each: build_one(each, folder), wanted))
    for instructions, (_, outcome) in zip(wanted, outcomes, strict=True):
        sys.stdout.write(f"{instructions.name:<11} {outcome}\n")
    sys.stdout.write(f"in {folder}\n")
    return 0 if all(done for done, _ in outcomes) else 1


def here() -> tuple[InstructionSet, ...]:
    """Return the instruction set that nodes on this processor choose by themselves; none if it has
    none."""
    usable = (
        each
        for each in INSTRUCTION_SETS
        if not (each.by_name or is_slow(each) or missing(each.cpu_flags))
    )
    return tuple(usable)[:1]


def build_one(instructions: InstructionSet, folder: Path) -> tuple[bool, str]:
    """Build a library if it is missing; return whether it exists now, and a line for people."""
    if (folder / library_name(instructions)).exists():
        return True, "was there"
    began = time.monotonic()
    try:
        path = compiled(instructions, folder)
    except CannotBuild as error:
        return False, f"not built: {error}"
    return True, f"built in {time.monotonic() - began:.0f} s: {path.name}"


if __name__ == "__main__":
    raise SystemExit(main())
