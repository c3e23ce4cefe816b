"""A slice of `python -m tests.fuzz.frames`, and the proof that it would notice."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.protocol.errors import KVError
from kv_transfer.exporter import Exporter
from kv_transfer.exports import ExportTable, Reader
from kv_transfer.fetcher import Fetched
from kv_transfer.lanes.framed_socket import FramedSocket
from kv_transfer.lanes.records import RecordSocket
from kv_transfer.pool.memory_map import MemoryMap
from kv_transfer.protocol.bodies import decode_body, encode_body, kind_of
from kv_transfer.protocol.fetch_session import FetcherSession
from kv_transfer.protocol.frames import Header
from kv_transfer.protocol.messages import (
    Ack,
    Confirm,
    End,
    Failure,
    FailureCode,
    Fetch,
    Message,
    Renew,
    SharedBlockTables,
)
from tests.fuzz import exporting, fetching, reading
from tests.fuzz.frames import main, run
from tests.fuzz.mutations import damaged, resealed
from tests.fuzz.sites import (
    EPOCH,
    HANDLE,
    SEED,
    SEQ,
    TOKENS,
    FuzzError,
    Sites,
    control,
    open_sites,
)


@pytest.fixture(scope="module")
def sites() -> Iterator[Sites]:
    with open_sites() as made:
        yield made


def test_five_thousand_inputs() -> None:
    counts = run(5000, seed=1)
    assert sum(counts.values()) == 5000
    assert min(counts.values()) > 200


def test_the_same_number_is_the_same_input(sites: Sites) -> None:
    rngs = random.Random("1 2"), random.Random("1 2")
    changes = [
        [(damaged(rng, data, sites.frames), resealed(rng, data, SEED)) for data in sites.frames]
        for rng in rngs
    ]
    assert changes[0] == changes[1]


def test_unharmed_conversations_end_well(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is mutated would pass as it is, and brings P's bytes: the fuzzer goes past the door."""
    monkeypatch.setattr(fetching, "harmed", lambda sites, rng, frames: list(frames))
    monkeypatch.setattr(fetching, "lying", lambda rng, address: address)
    check, lent, ended = fetching._check_written, list[int](), set[int]()

    def watched(site: Any, wanted: Any, spans: Any, fetched: Fetched | None) -> None:
        check(site, wanted, spans, fetched)
        assert fetched is not None
        for layer, spec in enumerate(site.layers if wanted.codec != "int8" else ()):
            at, heads = site.first(layer, wanted), range(spec.kv_heads)
            ours, theirs = (
                b"".join(pool.memory.read(layer, pool.blocks, at, fetching.TOKENS, heads))
                for pool in (site.d, site.p)
            )
            assert wanted.intent is not fetching.Intent.FETCH or ours == theirs
        ended.add(id(wanted))

    borrow = fetching._borrow
    monkeypatch.setattr(fetching, "_borrow", lambda *args: (lent.append(1), borrow(*args)))
    monkeypatch.setattr(fetching, "_check_written", watched)
    for number in range(20 * len(sites.talks)):
        fetching.fetching(sites, random.Random(number))
    assert ended == {id(talk.wanted) for talk in sites.talks}
    assert lent


