"""Regenerate the committed protobuf stubs, or with `--check` prove that they are up to date.

The generator is pinned (pyproject.toml) to the oldest supported grpcio: stubs refuse runtimes that
are older than their generator. Compiled from the root, so the stubs say `from protos import ...`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def generate(root: Path, output: Path) -> None:
    """Write the stubs of every protos/*.proto below `output`. Raises CalledProcessError."""
    sources = [str(path.relative_to(root)) for path in sorted((root / "protos").glob("*.proto"))]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I."]
    command += [f"--{kind}_out={output}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run([*command, *sources], cwd=root, check=True)
    for proto in sources:
        # A file without services gets an empty gRPC stub; nothing imports it.
        stub = output / f"{proto.removesuffix('.proto')}_pb2_grpc.py"
        if "\nservice " not in (root / proto).read_text():
            stub.unlink(missing_ok=True)


def stubs(folder: Path) -> dict[str, str]:
    """File name -> content of the stubs in a folder."""
    found = sorted(path for path in folder.glob("*") if path.name.endswith(SUFFIXES))
    return {path.name: path.read_text() for path in found}


def drift(committed: dict[str, str], fresh: dict[str, str]) -> list[str]:
    """Names of the stubs that differ, are missing, or have no .proto any more."""
    names = sorted(committed.keys() | fresh.keys())
    return [name for name in names if committed.get(name) != fresh.get(name)]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="regenerate or check the protobuf stubs")
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 on drift")
    options = parser.parse_args(arguments)
    if not options.check:
        generate(ROOT, ROOT)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(ROOT, Path(folder))
        changed = drift(stubs(ROOT / "protos"), stubs(Path(folder) / "protos"))
    for name in changed:
        print(f"protos/{name} is not what its .proto generates; run ./run proto")
    return 1 if changed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
