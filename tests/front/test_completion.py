"""Completion: every way of ending, counts, closing; cutting into events never changes the text."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.parsers.formats import TOOL_FORMATS
from baton.parsers.message import MessageRules
from baton.parsers.reasoning import QWEN3
from baton.protocol.clock import SystemClock
from baton.protocol.errors import InternalError, NodeLost
from baton.protocol.events import TokenEvent
from baton.protocol.request import FinishReason, Request
from baton.protocol.sampling import SamplingParams
from router.api.openai.message import message_of
from router.metrics.router import RouterMetrics
from router.request.completion import CallRunner, Completion, Delta, OutputRules, SampleText
from tests.front.fakes import EOS, TOKENIZER, FakeDispatcher

CLOCK = SystemClock()


def completion(
    rules: OutputRules, max_tokens: int = 500, stop_ids: tuple[int, ...] = (), **more: Any
) -> Completion:
    params = SamplingParams(max_tokens=max_tokens, seed=1, stop_token_ids=stop_ids, **more)
    return Completion(Request("r", (5, 6), params), "tiny", rules, TOKENIZER)


async def collect(
    dispatcher: FakeDispatcher, it: Completion, metrics: RouterMetrics | None = None
) -> list[Delta]:
    runner = CallRunner(dispatcher, metrics or RouterMetrics(), CLOCK)
    return [delta async for delta in it.deltas(runner)]


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.lists(st.text(st.sampled_from("ab 🙂é"), min_size=1, max_size=3), max_size=3),
    st.integers(1, 7),
    st.booleans(),
)
def test_cutting_into_events_never_changes_the_text(
    answer: str, stops: list[str], step: int, include: bool
) -> None:
    rules = OutputRules(tuple(stops), include)

    def run(tokens_per_event: int) -> tuple[str, int, FinishReason | None, object]:
        it = completion(rules)
        dispatcher = FakeDispatcher(answer, tokens_per_event=tokens_per_event)
        deltas = asyncio.run(collect(dispatcher, it))
        assert sum(len(delta.token_ids) for delta in deltas) == it.completion_tokens
        assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        last = deltas[-1]
        return text_of(deltas), it.completion_tokens, last.finish_reason, last.stop_reason

    assert run(step) == run(1)
    if not any(stop in answer for stop in stops):
        assert run(1)[0] == answer


@given(st.integers(1, 9), st.sampled_from([(), ("hm",), ("Oslo",)]))
def test_cutting_into_events_never_changes_the_parts(step: int, stop: tuple[str, ...]) -> None:
    answer = '<think>a hm b</think>\n<tool_call>{"name": "f", "arguments": {"city": "Oslo"}}'
    message = MessageRules(QWEN3, opened=True, tools=TOOL_FORMATS["hermes"])

    def run(tokens_per_event: int) -> tuple[Any, ...]:
        it = completion(OutputRules(stop, message=message), logprobs=0)
        dispatcher = FakeDispatcher(answer, tokens_per_event=tokens_per_event)
        deltas = asyncio.run(collect(dispatcher, it))
        sink = [part for delta in deltas for part in delta.parts]
        message_shown = message_of(sink, lambda: "id")
        told = [row for delta in deltas for row in delta.logprobs]
        assert len(told) == it.completion_tokens
        return message_shown, told, it.reasoning_tokens, deltas[-1].num_calls

    assert run(step) == run(1)
    assert run(step)[3] == (stop != ("hm",))


async def test_end_of_sequence_is_counted_and_not_shown() -> None:
    it = completion(OutputRules(skip_special_tokens=False))
    deltas = await collect(FakeDispatcher("hi"), it)
    assert text_of(deltas) == "hi"
    assert (it.completion_tokens, deltas[-1].finish_reason) == (3, FinishReason.STOP)
    assert deltas[-1].stop_reason is None
    assert deltas[-1].token_ids == (EOS,)
    assert [delta.position for delta in deltas] == [0, 1, 2]


async def test_a_stop_token_id_of_the_client_is_named() -> None:
    it = completion(OutputRules(), stop_ids=(EOS,))
    assert (await collect(FakeDispatcher("hi"), it))[-1].stop_reason == EOS


@pytest.mark.parametrize(("min_tokens", "text"), [(0, ""), (1, "a"), (2, "ab"), (9, "ababab")])
@pytest.mark.parametrize("step", [1, 2, 6])
async def test_stop_strings_wait_for_min_tokens(min_tokens: int, text: str, step: int) -> None:
    it = completion(OutputRules(("ab",) if min_tokens != 1 else ("ba",)), min_tokens=min_tokens)
    deltas = await collect(FakeDispatcher("ababab", tokens_per_event=step), it)
    assert text_of(deltas) == text


@pytest.mark.parametrize("stop", [(), ("zz",)])
async def test_a_stop_token_is_shown_to_who_wants_it(stop: tuple[str, ...]) -> None:
    a, b = TOKENIZER.encode("ab", False)
    request = Request("r", (5,), SamplingParams(stop_token_ids=(b,)))
    event = TokenEvent("r", 1, 0, (a, b), finish_reason=FinishReason.STOP, stop_token_id=b)
    for wanted, text in ((True, "ab"), (False, "a")):
        delta = SampleText(0, request, OutputRules(stop, wanted), TOKENIZER).absorb(event)
        assert (delta.text, delta.stop_reason) == (text, b)
    rules = OutputRules(stop, True)
    assert text_of(await collect(FakeDispatcher("ab"), completion(rules))) == "ab", "special"
    bare = replace(rules, skip_special_tokens=False)
    assert text_of(await collect(FakeDispatcher("ab"), completion(bare))) == "ab</s>"


async def test_length_flushes_what_was_held_back() -> None:
    it = completion(OutputRules(stop=("hello world",)), max_tokens=1)
    dispatcher = FakeDispatcher("hello")
    deltas = await collect(dispatcher, it)
    shown = TOKENIZER.decode(TOKENIZER.encode("hello")[:1])
    assert text_of(deltas) == shown != ""
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert (dispatcher.exhausted, dispatcher.closed) == (1, 0)


async def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    it = completion(OutputRules(), max_tokens=1)
    assert text_of(await collect(FakeDispatcher("🙃"), it)) == "\N{REPLACEMENT CHARACTER}"


async def test_a_stop_string_closes_the_dispatcher_before_the_end_is_shown() -> None:
    dispatcher = FakeDispatcher("one two three")
    it = completion(OutputRules(stop=("two",)))
    runner = CallRunner(dispatcher, RouterMetrics(), CLOCK)
    async with aclosing(it.deltas(runner)) as deltas:
        async for delta in deltas:
            assert (delta.finish_reason is not None) == (dispatcher.closed == 1)
    assert it.trace.text_stop


async def test_leaving_early_closes_the_dispatcher_and_ends_the_meter() -> None:
    dispatcher, metrics = FakeDispatcher("hello world"), RouterMetrics()
    it = completion(OutputRules())
    runner = CallRunner(dispatcher, metrics, CLOCK)
    async with aclosing(it.deltas(runner)) as deltas:
        await anext(deltas)
    assert dispatcher.closed == 1
    assert not it.trace.text_stop
    text = metrics.render().decode()
    assert "baton_live_requests 0.0" in text
    assert 'baton_request_failure_total{code="cancelled",model_name="tiny"} 1.0' in text


async def test_failures_pass_and_are_counted_by_code() -> None:
    metrics = RouterMetrics()
    dispatcher = FakeDispatcher("hi", fail_at=1, failure=NodeLost("x"))
    with pytest.raises(NodeLost):
        await collect(dispatcher, completion(OutputRules()), metrics)
    assert 'code="node_lost"' in metrics.render().decode()


async def test_a_stream_without_an_end_is_an_error() -> None:
    class Endless(FakeDispatcher):
        async def _events(self, request: Request):  # type: ignore[no-untyped-def]
            async for event in super()._events(request):
                if event.finish_reason is None:
                    yield event

    with pytest.raises(InternalError):
        await collect(Endless("hi"), completion(OutputRules()))
