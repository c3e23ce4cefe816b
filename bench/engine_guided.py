"""What guided decoding costs a step: `python -m bench.engine_guided`.

It uses a synthetic vocabulary of 152k words, and a few typical places in a few grammars.
Medians, microseconds of this thread's CPU time per row:
    compile   the grammar, once per request at most
    fill      the mask of the next token, from the matcher
    apply     that mask, to a row of logits
    take      a sampled token into the matcher
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch

from baton.engine.running import masks
from baton.engine.running.runner import Asked
from baton.engine.state.interface import SequenceChunk
from baton.guided.guide import Grammar
from baton.guided.matcher import GrammarCompiler, Matcher
from baton.guided.vocabulary import Vocabulary
from baton.protocol.sampling import GuidedDecoding
from bench.engine_kit import TimedPart, arguments_parser, prepare, tell

VOCAB_SIZE: Final = 152_000
EOS: Final = 256
_LETTERS: Final = b'etaoin shrdlucmfwypvbgkjqxz  0123456789{}[]":,.\n_-EA'
_SCHEMA: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "code": {"type": "string", "maxLength": 30},
        "n": {"type": "array", "items": {"type": "integer"}, "maxItems": 5},
    },
    "required": ["name", "code", "n"],
    "additionalProperties": False,
}
_TAGS: Final = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<tool>"],
        "tags": [
            {
                "type": "tag",
                "begin": "<tool>",
                "content": {"type": "json_schema", "json_schema": _SCHEMA},
                "end": "</tool>",
            }
        ],
    },
}
# (place, grammar, what has been written)
PLACES: Final = (
    ("schema: a key", GuidedDecoding("json_schema", json.dumps(_SCHEMA)), b"{"),
    ("schema: a string", GuidedDecoding("json_schema", json.dumps(_SCHEMA)), b'{"name":"he'),
    (
        "schema: a bounded string",
        GuidedDecoding("json_schema", json.dumps(_SCHEMA)),
        b'{"name":"he","code":"a',
    ),
    (
        "schema: a number",
        GuidedDecoding("json_schema", json.dumps(_SCHEMA)),
        b'{"name":"he","code":"a","n":[1',
    ),
    ("regex", GuidedDecoding("regex", r"[a-z]{3,40}-\d{2}"), b"abc"),
    ("tags: free text", GuidedDecoding("structural_tag", json.dumps(_TAGS)), b"hello"),
)


def vocabulary(size: int) -> Vocabulary:
    """Return random words of one to ten bytes, among them every single byte."""
    draw = random.Random(0)
    words = [bytes([byte]) for byte in range(256)] + [b""]
    known = set(words)
    while len(words) < size:
        word = bytes(draw.choices(_LETTERS, k=draw.randint(2, 10)))
        if word not in known:
            known.add(word)
            words.append(word)
    return Vocabulary(tuple(words), {}, (EOS,), lambda text: list(text.encode()))


def median_us(
    work: Callable[[Matcher], object], repetitions: int, fresh: Callable[[], Matcher]
) -> float:
    """Return the median microseconds of `work`, each time on a new matcher.

    A new one is needed because a matcher keeps a mask that it has computed.
    """
    taken: list[float] = []
    for _ in range(repetitions):
        matcher = fresh()
        began = time.thread_time()
        work(matcher)
        taken.append(time.thread_time() - began)
    return statistics.median(taken) * 1e6


def _apply(matcher: Matcher, logits: torch.Tensor) -> None:
    """Apply the mask, which the matcher has computed before, to a row of logits [1, vocab]."""
    guide = Grammar(matcher, None, frozenset({EOS})).guide()
    masks.apply(logits, [Asked(SequenceChunk("r", (), 0, (), guide=guide), 0, ())])


def measure(compiler: GrammarCompiler, size: int, repetitions: int) -> list[dict[str, Any]]:
    """Return a row per place."""
    rows: list[dict[str, Any]] = []
    words = np.zeros((1, -(-size // 32)), np.int32)
    logits = torch.randn(1, size, generator=torch.Generator().manual_seed(0))
    for place, guided, text in PLACES:
        start = compiler.compile(guided)
        matcher = start.clone()
        taken = [median_us(lambda m, t=token: m.advance(t), 1, lambda m=matcher: m)
                 for token in text]  # fmt: skip
        fill = median_us(lambda m: m.fill(words[0]), repetitions, matcher.clone)
        apply = median_us(lambda m: _apply(m, logits), repetitions, lambda m=matcher: m)
        rows.append(
            {
                "place": place,
                "allowed": int(np.unpackbits(words.view(np.uint8)).sum()),
                "compile us": median_us(lambda _, g=guided: compiler.compile(g), 3, start.clone),
                "fill us": fill,
                "fill and apply us": apply,
                "take us": statistics.median(taken),
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return the exit status."""
    given = arguments_parser("engine_guided", __doc__).parse_args(arguments)
    prepare(given)
    began = time.thread_time()
    words = vocabulary(VOCAB_SIZE)
    first = GrammarCompiler(words)
    made = time.thread_time() - began
    parts = [
        TimedPart("llguidance", measure(first, VOCAB_SIZE, 400 if given.full else 60)),
        TimedPart("once", [{"vocabulary and llguidance's trie, s": made}]),
    ]
    tell(parts, given.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
