"""`python -m encode_node`: one encode node."""

from __future__ import annotations

import os
import sys

from baton.runtime.collector import importing

with importing():
    from baton.engine.core.assembly import load_tower_parts
    from baton.node.main import NodeProgram, main
    from baton.protocol.handles import Role
    from encode_node.role import EncodeRole

PROGRAM = NodeProgram(
    Role.ENCODE,
    "Baton encode node: images in, rows of the model's input out.",
    EncodeRole,
    load_tower_parts,
)

if __name__ == "__main__":
    raise SystemExit(main(PROGRAM, sys.argv[1:], os.environ))
