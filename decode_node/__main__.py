"""`python -m decode_node`: one decode node."""

from __future__ import annotations

import os
import sys

from baton.runtime.collector import importing

with importing():
    from baton.node.main import NodeProgram, main
    from baton.protocol.handles import Role
    from decode_node.role import DecodeRole

PROGRAM = NodeProgram(Role.DECODE, "Baton decode node: KV blocks in, tokens out.", DecodeRole)

if __name__ == "__main__":
    raise SystemExit(main(PROGRAM, sys.argv[1:], os.environ))
