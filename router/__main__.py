"""Entry point of `python -m router` and of the command `baton-router`."""

from __future__ import annotations

import os
import sys

from baton.runtime.collector import importing

# gRPC reads this when it is imported, a worker inherits it. Of gRPC's own threads, three would wake
# for each step of a node.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client")
with importing():
    from router.main import main


def run() -> int:
    return main(sys.argv[1:], os.environ)


if __name__ == "__main__":
    sys.exit(run())
