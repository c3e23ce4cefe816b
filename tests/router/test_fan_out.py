"""Requests of several samples, against scripted nodes: one journey, and each sample ends once."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from baton.protocol.events import TokenEvent, TokenLogprob
from baton.protocol.messages import AbortRequest, StopSample, SubmitDecode, SubmitPrefill
from baton.protocol.request import FinishReason, Request, RequestState
from baton.protocol.sampling import SamplingParams
from router.store.base import LogEntry
from tests.router.clients import Client, cluster, first_of, state_of
from tests.router.fakes import PATIENCE_S, FakeNode, FakeRouter, make_request
from tests.waiting import eventually

END: dict[str, Any] = {"finish_reason": FinishReason.LENGTH}


def several(n: int = 3, **params: object) -> Request:
    asked = make_request()
    return replace(asked, params=replace(asked.params, n=n, **params))  # type: ignore[arg-type]


async def outputs(client: Client, count: int) -> list[list[int]]:
    """All tokens by sample, checked: no gap, no duplicate, one end each."""
    async with asyncio.timeout(PATIENCE_S):
        await client.task
    found: list[list[int]] = [[] for _ in range(count)]
    ends = [0] * count
    for event in client.events:
        assert ends[event.sample] == 0, "an event after the end"
        assert event.position == len(found[event.sample]), "a gap or a duplicate"
        found[event.sample] += event.token_ids
        ends[event.sample] += event.finish_reason is not None
    assert ends == [1] * count
    return found


def first_tokens(node: FakeNode, request: Request, *ids: int) -> None:
    """Token 1 of each sample, as a prefill node tells them: in one step."""
    node.say(
        tokens=tuple(
            TokenEvent(request.id, request.epoch, 0, (token,), sample)
            for sample, token in enumerate(ids)
        )
    )


async def decoding(
    router: FakeRouter, p: FakeNode, d: FakeNode, asked: Request
) -> tuple[Client, SubmitDecode]:
    """Token 1 of 3 samples is shown (41, 51, 61), D has subscribed."""
    client = Client(router, asked)
    prefill = await p.hear(SubmitPrefill)
    p.export(prefill.request)
    decode = await d.hear(SubmitDecode)
    first_tokens(p, prefill.request, 41, 51, 61)
    d.subscribe(decode.request)
    for _ in range(3):
        await client.next()
    return client, decode


async def test_one_journey_for_all_samples() -> None:
    async with cluster("p", "d") as (router, (p, d)):
        client, decode = await decoding(router, p, d, several())
        request = decode.request
        first_tokens(d, request, 41, 51, 61)  # repeated by END
        d.tokens(request, 1, 52, sample=1, **END)
        d.tokens(request, 1, 62, 63, sample=2)
        d.tokens(request, 1, 42, **END)
        d.tokens(request, 3, 64, sample=2, **END)
        assert await outputs(client, 3) == [[41, 42], [51, 52], [61, 62, 63, 64]]
        assert await state_of(router) == (RequestState.FINISHED, 1)
        assert len(p.heard_of(SubmitPrefill)) == len(d.heard_of(SubmitDecode)) == 1
        assert not d.heard_of(AbortRequest)
        log = await router.store.read_log("r")
        assert log_of(log) == {0: [41, 42], 1: [51, 52], 2: [61, 62, 63, 64]}
        assert client.trace.output_tokens == 8


def log_of(entries: list[LogEntry]) -> dict[int, list[int]]:
    """Tokens by sample; the log has no gap and no duplicate."""
    logged: dict[int, list[int]] = {}
    for entry in entries:
        mine = logged.setdefault(entry.sample, [])
        assert entry.position == len(mine)
        mine += entry.token_ids
    return logged


async def test_a_lost_decode_node_loses_no_sample_and_those_that_ended_stay_ended() -> None:
    async with cluster("p", "d1", "d2") as (router, (p, d1, d2)):
        client = Client(router, several())
        prefill = await p.hear(SubmitPrefill)
        p.export(prefill.request)
        victim = await first_of([d1, d2], SubmitDecode)
        other = d2 if victim is d1 else d1
        decode = await victim.hear(SubmitDecode)
        first_tokens(p, prefill.request, 41, 51, 61)
        for _ in range(3):
            await client.next()
        victim.subscribe(decode.request)
        victim.tokens(decode.request, 0, 41, 42, **END)
        victim.tokens(decode.request, 0, 51, 52, 53, sample=1)
        while len(client.events) < 5:
            await client.next()
        await victim.stop()
        again = await p.hear(SubmitPrefill)
        assert again.request.epoch == 2
        assert again.request.output_ids == ((41, 42), (51, 52, 53), (61,))
        assert again.request.ended == (0,)
        assert again.request.known_ids == again.request.prompt_ids, "what the live ones share"
        handle = p.export(again.request, seq=2)
        p.tokens(again.request, 0)  # nobody lacks token 1
        decode = await other.hear(SubmitDecode)
        assert (decode.handle, decode.request.ended) == (handle, (0,))
        other.tokens(decode.request, 3, 54, sample=1, **END)
        other.tokens(decode.request, 1, 62, sample=2, **END)
        assert await outputs(client, 3) == [[41, 42], [51, 52, 53, 54], [61, 62]]
        assert (client.trace.retries, client.trace.node_deaths) == (1, 1)


async def test_a_sample_that_its_text_ended_is_stopped_and_never_begun_again() -> None:
    async with cluster("p", "d1", "d2") as (router, (p, d1, d2)):
        client = Client(router, several())
        prefill = await p.hear(SubmitPrefill)
        p.export(prefill.request)
        victim = await first_of([d1, d2], SubmitDecode)
        other = d2 if victim is d1 else d1
        decode = await victim.hear(SubmitDecode)
        first_tokens(p, prefill.request, 41, 51, 61)
        for _ in range(3):
            await client.next()
        router.dispatcher.stop_sample("r", 1)
        assert await victim.hear(StopSample) == StopSample("r", 1, 1)
        victim.tokens(decode.request, 1, 52, sample=1)  # it had gone on: not shown
        victim.tokens(decode.request, 1, 62, sample=2)
        assert (await client.next()).sample == 2
        await victim.stop()
        again = await p.hear(SubmitPrefill)
        assert again.request.ended == (1,)
        p.export(again.request, seq=2)
        decode = await other.hear(SubmitDecode)
        assert decode.request.ended == (1,)
        other.tokens(decode.request, 1, 42, **END)
        other.tokens(decode.request, 2, 63, sample=2, **END)
        async with asyncio.timeout(PATIENCE_S):
            await client.task
        shown = {sample: [e for e in client.events if e.sample == sample] for sample in range(3)}
        assert [t for e in shown[1] for t in e.token_ids] == [51]
        assert [t for e in shown[2] for t in e.token_ids] == [61, 62, 63]
        assert await state_of(router) == (RequestState.FINISHED, 2)


async def test_a_sample_stopped_before_the_hand_over_is_not_handed_over() -> None:
    async with cluster("p", "d") as (router, (p, d)):
        client = Client(router, several())
        prefill = await p.hear(SubmitPrefill)
        first_tokens(p, prefill.request, 41, 51, 61)
        for _ in range(3):
            await client.next()
        router.dispatcher.stop_sample("r", 0)
        p.export(prefill.request)
        decode = await d.hear(SubmitDecode)
        assert decode.request.ended == (0,)
        assert not d.heard_of(StopSample)
        client.task.cancel()


async def test_the_last_stop_ends_a_request_whose_other_ends_are_on_their_way() -> None:
    async with cluster("p", "d") as (router, (p, d)):
        client, decode = await decoding(router, p, d, several())
        d.tokens(decode.request, 0, 41, 42, **END)
        d.tokens(decode.request, 0, 51, 52, sample=1, **END)
        while len(client.events) < 5:
            await client.next()
        router.dispatcher.stop_sample("r", 2)
        async with asyncio.timeout(PATIENCE_S):
            await client.task
        assert await state_of(router) == (RequestState.FINISHED, 1)
        await d.hear(AbortRequest)
        assert router.dispatcher.num_live == 0
        router.dispatcher.stop_sample("r", 2)  # nobody there: nothing happens


async def test_a_search_is_handed_over_without_a_token_and_begins_again() -> None:
    params = SamplingParams(n=2, beam_width=2, max_tokens=4, seed=1, prompt_logprobs=0)
    told = ((TokenLogprob(2, -0.5, 1),),)
    async with cluster("p", "d1", "d2") as (router, (p, d1, d2)):
        client = Client(router, replace(make_request(), params=params))
        prefill = await p.hear(SubmitPrefill)
        p.export(prefill.request)
        victim = await first_of([d1, d2], SubmitDecode)
        other = d2 if victim is d1 else d1
        decode = await victim.hear(SubmitDecode)
        p.tokens(prefill.request, 0, prompt_logprobs=told)  # computed: the candidates are in END
        victim.tokens(decode.request, 0)  # the KV arrived

        async def decodes() -> bool:
            return (await state_of(router))[0] is RequestState.DECODE

        await eventually(decodes)
        await victim.stop()
        again = await p.hear(SubmitPrefill)
        assert again.request.output_ids == ((), ())
        assert again.request.known_ids == again.request.prompt_ids
        p.export(again.request, seq=2)
        decode = await other.hear(SubmitDecode)
        other.say(
            tokens=tuple(
                TokenEvent("r", decode.request.epoch, 0, (7, 8, sample), sample, **END)
                for sample in range(2)
            )
        )
        assert await outputs(client, 2) == [[7, 8, 0], [7, 8, 1]]
        assert client.events[0].prompt_logprobs == told, "told once, with the first token"
        assert not client.events[1].prompt_logprobs
