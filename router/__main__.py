"""Entry point of `python -m router` and of the command `baton-router`."""

from __future__ import annotations

import os
import sys

from baton.runtime.collector import importing

with importing():
    from router.main import main


def run() -> int:
    return main(sys.argv[1:], os.environ)


if __name__ == "__main__":
    sys.exit(run())
