"""The exporting side frame by frame: the generator is stepped by hand, at chosen moments."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from baton.kv_spec import layout_fingerprint
from baton.timing import Timing
from kv_transfer.bodies import decode_body, encode_body, kind_of
from kv_transfer.exporter import Exporter
from kv_transfer.exports import ExportTable
from kv_transfer.frames import Kind, decode, encode, seed_of
from kv_transfer.identity import Identity, Side
from kv_transfer.layout import ArenaMemory
from kv_transfer.leases import Leases
from kv_transfer.messages import Ack, Failure, FailureCode, Fetch, Hello, Message
from kv_transfer.session import header_of
from kv_transfer.stats import TransferStats
from tests.block_lists import held
from tests.fakes import FakeClock, KVArena
from tests.transfer.pools import BOOT_D, BOOT_P, LAYERS
from tests.transfer.test_exports import LEASE_S, TOKENS, handle_of

SEED = seed_of(BOOT_P)
NONCE = b"D" * 16


class Peer:
    """A fetcher (base.Incoming) that says what it is given, after the handshake."""

    def __init__(self, identity: Identity, messages: list[Message]) -> None:
        self.identity = identity
        self.nonce: bytes | None = None
        self.messages: list[Message | None] = [None, None, *messages]
        self.closers: list[Callable[[], None]] = []

    def receive(self, timeout_s: float) -> bytes | None:
        if not self.messages:
            return None
        message = self.messages.pop(0)
        if message is None:
            message = self.identity.hello(Side.FETCHER, NONCE, self.nonce)
        return encode(header_of(kind_of(message), 1, 1), [encode_body(message)], SEED)

    def on_closed(self, callback: Callable[[], None]) -> None:
        self.closers.append(callback)


class Stage:
    """One export of TOKENS tokens and one fetcher in front of it."""

    def __init__(self, fetch: Fetch, timing: Timing) -> None:
        arena = KVArena(LAYERS, 4, 8, "bfloat16")
        self.memory = ArenaMemory(arena)
        fingerprint = layout_fingerprint("model", "rope", LAYERS)
        mine, theirs = (
            Identity(boot, fingerprint, self.memory.format, b"s") for boot in (BOOT_P, BOOT_D)
        )
        self.clock = FakeClock()
        self.freed: list[str] = []
        self.table = ExportTable(
            len(LAYERS), Leases(LEASE_S), self.clock, lambda h, b, why: self.freed.append(why)
        )
        self.table.add(handle_of(self.table.next_sequence()), held((0, 1, 2)), 1)
        self.stats = TransferStats()
        self.peer = Peer(theirs, [fetch, Ack(1)])
        exporter = Exporter(mine, self.memory, self.table, timing, self.clock, self.stats)
        self.frames: Iterator[bytes] = exporter.serve("test", self.peer)
        hello = self.next()
        assert isinstance(hello, Hello)
        self.peer.nonce = hello.nonce

    def publish(self) -> None:
        for layer in range(len(LAYERS)):
            assert self.table.publish(1, layer, TOKENS)

    def next(self) -> Message:
        frame = decode(next(self.frames), SEED)
        return decode_body(frame.header.kind, frame.payload)

    def kinds(self) -> list[Kind]:
        return [decode(frame, SEED).header.kind for frame in self.frames]


FETCH = Fetch(1, b"1", "r", 1)


@pytest.fixture
def stage() -> Stage:
    return Stage(FETCH, Timing(kv_progress_s=0.05))


def test_the_whole_conversation(stage: Stage) -> None:
    stage.publish()
    stage.table.complete(1, ())
    assert stage.kinds() == [Kind.DATA] * len(LAYERS) + [Kind.END]
    assert stage.freed == ["acknowledged"]


def test_a_lease_that_lapses_before_end_is_no_success(stage: Stage) -> None:
    """All bytes are out and were right, but END would promise what was not verified."""
    stage.publish()
    stage.table.complete(1, ())
    for _ in LAYERS:
        stage.next()
    stage.clock.advance(LEASE_S)
    last = stage.next()
    assert isinstance(last, Failure)
    assert last.code is FailureCode.STALE
    assert stage.kinds() == []


def test_a_lease_that_lapses_between_two_frames(stage: Stage) -> None:
    stage.publish()
    stage.next()
    stage.clock.advance(LEASE_S)
    assert stage.kinds() == [Kind.ERR]


def test_signs_of_life_until_the_fetcher_leaves(stage: Stage) -> None:
    stage.publish()
    for _ in LAYERS:
        stage.next()
    assert decode(next(stage.frames), SEED).header.kind is Kind.CONFIRM
    for close in stage.peer.closers:
        close()
    assert stage.kinds() == []
    assert stage.freed == []


def test_the_requests_time_is_over() -> None:
    stage = Stage(Fetch(1, b"1", "r", 1, timeout_ms=3000), Timing(kv_progress_s=0.05))
    assert decode(next(stage.frames), SEED).header.kind is Kind.CONFIRM
    stage.clock.advance(3.0)
    last = stage.next()
    assert isinstance(last, Failure)
    assert last.code is FailureCode.TIMEOUT


def test_a_release_that_another_reader_holds_up(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """The ACK is honoured; the conversation does not wait for ever for the other one."""
    reader = stage.table.open(1, b"1", "r", 1)
    stage.publish()
    stage.table.complete(1, ())
    with reader.reading():
        assert stage.kinds()[-1] is Kind.END
        assert stage.freed == []
    assert stage.freed == ["acknowledged"]
    assert "still being read" in caplog.text
