"""Only the node that computed the prompt tells of it: its event is always shown first."""

from __future__ import annotations

from dataclasses import replace

from baton.protocol.events import TokenLogprob
from baton.protocol.messages import SubmitDecode, SubmitPrefill
from baton.protocol.request import FinishReason, Request
from tests.router.clients import Client, cluster, first_of
from tests.router.fakes import FakeRouter, make_request
from tests.waiting import eventually

TOLD = ((TokenLogprob(11, -0.5, 1), TokenLogprob(12, -1.5, 2)),) * 9


def asking(max_tokens: int = 8) -> Request:
    request = make_request(max_tokens=max_tokens)
    return replace(request, params=replace(request.params, prompt_logprobs=1, logprobs=0))


async def logged(router: FakeRouter, count: int) -> None:
    """Until the router has read so many tokens: it logs them before anything else."""

    async def read() -> bool:
        events = await router.store.read_log("r")
        return sum(len(event.token_ids) for event in events) == count

    await eventually(read)


async def test_a_faster_decode_node_waits_for_the_prompts_logprobs() -> None:
    async with cluster("p", "d") as (router, (p, d)):
        client = Client(router, asking())
        prefill = await p.hear(SubmitPrefill)
        p.export(prefill.request)
        decode = await d.hear(SubmitDecode)
        d.subscribe(decode.request)
        d.tokens(decode.request, 0, 41, logprobs=((TokenLogprob(41, -1.0, 1),),))
        last = ((TokenLogprob(42, -2.0, 1),), (TokenLogprob(43, -3.0, 1),))
        d.tokens(decode.request, 1, 42, 43, logprobs=last, finish_reason=FinishReason.LENGTH)
        await logged(router, 3)
        assert client.events == []
        first = ((TokenLogprob(41, -1.0, 1),),)
        p.tokens(prefill.request, 0, 41, logprobs=first, prompt_logprobs=TOLD)
        assert await client.done() == [41, 42, 43]
        assert [event.prompt_logprobs for event in client.events] == [TOLD, ()]
        assert [event.logprobs for event in client.events] == [first, last]


async def test_a_prefill_node_lost_before_it_told_is_asked_again_elsewhere() -> None:
    async with cluster("p1", "p2", "d") as (router, (p1, p2, d)):
        client = Client(router, asking())
        victim = await first_of([p1, p2], SubmitPrefill)
        other = p2 if victim is p1 else p1
        victim.export((await victim.hear(SubmitPrefill)).request)
        decode = await d.hear(SubmitDecode)
        d.subscribe(decode.request)
        d.tokens(decode.request, 0, 41, 42)  # END held: the decode node needs nobody any more
        await logged(router, 2)
        await victim.stop()
        prefill = await other.hear(SubmitPrefill)
        assert (prefill.request.epoch, prefill.request.output_ids) == (2, ((),))
        other.export(prefill.request)
        decode = await d.hear(SubmitDecode)
        other.tokens(prefill.request, 0, 41, prompt_logprobs=TOLD)
        d.tokens(decode.request, 0, 41, 42, finish_reason=FinishReason.LENGTH)
        assert await client.done() == [41, 42]
        assert client.events[0].prompt_logprobs == TOLD
        assert (client.trace.retries, client.trace.node_deaths) == (1, 1)


async def test_once_told_a_retry_is_as_any_other() -> None:
    async with cluster("p", "d1", "d2") as (router, (p, d1, d2)):
        client = Client(router, asking())
        prefill = await p.hear(SubmitPrefill)
        p.export(prefill.request)
        victim = await first_of([d1, d2], SubmitDecode)
        other = d2 if victim is d1 else d1
        p.tokens(prefill.request, 0, 41, prompt_logprobs=TOLD)
        await client.next()
        decode = await victim.hear(SubmitDecode)
        victim.subscribe(decode.request)
        victim.tokens(decode.request, 0, 41, 42)
        await client.next()
        await victim.stop()
        again = await p.hear(SubmitPrefill)
        assert again.request.output_ids == ((41, 42),)
        p.export(again.request)
        decode = await other.hear(SubmitDecode)
        other.subscribe(decode.request)
        other.finish(decode.request, 2, 43)  # shown though the prefill node has not spoken
        assert await client.done() == [41, 42, 43]
        assert [event.prompt_logprobs for event in client.events] == [TOLD, (), ()]
