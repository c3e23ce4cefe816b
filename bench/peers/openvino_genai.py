"""OpenVINO GenAI as a peer: `--peer "PYTHON -m bench.peers.openvino_genai"`.

PYTHON has `openvino-genai` and, for the conversion, `optimum-intel` with torch; Baton need not be
installed there. Continuous batching over its paged attention, as its own pipelines choose it on a
CPU. Weights: bfloat16, int8 per channel (also for w8a8: it rounds activations to 8 bits by
default), int4 in groups of 128 (also for w4a8, likewise); KV in 8 bits and everything else as it
does by default.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.peers.protocol import Generate, Generated, Setup, Unsupported, serve

# The peer's environment has them, Baton's need not: no types.
genai: Any = importlib.import_module("openvino_genai")
openvino: Any = importlib.import_module("openvino")
np: Any = importlib.import_module("numpy")

FORMATS: Final = {
    "none": ("--weight-format", "fp16"),  # computed in bfloat16
    "int8": ("--weight-format", "int8"),
    "int4": ("--weight-format", "int4", "--sym", "--group-size", "128", "--ratio", "1.0"),
}
CACHE_GB: Final = 2
STEP: Final = 16_384  # tokens that one step takes


def convert(model: Path, quantization: str, path: Path) -> None:
    """Write the checkpoint `model` as OpenVINO's files into the folder `path`. Raises
    Unsupported."""
    if quantization not in FORMATS:
        raise Unsupported(f"no {quantization} weights")
    command = (
        *(sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino"),
        *("--model", str(model), "--task", "text-generation-with-past"),
        *(*FORMATS[quantization], str(path)),
    )
    subprocess.run(command, check=True)


class OpenVinoModel:
    """A model that OpenVINO GenAI has loaded."""

    def __init__(self, path: Path, threads: int) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.max_num_batched_tokens = STEP
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "bf16"}
        self._pipeline = genai.ContinuousBatchingPipeline(
            str(path), scheduler, "CPU", properties, {}, {}
        )

    def generate(self, prompts: Sequence[list[int]], new: int) -> Generated:
        """Generate `new` greedy tokens of each prompt, all at once, and return them."""
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new
        config.do_sample, config.ignore_eos, config.apply_chat_template = False, True, False
        inputs = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        results = self._pipeline.generate(inputs, [config] * len(inputs))
        tokens = [list(result.m_generation_ids[0]) for result in results]
        if len(results) > 1:
            return Generated(tokens)
        return Generated(tokens, results[0].perf_metrics.get_ttft().mean / 1e3)


def load(setup: Setup) -> Generate:
    """Convert the checkpoint, unless that was done before, and load the result."""
    return OpenVinoModel(setup.converted("-openvino", convert), setup.threads).generate


if __name__ == "__main__":
    serve(f"OpenVINO GenAI {genai.__version__.partition('-')[0]}", load)
