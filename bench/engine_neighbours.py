"""What engines keep of their speed beside other work: `python -m bench.engine_neighbours`.

Each side is a process of its own that is asked in turns: Baton (bench/engine_process.py) in each of
the environments that --environment names, and every --peer (bench/peer.py). All rows are measured
in a quiet machine, then beside --loops busy loops of equal weight:

    tokens/s    median over the rounds, of a prefill or of decode steps as in bench.engine
    over first  how many times as fast as the first side in the same round, median (least-most)
    kept        tokens/s beside the loops over those of the same side without them

`--environment ""` is the environment of this process, `--environment GOMP_SPINCOUNT=1000` adds a
variable to it. Loops and sides share the cores that this process may use.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from baton.protocol.errors import ConfigError
from baton.runtime.config import parse
from bench.engine import EngineRow, rate
from bench.engine_kit import TimedPart, arguments_parser, tell
from bench.measure import median_and_range
from bench.models import SMALL, write_checkpoint
from bench.peer import PeerServer

ROWS: Final = ((512, 0), (128, 1), (128, 8))  # tokens of a prompt; requests, 0 = its prefill
DECODED: Final = 128  # tokens of each request of a decode row
LOOP: Final = "while True: pass"
# As it is, and as OpenMP has it by default: threads spin for some milliseconds before they sleep.
ENVIRONMENTS: Final = ("", "GOMP_SPINCOUNT=300000")
Rates = Mapping[str, Sequence[float]]  # of each side, by round


@contextmanager
def busy(loops: int) -> Generator[Sequence[subprocess.Popen[bytes]], None, None]:
    """Run so many busy loops meanwhile, and yield their processes."""
    processes = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(loops)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def baton_command(environment: str) -> str:
    """Return the command of Baton as a peer, with variables such as "A=1 B=2"."""
    command = [sys.executable, "-m", "bench.engine_process"]
    return shlex.join(["env", *shlex.split(environment), *command])


def measure(sides: Mapping[str, PeerServer], row: EngineRow, vocab: int, rounds: int) -> Rates:
    """Return the tokens per second of each side in each round; a first one warms up."""
    rates = defaultdict[str, list[float]](list)
    for index in range(-1, rounds):
        for name in list(sides)[:: -1 if index % 2 else 1]:
            found = rate(sides[name].timed, row, vocab, index + 2, DECODED)
            if index >= 0:
                rates[name].append(found.per_s)
    return rates


def lines(row: EngineRow, loops: int, rates: Rates, quiet: Rates | None) -> list[dict[str, Any]]:
    """Return a line for each side. `quiet`: its rates without loops."""
    first = next(iter(rates.values()))
    return [
        {
            "row": row.name, "loops": loops, "side": name, "tokens/s": statistics.median(each),
            "over first": median_and_range([a / b for a, b in zip(each, first, strict=True)], 2),
            "kept": statistics.median(each) / statistics.median(quiet[name]) if quiet else None,
        }
        for name, each in rates.items()
    ]  # fmt: skip


def compared(
    sides: Mapping[str, PeerServer], model: str, vocab: int, loops: int, rounds: int
) -> list[dict[str, Any]]:
    """Return the lines of all rows, quiet and beside `loops` busy loops."""
    found: list[dict[str, Any]] = []
    rows = [EngineRow(model, context, batch) for context, batch in ROWS]
    quiet = {row: measure(sides, row, vocab, rounds) for row in rows}
    for row, rates in quiet.items():
        found += lines(row, 0, rates, None)
    with busy(loops):
        for row in rows:
            found += lines(row, loops, measure(sides, row, vocab, rounds), quiet[row])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return the exit status."""
    parser = arguments_parser("engine_neighbours", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default=SMALL, help="a name of bench/models.py")
    parser.add_argument("--folder", type=Path, help="keep the checkpoint, and what peers made")
    parser.add_argument("--loops", type=int, default=len(os.sched_getaffinity(0)))
    text = "variables of one of Baton's sides (repeatable)"
    parser.add_argument("--environment", action="append", default=[], metavar="A=1", help=text)
    parser.add_argument("--peer", action="append", default=[], metavar="CMD", help="see --help")
    try:
        given = parse(parser, sys.argv[1:] if arguments is None else arguments)
    except ConfigError as error:
        parser.error(error.message)
    threads = given.threads or len(os.sched_getaffinity(0))
    with ExitStack() as stack:
        folder = given.folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-")))
        path = write_checkpoint(given.model, folder)
        vocab = json.loads((path / "config.json").read_text())["vocab_size"]
        named = {f"baton {e}".strip(): baton_command(e) for e in given.environment or ENVIRONMENTS}
        sides = {
            name: stack.enter_context(PeerServer.start(command, path, "none", threads))
            for name, command in {**named, **{peer: peer for peer in given.peer}}.items()
        }
        found = compared(sides, given.model, vocab, given.loops, given.rounds)
    tell([TimedPart(f"{given.model}: beside busy loops", found)], given.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
