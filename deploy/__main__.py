"""`python -m deploy`, which is the command `baton`: deploy/cli.py, for `up` beside a fork server.

The server imports torch while this process imports what reads the command line; so it is started
before anything else is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack

from deploy.process.fork_server import ForkServer, helps


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the `baton` script. Return the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    with ExitStack() as stack:
        server = stack.enter_context(ForkServer()) if helps(given) else None
        from deploy import cli

        return cli.main(given, server)


if __name__ == "__main__":
    raise SystemExit(main())
