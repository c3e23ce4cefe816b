"""Baton's engine as a peer, in a process and an environment of its own.

bench.engine_neighbours starts it.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.llm import LLM
from baton.protocol.sampling import SamplingParams
from bench.peers.protocol import Generate, Setup, serve


def load(setup: Setup) -> Generate:
    """Load a checkpoint in bfloat16, or rounded to `setup.quantization` while it loads."""
    llm = LLM(
        model=str(setup.model), dtype="bfloat16", quantization=setup.quantization,
        num_kv_blocks=512, enable_prefix_caching=False, threads=setup.threads,
        measure_limits=False,
    )  # fmt: skip

    def generate(prompts: Sequence[list[int]], new: int) -> Sequence[Sequence[int]]:
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        return [answer.outputs[0].token_ids for answer in llm.generate(prompts, params)]

    return generate


if __name__ == "__main__":
    serve("baton", load)
