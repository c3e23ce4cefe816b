"""One engine in one process: no router, no network. `python examples/offline.py [MODEL_DIR]`."""

from __future__ import annotations

import sys

from baton.llm import LLM
from baton.sampling import SamplingParams


def main(model: str) -> None:
    llm = LLM(model=model)
    prompts = ["PagedAttention is", "The KV cache is"]
    for output in llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=32)):
        sys.stdout.write(f"{output.text!r} ({output.finish_reason})\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "demo_model")
