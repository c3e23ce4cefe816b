"""A GGUF file beside a peer: the arithmetic by hand, and the command once, small."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("gguf")
from bench import engine_gguf
from bench.engine_gguf import GgufRow, compared, measure, took
from bench.peer import Took
from tests.engine.gguf_models import write_gguf
from tests.tiny_models import make_tiny_model

FAKE = f"{sys.executable} -m tests.bench.fake_peer"


def side(asked: list[tuple[str, int, int]], name: str, seconds: float) -> engine_gguf.Generate:
    """Takes so many seconds for each new token of a call, and 1 for the prompts."""

    def run(prompts: Sequence[list[int]], new: int) -> Took:
        asked.append((name, len(prompts), new))
        return Took(1 + seconds * new, 2 * (1 + seconds * new))

    return run


def test_a_step_is_what_tokens_take_beyond_the_first() -> None:
    run = side([], "a", 0.5)
    assert took(run, GgufRow(9), 300, 0) == Took(1.5, 3.0)
    step = took(run, GgufRow(9, 4), 300, 0)
    assert (step.seconds, step.cpu_seconds) == pytest.approx((0.5, 1.0))


def test_sides_take_turns() -> None:
    asked: list[tuple[str, int, int]] = []
    (row,) = measure((side(asked, "a", 0.5), side(asked, "b", 1.0)), [GgufRow(9, 2)], 2, 300)
    assert [name for name, _, _ in asked] == ["a", "b", "a", "a", "b", "b", "b", "b", "a", "a"]
    assert all(prompts == 2 for _, prompts, _ in asked)
    assert row["row"] == "decode 2@9"
    assert row["CPU ratio"] == row["clock ratio"] == pytest.approx(2.0)
    assert (row["baton CPU ms"], row["peer CPU ms"]) == pytest.approx((1000, 2000))


def test_ratios_are_of_rounds() -> None:
    pairs = [(Took(1, 1), Took(3, 2)), (Took(2, 2), Took(2, 8)), (Took(1, 1), Took(1, 3))]
    found = compared(pairs)
    assert [found[name] for name in ("CPU ratio", "least", "greatest")] == [3, 2, 4]
    assert [found[f"clock {name}"] for name in ("ratio", "least", "greatest")] == [1, 1, 3]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(make_tiny_model("llama", tmp_path / "model"), file, "Q8_0")
    command = [str(file), "--peer", FAKE, "--rounds", "1", "--rows", "decode 1@", "--json"]
    assert engine_gguf.main([*command, "--threads", "1"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["tiny.gguf: Fake 1.0 over Baton"]
    assert row["row"] == "decode 1@32"
    assert row["baton CPU ms"] > 0
