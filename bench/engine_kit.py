"""What the engine benchmarks share: runners for measuring, command lines and tables.

The benchmarks `bench.engine_*` run an engine in their own process and import torch. All others talk
to servers. The `baton` command starts none of these benchmarks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from baton.engine.config import EngineConfig
from baton.engine.core.active_model import ActiveModel
from baton.engine.core.assembly import EngineParts, assemble
from baton.engine.core.engine import Engine
from baton.engine.memory.kv_cache import KVArena
from baton.engine.memory.layer_groups import LayerGroups, one_group
from baton.engine.state.interface import ChunkResult, ModelInfo, Runner, Sampled, SequenceChunk
from baton.protocol.events import TokenLogprob
from baton.protocol.kv_spec import LayerSpec
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from baton.runtime.config import add_config

VOCAB_SIZE = 32_000
FIRST_TOKEN = 8  # below: ids that a model might treat as special
_MIX = 0x9E3779B97F4A7C15


class InstantRunner:
    """A runner that takes no time: token ids by arithmetic, no KV. A step then costs the engine
    only.
    """

    def run(
        self, chunks: Sequence[SequenceChunk], on_layer: Callable[[int], None] | None = None
    ) -> list[ChunkResult]:
        """See interface.Runner.run."""
        return [self._answer(chunk) for chunk in chunks]

    def _answer(self, chunk: SequenceChunk) -> ChunkResult:
        if chunk.sample is None:
            return ChunkResult()
        seed = (chunk.position + 1) * _MIX ^ (chunk.sample_index + 1) * 0xBF58476D
        if not chunk.num_candidates:
            token = FIRST_TOKEN + seed % (VOCAB_SIZE - FIRST_TOKEN)
            return ChunkResult(Sampled((token,)))
        ranked = tuple(
            TokenLogprob(FIRST_TOKEN + (seed + rank) % 1000, -1.0 - rank, rank + 1)
            for rank in range(chunk.num_candidates)
        )
        return ChunkResult(Sampled((), candidates=ranked))


class Watcher:
    """A runner around another one; `seen` gets each step's chunks before they run."""

    def __init__(self, inner: Runner, seen: Callable[[Sequence[SequenceChunk]], None]) -> None:
        self._inner = inner
        self._seen = seen

    def run(
        self, chunks: Sequence[SequenceChunk], on_layer: Callable[[int], None] | None = None
    ) -> list[ChunkResult]:
        """See interface.Runner.run."""
        self._seen(chunks)
        return self._inner.run(chunks, on_layer)


@dataclass(frozen=True, slots=True)
class Lengths:
    """The numbers of tokens of one request's prompt and answer."""

    prompt: int
    output: int


def mixed_lengths(
    count: int, prompt_mean: float, output_mean: float, seed: int, sigma: float = 1.0
) -> list[Lengths]:
    """Return log-normal lengths (sigma 1 looks like chat traces), from 4 tokens to 8 times the
    mean.
    """
    draw = random.Random(seed)

    def length(mean: float) -> int:
        value = draw.lognormvariate(-sigma * sigma / 2, sigma) * mean
        return round(min(max(4.0, value), 8 * mean))

    return [Lengths(length(prompt_mean), length(output_mean)) for _ in range(count)]


def instant_engine(
    num_blocks: int,
    block_size: int,
    runner: Runner | None = None,
    groups: LayerGroups | None = None,
    **options: object,
) -> Engine:
    """Return an engine without a model.

    It has two bytes of KV per token and layer; by default one layer.
    """
    groups = groups or one_group((LayerSpec(1, 1, 0),))
    values: dict[str, Any] = {"model": "none", **options}
    config = EngineConfig(**values)
    info = ModelInfo(
        name="none",
        digest="none",
        layers=groups.layers,
        rope="none",
        vocab_size=VOCAB_SIZE,
        max_model_len=num_blocks // groups.num_groups * block_size,
        eos_token_ids=(),
        kv_dtype="float16",
        model_impl="lean",
    )
    arena = KVArena(groups, num_blocks, block_size, info.kv_dtype)
    return assemble(EngineParts(config, ActiveModel(runner or InstantRunner()), arena, info))


def plain_request(name: str, prompt: Sequence[int], output: int, **params: object) -> Request:
    """Return a request for exactly `output` tokens."""
    values: dict[str, Any] = {"max_tokens": output, "seed": 1, "ignore_eos": True, **params}
    return Request(name, tuple(prompt), SamplingParams(**values))


def run_all(engine: Engine, requests: Sequence[Request]) -> None:
    """Add all requests and make steps until they have ended."""
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
        engine.take_block_events()


def random_prompt(length: int, seed: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """Return token ids that share no prefix with those of another seed."""
    draw = random.Random(seed)
    return [draw.randrange(FIRST_TOKEN, vocab_size) for _ in range(length)]


# ---- the command lines ----


@dataclass(frozen=True, slots=True)
class TimedPart:
    """One table: a title, and rows that are dictionaries of the same keys."""

    title: str
    rows: list[dict[str, Any]]


def arguments_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every engine benchmark: --json, --full, --threads."""
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{module}", description=(description or "").partition("\n")[0]
    )
    add_config(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--full", action="store_true", help="more sizes and repetitions (minutes)")
    parser.add_argument("--threads", type=int, help="CPU threads of torch (default: its own)")
    return parser


def prepare(given: argparse.Namespace) -> None:
    """Apply the options that concern the process: its threads."""
    if given.threads is not None:
        torch.set_num_threads(given.threads)


def tell(parts: Sequence[TimedPart], as_json: bool) -> None:
    """Print all parts, as tables or as one JSON object."""
    if as_json:
        machine = {
            "cores": len(os.sched_getaffinity(0)),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
        found = {"machine": machine, **{part.title: part.rows for part in parts}}
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return
    console = Console()
    for part in parts:
        table = Table(*part.rows[0], title=part.title, box=box.SIMPLE, title_justify="left")
        for row in part.rows:
            table.add_row(*(_shown(value) for value in row.values()))
        console.print(table)


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
