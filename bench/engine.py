"""The engine against transformers' `generate`, row by row: `baton bench engine [--json]`.

Random weights of two real shapes, bfloat16, greedy, ends ignored, both in one process and in turn:
    prefill n        tokens of one prompt per second, its first new token included
    decode b@c       new tokens per second of b requests that hold c tokens each, prefill taken off
Beside each: the shares of the machine's own limits, measured in the same run: MBU = bytes that the
row must read (weights, KV) over the read bandwidth, MFU = its FLOPs over the rate of a large matrix
product, as baton/engine/state/work.py counts both. Integer weights are compared with transformers'
bfloat16; their vocabulary head is rounded as --lm-head-quantization auto says: int8 beside int8 and
int4, w8a8 beside w8a8. --peer CMD adds another engine to every round (bench/peer.py); it may be
repeated. --roofline draws the rows under the two limits (bench/roofline.py).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM

from baton.engine.performance.roofline import measure as measure_roof
from baton.engine.state.work import Limits, Work
from baton.llm import LLM
from baton.protocol.errors import ConfigError
from baton.protocol.sampling import SamplingParams
from baton.runtime.config import parse
from bench.engine_kit import TimedPart, arguments_parser, prepare, random_prompt, tell
from bench.models import LARGE, SMALL, write_checkpoint
from bench.peer import PeerServer
from bench.roofline import Point, Roofline, svg

NEW_TOKENS: Final = 24  # of a decode row of a short context
TRIES: Final = 3  # where a disturbed prefill hides what its decode steps took
LIMITS_S: Final = 0.4  # for each of the two, beside every row
OURS, THEIRS = "baton", "transformers"


@dataclass(frozen=True, slots=True)
class EngineRow:
    """What is measured: decode steps of `batch` requests, or with `batch` 0 a prefill."""

    model: str
    context: int
    batch: int = 0
    quantization: str = "none"

    @property
    def name(self) -> str:
        work = f"decode {self.batch}@{self.context}" if self.batch else f"prefill {self.context}"
        return work if self.quantization == "none" else f"{self.quantization} {work}"


ROWS: Final = (
    EngineRow(LARGE, 512), EngineRow(LARGE, 2048),
    EngineRow(LARGE, 128, 1), EngineRow(LARGE, 2048, 1), EngineRow(LARGE, 128, 8), EngineRow(LARGE,
    128, 16), EngineRow(LARGE, 512, 0, "int8"), EngineRow(LARGE, 128, 1, "int8"), EngineRow(LARGE,
    128, 16,
    "int8"), EngineRow(LARGE, 128, 1, "int4"),
    EngineRow(LARGE, 512, 0, "w8a8"), EngineRow(LARGE, 128, 1, "w8a8"), EngineRow(LARGE, 128, 16,
    "w8a8"), EngineRow(SMALL, 512), EngineRow(SMALL, 128, 1), EngineRow(SMALL, 128, 8),
    EngineRow(SMALL, 128,
    16),
)  # fmt: skip


Generate = Callable[[Sequence[list[int]], int], float]  # prompts, new tokens -> seconds


def ours(llm: LLM) -> Generate:
    """Return a function that generates through the engine, all requests at once."""

    def run(prompts: Sequence[list[int]], new: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        began = time.perf_counter()
        llm.generate(prompts, params)
        return time.perf_counter() - began

    return run


def theirs(model: Any) -> Generate:
    """Return a function that calls `generate` on one batch without padding."""

    @torch.inference_mode()
    def run(prompts: Sequence[list[int]], new: int) -> float:
        ids = torch.tensor(prompts)
        began = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=new,
            max_new_tokens=new, pad_token_id=0,
        )  # fmt: skip
        return time.perf_counter() - began

    return run


def rate(run: Generate, row: EngineRow, vocab: int, seed: int, new: int = NEW_TOKENS) -> float:
    """Return tokens per second; for decode of the `new` tokens after the first."""
    prompts = [random_prompt(row.context, seed * 1000 + i, vocab) for i in range(max(1, row.batch))]
    if not row.batch:
        return row.context / run(prompts, 1)
    new *= max(1, row.context // 512)  # after a long prefill the time of few tokens would be noise
    for _ in range(TRIES):
        first = run(prompts, 1)
        if (seconds := run(prompts, new + 1) - first) > 0:
            return row.batch * new / seconds
    raise RuntimeError(f"{row.name}: {new} tokens more took no longer, {TRIES} times")


def needs(llm: LLM, run: Generate, row: EngineRow, vocab: int) -> Work:
    """Return what the row's prefill needs, or what one token of each of its requests needs.

    The engine counts it (baton/engine/state/work.py).
    """
    used = llm.engine.stats.utilization

    def counted(new: int) -> Work:
        prompts = [random_prompt(row.context, 7_000 + i, vocab) for i in range(max(1, row.batch))]
        read, flops = used.read_bytes, used.flops
        run(prompts, new)
        return Work(used.read_bytes - read, used.flops - flops)

    first = counted(1)
    if not row.batch:
        return first
    both = counted(2)
    return Work(both.read_bytes - first.read_bytes, both.flops - first.flops)


def shares(row: EngineRow, tokens_per_s: float, work: Work, limits: Limits) -> dict[str, float]:
    """Return MBU and MFU of work at this rate, and its place on the roofline."""
    per_s = tokens_per_s / (row.batch or row.context)
    return {
        "MBU": work.read_bytes * per_s / limits.read_bytes_per_s,
        "MFU": work.flops * per_s / limits.flops_per_s,
        "FLOP/byte": work.intensity(), "GFLOP/s": work.flops * per_s / 1e9,
    }  # fmt: skip


def pictures(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Write a roofline of each model's rows, under the median of the limits measured with them."""
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        points = [
            Point(row["row"], row["FLOP/byte"], row["GFLOP/s"] * 1e9,
                  row["GFLOP/s"] * 1e9 / row["ratio"])
            for row in own
        ]  # fmt: skip
        read, flops = (
            statistics.median(row[key] for row in own) for key in ("read GB/s", "GEMM TFLOP/s")
        )
        picture = Roofline(model, read * 1e9, flops * 1e12, points)
        path = folder / f"roofline-{model.lower()}.svg"
        path.write_text(svg(picture))


