"""The export table in any order of calls: each export is freed exactly once, the fences hold."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
)

from baton.protocol.errors import InternalError, KVError, KVLost, KVRefused, KVStale
from baton.protocol.handles import Endpoint, KVHandle
from baton.protocol.kv_spec import PoolFormat
from kv_transfer.exports import ExportTable, Reader
from kv_transfer.protocol.base import Blocks
from kv_transfer.protocol.leases import Leases
from tests.block_lists import held
from tests.fakes import FakeClock

LEASE_S = 10.0
TOKENS = 20
ENDPOINT = Endpoint("0a" * 16, "f", PoolFormat(8, "float32"), ())


def handle_of(seq: int, request_id: str = "r", epoch: int = 1) -> KVHandle:
    return KVHandle(
        "0a" * 16, seq, request_id, epoch, TOKENS, b"%d" % seq, ENDPOINT, int(LEASE_S * 1000)
    )


class ExportTableMachine(RuleBasedStateMachine):
    """Against a model: which exports are held, what each request's highest epoch is, who reads."""

    exports = Bundle("exports")
    readers = Bundle("readers")
    reads = Bundle("reads")

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock(0.0)
        self.table = ExportTable((1, 1), Leases(LEASE_S), self.clock, self.on_released)
        self.freed: list[int] = []
        self.until: dict[int, float] = {}  # model: held exports and the end of their leases
        self.handles: dict[int, KVHandle] = {}
        self.highest: dict[str, int] = {}
        self.upto: dict[int, list[int]] = {}
        self.num_reads: dict[int, int] = {}
        self.promised: dict[int, dict[int, float]] = {}  # by export and epoch, until when
        self.open_reads: dict[int, tuple[ExitStack, int]] = {}

    def teardown(self) -> None:
        """When all readers have left and all leases have ended, nothing is left."""
        for read in list(self.open_reads.values()):
            self.leave(*read)
        self.clock.advance(LEASE_S)
        self.expire()
        assert sorted(self.freed) == sorted(self.handles)

    def on_released(self, handle: KVHandle, blocks: Blocks, why: str) -> None:
        seq = handle.export_seq
        assert seq not in self.freed, "freed twice"
        assert self.num_reads.get(seq, 0) == 0, "freed under a reader"
        assert not self.promised.get(seq), "freed in spite of a promise"
        assert blocks == held((seq, seq + 1))
        assert why
        self.freed.append(seq)

    def offered(self, seq: int) -> bool:
        return seq in self.until and self.clock.now < self.until[seq]

    def may_read(self, seq: int, epoch: int) -> bool:
        return self.offered(seq) and epoch >= self.highest[self.handles[seq].request_id]

    def saw(self, seq: int, epoch: int) -> None:
        request_id = self.handles[seq].request_id
        self.highest[request_id] = max(self.highest[request_id], epoch)

    def released(self, seq: int) -> None:
        self.until.pop(seq, None)
        self.settle(seq)

    def settle(self, seq: int) -> None:
        """Something has happened at which what is released looks for promises that are over."""
        if seq not in self.until:
            promised = self.promised.get(seq, {})
            self.promised[seq] = {e: t for e, t in promised.items() if self.clock.now < t}

    @rule(target=exports, request_id=st.sampled_from("ab"), epoch=st.integers(1, 4))
    def export(self, request_id: str, epoch: int) -> int:
        seq = self.table.next_sequence()
        handle = handle_of(seq, request_id, epoch)
        # A request's fence lives as long as one of its exports is not freed.
        if not any(
            h.request_id == request_id and s not in self.freed for s, h in self.handles.items()
        ):
            self.highest[request_id] = epoch
        self.handles[seq] = handle
        self.saw(seq, epoch)
        self.until[seq] = self.clock.now + LEASE_S
        self.upto[seq] = [0, 0]
        self.table.add(handle, held((seq, seq + 1)), 100)
        return seq

    @rule(seq=exports, layer=st.integers(0, 1), upto=st.integers(0, TOKENS))
    def publish(self, seq: int, layer: int, upto: int) -> None:
        offered = self.offered(seq)
        assert self.table.publish(seq, layer, upto) is offered
        if offered:
            self.until[seq] = self.clock.now + LEASE_S
            self.upto[seq][layer] = max(upto, self.upto[seq][layer])

    @rule(seq=exports)
    def complete(self, seq: int) -> None:
        self.table.complete(seq, ())

    @rule(target=readers, seq=exports, epoch=st.integers(1, 5), secret=st.booleans())
    def open(self, seq: int, epoch: int, secret: bool) -> tuple[Reader | None, int, int]:
        handle = self.handles[seq]
        allowed = secret and self.may_read(seq, epoch)
        key = handle.secret if secret else b"wrong"
        try:
            reader = self.table.open(seq, key, handle.request_id, epoch)
        except KVError:
            assert not allowed
            return None, seq, epoch
        assert allowed
        self.saw(seq, epoch)
        return reader, seq, epoch

    @rule(entry=readers)
    def look(self, entry: tuple[Reader | None, int, int]) -> None:
        reader, seq, epoch = entry
        if reader is None:
            return
        try:
            snapshot = reader.wait(None, 0)
        except (KVStale, KVLost):
            assert not self.may_read(seq, epoch)
            return
        assert self.may_read(seq, epoch)
        assert snapshot is not None
        assert list(snapshot.upto) == self.upto[seq]

    @rule(target=reads, entry=readers)
    def begin_read(self, entry: tuple[Reader | None, int, int]) -> tuple[ExitStack, int]:
        reader, seq, epoch = entry
        stack = ExitStack()
        if reader is None:
            return stack, -1
        try:
            stack.enter_context(reader.reading())
        except (KVStale, KVLost):
            assert not self.may_read(seq, epoch)
            return stack, -1
        assert self.may_read(seq, epoch)
        self.num_reads[seq] = self.num_reads.get(seq, 0) + 1
        self.open_reads[id(stack)] = stack, seq
        return stack, seq

    @rule(read=consumes(reads))
    def end_read(self, read: tuple[ExitStack, int]) -> None:
        self.leave(*read)

    def leave(self, stack: ExitStack, seq: int) -> None:
        self.num_reads[seq] = self.num_reads.get(seq, 0) - 1
        self.open_reads.pop(id(stack), None)
        self.settle(seq)
        stack.close()

    @rule(seq=exports, epoch=st.integers(1, 5))
    def renew(self, seq: int, epoch: int) -> None:
        try:
            self.table.renew(seq, self.handles[seq].secret, epoch)
        except KVStale:
            assert not self.may_read(seq, epoch)
            return
        assert self.may_read(seq, epoch)
        self.saw(seq, epoch)
        self.until[seq] = self.clock.now + LEASE_S
        if epoch in self.promised.get(seq, {}):
            self.promised[seq][epoch] = self.until[seq]

    @rule(entry=readers)
    def promise(self, entry: tuple[Reader | None, int, int]) -> None:
        reader, seq, epoch = entry
        if reader is None:
            return
        try:
            reader.promise()
        except (KVStale, KVLost):
            assert not self.may_read(seq, epoch)
            return
        assert self.may_read(seq, epoch)
        self.until[seq] = self.clock.now + LEASE_S
        self.promised.setdefault(seq, {})[epoch] = self.until[seq]

    @rule(seq=exports, epoch=st.integers(1, 5))
    def confirm(self, seq: int, epoch: int) -> None:
        """A promise is as good as the lease, for who has it."""
        kept = seq not in self.until and seq not in self.freed
        promised = kept and epoch in self.promised.get(seq, {})
        try:
            self.table.confirm(seq, self.handles[seq].secret, epoch)
        except KVStale:
            assert not promised
            assert not self.may_read(seq, epoch)
            return
        assert promised or self.may_read(seq, epoch)
        if not promised:
            self.saw(seq, epoch)

    @rule(seq=exports)
    def release(self, seq: int) -> None:
        self.released(seq)
        freed = self.table.release(seq, KVStale("released"))
        assert freed is None or freed.done() is (seq in self.freed)

    @rule(seq=exports, epoch=st.integers(1, 5))
    def acknowledge(self, seq: int, epoch: int) -> None:
        if self.promised.get(seq, {}).pop(epoch, None) is not None:
            self.settle(seq)
        if seq in self.until and epoch >= self.highest[self.handles[seq].request_id]:
            self.released(seq)
        self.table.acknowledge(seq, epoch)

    @rule(seconds=st.floats(0.1, 1.5 * LEASE_S))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def expire(self) -> None:
        lapsed = [seq for seq in self.until if not self.offered(seq)]
        for seq in lapsed:
            self.released(seq)
        for seq in self.handles:
            self.settle(seq)
        assert len(self.table.expire(self.clock.now)) == len(lapsed)

    @precondition(lambda self: self.until)
    @rule()
    def stop(self) -> None:
        self.until.clear()
        self.promised.clear()
        self.table.release_all(KVLost("stops"))

    @invariant()
    def freed_are_exactly_those_nobody_has(self) -> None:
        expected = {
            seq
            for seq in self.handles
            if seq not in self.until
            and self.num_reads.get(seq, 0) == 0
            and not self.promised.get(seq)
        }
        assert set(self.freed) == expected
        pinned = len(self.handles) - len(self.freed)
        assert self.table.num_exports == pinned
        assert self.table.export_bytes == 100 * pinned
        expiry = self.table.next_expiry()
        kept = [max(t.values()) for seq, t in self.promised.items() if seq not in self.until and t]
        assert expiry == min([*self.until.values(), *kept], default=None)


ExportTableMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
test_any_order_of_calls = ExportTableMachine.TestCase


# ---- waiting, with real threads ----------------------------------------------------------------
@pytest.fixture
def freed() -> list[str]:
    return []


@pytest.fixture
def table(freed: list[str]) -> ExportTable:
    clock = FakeClock(0.0)
    return ExportTable((1,), Leases(LEASE_S), clock, lambda handle, blocks, why: freed.append(why))


def opened(table: ExportTable, epoch: int = 1) -> Reader:
    handle = handle_of(table.next_sequence())
    table.add(handle, held((0,)), 1)
    return table.open(handle.export_seq, handle.secret, "r", epoch)


def test_progress_wakes_the_reader(table: ExportTable) -> None:
    reader = opened(table)
    first = reader.wait(None, 5.0)
    assert first is not None
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reader.wait, first.version, 5.0)
        table.publish(1, 0, 7)
        second = waiting.result(5.0)
    assert second is not None
    assert second.upto == (7,)
    assert reader.wait(second.version, 0.0) is None


@pytest.mark.parametrize("end", ["release", "newer epoch", "newer export", "close"])
def test_what_ends_a_wait(table: ExportTable, end: str) -> None:
    reader = opened(table)
    version = reader.wait(None, 0.0).version  # type: ignore[union-attr]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reader.wait, version, 30.0)
        if end == "close":
            reader.close()
            assert waiting.result(5.0) is None
            assert reader.closed
            return
        if end == "release":
            table.release(1, KVLost("gone"))
        elif end == "newer export":
            table.add(handle_of(2, epoch=2), held((1,)), 1)
        else:
            table.renew(1, b"1", 2)
        with pytest.raises(KVLost if end == "release" else KVStale):
            waiting.result(5.0)


