"""Decode attention alone: `python -m bench.engine_attention --threads 2`.

The compiled kernel over the blocks of a large pool, scattered, 16 query and 8 KV heads of 128
(--heads) in bfloat16 (--kv-cache-dtype int8: keys and values in int8, with their scales): bytes of
KV read per second, as a share of the read bandwidth that is measured in the same round. Calls
follow each other as the layers of a step do, over other blocks each time, so that nothing lies in a
cache. "call": what a call costs that has a single key; a step's phases do not pay it.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch

from baton.engine.kernels.cpu.library import (
    CpuKernels,
    DecodeLayer,
    DecodeRows,
    PoolScales,
    asking_state,
    kernels,
)
from baton.engine.memory import huge_pages
from baton.engine.performance.roofline import measure as measure_roof
from bench.engine_kit import TimedPart, arguments_parser, prepare, tell

KV_DTYPES: Final = ("auto", "int8")
LIMITS_S: Final = 0.15


class LayerHeads(NamedTuple):
    """How many query heads and KV heads a layer has, and the numbers of each."""

    query: int = 16
    kv: int = 8
    dim: int = 128

    def bytes_per_key(self, kv_dtype: str) -> int:
        """Return the bytes of a token's keys and values."""
        return 2 * self.kv * (self.dim + 4 if kv_dtype == "int8" else 2 * self.dim)


QWEN: Final = LayerHeads()


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """`rows` rows with `context` keys each, in blocks of `block_size`."""

    context: int
    rows: int = 1
    block_size: int = 16
    heads: LayerHeads = QWEN


CASES: Final = (
    AttentionCase(1024), AttentionCase(2048), AttentionCase(4096), AttentionCase(8192),
    AttentionCase(4096, block_size=128), AttentionCase(1024, 8), AttentionCase(4096, 8),
)  # fmt: skip


class Calls:
    """As many calls in a row as the pool has blocks for."""

    def __init__(
        self, compiled: CpuKernels, case: AttentionCase, pool_mb: int, kv_dtype: str
    ) -> None:
        rows, size, heads = case.rows, case.block_size, case.heads
        per_key = heads.bytes_per_key(kv_dtype)
        width = -(-case.context // size)
        self.num_bytes = rows * case.context * per_key
        self.count = max(1, (pool_mb << 20) // (rows * width * size * per_key))
        blocks = self.count * rows * width
        self._compiled = compiled
        shape = (2, blocks, size, heads.kv)
        scales = None
        if kv_dtype == "int8":
            # Each page is touched.
            pool = huge_pages.zeros(*shape, heads.dim, dtype=torch.int8).fill_(1)
            of_keys, of_values = huge_pages.zeros(*shape, dtype=torch.float32).fill_(0.01)
            scales = PoolScales(of_keys, of_values)
        else:
            pool = huge_pages.zeros(*shape, heads.dim, dtype=torch.bfloat16).fill_(0.01)
        self._layer = DecodeLayer(pool[0], pool[1], heads.dim**-0.5, scales=scales)
        self._q = torch.randn(rows, heads.query, heads.dim).bfloat16()
        self._out = torch.empty_like(self._q)
        tables = torch.randperm(blocks).view(self.count, rows, width)
        numbers = torch.arange(rows)
        self._steps = [
            DecodeRows(
                numbers, numbers, torch.full((rows,), case.context), 0 * numbers, table.contiguous()
            )
            for table in tables
        ]

    def seconds(self) -> float:
        """Return the mean seconds of one call."""
        began = time.perf_counter()
        for step in self._steps:
            self._compiled.decode_attention(self._q, self._out, self._layer, step)
        return (time.perf_counter() - began) / self.count


def measure(
    compiled: CpuKernels, case: AttentionCase, rounds: int, pool_mb: int, kv_dtype: str = "auto"
) -> dict[str, Any]:
    """Return the medians over alternating rounds."""
    calls = Calls(compiled, case, pool_mb, kv_dtype)
    empty = Calls(compiled, AttentionCase(1, case.rows, heads=case.heads), 1, kv_dtype)
    rates, limits, idle = list[float](), list[float](), list[float]()
    calls.seconds()
    for _ in range(rounds):
        rates.append(calls.num_bytes / calls.seconds())
        idle.append(empty.seconds())
        limits.append(measure_roof(torch.device("cpu"), torch.bfloat16, LIMITS_S).read_bytes_per_s)
    shares = [rate / limit for rate, limit in zip(rates, limits, strict=True)]
    return {
        "context": case.context, "rows": case.rows, "block": case.block_size,
        "GB/s": statistics.median(rates) / 1e9, "read GB/s": statistics.median(limits) / 1e9,
        "share": statistics.median(shares), "least": min(shares), "most": max(shares),
        "call µs": statistics.median(idle) * 1e6,
    }  # fmt: skip


def main() -> int:
    """Run the command. Return the exit status."""
    parser = arguments_parser("engine_attention", __doc__)
    parser.add_argument("--kv-cache-dtype", default="auto", choices=KV_DTYPES)
    parser.add_argument(
        "--heads", type=int, nargs=3, default=QWEN, metavar=("QUERY", "KV", "DIM"),
        help="query heads, KV heads and numbers of each (16 8 128)",
    )  # fmt: skip
    given = parser.parse_args()
    prepare(given)
    compiled = kernels()
    if compiled is None:
        raise SystemExit("no compiled kernels here: `baton doctor` says why")
    asking_state()  # as a node asks memory
    rounds = 15 if given.full else 5
    heads = LayerHeads(*given.heads)
    cases = [replace(case, heads=heads) for case in CASES]
    rows = [measure(compiled, case, rounds, 700, given.kv_cache_dtype) for case in cases]
    tell([TimedPart("Decode attention: share of the read bandwidth", rows)], given.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
