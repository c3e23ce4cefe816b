"""What a request's reader gets: in order, once, joined where it is behind."""

from __future__ import annotations

import asyncio
import itertools

from hypothesis import given
from hypothesis import strategies as st

from baton.protocol.events import TokenEvent, TokenLogprob
from baton.protocol.request import FinishReason
from router.request.output_stream import Events, OutputStream
from router.request.trace import RequestTrace
from tests.router.fakes import FakeClock, make_request


def event(position: int, *ids: int, **more: object) -> TokenEvent:
    return TokenEvent("r", 1, position, ids, **more)  # pyright: ignore[reportArgumentType]


@given(st.lists(st.booleans(), min_size=1, max_size=30))
def test_a_reader_that_is_behind_misses_nothing(reads: list[bool]) -> None:
    async def scenario() -> None:
        events = Events()
        got: list[TokenEvent] = []
        for position, read in enumerate(reads):
            row = ((TokenLogprob(position, -1.0, 1),),)
            events.put(event(position, position + 5, logprobs=row))
            if read:
                item = await events.get()
                assert item is not None
                got.append(item)
        events.put(event(len(reads), finish_reason=FinishReason.LENGTH, logprobs=()))
        events.put(None)
        while (item := await events.get()) is not None:
            got.append(item)
        assert [i for e in got for i in e.token_ids] == [p + 5 for p in range(len(reads))]
        assert [t.token_id for e in got for row in e.logprobs for t in row] == list(
            range(len(reads))
        )
        assert all(
            after.position == before.position + len(before.token_ids)
            for before, after in itertools.pairwise(got)
        )
        assert [e.finish_reason for e in got][-1] is FinishReason.LENGTH
        assert len(got) <= sum(reads) + 2

    asyncio.run(scenario())


async def test_a_reader_that_does_not_read_costs_one_event_per_sample() -> None:
    events = Events()
    for position in range(1000):
        events.put(event(position, 7))
    first = await events.get()
    assert first is not None
    assert (first.position, len(first.token_ids)) == (0, 1000)


async def test_samples_and_what_tells_of_the_prompt_stay_apart() -> None:
    events = Events()
    told = ((TokenLogprob(1, -1.0, 1),),)
    events.put(event(0, 1, prompt_logprobs=told))
    events.put(event(1, 2))
    events.put(event(0, 3, sample=1))
    events.put(event(1, 4, sample=1))
    got = [await events.get() for _ in range(3)]
    assert [(e.sample, e.token_ids) for e in got if e is not None] == [
        (0, (1,)), (0, (2,)), (1, (3, 4)),
    ]  # fmt: skip


async def test_what_simply_goes_on_is_shown_at_once_and_nothing_else() -> None:
    stream = OutputStream(make_request(), RequestTrace(), FakeClock())
    assert stream.show_next(event(0, 5))
    assert not stream.show_next(event(2, 6)), "a gap is the journey's to meet"
    assert not stream.show_next(event(0, 9)), "so is a contradiction"
    assert not stream.show_next(event(1, 6, finish_reason=FinishReason.LENGTH))
    assert stream.show_next(event(1, 6))
    assert stream.output.output_ids == ((5, 6),)
    got = await stream.events.get()
    assert got is not None
    assert got.token_ids == (5, 6)
