"""Recorded request traces as workloads: who asks how much, and when. Pure, except for reading
files.

A trace is scaled twice: lengths, so that a small model on few cores meets the same shape of load,
and time, so that requests arrive at the rate under test with the trace's own bursts.
bench/traces/README.md describes the columns of the files.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from baton.protocol.errors import ConfigError
from bench.workload import PlannedRequest

FOLDER: Final = Path(__file__).resolve().parent / "traces"
BLOCK: Final = 512  # tokens of a prefix block before scaling
_MIX: Final = 2_654_435_761  # Knuth's multiplicative hash


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request as recorded, before any scaling."""

    at_ms: float
    input_tokens: int
    output_tokens: int
    prefix_blocks: tuple[int, ...] = ()  # BLOCK tokens each; equal ids are equal text


@dataclass(frozen=True, slots=True)
class Scaling:
    """How a trace becomes a workload.

    `input_mean`, `output_mean`: tokens, after scaling. `max_tokens`: the most of prompt and answer
    together. `vocabulary`: token ids are drawn from [first, last).
    """

    rate: float
    duration_s: float
    input_mean: int
    output_mean: int
    max_tokens: int
    vocabulary: tuple[int, int]


def bundled() -> dict[str, Path]:
    """Return the traces in this repository, by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.csv"))}


def read_trace(path: Path) -> list[TraceRequest]:
    """Return the trace's requests in order of arrival. Raises ConfigError for a malformed file."""
    try:
        with path.open(newline="") as file:
            found = [_request(row) for row in csv.DictReader(file)]
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(f"{path} is no trace: {error}") from error
    if len(found) < 2:
        raise ConfigError(f"{path} holds {len(found)} requests")
    return sorted(found, key=lambda request: request.at_ms)


def _request(row: dict[str, str]) -> TraceRequest:
    blocks = tuple(_runs(row["prefix_blocks"] or ""))
    sizes = int(row["input_tokens"]), int(row["output_tokens"])
    return TraceRequest(float(row["ms"]), *sizes, blocks)


def _runs(text: str) -> Iterator[int]:
    """Yield 3, 7, 8, 9 for `3 7-9`."""
    for run in text.split():
        first, _, last = run.partition("-")
        yield from range(int(first), int(last or first) + 1)


def plan_trace(trace: Sequence[TraceRequest], scaling: Scaling, seed: int) -> list[PlannedRequest]:
    """Return `rate * duration_s` requests from the place `seed` of the trace on, around its end.

    The same arguments give the same list; another seed gives other requests with other prompts.
    """
    count = max(2, round(scaling.rate * scaling.duration_s))
    start = seed * 97 % len(trace)
    chosen = [trace[(start + index) % len(trace)] for index in range(count)]
    at_s = _arrivals(trace, start, count, scaling.rate)
    input_scale = scaling.input_mean / _mean([each.input_tokens for each in trace])
    output_scale = scaling.output_mean / _mean([each.output_tokens for each in trace])
    planned: list[PlannedRequest] = []
    for index, request in enumerate(chosen):
        output = min(max(1, round(request.output_tokens * output_scale)), scaling.max_tokens // 2)
        length = max(1, round(request.input_tokens * input_scale))
        length = min(length, scaling.max_tokens - output)
        salt = seed * 1_000_003 + (0 if request.prefix_blocks else index + 1)
        prompt = tuple(_prompt(request, length, input_scale, salt, scaling.vocabulary))
        planned.append(PlannedRequest(index, at_s[index], prompt, output))
    return planned


def _arrivals(trace: Sequence[TraceRequest], start: int, count: int, rate: float) -> list[float]:
    """Return seconds from the first arrival: the trace's gaps, stretched to the mean 1 / rate."""
    gaps: list[float] = []
    for index in range(start, start + count - 1):
        here, after = trace[index % len(trace)], trace[(index + 1) % len(trace)]
        gaps.append(max(0.0, after.at_ms - here.at_ms))
    stretch = (count - 1) / rate / total if (total := sum(gaps)) else 0.0
    times = [0.0]
    for gap in gaps:
        times.append(times[-1] + gap * stretch)
    return times


def _prompt(
    request: TraceRequest, length: int, scale: float, salt: int, vocabulary: tuple[int, int]
) -> Iterator[int]:
    """Yield token ids; those of a prefix block depend only on its id and the salt."""
    first, last = vocabulary
    per_block = max(1, round(BLOCK * scale))
    for index in range(length):
        block, within = divmod(index, per_block)
        shared = block < len(request.prefix_blocks)
        owner = request.prefix_blocks[block] if shared else -1 - block
        mixed = ((salt * 31 + owner) * 1_000_003 + within) * _MIX
        yield first + (mixed >> 7) % (last - first)


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values)
