"""The engine against transformers' `generate`, row by row: `baton bench engine [--json]`.

Random weights of two real shapes (--models names others: mixtures, hybrids), bfloat16, greedy,
ends ignored, both in one process and in turn:
    prefill n        tokens of one prompt per second, its first new token included
    decode b@c       new tokens per second of b requests that hold c tokens each, prefill taken off:
                     of one request from its first token on, if the side tells when that was there
Beside each: the shares of the machine's own limits, measured before and after the engine's turn in
each round: MBU = bytes that the row must read (weights, KV) over the read bandwidth, MFU = its
FLOPs over the rate of a large matrix product, as baton/engine/state/work.py counts both. Integer
weights are compared with transformers' bfloat16; their vocabulary head is rounded as
--lm-head-quantization auto says: int8 beside int8 and int4, w8a8 beside the others. --peer CMD adds
another engine to every round (bench/peer.py); it may be repeated; --no-transformers leaves only
peers. --full adds batches to 64 and contexts to 8,192.
--kv-cache-dtype int8 keeps the engine's KV in 8 bits, as OpenVINO does by default.
--roofline draws the rows under the two limits (bench/roofline.py).

A second table compares every round by CPU time and by the clock: on a machine that does other work
only CPU time holds. Before that, all sides answer the same prompts with one token; `same tokens` is
the share of these that are the engine's. A side with less than half of them in bfloat16 runs
another model, and the run stops.
"""

from __future__ import annotations

import re
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
from transformers import AutoConfig, AutoModelForCausalLM

from baton.engine.performance.roofline import measure as measure_roof
from baton.engine.state.work import Limits, Work
from baton.llm import LLM
from baton.protocol.errors import ConfigError
from baton.protocol.sampling import SamplingParams
from baton.runtime.config import parse
from bench.engine_kit import TimedPart, arguments_parser, prepare, random_prompt, tell
from bench.measure import median_and_range
from bench.models import HYBRIDS, LARGE, MIXTURES, SMALL, WRITERS, write_checkpoint
from bench.peer import PeerFailed, PeerServer, Took
from bench.roofline import Point, Roofline, svg

NEW_TOKENS: Final = 24  # of a decode row of one request with a short context
TRIES: Final = 3  # where a disturbed prefill hides what its decode steps took
LIMITS_S: Final = 0.4  # for each of the two, beside every row
SAME_PROMPTS, SAME_LENGTH = 32, 32  # of the prompts that show that all sides run the same model
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
    EngineRow(LARGE, 128, 1), EngineRow(LARGE, 2048, 1), EngineRow(LARGE, 128, 8),
    EngineRow(LARGE, 128, 16),
    *(EngineRow(LARGE, context, batch, quantization)
      for quantization in ("int8", "int4", "w8a8", "w4a8")
      for context, batch in ((512, 0), (128, 1), (128, 16))),
    EngineRow(SMALL, 512), EngineRow(SMALL, 128, 1), EngineRow(SMALL, 128, 8),
    EngineRow(SMALL, 128, 16),
    *(EngineRow(name, context, batch, quantization) for name in MIXTURES
      for quantization in ("none", "int8")
      for context, batch in ((512, 0), (32, 1), (32, 8), (32, 16))),
    *(EngineRow(name, context, batch) for name in HYBRIDS
      for context, batch in ((2048, 0), (128, 1), (128, 8), (128, 16))),
)  # fmt: skip
# With --full, too: many requests, and long contexts.
FURTHER_ROWS: Final = (
    *(EngineRow(model, context, batch) for model in (LARGE, SMALL)
      for context, batch in ((8192, 0), (8192, 1), (128, 32), (128, 64))),
    EngineRow(SMALL, 2048), EngineRow(SMALL, 2048, 1),
    *(EngineRow(LARGE, context, batch, quantization)
      for quantization in ("int8", "int4", "w8a8", "w4a8")
      for context, batch in ((2048, 0), (2048, 1), (8192, 0), (8192, 1), (128, 8), (128, 32),
                             (128, 64))),
)  # fmt: skip
NUM_KV_BLOCKS: Final = 1280  # of 16 tokens: 64 requests of 128 with 128 more, or one of 8,192


