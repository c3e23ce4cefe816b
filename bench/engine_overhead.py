"""What a step costs besides the model: `python -m bench.engine_overhead`.

Steady decode of 1, 32 and 256 sequences over a runner that answers at once but lays the batch out
as a real one does. Medians over steps, microseconds of this thread's CPU time, so that neighbours
do not count:
    batch        tokens, positions, slots and block tables as tensors (engine/batch.py)
    engine       everything else: schedule, block growth, events, statistics
and what penalties cost (engine/penalties.py) for texts of growing length, out of a large vocabulary
and out of a small one.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from baton.engine import penalties
from baton.engine.attention.reference import ReferenceAttention
from baton.engine.batch import flatten
from baton.engine.interface import ChunkResult, SequenceChunk
from baton.engine.kv_cache import KVArena
from baton.engine.runner import draws_of
from baton.engine.sequence import SequenceState
from baton.kv_spec import LayerSpec
from baton.request import Request
from baton.sampling import SamplingParams
from bench.engine_kit import (
    VOCAB_SIZE,
    InstantRunner,
    Part,
    arguments_parser,
    instant_engine,
    plain_request,
    prepare,
    random_prompt,
    tell,
)

BLOCK_SIZE = 16
PROMPT = 128
PENALISED = 32
TEXTS = ((256, VOCAB_SIZE), (2048, VOCAB_SIZE), (16384, VOCAB_SIZE), (2048, 600), (16384, 600))
WARM_UP = 20


class FlatteningRunner:
    """Lays each step out, then answers at once; keeps the seconds of both."""

    def __init__(self) -> None:
        self.batch_s: list[float] = []
        self.total_s: list[float] = []
        self._inner = InstantRunner()
        pool = KVArena((LayerSpec(1, 1, 0),), 2, BLOCK_SIZE, "float16")
        self._attention = ReferenceAttention(pool, ())

    def run(
        self, chunks: Sequence[SequenceChunk], on_layer: Callable[[int], None] | None = None
    ) -> list[ChunkResult]:
        """See interface.Runner.run."""
        began = time.thread_time()
        flatten(chunks, self._attention, BLOCK_SIZE, torch.device("cpu"), on_layer)
        self.batch_s.append(time.thread_time() - began)
        results = self._inner.run(chunks, on_layer)
        self.total_s.append(time.thread_time() - began)
        return results


def measure(num_sequences: int, num_steps: int) -> dict[str, Any]:
    """Medians over `num_steps` decode steps of so many sequences."""
    runner = FlatteningRunner()
    length = PROMPT + WARM_UP + num_steps + 8
    engine = instant_engine(
        num_sequences * (length // BLOCK_SIZE + 2), BLOCK_SIZE, runner,
        max_num_seqs=num_sequences, max_num_batched_tokens=max(2048, num_sequences),
    )  # fmt: skip
    for index in range(num_sequences):
        prompt = random_prompt(PROMPT, index)
        engine.add(plain_request(f"r{index}", prompt, WARM_UP + num_steps + 8))
    while engine.current_load().waiting:
        engine.step()
    for _ in range(WARM_UP):
        engine.step()
    runner.batch_s.clear()
    runner.total_s.clear()
    steps: list[float] = []
    for _ in range(num_steps):
        if not engine.has_work:
            break
        began = time.thread_time()
        engine.step()
        steps.append(time.thread_time() - began)
    own = [step - inside for step, inside in zip(steps, runner.total_s, strict=True)]
    engine_us, batch_us = (statistics.median(t) * 1e6 for t in (own, runner.batch_s))
    return {
        "sequences": num_sequences,
        "engine us": engine_us,
        "batch us": batch_us,
        "step us": engine_us + batch_us,
        "us per sequence": (engine_us + batch_us) / num_sequences,
        "steps": len(steps),
    }


def measure_penalties(length: int, vocabulary: int, num_steps: int) -> dict[str, Any]:
    """Medians over steps of `PENALISED` sequences that begin with `length` tokens of output, out of
    `vocabulary` that are as frequent as words are."""
    draw = random.Random(length)
    weights = [1 / rank for rank in range(1, vocabulary + 1)]
    texts = draw.choices(range(vocabulary), weights, k=length)
    params = SamplingParams(
        seed=1, max_tokens=1, repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1
    )
    sequences = [
        SequenceState(Request(f"r{i}", tuple(texts[:1]), params), b"", list(texts))
        for i in range(PENALISED)
    ]
    logits = torch.randn(PENALISED, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    steps: list[float] = []
    for _ in range(WARM_UP + num_steps):
        for sequence in sequences:
            sequence.num_computed = len(sequence.tokens)
            sequence.tokens.append(draw.choices(range(100))[0])
        chunks = [sequence.chunk(1) for sequence in sequences]
        raw = logits.clone()
        began = time.thread_time()
        draws = [one for chunk in chunks for one in draws_of(chunk)]
        penalties.apply(raw, draws, ())
        steps.append(time.thread_time() - began)
    taken = [step * 1e6 for step in steps[WARM_UP:]]
    least, middle, most = (statistics.quantiles(taken, n=20)[i] for i in (0, 9, 18))
    distinct = len({*texts, *range(100)})
    return {
        "tokens": length, "distinct": distinct, "sequences": PENALISED, "step us": middle,
        "5 %": least, "95 %": most, "us per sequence": middle / PENALISED,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit status."""
    given = arguments_parser("engine_overhead", __doc__).parse_args(arguments)
    prepare(given)
    num_steps = 1000 if given.full else 200
    rows = [measure(count, num_steps) for count in (1, 32, 256)]
    penalised = [measure_penalties(*text, num_steps // 4) for text in TEXTS]
    tell([Part("step overhead", rows), Part("penalties", penalised)], given.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
