"""`python -m router.worker`: one of several routers that share a port (router/workers.py).

It ends when the supervisor that started it ends."""

from __future__ import annotations

import os
import sys

from baton.runtime.collector import importing

with importing():
    from router.main import main
    from router.workers import end_with_stdin

if __name__ == "__main__":
    end_with_stdin()
    raise SystemExit(main(sys.argv[1:], os.environ))