Generate = Callable[[Sequence[list[int]], int], Took]  # of prompts and a number of new tokens


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens per second by the clock, and per second of CPU time (None if it was not told)."""

    per_s: float
    per_cpu_s: float | None

    @classmethod
    def of(cls, tokens: int, took: Took) -> Rate:
        """Return the rates of `tokens` that took so long."""
        return cls(tokens / took.seconds, tokens / took.cpu_seconds if took.cpu_seconds else None)


def ours(llm: LLM) -> Generate:
    """Return a function that generates through the engine, all requests at once."""

    def several(prompts: Sequence[list[int]], new: int) -> Took:
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        began, cpu = time.perf_counter(), time.process_time()
        answers = llm.generate(prompts, params)
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
        return Took(seconds, cpu_seconds, [answer.token_ids for answer in answers])

    def one(prompt: list[int], new: int) -> Took:
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        began, cpu = time.perf_counter(), time.process_time()
        stream = llm.stream(prompt, params, delta=True)
        tokens = list(next(stream).token_ids)
        first_seconds = time.perf_counter() - began
        for part in stream:
            tokens += part.token_ids
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
        return Took(seconds, cpu_seconds, [tokens], first_seconds)

    def run(prompts: Sequence[list[int]], new: int) -> Took:
        return one(prompts[0], new) if len(prompts) == 1 else several(prompts, new)

    return run


class FirstPut:
    """A streamer of transformers' `generate` that keeps the time of the first new token."""

    def __init__(self) -> None:
        self.at: float | None = None
        self._prompt = True  # the first call brings the prompt

    def put(self, value: Any) -> None:
        """Take the prompt, or a token."""
        if not self._prompt and self.at is None:
            self.at = time.perf_counter()
        self._prompt = False

    def end(self) -> None:
        """Nothing is left to show."""


def theirs(model: Any) -> Generate:
    """Return a function that calls `generate` on one batch without padding."""

    @torch.inference_mode()
    def run(prompts: Sequence[list[int]], new: int) -> Took:
        ids, first = torch.tensor(prompts), FirstPut()
        began, cpu = time.perf_counter(), time.process_time()
        answers = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=new,
            max_new_tokens=new, pad_token_id=0, streamer=first if len(prompts) == 1 else None,
        )  # fmt: skip
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
        first_seconds = first.at - began if first.at else None
        return Took(seconds, cpu_seconds, answers[:, ids.shape[1] :].tolist(), first_seconds)

    return run


def prompts_of(row: EngineRow, vocab: int, seed: int) -> list[list[int]]:
    """Return the prompts of a row; those of another seed share no prefix with them."""
    return [random_prompt(row.context, seed + i, vocab) for i in range(max(1, row.batch))]