def test_the_exporting_half_comes_to_promises_and_bursts(
    sites: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {"promise": 0, "renew": 0, "confirm": 0, "acknowledge": 0}
    for name in seen:
        method: Callable[..., Any] = getattr(ExportTable, name)

        def spy(*args: Any, name: str = name, method: Any = method, **rest: Any) -> Any:
            result = method(*args, **rest)
            seen[name] += 1
            return result

        monkeypatch.setattr(ExportTable, name, spy)
    bursts, wait = set[bool](), Reader.wait

    def waiting(self: Reader, seen: int | None, timeout_s: float, burst_bytes: int = 0) -> Any:
        bursts.add(burst_bytes > 0)
        return wait(self, seen, timeout_s, burst_bytes)

    monkeypatch.setattr(Reader, "wait", waiting)
    for number in range(300):
        exporting.exporting(sites, random.Random(number))
    assert min(seen.values()) > 0
    assert bursts == {True, False}


NUMBERS = st.sampled_from((SEQ, EPOCH, TOKENS)) | st.integers(0, (1 << 32) - 1)
SECRETS = st.sampled_from((HANDLE.secret, b"", b"x" * 16))
TABLES = st.lists(st.lists(NUMBERS, max_size=4).map(tuple), max_size=4).map(tuple)
MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        Fetch,
        NUMBERS,
        SECRETS,
        st.sampled_from(("r", "")),
        NUMBERS,
        start_token=NUMBERS,
        codec=st.sampled_from(("raw", "int8", "direct", "zip")),
        timeout_ms=NUMBERS,
        adopt=st.booleans(),
    ),
    st.builds(SharedBlockTables, st.just(8) | NUMBERS.filter(bool), TABLES),
    st.builds(End, NUMBERS, st.booleans(), st.just(()), NUMBERS, NUMBERS, NUMBERS),
    st.builds(Ack, NUMBERS, st.booleans(), st.booleans()),
    st.builds(Renew, NUMBERS, SECRETS, NUMBERS),
    st.builds(Confirm, NUMBERS, SECRETS, NUMBERS, st.booleans()),
    st.builds(Failure, st.sampled_from(FailureCode), st.text(max_size=9)),
)


@given(messages=st.lists(MESSAGES, max_size=5), seed=st.integers(0, 1 << 16), data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_messages_in_any_order(
    sites: Sites, messages: list[Message], seed: int, data: st.DataObject
) -> None:
    """Structured bytes: well-formed messages that nobody would say, to both halves; hypothesis
    shrinks what fails."""
    talk = data.draw(st.sampled_from(sites.talks))
    for message in messages:
        assert decode_body(kind_of(message), memoryview(encode_body(message))) == message
    exporting.serve(sites, random.Random(seed), talk.site, messages)
    said = st.sampled_from(talk.frames) | st.sampled_from(messages or [Ack(SEQ)]).map(control)
    frames = tuple(data.draw(st.lists(said, max_size=9)))
    fetching.hold(sites, random.Random(seed), replace(talk, frames=frames))


def planted(*_: object) -> object:
    raise ValueError("planted")


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (reading, "decode_body"),
        (Exporter, "serve"),
        (RecordSocket, "receive"),
        (FetcherSession, "receive"),
    ],
)
def test_another_exception_is_found(monkeypatch: pytest.MonkeyPatch, place: Any, name: str) -> None:
    monkeypatch.setattr(place, name, planted)
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


def test_a_read_beyond_the_pool_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A map that takes any block for one of its own."""
    pieces = MemoryMap.pieces

    def careless(self: MemoryMap, *rest: Any) -> Any:
        endless = copy.copy(self)
        object.__setattr__(endless, "num_blocks", 1 << 40)
        return pieces(endless, *rest)

    monkeypatch.setattr(MemoryMap, "pieces", careless)
    with pytest.raises(FuzzError, match=r"beyond the memory|StopIteration|buffer|strides"):
        run(5000, seed=1)


def test_a_write_beside_the_span_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    views = fetching.ArenaMemory.views

    def careless(self: Any, layer: int, blocks: Any, start: int, end: int, heads: range) -> Any:
        return views(self, layer, blocks, start + 1, end + 1, heads)

    monkeypatch.setattr(fetching.ArenaMemory, "views", careless)
    with pytest.raises(FuzzError, match="nobody asked for"):
        run(5000, seed=1)


def test_a_reader_that_takes_half_a_frame_for_an_end_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fill = FramedSocket._fill

    def careless(self: FramedSocket, view: memoryview, timeout_s: float, **_: bool) -> bool:
        try:
            return fill(self, view, timeout_s, True)
        except KVError:
            return False

    monkeypatch.setattr(FramedSocket, "_fill", careless)
    with pytest.raises(FuzzError, match="mid-frame"):
        run(2000, seed=1)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--inputs", "200", "--seed", "3"]) == 0
    assert "200 inputs" in capsys.readouterr().out
