"""Baton: prefill/decode disaggregated serving of large language models.

Importing it says how torch's threads wait for each other, unless the environment does: they spin
for about as long as waking one up takes, then they sleep. OpenMP's own way is to spin for
milliseconds. Beside other work on their cores that costs more than half of their speed, and in a
quiet machine it wins 5 % (`python -m bench.engine_neighbours`). OpenMP reads the variables once,
when torch is imported: import Baton before torch, or set them yourself.
"""

import os

__version__ = "0.1.0"
# GNU's OpenMP takes its own variable, other runtimes the standard's.
WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}
sets_waiting = WAITING.keys().isdisjoint(os.environ)
if sets_waiting:
    os.environ.update(WAITING)
