"""Loans: who lends to whom, what is promised until when, and what of a dead owner's pages."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.engine.memory.kv_cache import KVArena
from baton.node.lanes import LaneSettings, PoolPlace, make_lanes
from baton.protocol.errors import ConfigError, KVCorrupt
from baton.protocol.kv_spec import LayerSpec
from baton.runtime.timing import Timing
from kv_transfer.lanes.shm import ShmLane
from kv_transfer.lanes.shm_arena import ArenaPlace, ShmArena
from kv_transfer.loans import Promise
from kv_transfer.protocol.lending import LendingLane
from tests.fakes import FakeClock

LAYERS = (LayerSpec(2, 8, 8), LayerSpec(2, 8, 8))


@dataclass
class FakeLoan:
    ids: tuple[int, ...] = (7,)
    dead: bool = False

    def orphaned(self) -> bool:
        return self.dead

    def wanted(self) -> bool:
        return False

    def end(self) -> None: ...


def test_a_promise_holds_for_a_lease_from_when_it_was_asked_for() -> None:
    clock, loan = FakeClock(), FakeLoan()
    promise = Promise(clock, 10.0)
    promise.covers(loan)
    assert not promise.holds(), "nothing has been promised"
    assert promise.left() == 0.0
    start = clock.monotonic()
    promise.renewed(start)
    clock.advance(9.0)
    assert promise.holds()
    assert promise.left() == pytest.approx(1.0)
    clock.advance(1.0)
    assert not promise.holds()
    promise.renewed(start + 5.0)
    assert promise.holds()
    promise.renewed(start + 1.0)  # an answer that was overtaken takes nothing back
    assert promise.holds()
    clock.advance(6.0)
    assert not promise.holds()
    loan.dead = True
    assert promise.holds()


def test_without_a_loan_death_does_not_help() -> None:
    clock = FakeClock()
    promise = Promise(clock, 10.0)
    promise.renewed(clock.monotonic())
    clock.advance(11.0)
    assert not promise.holds()


OWNER = """
import sys, pathlib
from kv_transfer.lanes.shm_arena import ShmArena
arena = ShmArena("0c" * 16, 1 << 16, 4096, pathlib.Path(sys.argv[1]), 1 << 20)
arena.memory()[5 * 4096] = 42
print(arena.place.inode, flush=True)
sys.stdin.read()
"""


def test_only_a_dead_owner_leaves_orphans_and_their_bytes_stay(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        try:
            assert owner.stdout is not None
            place = ArenaPlace("baton-" + "0c" * 16, int(owner.stdout.readline()), 1 << 16)
            arena = ShmArena("0d" * 16, 1 << 16, 4096, tmp_path, 1 << 20)
            peer = arena.attach(place)
            assert not arena.orphaned(peer)
            owner.send_signal(signal.SIGSTOP)
            assert not arena.orphaned(peer), "who sleeps may wake up and write"
        finally:
            owner.kill()
        assert owner.wait(20) == -signal.SIGKILL
    assert arena.orphaned(peer)
    assert arena.pages()[arena.foreign_base(peer) + 5][0] == 42
    assert arena.orphaned(peer)
    arena.detach(peer)
    arena.close()


def lane_of(directory: Path, layers: tuple[LayerSpec, ...], size: int, num_blocks: int) -> ShmLane:
    place = PoolPlace(("shm",), directory)
    pool = KVArena(layers, num_blocks, size, "bfloat16", memory=place.memory)
    (lane,) = make_lanes(("shm",), LaneSettings(Timing(), pool=pool, shared=place.shared))
    assert isinstance(lane, ShmLane)
    return lane


def test_pools_lend_to_pools_of_the_same_layout(tmp_path: Path) -> None:
    ours = lane_of(tmp_path, LAYERS, 8, 8)
    assert isinstance(ours, LendingLane)
    alike, other = lane_of(tmp_path, LAYERS, 8, 5), lane_of(tmp_path, LAYERS, 4, 5)
    wider = lane_of(tmp_path, (LayerSpec(2, 8, 8), LayerSpec(2, 16, 16)), 8, 5)
    started = [lane.start("0e" * 16, lambda name, peer: iter(())) for lane in (alike, other, wider)]
    try:
        assert [ours.lends(address) for address in started] == [True, False, False]
        loan = ours.borrow(started[0], (0, 4, 2))
        assert [page - loan.ids[0] for page in loan.ids] == [0, 4, 2]
        assert min(loan.ids) >= 8, "beyond the own pool"
        assert not loan.orphaned()
        assert not loan.wanted()
        alike.want_back(True)
        assert loan.wanted()
        alike.want_back(False)
        assert not loan.wanted()
        alike.want_back(True)
        loan.end()
        assert not loan.wanted(), "nothing of it is here"
        loan.end()
        for wrong in ((5,), (-1,)):
            with pytest.raises(KVCorrupt):
                ours.borrow(started[0], wrong)
    finally:
        for lane in (alike, other, wider):
            lane.stop()


def test_a_pool_that_does_not_fit_says_so(tmp_path: Path) -> None:
    place = PoolPlace(("shm",), tmp_path / "missing")
    with pytest.raises(ConfigError):
        KVArena(LAYERS, 4, 8, "bfloat16", memory=place.memory)
