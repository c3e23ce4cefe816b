"""A slice of `python -m tests.fuzz.frames`, and the proof that it would notice."""

from __future__ import annotations

import random

import pytest

from kv_transfer.fetch_session import FetcherSession
from kv_transfer.framed_socket import FramedSocket
from kv_transfer.frames import Header
from tests.fuzz import frames
from tests.fuzz.frames import CONVERSATIONS, FRAMES, SEED, FuzzError, main, run
from tests.fuzz.mutations import damaged, resealed


def test_twenty_thousand_inputs() -> None:
    counts = run(20_000, seed=1)
    assert sum(counts.values()) == 20_000
    assert min(counts.values()) > 1000


def test_the_same_number_is_the_same_input() -> None:
    rngs = random.Random("1 2"), random.Random("1 2")
    changes = [
        [(damaged(rng, data, FRAMES), resealed(rng, data, SEED)) for data in FRAMES] for rng in rngs
    ]
    assert changes[0] == changes[1]


def test_unharmed_conversations_end_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is mutated would pass as it is: the fuzzer does not stop at the door."""
    monkeypatch.setattr(frames, "reordered", lambda rng, sent: list(sent))
    monkeypatch.setattr(frames, "changed", lambda rng, frame: frame)
    ended: list[bool] = []
    check = frames._check_written

    def watched(session: FetcherSession, *rest: object) -> None:
        ended.append(session.done)
        check(session, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(frames, "_check_written", watched)
    for number in range(50 * len(CONVERSATIONS)):
        frames.fetching(random.Random(number))
    assert all(ended)


def test_another_exception_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(*_: object) -> object:
        raise ValueError("planted")

    monkeypatch.setattr(frames, "decode_body", careless)
    with pytest.raises(FuzzError, match=r"input \d+ of seed 1 .*planted"):
        run(1000, seed=1)


def test_a_hole_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that does not look at the first token."""
    expect = FetcherSession.expect

    def careless(self: FetcherSession, header: Header, num_bytes: int) -> object:
        if header.layer < len(self._received):
            self._received[header.layer] = header.token0
        return expect(self, header, num_bytes)

    monkeypatch.setattr(FetcherSession, "expect", careless)
    with pytest.raises(FuzzError, match="tokens twice, or never"):
        run(5000, seed=1)


def test_a_reader_that_takes_half_a_frame_for_an_end_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fill = FramedSocket._fill

    def careless(self: FramedSocket, view: memoryview, timeout_s: float, **_: bool) -> bool:
        try:
            return fill(self, view, timeout_s, True)
        except frames.KVError:
            return False

    monkeypatch.setattr(FramedSocket, "_fill", careless)
    with pytest.raises(FuzzError, match="mid-frame"):
        run(2000, seed=1)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--inputs", "200", "--seed", "3"]) == 0
    assert "200 inputs" in capsys.readouterr().out
