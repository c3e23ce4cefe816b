"""What Baton is installed with, as a software bill of materials: `./run sbom [FILE]`.

cyclonedx-py reads .venv and writes CycloneDX 1.6 as JSON, checked by its schema. It lives in an
environment of its own (.cache/sbom), so it is no part of what it lists. The same .venv gives the
same bytes. Known holes in these packages: tools/audit.py.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

PACKAGE = "cyclonedx-bom>=7,<8"
ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / ".cache" / "sbom"
FILE = ROOT / "build" / "sbom.cdx.json"
INSTALL_S = 300.0
LIST_S = 300.0


def installed(place: Path = PLACE) -> Path:
    """The program cyclonedx-py in `place`, which is made if it lacks it.

    Raises subprocess.SubprocessError when pip cannot install it.
    """
    program = place / "bin" / "cyclonedx-py"
    if not program.exists():
        venv.create(place, clear=True, with_pip=True)
        install = [str(place / "bin" / "python"), "-m", "pip", "install", "-q", PACKAGE]
        subprocess.run(install, check=True, timeout=INSTALL_S)
    return program


def sbom_command(program: Path, file: Path) -> list[str]:
    """Everything installed beside this Python, with Baton as the root."""
    command = [str(program), "environment", "--pyproject", str(ROOT / "pyproject.toml")]
    return [*command, "--output-reproducible", "--output-file", str(file), sys.prefix]


def main(arguments: Sequence[str]) -> int:
    file = Path(arguments[0]) if arguments else FILE
    try:
        program = installed()
    except subprocess.SubprocessError as error:
        print(f"no SBOM: {PACKAGE} could not be installed: {error}", file=sys.stderr)
        return 1
    file.parent.mkdir(parents=True, exist_ok=True)
    status = subprocess.run(sbom_command(program, file), check=False, timeout=LIST_S).returncode
    if status == 0:
        print(file)
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
