"""Known holes in what Baton is installed with: pip-audit over .venv, `./run audit`.

pip-audit asks PyPI and OSV, so without a network there is nothing to be said: then this says so and
exits 0. Exits 1 for a package with a known hole. IGNORED holds the advisories that do not concern
Baton, each with its reason. Not here: our own code (tools/safety.py).
"""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
from collections.abc import Sequence

PACKAGE = "pip-audit>=2.9,<3"
HOST = ("pypi.org", 443)
PROBE_S = 5.0
INSTALL_S = 300.0
AUDIT_S = 600.0
# Advisory -> why it is none of ours.
IGNORED: dict[str, str] = {}


def reachable(host: tuple[str, int] = HOST, timeout_s: float = PROBE_S) -> bool:
    try:
        socket.create_connection(host, timeout_s).close()
    except OSError:
        return False
    return True


def audit_command(ignored: Sequence[str] = tuple(IGNORED)) -> list[str]:
    """Everything installed here but Baton itself, which is on no index."""
    command = [sys.executable, "-m", "pip_audit", "--local", "--skip-editable", "--desc", "off"]
    command += ["--progress-spinner", "off"]
    for advisory in ignored:
        command += ["--ignore-vuln", advisory]
    return command


def main(online: bool | None = None) -> int:
    """`online` None: find out."""
    if not (reachable() if online is None else online):
        print(f"audit skipped: {HOST[0]} cannot be reached, and advisories are read from there")
        return 0
    if importlib.util.find_spec("pip_audit") is None:
        print(f"installing {PACKAGE}")
        install = [sys.executable, "-m", "pip", "install", "-q", PACKAGE]
        if subprocess.run(install, check=False, timeout=INSTALL_S).returncode != 0:
            print("audit skipped: pip-audit could not be installed; its message is above")
            return 0
    return subprocess.run(audit_command(), check=False, timeout=AUDIT_S).returncode


if __name__ == "__main__":
    raise SystemExit(main())
