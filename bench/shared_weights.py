"""Weights held once per host, or by each process: `python -m bench.shared_weights --model DIR`.

Two processes load the same model, as a prefill and a decode node of one host do, with private
weights and with shared ones, in turns:

    load     seconds of load_model: the first, the second, and one after both were killed (-9)
    memory   sum of both processes' proportional set sizes (PSS), MB: what the host really holds
    decode   milliseconds per token of one greedy sequence in the second process, the first one idle

`--model-impl transformers` measures the universal route. With `--data-parallel` the two processes
are ranks 0 and 1 of a node with `--data-parallel-size 2`; they load and do not decode.

Other work on the machine shows in the figures, so they are medians of `--rounds`, with their range;
ratios are within a round. `--model` is a checkpoint of at least 64 MiB (`python -m bench.models
FOLDER` writes one).
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from baton.engine.config import EngineConfig
from baton.engine.loading.loading import LoadedModel, load_model
from baton.engine.parallel.data_rank import DataRank
from baton.engine.state.place import RankPlace
from baton.llm import LLM
from baton.protocol.sampling import SamplingParams

PROMPT: Final = list(range(5, 37))
SHORT, LONG = 8, 40  # tokens
NUM_RANKS: Final = 2
PROGRAM: Final = "bench.shared_weights"


@dataclass(slots=True)
class SharingFigures:
    """The figures of the rounds, by name."""

    values: dict[str, list[float]] = field(default_factory=dict[str, list[float]])

    def add(self, name: str, value: float) -> None:
        self.values.setdefault(name, []).append(value)

    def lines(self) -> list[str]:
        """Return a line per figure, with median and range."""
        return [
            f"{name:<28} {statistics.median(v):8.2f}   ({min(v):.2f}-{max(v):.2f})"
            for name, v in self.values.items()
        ]


@dataclass(frozen=True, slots=True)
class SharingCase:
    """What both processes load, as the command line names it."""

    model: Path
    quantization: str
    model_impl: str
    data_parallel: bool

    def arguments(self) -> list[str]:
        """Return the options of a child."""
        named = {
            "--model": str(self.model),
            "--quantization": self.quantization,
            "--model-impl": self.model_impl,
        }
        ranks = ["--data-parallel"] if self.data_parallel else []
        return [part for pair in named.items() for part in pair] + ranks


class Loaded:
    """A process with the model in memory."""

    def __init__(self, case: SharingCase, shared: bool, rank: int = 0) -> None:
        command = [sys.executable, "-m", PROGRAM, "--child", *case.arguments()]
        more = ["--rank", str(rank), *(["--shared"] if shared else [])]
        self._process = subprocess.Popen(
            [*command, *more],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.load_s = float(self._told()["load_s"])

    def decode_ms(self) -> float:
        """Return the milliseconds per token, measured now."""
        assert self._process.stdin is not None
        self._process.stdin.write("decode\n")
        self._process.stdin.flush()
        return float(self._told()["decode_ms"])

    def pss(self) -> float:
        """Return the process' proportional set size in MB."""
        text = Path(f"/proc/{self._process.pid}/smaps_rollup").read_text()
        return int(text.partition("\nPss:")[2].split()[0]) / 1024

    def end(self, by: signal.Signals = signal.SIGTERM) -> None:
        self._process.send_signal(by)
        self._process.wait()

    def _told(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def one_round(case: SharingCase, found: SharingFigures) -> None:
    """Measure private weights, then shared ones."""
    memory: dict[str, float] = {}
    decode: dict[str, float] = {}
    for name in ("private", "shared"):
        shared = name == "shared"
        first, second = Loaded(case, shared), Loaded(case, shared, rank=1)
        found.add(f"{name}: first load, s", first.load_s)
        found.add(f"{name}: second load, s", second.load_s)
        memory[name] = first.pss() + second.pss()
        found.add(f"{name}: memory of both, MB", memory[name])
        if not case.data_parallel:
            decode[name] = second.decode_ms()
            found.add(f"{name}: decode, ms", decode[name])
        for each in (first, second):
            each.end(signal.SIGKILL)
        if shared:
            again = Loaded(case, shared)
            found.add("shared: load after kill, s", again.load_s)
            again.end()
    found.add("memory, shared / private", memory["shared"] / memory["private"])
    if decode:
        found.add("decode, shared / private", decode["shared"] / decode["private"])


def child(case: SharingCase, shared: bool, rank: int) -> None:
    """Load the model, report it, then decode at every line of stdin."""
    start = time.perf_counter()
    if case.data_parallel:
        loaded = _load_rank(case, shared, rank)
        _say(load_s=time.perf_counter() - start)
        sys.stdin.read()
        del loaded
        return
    options: dict[str, Any] = {
        "quantization": case.quantization,
        "model_impl": case.model_impl,
        "shared_weights": shared,
    }
    llm = LLM(str(case.model), dtype="bfloat16", num_kv_blocks=64, measure_limits=False, **options)
    _say(load_s=time.perf_counter() - start)
    for _ in sys.stdin:
        _say(decode_ms=_decode_ms(llm))


def _load_rank(case: SharingCase, shared: bool, rank: int) -> LoadedModel:
    """Load what rank `rank` of two holds."""
    options: dict[str, Any] = {"quantization": case.quantization, "shared_weights": shared}
    config = EngineConfig(
        str(case.model), dtype="bfloat16", device="cpu", data_parallel_size=NUM_RANKS, **options
    )
    with tempfile.TemporaryDirectory() as meeting:
        data = DataRank(RankPlace(rank, NUM_RANKS), Path(meeting))
        loaded = load_model(config, data=data)
        data.close()
    return loaded


def _decode_ms(llm: LLM) -> float:
    def seconds(count: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        start = time.perf_counter()
        llm.generate([PROMPT], params)
        return time.perf_counter() - start

    seconds(SHORT)
    return min(seconds(LONG) - seconds(SHORT) for _ in range(3)) / (LONG - SHORT) * 1e3


def _say(**found: float) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return the exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model-impl", default="auto")
    parser.add_argument("--data-parallel", action="store_true")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--shared", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    case = SharingCase(
        options.model, options.quantization, options.model_impl, options.data_parallel
    )
    if options.child:
        child(case, options.shared, options.rank)
        return 0
    found = SharingFigures()
    for _ in range(options.rounds):
        one_round(case, found)
    sys.stdout.write("\n".join(found.lines()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
