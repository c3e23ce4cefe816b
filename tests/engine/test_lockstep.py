"""Lockstep: ranks as engine threads whose forwards meet. Requests come to any rank at any time,
ranks are held, stalled, killed: every request ends right, every wave ends, nobody waits in vain."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from torch import Tensor

from baton.engine.core.active_model import ActiveModel
from baton.engine.core.engine import Engine
from baton.engine.parallel.lockstep import Lockstep, WakeSockets
from baton.engine.state.interface import ChunkResult, Reservation, SequenceChunk
from baton.engine.state.place import RankPlace
from baton.engine.thread import EngineThread, StepReport
from baton.protocol.errors import InternalError
from baton.protocol.request import Request
from tests.engine.driving import expected
from tests.fakes import FakeRunner, fake_engine, request

PATIENCE_S = 30.0  # a guard against deadlocks, never waited for
NUM_BLOCKS = 24


class Meeting:
    """Where threads meet instead of processes. `abort`: what a dead rank does to the others."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._parts: list[Tensor | None] = [None] * size

    def sum(self, rank: int, part: Tensor) -> Tensor:
        self._parts[rank] = part.clone()
        try:
            self._barrier.wait(PATIENCE_S)
            total = torch.stack([each for each in self._parts if each is not None]).sum(0)
            self._barrier.wait(PATIENCE_S)
        except threading.BrokenBarrierError as error:
            raise InternalError("a collective failed") from error
        return total

    def abort(self) -> None:
        self._barrier.abort()


@dataclass
class ThreadGroup:
    """What Lockstep needs of a RankGroup."""

    place: RankPlace
    meeting: Meeting

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self.meeting.sum(self.place.rank, tensor)


@dataclass
class ThreadWakes:
    """Implements Wakes. Calls arrive on another thread, some time later."""

    others: list[ThreadWakes] = field(default_factory=list["ThreadWakes"])
    calls: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue[int])
    numbers: list[int] = field(default_factory=list[int])

    def call(self, wave: int) -> None:
        self.numbers.append(wave)
        for other in self.others:
            other.calls.put(wave)

    def listen(self, heard: Callable[[int], None]) -> None:
        def run() -> None:
            while number := self.calls.get():
                heard(number)

        threading.Thread(target=run, daemon=True).start()


class MeetingRunner:
    """A runner whose forwards need all ranks, as those of a mixture of experts do."""

    def __init__(self, inner: FakeRunner, lockstep: Lockstep, forward: Callable[[], None]) -> None:
        self._inner = inner
        self._lockstep = lockstep
        self.forward = forward

    def run(
        self, chunks: Sequence[SequenceChunk], on_layer: Callable[[int], None] | None = None
    ) -> list[ChunkResult]:
        self._lockstep.begin(sum(len(chunk.token_ids) for chunk in chunks))
        with self._lockstep.fatal():
            self.forward()
        return self._inner.run(chunks, on_layer)


class Rank:
    """One rank: an engine over its own pool, on its own thread."""

    def __init__(self, place: RankPlace, meetings: tuple[Meeting, Meeting], wakes: ThreadWakes):
        rounds, forwards = meetings
        self.wakes = wakes
        self.lockstep = Lockstep(ThreadGroup(place, rounds), wakes)  # type: ignore[arg-type]
        self.reports: queue.SimpleQueue[StepReport] = queue.SimpleQueue()
        self.engine, inner = fake_engine(num_blocks=NUM_BLOCKS)
        self.num_forwards = 0
        self.lost: list[str] = []

        def forward() -> None:
            self.num_forwards += 1
            counts = torch.tensor([self.num_forwards])
            total = forwards.sum(place.rank, counts)
            assert total == place.size * counts, "the ranks are at different forwards"

        self.lockstep.set_empty_forward(forward)
        self.lockstep.on_lost(self.lost.append)
        runner = MeetingRunner(inner, self.lockstep, forward)
        self.engine.use(ActiveModel(runner, lockstep=self.lockstep))
        self.thread = EngineThread(self.engine, self.reports.put)

    def ask(self, function: Callable[[Engine], object]) -> object:
        """What `function` returns on the engine thread."""
        done: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.thread.post(lambda engine: done.put(function(engine)))
        return done.get(timeout=PATIENCE_S)


