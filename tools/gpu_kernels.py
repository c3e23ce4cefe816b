"""Compile the Triton kernels for an absent GPU: `python -m tools.gpu_kernels [FAMILY ...]`.

The kernels' own Python calls run on CPU tensors of a model's widths; where they would launch,
Triton compiles down to the GPU's machine code instead, with the very types, alignments, tiles and
warps of that launch. Told of each: registers, bytes of stack (spilled registers), shared memory.
Exits 1 if one does not compile, or wants more shared memory than the GPU has. It runs nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

FLOAT8_FAMILY: Final = "8-bit floats"
FLOAT8_CAPABILITY: Final = 89  # older GPUs do not multiply them
SHARED_MEMORY: Final = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448}  # bytes per program


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel in one of its variants."""

    family: str
    case: str
    kernel: str
    warps: int
    registers: int
    stack_bytes: int
    shared_bytes: int


Launch = tuple[str, str, Callable[[], object]]  # family and name, and the call that launches


class AbsentGpu:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        """What is compiled for."""
        return self._target

    def get_current_device(self) -> int:
        """There is one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Nothing is launched on it."""
        return 0


def compile_all(cases: Iterable[Launch], capability: int) -> list[Compiled]:
    """What each call would launch on a GPU of this compute capability (90 = 9.0), each variant
    once a family. Raises what Triton raises for a kernel that does not compile."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    driver.set_active(AbsentGpu(GPUTarget("cuda", capability, 32)))  # pyright: ignore[reportArgumentType]
    found: dict[tuple[str, str], Compiled] = {}
    current = ("", "")
    launch = triton.JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel: Any = launch(self, *args, grid=grid, warmup=True, **kwargs)
        family, case = current
        if (family, kernel.hash) not in found:
            found[family, kernel.hash] = _told(family, case, kernel)
        return kernel

    triton.JITFunction.run = compile_only
    try:
        for family, name, call in cases:
            current = (family, name)
            call()
    finally:
        triton.JITFunction.run = launch
    return list(found.values())


def _told(family: str, case: str, kernel: Any) -> Compiled:
    """What cuobjdump says of the machine code."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    used = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", text)}
    metadata = kernel.metadata
    return Compiled(
        family, case, metadata.name, metadata.num_warps, used.get("REG", 0),
        used.get("STACK", 0) + used.get("LOCAL", 0), metadata.shared,
    )  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="compile the Triton kernels for an absent GPU")
    parser.add_argument("families", nargs="*", help="of bench/gpu_cases.py; default: all")
    parser.add_argument("--dtype", nargs="*", default=["bfloat16", "float32"])
    parser.add_argument("--capability", type=int, default=90, choices=sorted(SHARED_MEMORY))
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    # Interpreted kernels cannot be compiled; Triton reads this at its import.
    os.environ.pop("TRITON_INTERPRET", None)
    import torch

    from bench.gpu_case import widths
    from bench.gpu_cases import FAMILIES, cases_of

    families: list[str] = options.families or list(FAMILIES)
    if options.capability < FLOAT8_CAPABILITY:
        families = [each for each in families if each != FLOAT8_FAMILY]
    dtypes = [getattr(torch, name) for name in options.dtype]
    shape = widths(torch.device("cpu"))
    cases = (
        (family, case.name, case.ours)
        for family in families
        for case in cases_of(shape, dtypes, [family])
    )
    compiled = compile_all(cases, options.capability)
    limit = SHARED_MEMORY[options.capability]
    if options.json:
        print(json.dumps([asdict(each) for each in compiled], indent=1))
    else:
        print(f"{'kernel':20} {'warps':>5} {'regs':>5} {'stack':>6} {'shared':>7}  first met in")
        for each in compiled:
            sizes = f"{each.registers:5} {each.stack_bytes:6} {each.shared_bytes:7}"
            print(f"{each.kernel:20} {each.warps:5} {sizes}  {each.case}")
    return 1 if any(each.shared_bytes > limit for each in compiled) or not compiled else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