def test_a_promise_outlives_whoever_releases(table: ExportTable, freed: list[str]) -> None:
    reader = opened(table)
    reader.promise()
    released = table.release(1, KVStale("somebody else says so"))
    assert released is not None
    assert (freed, released.done()) == ([], False)
    with pytest.raises(KVRefused, match="secret"):
        table.confirm(1, b"x", 1)
    with pytest.raises(KVStale):
        table.confirm(1, b"1", 2)
    with pytest.raises(KVStale):
        table.renew(1, b"1", 1)  # it is not extended any more
    table.confirm(1, b"1", 1)
    assert table.acknowledge(1, 1) is released
    assert (freed, released.done()) == (["somebody else says so"], True)


def test_each_error_says_what_is_wrong(table: ExportTable) -> None:
    opened(table, epoch=3)
    with pytest.raises(KVStale, match="no export 9"):
        table.open(9, b"1", "r", 3)
    with pytest.raises(KVRefused, match="secret"):
        table.confirm(1, b"x", 3)
    with pytest.raises(KVStale, match="request other"):
        table.open(1, b"1", "other", 3)
    with pytest.raises(KVStale, match="epoch 2"):
        table.confirm(1, b"1", 2)
    with pytest.raises(InternalError, match="published 21 of 20"):
        table.publish(1, 0, TOKENS + 1)
    table.confirm(1, b"1", 3)


def test_publishing_never_waits_for_a_reader(table: ExportTable, freed: list[str]) -> None:
    reader = opened(table)
    with reader.reading():
        done = threading.Event()
        thread = threading.Thread(target=lambda: (table.publish(1, 0, 5), done.set()))
        thread.start()
        assert done.wait(5.0)
        thread.join()
        table.release(1, KVStale("over"))
        assert freed == []
    assert freed == ["over"]


def test_a_failing_callback_still_frees(table: ExportTable) -> None:
    def broken(handle: KVHandle, blocks: Blocks, why: str) -> None:
        raise ValueError("callback")

    table = ExportTable((1,), Leases(LEASE_S), FakeClock(0.0), broken)
    table.add(handle_of(1), held((0,)), 1)
    with pytest.raises(ValueError, match="callback"):
        table.release(1, KVStale("over"))
    assert table.num_exports == 0