def make_ranks(size: int) -> tuple[list[Rank], tuple[Meeting, Meeting]]:
    meetings = Meeting(size), Meeting(size)
    wakes = [ThreadWakes() for _ in range(size)]
    for each in wakes:
        each.others = [other for other in wakes if other is not each]
    ranks = [Rank(RankPlace(rank, size), meetings, wakes[rank]) for rank in range(size)]
    for each in ranks:
        each.thread.start()
    return ranks, meetings


def stop_all(ranks: Sequence[Rank]) -> None:
    stops = [threading.Thread(target=rank.thread.stop) for rank in ranks]
    for each in stops:
        each.start()
    for each in stops:
        each.join(PATIENCE_S)
        assert not each.is_alive(), "a rank does not stop"
    for rank in ranks:
        rank.wakes.calls.put(0)


def collect(rank: Rank, wanted: dict[str, Request]) -> None:
    """Until every request of `wanted` has ended, each with its own tokens."""
    tokens: dict[str, list[int]] = {}
    missing = set(wanted)
    while missing:
        for event in rank.reports.get(timeout=PATIENCE_S).events:
            tokens.setdefault(event.request_id, []).extend(event.token_ids)
            if event.finish_reason is not None:
                missing.discard(event.request_id)
    for name, asked in wanted.items():
        assert tokens[name] == expected(asked)


class Waves(RuleBasedStateMachine):
    """Whatever happens to the ranks, all requests end, and then all ranks sleep."""

    size = 3

    def __init__(self) -> None:
        super().__init__()
        self.ranks, self.meetings = make_ranks(self.size)
        self.wanted: list[dict[str, Request]] = [{} for _ in self.ranks]
        self.reserved: list[tuple[Rank, Reservation]] = []
        self.count = 0

    @rule(
        rank=st.integers(0, size - 1),
        length=st.integers(1, 12),
        max_tokens=st.integers(1, 9),
    )
    def add(self, rank: int, length: int, max_tokens: int) -> None:
        self.count += 1
        asked = request(f"r{self.count}", tuple(range(5, 5 + length)), max_tokens=max_tokens)
        self.wanted[rank][asked.id] = asked
        self.ranks[rank].thread.post(lambda engine: engine.add(asked))

    @rule(rank=st.integers(0, size - 1))
    def stall(self, rank: int) -> None:
        """Nothing is free any more: what waits for blocks stalls the engine."""
        mine = self.ranks[rank]

        def take(engine: Engine) -> Reservation | None:
            free = engine.pool.num_free * engine.pool.block_size
            return engine.reserve(request(f"x{self.count}"), free) if free else None

        self.count += 1
        reservation = mine.ask(take)
        if isinstance(reservation, Reservation):
            self.reserved.append((mine, reservation))

    @rule()
    def free(self) -> None:
        if self.reserved:  # no precondition: how much is reserved depends on the ranks' threads
            rank, reservation = self.reserved.pop()
            rank.thread.post(lambda engine: engine.cancel(reservation))

    @rule(rank=st.integers(0, size - 1), held=st.booleans())
    def hold(self, rank: int, held: bool) -> None:
        self.ranks[rank].thread.hold(held)

    @rule(rank=st.integers(0, size - 1))
    def abort(self, rank: int) -> None:
        if self.wanted[rank]:
            name, _ = self.wanted[rank].popitem()
            self.ranks[rank].thread.post(lambda engine: engine.abort(name))

    @rule(rank=st.integers(0, size - 1))
    def forward_in_a_call(self, rank: int) -> None:
        """As embeddings do."""
        mine = self.ranks[rank]

        def run(engine: Engine) -> bool:
            mine.lockstep.begin(3)
            runner = engine.steps.runner
            assert isinstance(runner, MeetingRunner)
            runner.forward()
            return True

        assert mine.ask(run)

    @rule()
    def end_all(self) -> None:
        """Every request ends, then every wave, and all ranks are as far as each other."""
        while self.reserved:
            self.free()
        for rank, wanted in zip(self.ranks, self.wanted, strict=True):
            rank.thread.hold(False)
            collect(rank, wanted)
            wanted.clear()
        asleep(self.ranks)
        assert len({rank.num_forwards for rank in self.ranks}) == 1
        assert len({rank.lockstep.num_rounds for rank in self.ranks}) == 1

    def teardown(self) -> None:
        for rank in self.ranks:
            assert not rank.lost
        self.end_all()
        stop_all(self.ranks)
        for rank in self.ranks:
            assert rank.lockstep.all_leave
            assert rank.engine.pool.num_free == NUM_BLOCKS


