"""A GGUF file by the engine and by llama.cpp: `python -m bench.engine_gguf FILE --peer CMD`.

The file is llama.cpp's own, as `bench.peers.llama_cpp --convert` writes it. Both sides answer the
same prompts, greedy, ends ignored, with --threads threads each; every round asks one after the
other. A row's figures are seconds of CPU and by the clock:
    prefill n        of one prompt, its first new token included
    decode b@c       of a step of b requests that hold c tokens each, prefill taken off
On a machine that does other work only the ratios of CPU time hold: the peer's over ours, the median
of the rounds, the least and the greatest. --widened reads the file in the model's dtype instead.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from baton.llm import LLM
from baton.protocol.errors import ConfigError
from baton.runtime.config import parse
from bench.engine import Generate, ours
from bench.engine_kit import TimedPart, arguments_parser, prepare, random_prompt, tell
from bench.peer import PeerServer, Took

NEW_TOKENS: Final = 24  # of a decode row


@dataclass(frozen=True, slots=True)
class GgufRow:
    """`batch` 0 is a prefill of `context` tokens."""

    context: int
    batch: int = 0

    @property
    def name(self) -> str:
        return f"decode {self.batch}@{self.context}" if self.batch else f"prefill {self.context}"


ROWS: Final = (GgufRow(32, 1), GgufRow(32, 8), GgufRow(32, 16), GgufRow(512))


def took(run: Generate, row: GgufRow, vocab: int, seed: int) -> Took:
    """Of the prefill, or of one decode step."""
    prompts = [random_prompt(row.context, seed * 1000 + i, vocab) for i in range(max(1, row.batch))]
    first = run(prompts, 1)
    if not row.batch:
        return first
    whole = run(prompts, NEW_TOKENS + 1)
    return Took(
        (whole.seconds - first.seconds) / NEW_TOKENS,
        (whole.cpu_seconds - first.cpu_seconds) / NEW_TOKENS,
    )


def measure(
    runs: tuple[Generate, Generate], rows: Sequence[GgufRow], rounds: int, vocab: int
) -> list[dict[str, Any]]:
    """Ours and the peer's, in turns."""
    found: list[dict[str, Any]] = []
    for row in rows:
        for run in runs:
            run([random_prompt(8, 99, vocab)] * max(1, row.batch), 2)  # warm
        pairs = [
            tuple(took(run, row, vocab, index) for run in runs[:: -1 if index % 2 else 1])
            for index in range(rounds)
        ]
        pairs = [pair[:: -1 if index % 2 else 1] for index, pair in enumerate(pairs)]
        found.append({"row": row.name} | compared(pairs))
        sys.stderr.write(f"{found[-1]}\n")
    return found


def compared(pairs: Sequence[tuple[Took, ...]]) -> dict[str, Any]:
    """Medians in milliseconds; the peer's over ours in each round."""
    cpu = [theirs.cpu_seconds / mine.cpu_seconds for mine, theirs in pairs]
    clock = [theirs.seconds / mine.seconds for mine, theirs in pairs]
    median = statistics.median
    return {
        "baton CPU ms": 1e3 * median(mine.cpu_seconds for mine, _ in pairs),
        "peer CPU ms": 1e3 * median(theirs.cpu_seconds for _, theirs in pairs),
        "CPU ratio": median(cpu), "least": min(cpu), "greatest": max(cpu),
        "clock ratio": median(clock), "clock least": min(clock), "clock greatest": max(clock),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = arguments_parser("engine_gguf", __doc__)
    parser.add_argument("file", type=Path, help="the GGUF file")
    parser.add_argument("--peer", required=True, metavar="CMD", help="see bench/peers/llama_cpp.py")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", default="", help="only rows that contain this, such as decode")
    parser.add_argument("--widened", action="store_true", help="not the file's integers")
    try:
        given = parse(parser, sys.argv[1:] if arguments is None else arguments)
    except ConfigError as error:
        parser.error(error.message)
    prepare(given)
    threads = given.threads or 1
    with PeerServer.start(given.peer, given.file.resolve(), "none", threads) as peer:
        llm = LLM(
            model=str(given.file), dtype="bfloat16", num_kv_blocks=256, threads=threads,
            quantization="widened" if given.widened else "none", enable_prefix_caching=False,
            measure_limits=False,
        )  # fmt: skip
        rows = [row for row in ROWS if given.rows in row.name]
        vocab = llm.engine.info.vocab_size
        found = measure((ours(llm), peer.timed), rows, given.rounds, vocab)
        tell([TimedPart(f"{given.file.name}: {peer.name} over Baton", found)], given.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
