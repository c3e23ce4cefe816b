"""The oracle sees what is wrong: a check that cannot fail proves nothing."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any, cast

import pytest

from baton.client import GenerateEvent, Usage
from baton.protocol.errors import Unavailable
from baton.protocol.sampling import SamplingParams
from tests.chaos.cluster import PLAIN, Cluster
from tests.chaos.doubles import second_victim
from tests.chaos.kills import kill_cases
from tests.chaos.oracle import Broken, Terms, check_log, check_stream
from tests.chaos.streams import Spec, Stream

SPEC = Spec("two", (1, 2), SamplingParams(max_tokens=3), ((7, 8, 9),), ("length",))
STRICT = Terms()


def event(position: int, *tokens: int, end: str | None = None, used: int = 0) -> GenerateEvent:
    usage = Usage(2, used) if used else None
    return GenerateEvent("r", 0, position, tokens, "", end, 0, usage)


def stream(*events: GenerateEvent) -> Stream:
    seen = Stream(SPEC, "r")
    for each in events:
        seen._take(each)
    return seen


def test_the_undisturbed_stream_passes() -> None:
    check_stream(stream(event(0, 7), event(1, 8, 9, end="length", used=3)), STRICT)


@pytest.mark.parametrize(
    ("events", "what"),
    [
        ((event(0, 7), event(2, 9, end="length", used=2)), "position 2 after 1"),
        ((event(0, 7), event(0, 7), event(1, 8, 9, end="length", used=4)), "position 0 after 1"),
        ((event(0, 7, 5, 9, end="length", used=3),), "differs from position 1 on"),
        ((event(0, 7, 8),), "ends after 2 tokens"),
        ((event(0, 7, 8, 9, used=3),), "ended by None"),
        ((event(0, 7, 8, 9, end="stop", used=3),), "ended by stop"),
        ((event(0, 7, 8, 9, end="length", used=4),), "usage"),
        ((event(0, 7, 8, 9, end="length"),), "usage None"),
        ((event(0, 7, 8, 9, end="length", used=3), event(3, end="length")), "after its end"),
        (
            (event(0, 7, 8, used=3), event(2, 9, end="length", used=3)),
            "a second usage",
        ),
    ],
)
def test_what_contradicts_it_is_seen(events: tuple[GenerateEvent, ...], what: str) -> None:
    with pytest.raises(Broken, match=re.escape(what)):
        check_stream(stream(*events), STRICT)


def test_an_error_is_excused_where_the_router_died_and_only_there() -> None:
    cut = stream(event(0, 7))
    cut.error = Unavailable("gone")
    check_stream(cut, Terms(cut=True))
    with pytest.raises(Broken, match="unavailable after 1 tokens"):
        check_stream(cut, STRICT)
    wrong = stream(event(0, 8))
    wrong.error = Unavailable("gone")
    with pytest.raises(Broken, match="differs"):
        check_stream(wrong, Terms(cut=True))


def test_late_is_broken() -> None:
    late = stream(event(0, 7, 8, 9, end="length", used=3))
    late.ended = late.started + late.deadline_s + 1
    with pytest.raises(Broken, match="took"):
        check_stream(late, STRICT)


class FakeStore:
    """A log and a record, in place of a cluster's Redis."""

    def __init__(self, rows: list[Mapping[str, str]], state: str = "finished") -> None:
        self.rows = rows
        self.state = state

    async def log_rows(self, request_id: str) -> list[Mapping[str, str]]:
        return self.rows

    async def request_fields(self, request_id: str) -> dict[str, str]:
        return {"state": self.state}


def row(epoch: int, position: int, *tokens: int) -> dict[str, str]:
    text = ",".join(map(str, tokens))
    return {"e": str(epoch), "s": "0", "p": str(position), "t": text}


async def judged(store: FakeStore, terms: Terms = STRICT) -> None:
    whole = stream(event(0, 7, 8, 9, end="length", used=3))
    await check_log(cast("Cluster", cast("Any", store)), whole, terms)


async def test_the_log_of_a_failover_passes() -> None:
    await judged(FakeStore([row(1, 0, 7), row(2, 1, 8, 9)]))


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ([row(2, 0, 7), row(1, 1, 8, 9)], "epoch 1 was appended after 2"),
        ([row(1, 0, 7), row(1, 2, 9)], "log position 2 after 1"),
        ([row(1, 0, 7, 5)], "differs"),
        ([row(1, 0, 7, 8)], "3 tokens were shown, 2 logged"),
    ],
)
async def test_what_is_wrong_in_the_log_is_seen(rows: list[Mapping[str, str]], what: str) -> None:
    with pytest.raises(Broken, match=re.escape(what)):
        await judged(FakeStore(rows))


async def test_the_log_of_a_plain_request_may_end_early_where_its_router_died() -> None:
    cut = stream(event(0, 7, 8))
    cut.error = Unavailable("gone")
    rows = cast("Cluster", cast("Any", FakeStore([row(1, 0, 7)])))
    await check_log(rows, cut, Terms(cut=True))
    with pytest.raises(Broken, match="2 tokens were shown, 1 logged"):
        await check_log(rows, cut, STRICT)
    cut.resumable = True
    with pytest.raises(Broken, match="2 tokens were shown, 1 logged"):
        await check_log(rows, cut, Terms(cut=True))


async def test_a_record_without_an_end_is_seen() -> None:
    with pytest.raises(Broken, match="recorded as decode"):
        await judged(FakeStore([row(1, 0, 7, 8, 9)], state="decode"))
    await judged(FakeStore([]), Terms(unlogged=True))


def test_all_stages_of_all_victims_are_cases() -> None:
    cases = kill_cases()
    assert len(cases) == len({case.name for case in cases}) == 72
    assert sum(case.layout == PLAIN for case in cases) == 64


def test_a_second_victim_has_another_role() -> None:
    draw = random.Random(1)
    for first in ("p0", "d1", "r0", "redis"):
        drawn: set[str] = {second_victim(first, draw) for _ in range(200)}
        assert drawn
        assert all(name.rstrip("01") != first.rstrip("01") for name in drawn)
