"""Fuzzes all that reads what a KV peer sends. `python -m tests.fuzz.frames --inputs 1000000`

Six readers, each fed whole conversations, single frames, records or maps that were damaged (digest
wrong) or resealed (digest right, meaning wrong): the frame decoder with the message bodies, the
fetching half of a connector on every kind of wire, the exporting half with its export table, the
socket reader of the `stream` lane, the records of the `dist` lane, and memory maps.

An input passes if nothing but KVError comes out, no more is read or written than was offered, a
fetch that calls itself complete has every token once, nothing beside its own tokens is written, and
no export is left pinned. A failure prints its number; `--seed S --first N --inputs 1` runs it again
alone.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeAlias

from tests.fuzz.exporting import exporting
from tests.fuzz.fetching import fetching
from tests.fuzz.reading import decoding, mapping, reading, recording
from tests.fuzz.sites import FuzzError, Sites, open_sites

Case: TypeAlias = Callable[[Sites, random.Random], None]
CASES: Final[tuple[tuple[Case, int], ...]] = (
    (decoding, 52),
    (fetching, 16),
    (exporting, 8),
    (reading, 10),
    (recording, 8),
    (mapping, 6),
)


@contextmanager
def silence() -> Iterator[None]:
    """Corrupt frames are worth a warning each, but not a million."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def run(inputs: int, seed: int, first: int = 0) -> dict[str, int]:
    """Runs inputs [first, first + inputs) of `seed`; how many each reader got. Raises FuzzError,
    naming the input, from whatever it raised."""
    cases, weights = zip(*CASES, strict=True)
    counts = {case.__name__: 0 for case in cases}
    with silence(), open_sites() as sites:
        for number in range(first, first + inputs):
            rng = random.Random(f"{seed} {number}")
            (case,) = rng.choices(cases, weights)
            try:
                case(sites, rng)
            except BaseException as error:
                text = f"input {number} of seed {seed} ({case.__name__}): {error!r}"
                raise FuzzError(text) from error
            counts[case.__name__] += 1
    return counts


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Fuzz what reads a KV peer's frames.")
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args(argv)
    started = time.monotonic()
    counts = run(options.inputs, options.seed, options.first)
    seconds = time.monotonic() - started
    sys.stdout.write(f"{sum(counts.values())} inputs in {seconds:.0f} s: {counts}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
