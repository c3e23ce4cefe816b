"""Steps on cores of idle nodes: who may have which core when, and where threads really run."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.config import EngineConfig
from baton.engine.kernels.cpu.library import kernels
from baton.engine.running import spare_cores
from baton.engine.running.spare_cores import (
    LEAST_STEP_S,
    LEAST_TOKENS,
    LONGEST_PAUSE_S,
    SHORTEST_PAUSE_S,
    SpareCores,
)
from baton.protocol.errors import ConfigError
from baton.runtime.cores import CoreBoard
from tests.router.fakes import FakeClock

CPU = torch.device("cpu")


@dataclass
class Placing:
    """Kernels that place nothing. `placed`: the spare cores of each call."""

    placed: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    refuses: bool = False

    def place_team(self, own: Sequence[int], spare: Sequence[int]) -> list[int]:
        if self.refuses:
            raise OSError(22, "Invalid argument")
        self.placed.append(tuple(spare))
        return [threading.get_native_id()] * len(spare)


@dataclass
class Host:
    """A node with core 0, which may use 1 and 2 of two others. `waiting`: the share of their
    time in which threads on spare cores have waited."""

    cores: SpareCores
    owners: list[CoreBoard]
    kernels: Placing
    clock: FakeClock
    waiting: float = 0.0

    def taken(self, num_prefill_tokens: int = LEAST_TOKENS) -> tuple[int, ...]:
        """The cores that the next step has beside its own."""
        before = self.cores.num_steps
        self.cores.take(num_prefill_tokens)
        num_spare = torch.get_num_threads() - 1
        assert self.cores.share == 1 + num_spare
        assert self.cores.num_steps - before == bool(num_spare)
        return self.kernels.placed[-1] if num_spare else ()


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    file, before = tmp_path / "cores", torch.get_num_threads()
    owners = [CoreBoard(file, (1,)), CoreBoard(file, (2,))]
    placing: Any = Placing()
    clock = FakeClock()
    made = Host(
        SpareCores(CoreBoard(file, (0,)), (0,), (1, 2), placing, clock), owners, placing, clock
    )
    monkeypatch.setattr(spare_cores.Team, "share_of_waiting", lambda _: made.waiting)
    torch.set_num_threads(1)
    yield made
    torch.set_num_threads(before)


def test_cores_are_taken_while_their_owners_are_idle(host: Host) -> None:
    assert host.taken() == (), "they have not told anything but that they are there"
    host.owners[1].tell(idle=True)
    assert host.taken() == (2,)
    host.owners[0].tell(idle=True)
    assert host.taken() == (1, 2)
    assert host.taken() == (1, 2)
    assert host.kernels.placed == [(2,), (1, 2)], "nothing changed in the last step"
    host.owners[1].tell(idle=False)
    assert host.taken() == (1,)
    host.cores.give_back()
    assert torch.get_num_threads() == 1
    assert host.taken() == (1,)


def test_short_steps_stay_on_the_own_cores(host: Host) -> None:
    host.owners[0].tell(idle=True)
    assert host.taken(LEAST_TOKENS - 1) == (), "nothing is known of its steps"
    assert host.taken(LEAST_TOKENS) == (1,)
    host.cores.step_s = LEAST_STEP_S - 0.001
    assert host.taken(0) == ()
    host.cores.step_s = LEAST_STEP_S
    assert host.taken(0) == (1,)


def test_a_step_with_an_exact_request_stays_on_the_own_cores(host: Host) -> None:
    host.owners[0].tell(idle=True)
    assert host.taken() == (1,)
    host.cores.take(LEAST_TOKENS, exact=True)
    assert (torch.get_num_threads(), host.cores.share) == (1, 1.0)
    assert host.taken() == (1,), "it may use them again at once"


def test_this_node_tells_its_own(host: Host, tmp_path: Path) -> None:
    other = CoreBoard(tmp_path / "cores", (5,))
    assert other.idle((0,)) == ()
    host.cores.rest(resting=True)
    assert other.idle((0, 1, 2, 5)) == (0,)
    host.cores.rest(resting=False)
    assert other.idle((0,)) == ()


def test_a_core_of_another_program_is_left_alone_ever_longer(host: Host) -> None:
    host.owners[0].tell(idle=True)
    pause = SHORTEST_PAUSE_S
    for _ in range(8):
        assert host.taken() == (1,)
        host.waiting = 0.5
        assert host.taken() == ()
        host.waiting = 0.0
        host.clock.advance(pause - 0.01)
        assert host.taken() == ()
        host.clock.advance(0.02)
        pause = min(2 * pause, LONGEST_PAUSE_S)
    assert host.taken() == (1,)
    assert host.taken() == (1,), "the program is gone"
    host.waiting = 0.5
    assert host.taken() == ()
    host.clock.advance(SHORTEST_PAUSE_S + 0.01)
    assert host.taken() == (1,), "the first pause again"


def test_an_owner_that_begins_is_no_other_program(host: Host) -> None:
    host.owners[0].tell(idle=True)
    assert host.taken() == (1,)
    host.owners[0].tell(idle=False)
    host.waiting = 0.9  # beside its owner
    assert host.taken() == ()
    host.owners[0].tell(idle=True)
    assert host.taken() == (1,), "without a pause"


def test_cores_that_the_kernel_refuses_are_never_asked_for_again(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    host.owners[0].tell(idle=True)
    host.kernels.refuses = True
    assert host.taken() == ()
    host.kernels.refuses = False
    assert host.taken() == ()
    assert [record.message for record in caplog.records] == [
        "the cores (1,) cannot be used: [Errno 22] Invalid argument"
    ]


@dataclass
class Masks:
    """The cores of this process' threads, of which each has core 0 at first. `ended`: whose end is
    noticed as they are moved."""

    of: dict[int, set[int]] = field(default_factory=dict[int, set[int]])
    ended: set[int] = field(default_factory=set[int])

    def move(self, thread: int, cores: set[int]) -> None:
        if thread in self.ended:
            raise ProcessLookupError(3, "No such process")
        self.of[thread] = set(cores)


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> Masks:
    found = Masks({thread: {0} for thread in (10, 11, 12)})
    monkeypatch.setattr(os, "listdir", lambda _: [str(each) for each in found.of])
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: found.of[thread])
    monkeypatch.setattr(os, "sched_setaffinity", found.move)
    return found


SHORT = LEAST_TOKENS - 1  # a step that stays on the own cores


def test_threads_that_do_not_compute_roam_on_idle_cores(host: Host, masks: Masks) -> None:
    host.owners[0].tell(idle=True)
    host.cores.take(SHORT)
    assert masks.of[11] == {0}, "of a prefill node none may"
    host.cores.let_roam((11, 12))
    host.cores.take(SHORT)
    assert masks.of == {10: {0}, 11: {0, 1}, 12: {0, 1}}
    host.owners[1].tell(idle=True)
    host.owners[0].tell(idle=False)
    host.cores.take(SHORT)
    assert masks.of == {10: {0}, 11: {0, 2}, 12: {0, 2}}
    host.owners[1].tell(idle=False)
    host.cores.take(SHORT)
    assert masks.of == {10: {0}, 11: {0}, 12: {0}}


def test_roaming_threads_make_room_for_a_step_on_spare_cores(host: Host, masks: Masks) -> None:
    host.cores.let_roam((11,))
    host.owners[0].tell(idle=True)
    host.cores.take(SHORT)
    assert masks.of[11] == {0, 1}
    assert host.taken(LEAST_TOKENS) == (1,)
    assert masks.of[11] == {0}


def test_roaming_threads_come_back_when_the_node_rests(host: Host, masks: Masks) -> None:
    host.cores.let_roam((11,))
    host.owners[0].tell(idle=True)
    host.cores.take(SHORT)
    host.cores.rest(resting=False)
    assert masks.of[11] == {0, 1}
    host.cores.rest(resting=True)
    assert masks.of[11] == {0}
    host.cores.take(SHORT)
    assert masks.of[11] == {0, 1}


def test_threads_started_by_a_roaming_one_come_back_with_it(host: Host, masks: Masks) -> None:
    host.cores.let_roam((11,))
    host.owners[0].tell(idle=True)
    host.cores.take(SHORT)
    masks.of |= {13: {0, 1}, 14: {1}}  # the second is of a team on a spare core
    host.owners[0].tell(idle=False)
    host.cores.take(SHORT)
    assert masks.of == {10: {0}, 11: {0}, 12: {0}, 13: {0}, 14: {1}}


def test_a_thread_that_has_ended_stops_no_other(host: Host, masks: Masks) -> None:
    masks.ended = {11}
    host.cores.let_roam((11, 12, 99))
    host.owners[0].tell(idle=True)
    host.cores.take(SHORT)
    assert masks.of == {10: {0}, 11: {0}, 12: {0, 1}}, "99 is no thread of this process any more"


def test_threads_run_where_they_were_placed() -> None:
    """Of a thread of its own, whose team nobody else uses."""
    found, cores = kernels(), sorted(os.sched_getaffinity(0))
    if found is None or len(cores) < 2:
        pytest.skip("needs the compiled kernels and two cores")
    placed: list[set[int]] = []

    def place() -> None:
        os.sched_setaffinity(0, {cores[0]})
        threads = found.place_team(cores[:1], cores[1:2])
        placed.extend(os.sched_getaffinity(each) for each in [*threads, 0])

    thread = threading.Thread(target=place)
    thread.start()
    thread.join()
    assert placed == [{cores[1]}, {cores[0]}]
    assert sorted(os.sched_getaffinity(0)) == cores, "this thread is where it was"


def test_how_long_threads_have_waited_is_what_linux_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    team = spare_cores.Team()
    team.place((1,), [threading.get_native_id()])
    sum(range(200_000))
    assert 0.0 <= team.share_of_waiting() < 1.0
    times = iter([(100, 0), (400, 100), (400, 100)])
    monkeypatch.setattr(team, "times", lambda: next(times))
    team.ran, team.waited = team.times()
    assert team.share_of_waiting() == 0.25
    assert team.share_of_waiting() == 0.0, "it did not run"
    monkeypatch.undo()
    team.place((), ())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"core_board": "cores"}, "come together"),
        ({"spare_cores": "1"}, "come together"),
        ({"core_board": "cores", "spare_cores": "one"}, "not a list"),
        ({"core_board": "cores", "spare_cores": "1", "deterministic": True}, "deterministic"),
        ({"core_board": "cores", "spare_cores": "1", "tensor_parallel_size": 2}, "ranks"),
        ({"core_board": "cores", "spare_cores": "1", "data_parallel_size": 2}, "ranks"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        EngineConfig("model", **options)


def test_what_cannot_use_them_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, board = sorted(os.sched_getaffinity(0)), str(tmp_path / "cores")
    monkeypatch.setattr(torch, "get_num_threads", lambda: len(own))
    config = EngineConfig("model", core_board=board, spare_cores="999")
    assert SpareCores.of(EngineConfig("model"), CPU) is None
    with pytest.raises(ConfigError, match="not on the CPU"):
        SpareCores.of(config, torch.device("cuda"))
    with pytest.raises(ConfigError, match="itself"):
        SpareCores.of(replace(config, spare_cores=str(own[0])), CPU)
    with pytest.raises(ConfigError, match="below 1024"):
        SpareCores.of(replace(config, spare_cores="1024"), CPU)
    with pytest.raises(ConfigError, match="cannot be mapped"):
        SpareCores.of(replace(config, core_board=str(tmp_path / "none" / "cores")), CPU)
    monkeypatch.setattr(torch, "get_num_threads", lambda: len(own) + 1)
    with pytest.raises(ConfigError, match="as many threads"):
        SpareCores.of(config, CPU)