def asleep(ranks: Sequence[Rank]) -> None:
    """Until no rank has a round to make: each has answered a call, and made none since."""
    for _ in range(int(PATIENCE_S * 1000)):
        before = [rank.lockstep.num_rounds for rank in ranks]
        for rank in ranks:
            rank.ask(lambda engine: True)
        if not any(rank.lockstep.wanted for rank in ranks) and before == [
            rank.lockstep.num_rounds for rank in ranks
        ]:
            return
    raise AssertionError("a wave does not end")


TestWaves = Waves.TestCase
TestWaves.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)


@pytest.fixture
def pair() -> Iterator[tuple[list[Rank], tuple[Meeting, Meeting]]]:
    ranks, meetings = make_ranks(2)
    yield ranks, meetings
    stop_all(ranks)


Pair = tuple[list[Rank], tuple[Meeting, Meeting]]


def test_an_idle_group_makes_no_rounds_and_a_wave_makes_one_too_many(pair: Pair) -> None:
    (busy, idle), _ = pair
    asked = request("a", (5, 6, 7), max_tokens=4)
    busy.thread.post(lambda engine: engine.add(asked))
    collect(busy, {"a": asked})
    asleep((busy, idle))
    assert busy.num_forwards == idle.num_forwards == 4
    assert busy.lockstep.num_rounds == idle.lockstep.num_rounds == 5
    assert busy.wakes.numbers == [1], "one call a wave"
    assert idle.wakes.numbers == []


def test_a_held_rank_takes_part(pair: Pair) -> None:
    (busy, held), _ = pair
    held.thread.hold(True)
    waiting = request("w", (5, 6, 7), max_tokens=4)
    held.thread.post(lambda engine: engine.add(waiting))
    asked = request("a", (5, 6, 7), max_tokens=4)
    busy.thread.post(lambda engine: engine.add(asked))
    collect(busy, {"a": asked})
    assert held.reports.empty()
    held.thread.hold(False)
    collect(held, {"w": waiting})


def test_a_dead_rank_ends_all(pair: Pair) -> None:
    """In a forward, as gloo says it: the waiting rank hears of it, fails its request, and ends."""
    (first, second), (rounds, forwards) = pair

    def die() -> None:
        rounds.abort()
        forwards.abort()
        raise InternalError("killed")

    second.lockstep.set_empty_forward(die)
    first.thread.post(lambda engine: engine.add(request("a", (5, 6, 7), max_tokens=40)))
    [failed] = first.reports.get(timeout=PATIENCE_S).failed
    assert (failed.request_id, failed.message) == ("a", "a collective failed")
    first.thread.post(lambda engine: engine.add(request("b")))
    [failed] = first.reports.get(timeout=PATIENCE_S).failed
    assert failed.message == "the data-parallel group has ended: a collective failed"
    for rank in (first, second):
        rank.ask(lambda engine: True)
        assert not rank.lockstep.wanted
    assert first.lost == ["a collective failed"]
    assert second.lost == ["killed"]


def test_a_rank_that_leaves_waits_for_the_others(pair: Pair) -> None:
    (first, second), _ = pair
    asked = request("a", (5, 6, 7), max_tokens=30)
    second.thread.hold(True)
    second.thread.post(lambda engine: engine.add(asked))
    stopping = threading.Thread(target=first.thread.stop)
    stopping.start()
    second.ask(lambda engine: True)
    second.thread.hold(False)
    collect(second, {"a": asked})
    assert stopping.is_alive()
    second.thread.stop()
    stopping.join(PATIENCE_S)
    assert not stopping.is_alive()


def test_wakes_by_sockets(tmp_path: Path) -> None:
    ranks = [WakeSockets(tmp_path, RankPlace(rank, 3)) for rank in range(3)]
    heard: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    for rank, each in enumerate(ranks):
        each.listen(lambda wave, rank=rank: heard.put((rank, wave)))
    ranks[1].call(1 << 40)
    assert {heard.get(timeout=PATIENCE_S) for _ in range(2)} == {(0, 1 << 40), (2, 1 << 40)}
    ranks[0].close()
    ranks[1].call(7)
    assert heard.get(timeout=PATIENCE_S) == (2, 7)
    for each in ranks:
        each.close()
    assert not list(tmp_path.iterdir())
