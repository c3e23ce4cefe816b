"""Write deploy/kubernetes/base/baton.yaml from the chart: `python -m tools.kustomize_base`.

It is the chart with the values of a trial, for `kubectl apply -k` and for overlays of kustomize.
A test (tests/deploy/test_kubernetes.py) fails while the file shows something else.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

KUBERNETES: Final = Path(__file__).resolve().parent.parent / "deploy" / "kubernetes"
PAGE: Final = KUBERNETES / "base" / "baton.yaml"
HEAD: Final = (
    "# Written by `python -m tools.kustomize_base` from ../chart and ../values/trial.yaml.\n"
)
# What only Helm writes: labels of its own, and the file that an object comes from.
HELMS: Final = re.compile(
    r"^ *(helm\.sh/chart|app\.kubernetes\.io/managed-by): .*\n|^# Source: .*\n", re.MULTILINE
)


def base(rendered: str) -> str:
    """The base of what `helm template` printed."""
    return HEAD + HELMS.sub("", rendered)


def command(helm: str) -> list[str]:
    values = str(KUBERNETES / "values" / "trial.yaml")
    return [helm, "template", "baton", str(KUBERNETES / "chart"), "-f", values]


def main() -> int:
    beside = str(Path(sys.executable).parent)
    helm = shutil.which("helm", path=beside) or shutil.which("helm")
    if helm is None:
        print("no helm: `python -m tools.helm`", file=sys.stderr)
        return 1
    told = subprocess.run(command(helm), capture_output=True, text=True, check=True)
    PAGE.write_text(base(told.stdout))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
