"""The peer's half of bench.peer's protocol: JSON lines, a question on stdin, an answer on stdout.

    {"model": FOLDER, "quantization": "none", "threads": 2}       first, once
        {"name": "Engine 1.2"}                                    it is loaded and ready
        {"name": "Engine 1.2", "unsupported": "no int4 weights"}  its rows stay empty
    {"prompts": [[5, 6], [7, 8]], "new_tokens": 24}               any number of times
        {"seconds": 0.8, "cpu_seconds": 1.6, "new_tokens": [24, 24], "tokens": [[9, 4], [7, 7]]}
                                                                  greedy, ends ignored, all at once
    {"prompts": [[5, 6]], "new_tokens": 24}                       of one prompt
        {"seconds": 0.6, "first_seconds": 0.2, ...}               when its first token was there
    (end of input)                                                the peer ends

`model` is a checkpoint in Hugging Face's format, or a GGUF file; `quantization` is none (bfloat16,
or the file as it is), int8, int4, w8a8 or w4a8; `seconds` are those of the engine's own call;
`tokens`, here cut short, may be left out: they show that both sides compute the same model.
`first_seconds` may be left out, too: decode steps then take the time of the call less that of a
call for one token.
{"error": "..."} answers what went wrong.
Imports nothing but the standard library: it runs where Baton is not installed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO


@dataclass(frozen=True, slots=True)
class Generated:
    """The new tokens of each prompt; for one prompt, if the engine tells it, the seconds from the
    call to its first new token."""

    tokens: Sequence[Sequence[int]]
    first_seconds: float | None = None


Generate = Callable[[Sequence[list[int]], int], Generated]
"""Prompts and a number of new tokens -> the new tokens of each."""


class Unsupported(Exception):
    """The engine does not have what was asked for; the message says what."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The first question: what to load, and on how many threads."""

    model: Path
    quantization: str
    threads: int

    @property
    def weights(self) -> str:
        """The weights' format; w8a8 is int8 and w4a8 is int4, for engines that round activations by
        themselves."""
        return {"w8a8": "int8", "w4a8": "int4"}.get(self.quantization, self.quantization)

    def converted(self, ending: str, convert: Callable[[Path, str, Path], None]) -> Path:
        """Return the file that `convert` makes of the model and its weights.

        The file lies beside the model and is made once for all runs. A conversion that breaks off
        leaves a file of another name.
        """
        path = self.model.parent / f"{self.model.name}-{self.weights}{ending}"
        if not path.exists():
            unfinished = path.with_name(f".{path.name}")
            convert(self.model, self.weights, unfinished)
            unfinished.rename(path)
        return path


def serve(name: str, load: Callable[[Setup], Generate]) -> None:
    """Answer questions until the input ends.

    Only answers go to stdout; what libraries print goes to stderr.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer_all(name, load, sys.stdin, answers)


def answer_all(
    name: str, load: Callable[[Setup], Generate], questions: TextIO, answers: TextIO
) -> None:
    """Write one line to `answers` for each of `questions`.

    A failure is such a line, too, and ends the answers.
    """
    generate: Generate | None = None
    for line in questions:
        question = json.loads(line)
        try:
            if generate is None:
                generate = load(_setup(question))
                answer: dict[str, Any] = {"name": name}
            else:
                answer = _timed(generate, question)
        except Unsupported as error:
            answer = {"name": name, "unsupported": str(error)}
        except Exception as error:  # noqa: BLE001 - whatever an engine raises is told, not lost
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if generate is None or "error" in answer:
            return


def _setup(question: dict[str, Any]) -> Setup:
    return Setup(Path(question["model"]), question["quantization"], question["threads"])


def _timed(generate: Generate, question: dict[str, Any]) -> dict[str, Any]:
    began, cpu = time.perf_counter(), time.process_time()
    found = generate(question["prompts"], question["new_tokens"])
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    counts = [len(each) for each in found.tokens]
    told = [list(each) for each in found.tokens]
    answer = {
        "seconds": seconds, "cpu_seconds": cpu_seconds, "new_tokens": counts, "tokens": told
    }  # fmt: skip
    if found.first_seconds is not None:
        answer["first_seconds"] = found.first_seconds
    return answer
