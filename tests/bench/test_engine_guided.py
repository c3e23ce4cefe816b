"""The benchmark of guided decoding runs, over a small vocabulary, and its masks are masks."""

from __future__ import annotations

from baton.guided.matcher import GrammarCompiler
from bench.engine_guided import PLACES, measure, vocabulary


def test_every_place_is_measured() -> None:
    words = vocabulary(1200)
    assert len(words.tokens) == len(set(words.tokens)) == 1200
    rows = measure(GrammarCompiler(words), 1200, repetitions=2)
    assert [row["place"] for row in rows] == [place for place, _, _ in PLACES]
    for row in rows:
        assert 0 < row["allowed"] < 1200
        assert row["compile us"] > 0
        assert row["fill and apply us"] > 0