@dataclass(frozen=True, slots=True)
class Against:
    """The opponents of the engine: transformers, and peers by their commands."""

    rounds: int
    peers: Sequence[str] = ()


def measure(
    model: str, path: Path, rows: Sequence[EngineRow], against: Against
) -> list[dict[str, Any]]:
    """Return all rows of one model, as medians over alternating rounds.

    Raises PeerFailed, ConfigError.
    """
    found: list[dict[str, Any]] = []
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    baseline = theirs(reference)
    vocab = reference.config.vocab_size
    threads = torch.get_num_threads()
    for quantization in dict.fromkeys(row.quantization for row in rows):
        with ExitStack() as stack:
            peers = [
                stack.enter_context(PeerServer.start(command, path, quantization, threads))
                for command in against.peers
            ]
            llm = LLM(
                model=str(path), dtype="bfloat16", quantization=quantization, num_kv_blocks=512,
                enable_prefix_caching=False, threads=threads, measure_limits=False,
            )  # fmt: skip
            runs = {OURS: ours(llm), THEIRS: baseline}
            runs |= {peer.name: peer.generate for peer in peers if peer.unsupported is None}
            for row in (row for row in rows if row.quantization == quantization):
                for run in runs.values():
                    rate(run, row, vocab, 99)  # warm
                limits = measure_roof(torch.device("cpu"), torch.bfloat16, LIMITS_S)
                work = needs(llm, runs[OURS], row, vocab)
                rates = {name: list[float]() for name in runs}
                for index in range(against.rounds):
                    for name, run in runs.items():
                        rates[name].append(rate(run, row, vocab, index))
                found.append(
                    {"model": model, "row": row.name}
                    | compared(rates, [peer.name for peer in peers])
                    | shares(row, statistics.median(rates[OURS]), work, limits)
                    | {"read GB/s": limits.read_bytes_per_s / 1e9,
                       "GEMM TFLOP/s": limits.flops_per_s / 1e12}
                )  # fmt: skip
                sys.stderr.write(f"{found[-1]}\n")
    return found


def compared(rates: Mapping[str, Sequence[float]], peers: Sequence[str]) -> dict[str, Any]:
    """Return the medians of every side (None for a peer that did not run), and their ratios."""
    median = {name: statistics.median(values) for name, values in rates.items()}
    ran = [median[name] for name in peers if name in median]
    return {
        OURS: median[OURS], THEIRS: median[THEIRS],
        "ratio": median[OURS] / median[THEIRS],
        "peers": {name: median.get(name) for name in peers},
        "best peer's ratio": max(ran) / median[THEIRS] if ran else None,
        "over best peer": median[OURS] / max(ran) if ran else None,
        "baton min": min(rates[OURS]), "baton max": max(rates[OURS]),
    }  # fmt: skip


def tables(rows: Sequence[dict[str, Any]]) -> list[TimedPart]:
    """Return a table per model that fits a screen: tokens per second, ratios and shares."""
    shown = ("row", OURS, THEIRS, "ratio", "best peer's ratio", "over best peer", "MBU", "MFU")
    parts: list[TimedPart] = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        parts.append(
            TimedPart(
                f"{model}: tokens/s, ratios to transformers, shares of the machine's limits",
                [
                    {name: row[name] for name in shown[:3]} | row["peers"]
                    | {name: row[name] for name in shown[3:] if row["peers"] or "peer" not in name}
                    for row in own
                ],
            )
        )  # fmt: skip
    return parts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return the exit status."""
    parser = arguments_parser("engine", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", default="", help="only rows that contain this, such as decode")
    parser.add_argument("--models", default=f"{LARGE},{SMALL}", help="of the two")
    text = "another engine to measure in every round, such as one of bench/peers (repeatable)"
    parser.add_argument("--peer", action="append", default=[], metavar="CMD", help=text)
    parser.add_argument("--folder", type=Path, help="keep checkpoints, and what peers made of them")
    parser.add_argument("--roofline", type=Path, help="folder for a picture (SVG) per model")
    try:
        given = parse(parser, sys.argv[1:] if arguments is None else arguments)
    except ConfigError as error:
        parser.error(error.message)
    models = given.models.split(",")
    if not any(row.model in models and given.rows in row.name for row in ROWS):
        known = ", ".join(sorted({row.model for row in ROWS}))
        parser.error(f"no row is called so: the models are {known}; --rows takes a part of a name")
    prepare(given)
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = given.folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-")))
        for model in models:
            asked = [row for row in ROWS if row.model == model and given.rows in row.name]
            if asked:
                path = write_checkpoint(model, folder)
                rows += measure(model, path, asked, Against(given.rounds, given.peer))
    if given.roofline is not None:
        pictures(rows, given.roofline)
    title = "Against transformers' generate, tokens/s"
    tell([TimedPart(title, rows)] if given.json else tables(rows), given.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
