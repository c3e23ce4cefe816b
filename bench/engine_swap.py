"""Swapping against recomputation: `python -m bench.engine_swap [--model DIR]`.

A preempted request of `context` tokens either has its blocks copied to host memory and back, or its
tokens are computed again. Both times are measured on the same model and arena, per block size, as a
scheduler would wait for them. vLLM's paper (arXiv 2309.06180, section 7.3) found on a GPU:
recomputing does not depend on the block size; swapping small blocks costs much (many small copies
over PCIe); from 16 to 64 both are alike, and recomputing is never above 1.2 times swapping. On a
CPU a swap is a copy within one memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from baton.engine.config import EngineConfig
from baton.engine.loading.loading import LoadedModel, load_model
from baton.engine.memory.kv_cache import KVArena
from baton.engine.memory.layer_groups import one_group
from baton.engine.running.runner import ModelRunner
from baton.engine.state.interface import SequenceChunk
from baton.protocol.kv_spec import HeldBlocks
from baton.protocol.sampling import SamplingParams
from bench.engine_kit import TimedPart, arguments_parser, prepare, random_prompt, tell

DEMO_MODEL = Path(__file__).resolve().parents[1] / "demo_model"
BLOCK_SIZES = (8, 16, 32, 64, 128)
STEP_TOKENS = 512  # tokens of a recomputation's step, like those of a chunked prefill


def median_s(run: Callable[[], object], repetitions: int) -> float:
    """Return the median seconds of `run`, after one call that does not count."""
    run()
    seconds: list[float] = []
    for _ in range(repetitions):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def measure(model: LoadedModel, block_size: int, context: int, repetitions: int) -> dict[str, Any]:
    """Return one row: a request of `context` tokens, in blocks scattered over the pool."""
    info = model.info
    count = -(-context // block_size)
    arena = KVArena(one_group(info.layers), 4 * count, block_size, info.kv_dtype, model.device)
    # Scattered, as after hours of serving: every third block, backwards.
    blocks = [(3 * index) % (4 * count - 1) for index in range(count)][::-1]
    runner = ModelRunner(model, arena)
    tokens = random_prompt(context, 0, info.vocab_size)
    params = SamplingParams(temperature=0, max_tokens=1)

    def recompute() -> None:
        for start in range(0, context, STEP_TOKENS):
            part = tokens[start : start + STEP_TOKENS]
            last = start + len(part) == context
            chunk = SequenceChunk(
                "r",
                part,
                start,
                (HeldBlocks(blocks),),
                params if last else None,
                history=tokens,
                num_prompt=context,
            )
            runner.run([chunk])

    recomputed = median_s(recompute, repetitions)
    out = median_s(lambda: arena.read_blocks(blocks), repetitions)
    host = arena.read_blocks(blocks)
    back = median_s(lambda: arena.write_blocks(host, range(count), blocks), repetitions)
    return {
        "block size": block_size,
        "context": context,
        "swap out ms": out * 1e3,
        "swap in ms": back * 1e3,
        "swap both ms": (out + back) * 1e3,
        "recompute ms": recomputed * 1e3,
        "recompute / swap": recomputed / (out + back),
        "swap GB/s": 2 * host.num_bytes / (out + back) / 1e9,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return the exit status."""
    parser = arguments_parser("engine_swap", __doc__)
    parser.add_argument("--model", default=str(DEMO_MODEL), help="checkpoint (default: the demo)")
    given = parser.parse_args(arguments)
    prepare(given)
    model = load_model(EngineConfig(model=given.model))
    contexts = (256, 1024, 2000) if given.full else (256, 1024)
    repetitions = 15 if given.full else 5
    rows = [
        measure(model, block_size, context, repetitions)
        for context in contexts
        if context < model.info.max_model_len
        for block_size in BLOCK_SIZES
    ]
    tell([TimedPart("swap against recompute", rows)], given.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
