"""Baton: prefill/decode disaggregated serving of large language models.

Importing it sets OMP_WAIT_POLICY to PASSIVE unless the environment has it. torch's threads then
sleep while they wait for each other. If they spin, other work on their cores takes most of what
they do (`python -m bench.engine_neighbours`). OpenMP reads the variable once, when torch is
imported: import Baton before torch, or set it yourself.
"""

import os

__version__ = "0.1.0"
WAIT_POLICY = "OMP_WAIT_POLICY"
sets_wait_policy = WAIT_POLICY not in os.environ
os.environ.setdefault(WAIT_POLICY, "PASSIVE")
