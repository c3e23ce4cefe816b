"""What a step costs besides the model: `python -m bench.engine_overhead`.

Medians over steps of steady decode, in microseconds of this thread's CPU time, so that other
processes do not count (with one thread, this is all of the step's time):
    batch        tokens, positions, slots and block tables as tensors (baton/engine/state/batch.py)
    engine       everything else: schedule, block growth, events, statistics; over a runner that
                 answers at once but lays out the batch as a real one does
    outside      a whole step of the real runner with a model that has its logits already
    sampling     tokens from 151,936 logits a row, with the compiled kernels and with torch alone;
                 "widen": bfloat16 logits to float32, the last work of a model
    penalties    baton/engine/sampling/penalties.py for texts of growing length, with a large and
                 with a small vocabulary
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from baton.engine.attention.reference import ReferenceAttention
from baton.engine.config import EngineConfig
from baton.engine.core.active_model import activate
from baton.engine.core.assembly import EngineParts, assemble
from baton.engine.loading.loading import LoadedModel
from baton.engine.memory.kv_cache import KVArena
from baton.engine.models.lora import Adapter
from baton.engine.running.runner import draws_of
from baton.engine.sampling import penalties
from baton.engine.sampling.sampler import Draw, sample, sample_plainly
from baton.engine.state.attention import AttentionLayer
from baton.engine.state.batch import Batch, flatten
from baton.engine.state.interface import ChunkResult, ModelInfo, SequenceChunk
from baton.engine.state.sequence import SequenceState
from baton.engine.state.work import ParameterCounts, Utilization
from baton.protocol.kv_spec import LayerSpec
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from bench.engine_kit import (
    VOCAB_SIZE,
    InstantRunner,
    TimedPart,
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
LARGE_VOCAB = 151_936
LIKELY = 40  # tokens of a row that stand out, as a text's next ones do
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0},
    "top-p 0.95, top-k 20": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    "top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
}


class FlatteningRunner:
    """A runner that lays out each step, then answers at once; it keeps the seconds of both."""

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
    """Return medians over `num_steps` decode steps of `num_sequences` sequences."""
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


class KnownLogits:
    """A CausalModel that takes no time: it has logits [rows, LARGE_VOCAB] float32 already."""

    vocab_size = LARGE_VOCAB
    max_positions = None
    layers = (LayerSpec(1, 1, 0),)
    attention_layers = (AttentionLayer(1, 1.0),)
    parameter_counts = ParameterCounts(0, 0)

    def __init__(self, rows: int) -> None:
        self._logits = likely_logits(rows).float()

    def forward(self, token_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """See CausalModel.forward."""
        return torch.zeros(token_ids.shape[0], 1)

    def logits(self, hidden: Tensor) -> Tensor:
        """See CausalModel.logits."""
        return self._logits[: hidden.shape[0]]

    def add_adapter(self, adapter: Adapter) -> None:
        """See CausalModel.add_adapter."""
        raise NotImplementedError(adapter.name)

    def remove_adapter(self, id_: str) -> None:
        """See CausalModel.remove_adapter."""
        raise NotImplementedError(id_)


def likely_logits(rows: int) -> Tensor:
    """Return bfloat16 [rows, LARGE_VOCAB] in which some ids stand out, as a text's next tokens
    do.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, LARGE_VOCAB, generator=generator)
    logits[:, :LIKELY] += 18 * torch.rand(rows, LIKELY, generator=generator)
    return logits.bfloat16()


def measure_outside(kind: str, num_sequences: int, num_steps: int) -> dict[str, Any]:
    """Return medians over decode steps that do everything except run a model."""
    length = PROMPT + WARM_UP + num_steps + 8
    num_blocks = num_sequences * (length // BLOCK_SIZE + 2)
    pool = KVArena((LayerSpec(1, 1, 0),), num_blocks, BLOCK_SIZE, "float16")
    model = KnownLogits(num_sequences)
    info = ModelInfo(
        "none", "none", model.layers, "none", LARGE_VOCAB, num_blocks * BLOCK_SIZE, (), "float16",
        "lean",
    )  # fmt: skip
    loaded = LoadedModel(info, model, torch.device("cpu"), torch.float16, 0)
    config = EngineConfig(
        model="none", max_num_seqs=num_sequences, max_num_batched_tokens=2048, measure_limits=False
    )
    active = activate(loaded, None, config, pool, Utilization())
    engine = assemble(EngineParts(config, active, pool, info))
    for index in range(num_sequences):
        prompt = random_prompt(PROMPT, index, LARGE_VOCAB)
        engine.add(plain_request(f"r{index}", prompt, WARM_UP + num_steps + 8, **KINDS[kind]))
    while engine.current_load().waiting or engine.stats.num_steps < WARM_UP:
        engine.step()
    steps: list[float] = []
    for _ in range(num_steps):
        began = time.thread_time()
        engine.step()
        steps.append(time.thread_time() - began)
    least, middle, most = (statistics.quantiles(steps, n=20)[i] * 1e6 for i in (0, 9, 18))
    return {
        "kind": kind, "sequences": num_sequences, "step us": middle, "5 %": least, "95 %": most,
        "steps": num_steps,
    }  # fmt: skip


def measure_sampling(kind: str, rows: int, num_steps: int) -> dict[str, Any]:
    """Return medians over steps: from the model's bfloat16 logits [rows, LARGE_VOCAB] to tokens."""
    computed = likely_logits(rows)
    times: dict[str, list[float]] = {"widen us": [], "us": [], "torch us": []}
    for step in range(num_steps):
        draws = [
            Draw(SamplingParams(seed=row, max_tokens=1, **KINDS[kind]), 0, step)
            for row in range(rows)
        ]
        began = time.thread_time()
        widened = computed.float()
        times["widen us"].append(time.thread_time() - began)
        tokens: list[list[int]] = []
        for name, choose in (("us", sample), ("torch us", sample_plainly)):
            began = time.thread_time()
            tokens.append(choose(widened, draws))
            times[name].append(time.thread_time() - began)
        assert tokens[0] == tokens[1], "a compiled kernel and its twin disagree"
    medians = {name: statistics.median(taken) * 1e6 for name, taken in times.items()}
    return {"kind": kind, "rows": rows, **medians, "steps": num_steps}


def measure_penalties(length: int, vocabulary: int, num_steps: int) -> dict[str, Any]:
    """Return medians over steps of `PENALISED` sequences, which begin with `length` output tokens.

    The tokens come from `vocabulary` ids, which are as frequent as words are.
    """
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
    """Run the command. Return the exit status."""
    given = arguments_parser("engine_overhead", __doc__).parse_args(arguments)
    prepare(given)
    num_steps = 1000 if given.full else 200
    rows = [measure(count, num_steps) for count in (1, 32, 256)]
    penalised = [measure_penalties(*text, num_steps // 4) for text in TEXTS]
    outside = [
        measure_outside(kind, count, max(20, num_steps // 5)) for kind in KINDS for count in (1, 32)
    ]
    sampled = [
        measure_sampling(kind, count, num_steps // 20) for kind in KINDS for count in (1, 32)
    ]
    parts = [
        TimedPart("step overhead", rows), TimedPart("outside the model", outside),
        TimedPart("sampling", sampled), TimedPart("penalties", penalised),
    ]  # fmt: skip
    tell(parts, given.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
