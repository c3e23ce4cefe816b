"""The time that a request waits on a node counts from its arrival there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from baton.engine.state.stats import EngineStats
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from decode_node.role import Seat
from prefill_node import role as prefill_role
from tests.fakes import FakeClock

ARRIVAL = 7.0


class NoEngine:
    """Takes everything; has room for KV only while `room` is set."""

    def __init__(self) -> None:
        self.stats = EngineStats()
        self.may_adopt = False
        self.room: object | None = None

    def add(self, *_: object) -> None:
        """Take a request."""

    def validate(self, *_: object) -> None:
        """Refuse nothing."""

    def reserve(self, *_: object) -> object | None:
        return self.room


def request() -> Request:
    return Request("r", (5, 6), SamplingParams(), arrival=ARRIVAL)


def seat(clock: FakeClock) -> Seat:
    asked = request()
    return Seat(cast(Any, SimpleNamespace(request=asked, wanted=asked)), clock)


def test_on_a_prefill_node_until_the_engine_has_it() -> None:
    engine = NoEngine()
    prefill_role._add(cast(Any, engine), request(), FakeClock(10.0))
    assert engine.stats.queue_seconds == 3.0


def test_on_a_decode_node_until_the_engine_has_it() -> None:
    engine = NoEngine()
    seat(FakeClock(10.0)).add(cast(Any, engine))
    assert engine.stats.queue_seconds == 3.0


def test_on_a_decode_node_until_there_is_room_for_its_kv() -> None:
    engine, clock = NoEngine(), FakeClock(10.0)
    waiting = seat(clock)
    assert waiting.reserve(cast(Any, engine), 2, None, False) is None
    assert engine.stats.queue_seconds == 0.0, "it still waits"
    clock.advance(5.0)
    engine.room = object()
    waiting.reserve(cast(Any, engine), 2, None, False)
    assert engine.stats.queue_seconds == 8.0
    clock.advance(5.0)
    waiting.add_computed(cast(Any, engine), ())
    assert engine.stats.queue_seconds == 8.0, "the fetch is no wait"
