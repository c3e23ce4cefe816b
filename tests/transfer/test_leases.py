"""Leases and deadlines: the two places where time decides."""

from __future__ import annotations

import threading

import pytest

from baton.protocol.clock import SystemClock
from kv_transfer.lanes.deadlines import Deadlines
from kv_transfer.protocol.leases import Leases

PATIENCE_S = 30.0


def test_a_lease_lapses_and_never_comes_back() -> None:
    leases = Leases(10.0)
    assert leases.next_expiry() is None
    leases.grant(1, 0.0)
    leases.grant(2, 3.0)
    assert leases.next_expiry() == 10.0
    assert leases.renew(1, 9.9)
    assert leases.next_expiry() == 13.0
    assert (leases.held(2, 12.9), leases.held(2, 13.0)) == (True, False)
    assert leases.due(13.0) == [2]
    assert not leases.renew(2, 13.0)
    assert not leases.renew(3, 0.0)
    assert leases.due(100.0) == [1, 2]
    leases.drop(1)
    leases.drop(1)
    assert leases.due(100.0) == [2]


def test_a_deadline_calls_back_once_and_only_when_missed() -> None:
    deadlines = Deadlines(SystemClock())
    calls: list[str] = []
    missed = threading.Event()
    with deadlines.guard(60.0, lambda: calls.append("long")):
        with deadlines.guard(0.01, missed.set):  # an earlier one than the thread sleeps for
            assert missed.wait(PATIENCE_S)
        with deadlines.guard(60.0, lambda: calls.append("short")):
            pass
    missed.clear()
    with deadlines.guard(0.0, missed.set):
        assert missed.wait(PATIENCE_S)
    deadlines.stop()
    deadlines.stop()
    assert calls == []


def test_a_guard_after_the_stop_is_harmless() -> None:
    deadlines = Deadlines(SystemClock())
    deadlines.stop()
    with deadlines.guard(0.0, lambda: pytest.fail("called back after stop")):
        pass
