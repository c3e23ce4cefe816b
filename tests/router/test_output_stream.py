"""What a request's reader gets: each token once, in order, joined where it is behind, and the end.

However nodes repeat themselves."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.protocol.errors import InternalError
from baton.protocol.events import TokenEvent, TokenLogprob
from baton.protocol.request import FinishReason
from baton.protocol.sampling import SamplingParams
from router.request.output_stream import OutputStream
from router.request.trace import RequestTrace
from tests.router.fakes import FakeClock, make_request

LENGTH = FinishReason.LENGTH


def output_of(output_ids: tuple[tuple[int, ...], ...], samples: int) -> OutputStream:
    params = SamplingParams(temperature=0.0, seed=1, n=samples)
    request = replace(make_request(), output_ids=output_ids, params=params)
    return OutputStream(request, RequestTrace(), FakeClock())


def event(position: int, *ids: int, end: bool = False, sample: int = 0) -> TokenEvent:
    return TokenEvent("r", 1, position, ids, sample, LENGTH if end else None)


@given(
    length=st.integers(1, 12),
    steps=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), max_size=12),
    repeats_end=st.booleans(),
)
def test_any_repetition_of_a_stream_is_shown_once(
    length: int, steps: list[tuple[int, int]], repeats_end: bool
) -> None:
    truth = tuple(range(100, 100 + length))
    output = output_of(((),), 1)
    shown: list[int] = []
    ends = 0
    # Each event goes back some tokens from what is known, then forward; the last ones end it.
    spans = [(max(0, len(truth) - 1), len(truth), True)] * (1 + repeats_end)
    known = 0
    cuts: list[tuple[int, int, bool]] = []
    for back, forward in [*steps, (0, length)]:
        start = max(0, known - back)
        stop = min(len(truth) - 1, start + forward)
        if stop >= start:
            cuts.append((start, stop, False))
            known = max(known, stop)
    for start, stop, end in cuts + spans:
        fresh = output.take(event(start, *truth[start:stop], end=end))
        if fresh is not None:
            assert fresh.position == len(shown)
            shown += fresh.token_ids
            ends += fresh.finish_reason is not None
    assert tuple(shown) == truth
    assert ends == 1
    assert output.finished
    assert output.output_ids == (truth,)


def test_what_earlier_epochs_emitted_is_known() -> None:
    output = output_of(((1, 2),), 1)
    assert output.take(event(1, 2)) is None
    fresh = output.take(event(1, 2, 3))
    assert fresh is not None
    assert (fresh.position, fresh.token_ids) == (2, (3,))


def test_gaps_contradictions_and_late_tokens_are_refused() -> None:
    output = output_of(((),), 1)
    assert output.take(event(0, 1, 2)) is not None
    for wrong in (event(3, 4), event(1, 9), event(0, 1, 9, 3), event(0, 1, end=True)):
        with pytest.raises(InternalError):
            output.take(wrong)
    with pytest.raises(InternalError):
        output.take(event(0, 1, sample=1))
    assert output.take(event(2, end=True)) is not None  # an end without a token
    assert output.take(event(2, end=True)) is None
    with pytest.raises(InternalError):
        output.take(event(2, 3))


def test_samples_are_apart_and_end_together() -> None:
    output = output_of(((),), 2)
    assert output.take(event(0, 1, end=True)) is not None
    assert not output.finished
    assert output.take(event(0, 5, 6, sample=1, end=True)) is not None
    assert output.finished
    assert output.output_ids == ((1,), (5, 6))
    assert output.num_tokens == 3


def test_logprobs_are_cut_with_their_tokens() -> None:
    first, second = (TokenLogprob(1, -0.1, 1),), (TokenLogprob(2, -0.2, 1),)
    output = output_of(((1,),), 1)
    fresh = output.take(TokenEvent("r", 1, 0, (1, 2), logprobs=(first, second)))
    assert fresh is not None
    assert (fresh.token_ids, fresh.logprobs) == ((2,), (second,))


def more(position: int, *ids: int, **fields: object) -> TokenEvent:
    return TokenEvent("r", 1, position, ids, **fields)  # pyright: ignore[reportArgumentType]


@given(st.lists(st.booleans(), min_size=1, max_size=30))
def test_a_reader_that_is_behind_misses_nothing(reads: list[bool]) -> None:
    async def scenario() -> None:
        stream = output_of((), 2)
        got: list[TokenEvent] = []
        for position, read in enumerate(reads):
            row = ((TokenLogprob(position, -1.0, 1),),)
            stream.show(more(position, position + 5, logprobs=row))
            if read:
                item = await stream.next()
                assert item is not None
                got.append(item)
        stream.show(more(len(reads), finish_reason=FinishReason.LENGTH, logprobs=()))
        stream.close()
        while (item := await stream.next()) is not None:
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
    stream = output_of((), 2)
    for position in range(1000):
        stream.show(more(position, 7))
    first = await stream.next()
    assert first is not None
    assert (first.position, len(first.token_ids)) == (0, 1000)


async def test_samples_and_what_tells_of_the_prompt_stay_apart() -> None:
    stream = output_of((), 2)
    told = ((TokenLogprob(1, -1.0, 1),),)
    stream.show(more(0, 1, prompt_logprobs=told))
    stream.show(more(1, 2))
    stream.show(more(0, 3, sample=1))
    stream.show(more(1, 4, sample=1))
    got = [await stream.next() for _ in range(3)]
    assert [(e.sample, e.token_ids) for e in got if e is not None] == [
        (0, (1,)), (0, (2,)), (1, (3, 4)),
    ]  # fmt: skip


async def test_what_simply_goes_on_is_shown_at_once_and_nothing_else() -> None:
    stream = OutputStream(make_request(), RequestTrace(), FakeClock())
    assert stream.show_next(more(0, 5))
    assert not stream.show_next(more(2, 6)), "a gap is the journey's to meet"
    assert not stream.show_next(more(0, 9)), "so is a contradiction"
    assert not stream.show_next(more(1, 6, finish_reason=FinishReason.LENGTH))
    assert stream.show_next(more(1, 6))
    assert stream.output_ids == ((5, 6),)
    got = await stream.next()
    assert got is not None
    assert got.token_ids == (5, 6)


async def test_a_waiting_reader_takes_what_continues_the_sample_at_once() -> None:
    trace, taken = RequestTrace(), list[TokenEvent]()
    request = replace(make_request(), params=SamplingParams(temperature=0.0, seed=1))
    output = OutputStream(request, trace, FakeClock())
    takes = True

    def shows(event: TokenEvent) -> bool:
        taken.append(event)
        return takes

    trace.shows = shows
    assert output.show_next(event(0, 5))
    assert not taken, "nobody waits yet"
    assert await output.next() == event(0, 5)
    waiting = asyncio.create_task(output.next())
    await asyncio.sleep(0)
    assert output.show_next(event(1, 6))
    assert taken == [event(1, 6)]
    assert output.show_next(event(1, 6, 7)), "it repeats a token: the stream takes the rest of it"
    assert len(taken) == 1
    assert await waiting == event(2, 7)
    waiting = asyncio.create_task(output.next())
    await asyncio.sleep(0)
    takes = False
    assert output.show_next(event(3, 8))
    assert taken[-1] == event(3, 8), "it was asked"
    assert output.show_next(event(4, 9))
    assert len(taken) == 2, "after an unread event nobody is"
    assert await waiting == event(3, 8, 9)
    assert not output.show_next(event(5, 10, end=True)), "an end is the journey's"
    assert not output.show_next(event(9, 10)), "so is a gap"
    assert output.output_ids == ((5, 6, 7, 8, 9),)
    assert (output.num_tokens, trace.output_tokens) == (5, 5)


async def test_a_reader_that_gathers_is_woken_by_the_end_alone() -> None:
    trace, gathered = RequestTrace(gathers=True), list[TokenEvent]()
    request = replace(make_request(), params=SamplingParams(temperature=0.0, seed=1))
    output = OutputStream(request, trace, FakeClock())

    def shows(event: TokenEvent) -> bool:
        gathered.append(event)
        return not event.prompt_logprobs

    trace.shows = shows
    waiting = asyncio.create_task(output.next())
    output.show(event(0, 5))  # by the journey
    assert output.show_next(event(1, 6))
    assert output.show_next(event(1, 6, 7))
    assert gathered == [event(0, 5), event(1, 6), event(2, 7)]
    await asyncio.sleep(0)
    assert not waiting.done()
    output.show(event(3, 8, end=True))
    assert await waiting == event(3, 8, end=True)
    assert len(gathered) == 3
