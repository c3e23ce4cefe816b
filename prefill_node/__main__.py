"""`python -m prefill_node`: one prefill node."""

from __future__ import annotations

import os
import sys

from baton.runtime.collector import importing

with importing():
    from baton.node.main import NodeProgram, main
    from baton.protocol.handles import Role
    from prefill_node.role import PrefillRole

PROGRAM = NodeProgram(
    Role.PREFILL, "Baton prefill node: prompt in, token 1 and KV blocks out.", PrefillRole
)

if __name__ == "__main__":
    raise SystemExit(main(PROGRAM, sys.argv[1:], os.environ))
