"""The exporting side frame by frame: the generator is stepped by hand, at chosen moments."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from baton.protocol.errors import KVStale
from baton.protocol.kv_spec import LayerSpec, layout_fingerprint
from baton.runtime.rotation.deployment_secret import fixed
from baton.runtime.timing import Timing
from kv_transfer.exporter import Exporter
from kv_transfer.exports import ExportTable, Reader
from kv_transfer.pool.layout import ArenaMemory
from kv_transfer.protocol.bodies import decode_body, encode_body, kind_of
from kv_transfer.protocol.frames import (
    HEADER_BYTES,
    MAX_PAYLOAD,
    Buffer,
    Frame,
    Kind,
    decode,
    encode,
    seed_of,
    split,
)
from kv_transfer.protocol.identity import Identity, Side
from kv_transfer.protocol.leases import Leases
from kv_transfer.protocol.messages import (
    DIRECT,
    Ack,
    Confirm,
    End,
    Failure,
    FailureCode,
    Fetch,
    Hello,
    Message,
    Renew,
    SharedBlockTables,
)
from kv_transfer.protocol.session import header_of
from kv_transfer.stats import TransferStats
from tests.block_lists import held
from tests.fakes import FakeClock, KVArena
from tests.transfer.pools import BOOT_D, BOOT_P, LAYERS
from tests.transfer.test_exports import LEASE_S, TOKENS, handle_of

SEED = seed_of(BOOT_P)
NONCE = b"D" * 16


class Peer:
    """A fetcher (base.Incoming) that says what it is given, after the handshake."""

    buffer: memoryview | None = None

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
        seq = getattr(message, "export_seq", 1)
        return encode(header_of(kind_of(message), seq, 1), [encode_body(message)], SEED)

    def on_closed(self, callback: Callable[[], None]) -> None:
        self.closers.append(callback)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a burst, and of the export as it was announced."""

    burst: int
    export: int


ONE_BYTE = Sizes(0, 1)


class Stage:
    """One export of TOKENS tokens and one fetcher in front of it."""

    def __init__(
        self,
        question: Message,
        timing: Timing,
        *then: Message,
        layers: tuple[LayerSpec, ...] = LAYERS,
        sizes: Sizes = ONE_BYTE,
        direct: bool = False,
    ) -> None:
        arena = KVArena(layers, 4, 8, "bfloat16")
        self.memory = ArenaMemory(arena)
        fingerprint = layout_fingerprint("model", "rope", layers)
        mine, theirs = (
            Identity(boot, fingerprint, self.memory.format, fixed("s")) for boot in (BOOT_P, BOOT_D)
        )
        self.clock = FakeClock()
        self.freed: list[str] = []
        self.table = ExportTable(
            (1,) * len(layers),
            Leases(LEASE_S),
            self.clock,
            lambda h, b, why: self.freed.append(why),
        )
        self.table.add(handle_of(self.table.next_sequence()), held((0, 1, 2)), sizes.export)
        self.stats = TransferStats()
        self.peer = Peer(theirs, [question, *(then or (Ack(1),))])
        exporter = Exporter(
            mine,
            self.memory,
            self.table,
            timing,
            self.clock,
            self.stats,
            direct=frozenset(("test",) if direct else ()),
            burst_bytes=sizes.burst,
            small_bytes=8 * sizes.burst,
        )
        self.parcels: Iterator[Buffer] = exporter.serve("test", self.peer)
        self.inbox: deque[memoryview] = deque()
        hello = self.next()
        assert isinstance(hello, Hello)
        self.peer.nonce = hello.nonce

    def lapse_after_read(self, count: int) -> None:
        """The lease ends right after the memory has been read for the `count`th time."""
        read, num_reads = self.memory.read, 0

        def spy(*arguments: Any) -> object:
            nonlocal num_reads
            num_reads += 1
            fragments = read(*arguments)
            if num_reads == count:
                self.clock.advance(LEASE_S)
            return fragments

        self.memory.read = spy  # type: ignore[method-assign]

    def publish(self) -> None:
        for layer in range(len(LAYERS)):
            assert self.table.publish(1, layer, TOKENS)

    def next_frame(self) -> Frame:
        while not self.inbox:
            self.inbox.extend(split(next(self.parcels)))
        return decode(self.inbox.popleft(), SEED)

    def next(self) -> Message:
        frame = self.next_frame()
        return decode_body(frame.header.kind, frame.payload)

    def kinds(self) -> list[Kind]:
        """Of all frames that are still to come."""
        for parcel in self.parcels:
            self.inbox.extend(split(parcel))
        kinds = [decode(frame, SEED).header.kind for frame in self.inbox]
        self.inbox.clear()
        return kinds


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
    stage.lapse_after_read(len(LAYERS))
    for _ in LAYERS:
        stage.next()
    last = stage.next()
    assert isinstance(last, Failure)
    assert last.code is FailureCode.STALE
    assert stage.kinds() == []


