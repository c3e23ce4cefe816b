"""Baton's engine as a peer, in a process and an environment of its own.

bench.engine_neighbours starts it.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.llm import LLM
from bench.engine import ours
from bench.peers.protocol import Generate, Generated, Setup, serve


def load(setup: Setup) -> Generate:
    """Load a checkpoint in bfloat16, or rounded to `setup.quantization` while it loads."""
    llm = LLM(
        model=str(setup.model), dtype="bfloat16", quantization=setup.quantization,
        num_kv_blocks=512, enable_prefix_caching=False, threads=setup.threads,
        measure_limits=False,
    )  # fmt: skip
    run = ours(llm)

    def generate(prompts: Sequence[list[int]], new: int) -> Generated:
        took = run(prompts, new)
        return Generated(took.tokens, took.first_seconds)

    return generate


if __name__ == "__main__":
    serve("baton", load)
