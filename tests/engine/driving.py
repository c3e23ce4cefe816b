"""How engine tests drive an engine:
to its end, checking on the way what every event stream must be."""

from __future__ import annotations

from baton.engine.core.engine import Engine
from baton.protocol.events import TokenEvent
from baton.protocol.request import Request
from tests.fakes import expected_output

PROMPT = tuple(range(10, 29))  # 19 tokens: 4 full blocks of 4, and 3 more


def run(engine: Engine) -> dict[str, list[TokenEvent]]:
    """Step until nothing is left; events by request. Positions must be gapless."""
    events: dict[str, list[TokenEvent]] = {}
    while engine.has_work:
        for event in engine.step():
            mine = events.setdefault(event.request_id, [])
            if mine:
                last = mine[-1]
                assert last.finish_reason is None, "an event after the end"
                assert event.position == last.position + len(last.token_ids)
            mine.append(event)
        assert not engine.stalled
    return events


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def expected(asked: Request) -> list[int]:
    return expected_output(asked.prompt_ids, asked.params)


def assert_all_free(engine: Engine) -> None:
    engine.check()
    assert engine.pool.num_free == engine.pool.num_blocks
    assert not engine.has_work


def run_samples(engine: Engine) -> dict[tuple[str, int], list[TokenEvent]]:
    """As `run`, with the events of each sample of each request by themselves."""
    events: dict[tuple[str, int], list[TokenEvent]] = {}
    while engine.has_work:
        for event in engine.step():
            mine = events.setdefault((event.request_id, event.sample), [])
            if mine:
                assert mine[-1].finish_reason is None, "an event after the end"
                assert event.position == mine[-1].position + len(mine[-1].token_ids)
            mine.append(event)
        assert not engine.stalled
    return events