def test_a_lease_that_lapses_between_two_frames(stage: Stage) -> None:
    stage.publish()
    stage.lapse_after_read(1)
    assert stage.kinds() == [Kind.DATA, Kind.ERR]


def test_signs_of_life_until_the_fetcher_leaves(stage: Stage) -> None:
    stage.publish()
    for _ in LAYERS:
        stage.next()
    assert stage.next_frame().header.kind is Kind.CONFIRM
    for close in stage.peer.closers:
        close()
    assert stage.kinds() == []
    assert stage.freed == []


@pytest.mark.parametrize("adopt", [True, False])
def test_signs_of_life_while_there_is_progress(
    adopt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress comes during every wait, and none of it is anything that the fetcher wants."""
    fetch = Fetch(1, b"1", "r", 1, start_token=TOKENS, codec=DIRECT, adopt=adopt)
    stage = Stage(fetch, Timing(kv_progress_s=0.03), direct=True)
    published = 0
    wait = Reader.wait

    def progress(reader: Reader, seen: int | None, timeout_s: float, burst: int = 0) -> Any:
        nonlocal published
        if seen is not None:
            published += 1
            assert stage.table.publish(1, 0, published)
        return wait(reader, seen, timeout_s, burst)

    monkeypatch.setattr(Reader, "wait", progress)
    assert isinstance(stage.next(), SharedBlockTables)
    for waits in range(1, 6):
        assert stage.next() == Confirm(1, b"", 1, held=True)
        assert published == waits


def test_the_requests_time_is_over() -> None:
    stage = Stage(Fetch(1, b"1", "r", 1, timeout_ms=3000), Timing(kv_progress_s=0.05))
    assert stage.next_frame().header.kind is Kind.CONFIRM
    stage.clock.advance(3.0)
    last = stage.next()
    assert isinstance(last, Failure)
    assert last.code is FailureCode.TIMEOUT


def test_a_release_that_another_reader_holds_up(caplog: pytest.LogCaptureFixture) -> None:
    """The ACK is honoured, but answered only when the blocks are free, or after a while."""
    stage = Stage(Confirm(1, b"1", 1), Timing(kv_progress_s=0.05), Ack(1, answer=True))
    reader = stage.table.open(1, b"1", "r", 1)
    with reader.reading():
        assert stage.kinds() == [Kind.CONFIRM, Kind.CONFIRM]
        assert stage.freed == []
    assert stage.freed == ["acknowledged"]
    assert "still being read" in caplog.text


def test_one_connection_serves_one_question_after_the_other() -> None:
    questions = (Ack(1), Fetch(2, b"2", "r", 1), Ack(2), Renew(3, b"3", 1))
    stage = Stage(FETCH, Timing(kv_progress_s=0.05), *questions)
    for seq in (2, 3):
        stage.table.add(handle_of(stage.table.next_sequence()), held((0, 1, 2)), 1)
        for layer in range(len(LAYERS)):
            assert stage.table.publish(seq, layer, TOKENS)
        stage.table.complete(seq, ())
    stage.publish()
    stage.table.complete(1, ())
    fetched = [Kind.DATA] * len(LAYERS) + [Kind.END]
    assert stage.kinds() == [*fetched, *fetched, Kind.CONFIRM]
    assert stage.freed == ["acknowledged"] * 2
    assert stage.table.num_exports == 1
    assert stage.stats.exposed_tails == 2


def test_small_frames_of_one_moment_are_one_message(stage: Stage) -> None:
    stage.publish()
    stage.table.complete(1, ())
    assert [len(list(split(parcel))) for parcel in stage.parcels] == [len(LAYERS) + 1]


def test_big_frames_are_built_in_the_lanes_memory() -> None:
    layers = (LayerSpec(8, 128, 128),)  # 4 KiB a token, 80 KiB in all
    stage = Stage(FETCH, Timing(kv_progress_s=0.05), layers=layers)
    buffer = stage.peer.buffer = memoryview(bytearray(HEADER_BYTES + MAX_PAYLOAD))
    assert stage.table.publish(1, 0, TOKENS)
    stage.table.complete(1, ())
    parcel = next(stage.parcels)
    assert isinstance(parcel, memoryview)
    assert parcel.obj is buffer.obj
    header = decode(parcel, SEED).header
    assert (header.kind, header.num_tokens) == (Kind.DATA, TOKENS)
    assert stage.kinds() == [Kind.END]


def test_progress_is_sent_in_bursts() -> None:
    """Of three layers, 16 tokens each (a byte per token and layer): bursts of 4 bytes."""
    stage = Stage(FETCH, Timing(kv_progress_s=30), sizes=Sizes(4, 1000))
    with ThreadPoolExecutor(1) as pool:
        for upto in (4, 8):
            waiting = pool.submit(stage.next_frame)
            assert stage.table.publish(1, 0, upto - 1)
            assert not waiting.done()
            assert stage.table.publish(1, 0, upto)
            header = waiting.result(5.0).header
            assert (header.layer, header.token0, header.num_tokens) == (0, upto - 4, 4)


def test_a_small_export_follows_token_1() -> None:
    num_bytes = TOKENS * len(LAYERS)
    stage = Stage(FETCH, Timing(kv_progress_s=30), sizes=Sizes(num_bytes, num_bytes))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(stage.next_frame)
        stage.publish()
        assert not waiting.done()
        assert stage.stats.total_sent == 0
        stage.table.complete(1, ())
        header = waiting.result(5.0).header
    assert (header.layer, header.token0, header.num_tokens) == (0, 0, TOKENS)
    assert stage.kinds().count(Kind.DATA) == len(LAYERS) - 1


def test_the_tail_of_who_adopts_ends_with_end() -> None:
    """However long the pages are read then; and whoever releases them meanwhile frees nothing."""
    fetch = Fetch(1, b"1", "r", 1, start_token=TOKENS, codec=DIRECT, adopt=True)
    confirm = Confirm(1, b"1", 1)
    stage = Stage(fetch, Timing(), confirm, Ack(1, answer=True), direct=True)
    stage.publish()
    stage.table.complete(1, ())
    assert isinstance(stage.next(), SharedBlockTables)
    end = stage.next()
    assert isinstance(end, End)
    assert end.lease_ms == LEASE_S * 1000
    stage.clock.advance(LEASE_S / 2)
    stage.table.release(1, KVStale("somebody else says so"))
    assert stage.freed == []
    assert stage.next() == Confirm(1, b"", 1, held=True)
    assert stage.next() == Confirm(1, b"", 1, held=False)
    assert stage.freed == ["somebody else says so"]
    lane = stage.stats.lane("test")
    assert (lane.tails, lane.tail_seconds, lane.bytes_sent) == (1, 0.0, 0)