def rate(run: Generate, row: EngineRow, vocab: int, seed: int, new: int = NEW_TOKENS) -> Rate:
    """Return tokens per second; for decode of the `new` tokens after the first."""
    prompts = prompts_of(row, vocab, seed * 1000)
    if not row.batch:
        return Rate.of(row.context, run(prompts, 1))
    # After long prefills the time of few tokens would be noise.
    new = min(new * max(1, row.batch * row.context // 512), max(new, row.context))
    for _ in range(TRIES):
        first, whole = run(prompts, 1), run(prompts, new + 1)
        prefill_s = whole.first_seconds or first.seconds
        seconds = whole.seconds - prefill_s
        # If this prefill took longer than the other one, so did its CPU time.
        cpu_seconds = whole.cpu_seconds - first.cpu_seconds * prefill_s / first.seconds
        if seconds > 0 and (cpu_seconds > 0 or not whole.cpu_seconds):
            return Rate.of(row.batch * new, Took(seconds, cpu_seconds))
    raise RuntimeError(f"{row.name}: {new} tokens more took no longer, {TRIES} times")


def needs(llm: LLM, run: Generate, row: EngineRow, vocab: int) -> Work:
    """Return what the row's prefill needs, or what one token of each of its requests needs.

    The engine counts it (baton/engine/state/work.py).
    """
    used = llm.engine.stats.utilization

    def counted(new: int) -> Work:
        read, flops = used.read_bytes, used.flops
        run(prompts_of(row, vocab, 7_000), new)
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


def machine_limits() -> Limits:
    """Return what this machine's memory and cores give now, with torch's threads."""
    return measure_roof(torch.device("cpu"), torch.bfloat16, LIMITS_S)


def mean_limits(before: Limits, after: Limits) -> Limits:
    """Return the mean of limits measured before and after something."""
    return Limits(
        (before.read_bytes_per_s + after.read_bytes_per_s) / 2,
        (before.flops_per_s + after.flops_per_s) / 2,
    )


def median_shares(
    row: EngineRow, tokens_per_s: Sequence[float], work: Work, limits: Sequence[Limits]
) -> dict[str, float]:
    """Return the medians of `shares` and of the limits over rounds, each by its own limits."""
    rounds = [
        shares(row, speed, work, limit)
        | {"read GB/s": limit.read_bytes_per_s / 1e9, "GEMM TFLOP/s": limit.flops_per_s / 1e12}
        for speed, limit in zip(tokens_per_s, limits, strict=True)
    ]
    return {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}


def pictures(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Write a roofline of each model's rows, under the median of the limits measured with them.

    Makes the folder if it is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        points = [
            Point(row["row"], row["FLOP/byte"], row["GFLOP/s"] * 1e9,
                  row["GFLOP/s"] * 1e9 / row["ratio"] if row["ratio"] else None)
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
    """The opponents of the engine: transformers unless left out, and peers by their commands."""

    rounds: int
    peers: Sequence[str] = ()
    new_tokens: int = NEW_TOKENS
    transformers: bool = True
    kv_cache_dtype: str = "auto"


def measure(
    model: str, path: Path, rows: Sequence[EngineRow], against: Against
) -> list[dict[str, Any]]:
    """Return all rows of one model, as medians over alternating rounds.

    Raises PeerFailed, ConfigError.
    """
    found: list[dict[str, Any]] = []
    baseline = dict[str, Generate]()
    if against.transformers:
        reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
        baseline[THEIRS] = theirs(reference)
    vocab: int = AutoConfig.from_pretrained(path).vocab_size
    threads, new = torch.get_num_threads(), against.new_tokens
    for quantization in dict.fromkeys(row.quantization for row in rows):
        with ExitStack() as stack:
            peers = [
                stack.enter_context(PeerServer.start(command, path, quantization, threads))
                for command in against.peers
            ]
            llm = LLM(
                model=str(path), dtype="bfloat16", quantization=quantization,
                num_kv_blocks=NUM_KV_BLOCKS, enable_prefix_caching=False, threads=threads,
                measure_limits=False, kv_cache_dtype=against.kv_cache_dtype,
            )  # fmt: skip
            runs = {OURS: ours(llm), **baseline}
            runs |= {peer.name: peer.timed for peer in peers if peer.unsupported is None}
            same = same_tokens(runs, vocab)
            if quantization == "none":
                refuse_others(same)
            for row in (row for row in rows if row.quantization == quantization):
                for run in runs.values():
                    run(prompts_of(row, vocab, 99_000), new + 1)  # takes the memory that it needs
                work = needs(llm, runs[OURS], row, vocab)
                rates, limits = {name: list[Rate]() for name in runs}, list[Limits]()
                for index in range(against.rounds):
                    for name in list(runs)[:: -1 if index % 2 else 1]:
                        before = machine_limits() if name == OURS else None
                        rates[name].append(rate(runs[name], row, vocab, index, new))
                        if before is not None:
                            limits.append(mean_limits(before, machine_limits()))
                by_clock = {name: [one.per_s for one in each] for name, each in rates.items()}
                found.append(
                    {"model": model, "row": row.name}
                    | compared(by_clock, [peer.name for peer in peers])
                    | {"rounds": round_by_round(rates), "same tokens": same}
                    | median_shares(row, by_clock[OURS], work, limits)
                )
                sys.stderr.write(f"{found[-1]}\n")
    return found


def same_tokens(runs: Mapping[str, Generate], vocab: int) -> dict[str, float | None]:
    """Return which share of the first tokens of random prompts are the engine's, for each other.

    None for a side that does not tell its tokens.
    """
    prompts = [random_prompt(SAME_LENGTH, 8_000 + i, vocab) for i in range(SAME_PROMPTS)]
    tokens = {name: [each[0] for each in run(prompts, 1).tokens] for name, run in runs.items()}
    ours = tokens.pop(OURS)
    return {
        name: sum(map(int.__eq__, ours, told)) / len(ours) if told else None
        for name, told in tokens.items()
    }


def refuse_others(same: Mapping[str, float | None]) -> None:
    """Raises PeerFailed for a side whose tokens show that it runs another model."""
    for name, share in same.items():
        if share is not None and share < 0.5:
            raise PeerFailed(f"{name} runs another model: {share:.0%} of its tokens are the same")


def round_by_round(rates: Mapping[str, Sequence[Rate]]) -> dict[str, dict[str, Any]]:
    """Return of each other side how many times as fast the engine was, "median (least-most)".

    `CPU ms` is the side's CPU time of a token, the median of the rounds.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, each in rates.items():
        cpu = [one.per_cpu_s for one in each]
        told = [one for one in cpu if one is not None]
        row: dict[str, Any] = {"CPU ms": 1e3 / statistics.median(told) if told else None}
        if name != OURS:
            both = list(zip(rates[OURS], each, strict=True))
            by_cpu = [a.per_cpu_s / b.per_cpu_s for a, b in both if a.per_cpu_s and b.per_cpu_s]
            row["by CPU time"] = median_and_range(by_cpu, 2) if by_cpu else None
            row["by the clock"] = median_and_range([a.per_s / b.per_s for a, b in both], 2)
        found[name] = row
    return found


def compared(rates: Mapping[str, Sequence[float]], peers: Sequence[str]) -> dict[str, Any]:
    """Return the medians of every side (None for one that did not run), and their ratios."""
    median = {name: statistics.median(values) for name, values in rates.items()}
    ran, base = [median[name] for name in peers if name in median], median.get(THEIRS)
    return {
        OURS: median[OURS], THEIRS: base,
        "ratio": median[OURS] / base if base else None,
        "peers": {name: median.get(name) for name in peers},
        "best peer's ratio": max(ran) / base if ran and base else None,
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
        lines = [line for row in own for line in _by_round(row)]
        if lines:
            title = f"{model}: how many times as fast Baton is, round by round"
            parts.append(TimedPart(title, lines))
    return parts


def _by_round(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a line for each side but ours; none for a row that has no rounds."""
    if "rounds" not in row:
        return []
    mine = row["rounds"][OURS]["CPU ms"]
    return [
        {"row": row["row"], "beside": name, "CPU ms": mine, "its CPU ms": told["CPU ms"],
         "by CPU time": told["by CPU time"], "by the clock": told["by the clock"],
         "same tokens": row["same tokens"][name]}
        for name, told in row["rounds"].items() if name != OURS
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return the exit status."""
    parser = arguments_parser("engine", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    text = "of a decode row of a short context (%(default)s)"
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS, help=text)
    parser.add_argument(
        "--rows", default="", help="only rows with this, such as decode, or ^decode"
    )
    parser.add_argument(
        "--models",
        default=f"{LARGE},{SMALL}",
        help="%(default)s, or others of bench/models.py, by commas; all: every one",
    )
    text = "another engine to measure in every round, such as one of bench/peers (repeatable)"
    parser.add_argument("--peer", action="append", default=[], metavar="CMD", help=text)
    text = "of the engine's KV: auto (the default) or int8"
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "int8"), help=text)
    text = "leave transformers out, which takes the most time"
    parser.add_argument("--no-transformers", action="store_true", help=text)
    parser.add_argument("--folder", type=Path, help="keep checkpoints, and what peers made of them")
    parser.add_argument("--roofline", type=Path, help="folder for a picture (SVG) per model")
    try:
        given = parse(parser, sys.argv[1:] if arguments is None else arguments)
    except ConfigError as error:
        parser.error(error.message)
    models = list(WRITERS) if given.models == "all" else given.models.split(",")
    possible = (*ROWS, *FURTHER_ROWS) if given.full else ROWS
    if strange := [model for model in models if model not in WRITERS]:
        parser.error(f"no model is called {strange[0]!r}; the models are {', '.join(WRITERS)}")
    asked = {
        model: [row for row in possible if row.model == model and re.search(given.rows, row.name)]
        for model in models
    }
    if not any(asked.values()):
        names = ", ".join(dict.fromkeys(row.name for row in possible if row.model in models))
        parser.error(f"no row of these models matches {given.rows!r}; they have {names}")
    prepare(given)
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = given.folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-")))
        for model, its_rows in asked.items():
            if its_rows:
                path = write_checkpoint(model, folder)
                against = Against(
                    given.rounds, given.peer, given.new_tokens, not given.no_transformers,
                    given.kv_cache_dtype,
                )  # fmt: skip
                found = measure(model, path, its_rows, against)
                rows += found
                if given.roofline is not None:
                    pictures(found, given.roofline)
    title = "Against transformers' generate, tokens/s"
    tell([TimedPart(title, rows)] if given.json else tables(rows), given.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
