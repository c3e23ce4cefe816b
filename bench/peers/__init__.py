"""Other engines as peers of bench.engine; each runs in an environment of its own.

Their threads wait as their own users find them: what Baton has set for itself is taken back.
"""

import os

import baton

if baton.sets_waiting:
    for name in baton.WAITING:
        os.environ.pop(name, None)
