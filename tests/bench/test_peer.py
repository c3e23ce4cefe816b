"""Peers of bench.engine: the protocol on both sides, with programs that play an engine."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from baton.engine.state.work import Limits, Work
from baton.llm import LLM
from baton.protocol.errors import ConfigError
from bench import engine, models
from bench.engine import Against, EngineRow, Rate, compared, measure, tables
from bench.engine_kit import random_prompt, tell
from bench.models import widen_tokenizer
from bench.peer import PeerFailed, PeerServer, Took
from bench.peers.protocol import Generate, Generated, Setup, Unsupported, answer_all
from tests.tiny_models import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
FAKE = f"{sys.executable} -m tests.bench.fake_peer"


def told(load: object, *questions: dict[str, object]) -> list[dict[str, object]]:
    answers = io.StringIO()
    text = "".join(json.dumps(question) + "\n" for question in questions)
    answer_all("Fake 1", load, io.StringIO(text), answers)  # type: ignore[arg-type]
    return [json.loads(line) for line in answers.getvalue().splitlines()]


SETUP = {"model": "/m", "quantization": "int8", "threads": 2}
ASK = {"prompts": [[5, 6], [7]], "new_tokens": 3}


def test_a_peer_answers_line_by_line() -> None:
    asked: list[object] = []

    def load(setup: Setup) -> Generate:
        asked.append(setup)

        def generate(prompts: Sequence[list[int]], new: int) -> Generated:
            asked.append((prompts, new))
            first = 0.5 if len(prompts) == 1 else None
            return Generated([[prompt[0]] * new for prompt in prompts], first)

        return generate

    alone: dict[str, object] = {"prompts": [[9]], "new_tokens": 2}
    ready, once, again, one = told(load, SETUP, ASK, ASK, alone)
    assert ready == {"name": "Fake 1"}
    assert asked[:3] == [Setup(Path("/m"), "int8", 2), ([[5, 6], [7]], 3), ([[5, 6], [7]], 3)]
    assert (one["tokens"], one["first_seconds"]) == ([[9, 9]], 0.5)
    for answer in (once, again):
        assert answer["new_tokens"] == [3, 3]
        assert answer["tokens"] == [[5] * 3, [7] * 3]
        assert "first_seconds" not in answer
        assert float(str(answer["seconds"])) >= 0


def test_a_peer_says_what_it_does_not_have_or_what_went_wrong() -> None:
    def lacks(setup: Setup) -> Generate:
        raise Unsupported(f"no {setup.quantization} weights")

    def breaks(setup: Setup) -> Generate:
        raise OSError("no such file")

    assert told(lacks, SETUP, ASK) == [{"name": "Fake 1", "unsupported": "no int8 weights"}]
    assert told(breaks, SETUP, ASK) == [{"error": "OSError: no such file"}]


def test_weights_are_converted_once(tmp_path: Path) -> None:
    made: list[tuple[Path, str]] = []

    def convert(model: Path, weights: str, path: Path) -> None:
        made.append((model, weights))
        path.write_text("weights")
        if weights == "int4":
            raise OSError("no room")

    model = tmp_path / "M"
    for quantization in ("int8", "w8a8", "int8"):
        path = Setup(model, quantization, 2).converted(".x", convert)
        assert path == tmp_path / "M-int8.x"
    assert made == [(model, "int8")]
    assert Setup(model, "w4a8", 2).weights == "int4"
    with pytest.raises(OSError, match="no room"):
        Setup(model, "int4", 2).converted(".x", convert)
    assert not (tmp_path / "M-int4.x").exists()


def test_a_running_peer_is_asked_and_ended() -> None:
    with PeerServer.start(FAKE, Path("/m"), "none", 2) as peer:
        assert (peer.name, peer.unsupported) == ("Fake 1.0", None)
        assert peer.generate([[1, 2, 3], [4]], 8) == 8 * 0.25
        process = peer._process
    assert process.returncode == 0


def test_weights_that_a_peer_lacks() -> None:
    with PeerServer.start(FAKE, Path("/m"), "int4", 2) as peer:
        assert peer.unsupported == "no int4 weights"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (f"{FAKE} --fail", "OSError: the model is gone"),
        (f"{FAKE} --silent", "answered nothing"),
        (f"{FAKE} --noise", "answered 'a line of a library"),
    ],
)
def test_a_peer_that_fails_is_told_in_its_own_words(command: str, said: str) -> None:
    with pytest.raises(PeerFailed, match=said), PeerServer.start(command, Path("/m"), "none", 2):
        pass


def test_too_few_tokens_are_no_figure() -> None:
    with (
        PeerServer.start(f"{FAKE} --short", Path("/m"), "none", 2) as peer,
        pytest.raises(PeerFailed, match="8 tokens each were asked for"),
    ):
        peer.generate([[1, 2]], 8)


def test_a_program_that_is_not_there() -> None:
    with (
        pytest.raises(ConfigError, match="no-such-program"),
        PeerServer.start("no-such-program", Path("/m"), "none", 2),
    ):
        pass


def test_every_side_is_measured_and_the_best_peer_compared() -> None:
    rates = {"baton": [9.0, 12.0, 11.0], "transformers": [4.0], "A": [8.0], "B": [5.5]}
    row = compared(rates, ["A", "B", "C"])
    assert (row["baton"], row["baton min"], row["baton max"]) == (11.0, 9.0, 12.0)
    assert row["peers"] == {"A": 8.0, "B": 5.5, "C": None}
    assert row["best peer's ratio"] == 2.0
    assert row["over best peer"] == 11.0 / 8.0
    assert compared(rates, ["C"])["over best peer"] is None


def test_a_table_has_a_column_for_each_peer(capsys: pytest.CaptureFixture[str]) -> None:
    rates = {"baton": [11.0], "transformers": [4.0], "A": [8.0]}
    shares = {"MBU": 0.5, "MFU": 0.25}
    row = {"model": "M", "row": "decode 1@8"}
    (part,) = tables([row | compared(rates, ["A", "B"]) | shares])
    assert list(part.rows[0]) == [
        "row", "baton", "transformers", "A", "B", "ratio", "best peer's ratio", "over best peer",
        "MBU", "MFU",
    ]  # fmt: skip
    (alone,) = tables([row | compared(rates, []) | shares])
    assert list(alone.rows[0]) == ["row", "baton", "transformers", "ratio", "MBU", "MFU"]
    tell([part], as_json=False)
    assert " - " in capsys.readouterr().out


def test_a_row_is_measured_beside_a_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_tiny_model("llama", tmp_path)
    monkeypatch.setattr(engine, "LIMITS_S", 0.01)
    monkeypatch.setattr(engine, "TRIES", 1000)  # one token takes less than other work disturbs
    rows = [EngineRow("m", 8), EngineRow("m", 8, 2), EngineRow("m", 8, 1, "int8")]
    found = measure("m", path, rows, Against(1, [FAKE], 2))
    assert [row["row"] for row in found] == ["prefill 8", "decode 2@8", "int8 decode 1@8"]
    assert found[0]["peers"] == {"Fake 1.0": 8 / 0.25}
    assert all(row["baton"] > 0 and row["over best peer"] > 0 for row in found)
    assert all(row["MBU"] > 0 and row["MFU"] > 0 for row in found)
    for row in found:
        assert row["rounds"]["transformers"]["by CPU time"]
        assert row["rounds"]["Fake 1.0"]["by CPU time"] is None, "it does not tell CPU time"
        assert row["same tokens"]["Fake 1.0"] is None, "it does not tell its tokens"
    assert found[0]["same tokens"]["transformers"] == 1.0


def test_peers_alone_are_compared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_tiny_model("llama", tmp_path)
    monkeypatch.setattr(engine, "LIMITS_S", 0.01)
    (alone,) = measure("m", path, [EngineRow("m", 8)], Against(1, transformers=False))
    assert alone["over best peer"] is None
    tell(tables([alone]), as_json=False)
    (row,) = measure("m", path, [EngineRow("m", 8)], Against(1, [FAKE], transformers=False))
    assert (row["transformers"], row["ratio"], row["best peer's ratio"]) == (None, None, None)
    assert row["over best peer"] > 0
    assert list(row["rounds"]) == ["baton", "Fake 1.0"]
    assert len(tables([row])) == 2
    engine.pictures([row], tmp_path)
    assert (tmp_path / "roofline-m.svg").read_text().count("<circle") == 2  # and one in the key


def test_rounds_by_hand() -> None:
    rates = {
        "baton": [Rate(8.0, 4.0), Rate(9.0, 6.0), Rate(9.0, 3.0)],
        "A": [Rate(4.0, 2.0), Rate(3.0, 2.0), Rate(1.0, 3.0)],
        "B": [Rate(8.0, None)] * 3,
    }
    found = engine.round_by_round(rates)
    assert found["baton"] == {"CPU ms": 250.0}
    assert found["A"] == {
        "CPU ms": 500.0, "by CPU time": "2.00 (1.00-3.00)", "by the clock": "3.00 (2.00-9.00)"
    }  # fmt: skip
    assert found["B"]["by CPU time"] is None
    same = {"A": 0.75, "B": None}
    lines = tables([
        {"model": "M", "row": "r", "peers": {}, "rounds": found, "same tokens": same}
        | dict.fromkeys(("baton", "transformers", "ratio", "MBU", "MFU"), 1.0)
    ])[1].rows  # fmt: skip
    assert [line["beside"] for line in lines] == ["A", "B"]
    assert [line["same tokens"] for line in lines] == [0.75, None]


def test_a_side_with_other_tokens_is_refused() -> None:
    def side(*tokens: int) -> engine.Generate:
        return lambda prompts, new: Took(1, 1, [[tokens[i % 2]] for i in range(len(prompts))])

    def untold(prompts: Sequence[list[int]], new: int) -> Took:
        return Took(1, 1)

    runs = {"baton": side(5, 6), "A": side(5, 7), "B": untold, "C": side(7, 8)}
    same = engine.same_tokens(runs, 100)
    assert same == {"A": 0.5, "B": None, "C": 0.0}
    engine.refuse_others({"A": same["A"], "B": same["B"]})
    with pytest.raises(PeerFailed, match="C runs another model: 0% of its tokens"):
        engine.refuse_others(same)


def test_steps_of_one_request_begin_at_its_own_first_token() -> None:
    def side(first_seconds: float | None) -> engine.Generate:
        def run(prompts: Sequence[list[int]], new: int) -> Took:
            slow = 3 if new == 1 else 1  # the machine, while the prefill is measured by itself
            seconds, steps = slow * 2.0, 0.5 * (new - 1)
            return Took(seconds + steps, 2 * seconds + steps, first_seconds=first_seconds)

        return run

    row = EngineRow("m", 8, 1)
    assert engine.rate(side(2.0), row, 100, 0, 8) == Rate(8 / 4.0, 8 / 4.0)
    with pytest.raises(RuntimeError, match="took no longer"):
        engine.rate(side(None), row, 100, 0, 8)


def test_shares_are_of_the_limits_of_their_own_round() -> None:
    limits = [engine.mean_limits(Limits(50.0, 8.0), Limits(150.0, 8.0)), Limits(20.0, 4.0)]
    found = engine.median_shares(EngineRow("m", 8, 2), [10.0, 4.0], Work(10.0, 0.8), limits)
    assert found["MBU"] == pytest.approx((10 * 5 / 100 + 10 * 2 / 20) / 2)
    assert found["MFU"] == pytest.approx((0.8 * 5 / 8 + 0.8 * 2 / 4) / 2)
    assert found["read GB/s"] == pytest.approx(60e-9)


def test_both_sides_of_this_process_tell_when_the_first_token_came(tmp_path: Path) -> None:
    path = make_tiny_model("llama", tmp_path)
    llm = LLM(model=str(path), num_kv_blocks=64, measure_limits=False)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    prompt = random_prompt(8, 1, 100)
    told = [side([prompt], 4) for side in (engine.ours(llm), engine.theirs(model))]
    assert told[0].tokens[0] == told[1].tokens[0]
    for took in told:
        assert took.first_seconds is not None
        assert 0 < took.first_seconds < took.seconds
    several = [side([prompt] * 2, 4) for side in (engine.ours(llm), engine.theirs(model))]
    assert [took.first_seconds for took in several] == [None, None]


def test_tokens_that_cost_nothing_are_no_figure() -> None:
    with pytest.raises(RuntimeError, match="decode 2@8: 24 tokens more took no longer"):
        engine.rate(lambda prompts, new: Took(0.25, 0.25), EngineRow("m", 8, 2), 100, 0)


def test_a_checkpoint_that_is_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []

    def write(path: Path) -> None:
        path.mkdir()
        written.append(path)

    monkeypatch.setitem(models.WRITERS, "tiny", write)  # type: ignore[arg-type]
    assert models.write_checkpoint("tiny", tmp_path) == tmp_path / "tiny"
    assert models.write_checkpoint("tiny", tmp_path).is_dir()
    assert len(written) == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "tiny"], "what is unfinished bears another name"


def test_every_id_has_a_text(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes((ROOT / "demo_model" / "tokenizer.json").read_bytes())
    before = json.loads(path.read_text())["model"]
    widen_tokenizer(path, 5000)
    after = json.loads(path.read_text())["model"]
    assert sorted(after["vocab"].values()) == list(range(5000))
    assert after["vocab"].items() >= before["vocab"].items()
    assert after["merges"] == before["merges"]
