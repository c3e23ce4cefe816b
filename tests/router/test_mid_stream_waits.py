"""A stream that has begun waits for a node, whatever became of those that it had or asked before.

Its client cannot just send it again. If no node comes within `node_wait_s`, it ends with an error.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from baton.protocol.errors import Overloaded, Unavailable
from baton.protocol.messages import Migrate, SubmitDecode
from baton.protocol.request import RequestState
from tests.router.clients import Client, cluster, first_of, state_of
from tests.router.fakes import FakeNode, FakeRouter, make_request
from tests.router.test_expected_nodes import WAIT_S, back, gone
from tests.waiting import eventually

SHORT_S = 0.3


async def begun(router: FakeRouter, nodes: list[FakeNode]) -> tuple[Client, FakeNode, FakeNode]:
    """A stream of which a node has sent token 41; that node, and the other one."""
    client = Client(router, make_request())
    node = await first_of(nodes, SubmitDecode)
    node.tokens((await node.hear(SubmitDecode)).request, 0, 41)
    await client.next()
    return client, node, nodes[node is nodes[0]]


async def begun_elsewhere(
    router: FakeRouter, nodes: list[FakeNode]
) -> tuple[Client, FakeNode, FakeNode]:
    """The same after the other node has refused it, because it was full."""
    client = Client(router, make_request())
    full = await first_of(nodes, SubmitDecode)
    full.fail((await full.hear(SubmitDecode)).request, "overloaded", retryable=True)
    node = nodes[full is nodes[0]]
    node.tokens((await node.hear(SubmitDecode)).request, 0, 41)
    await client.next()
    return client, node, full


async def goes_on(client: Client, node: FakeNode, epoch: int) -> None:
    """The stream goes on with this node, in this epoch, from token 41 to its end."""
    request = (await node.hear(SubmitDecode)).request
    assert (request.epoch, request.output_ids) == (epoch, ((41,),))
    node.finish(request, 1, 42)
    assert await client.done() == [41, 42]


async def woken(node: FakeNode) -> FakeNode:
    """The same boot at the same address: it had only been stopped."""
    again = FakeNode(node.record)
    await again.start(int(node.address.rpartition(":")[2]))
    return again


# ---- all nodes are away at once ----


async def test_the_only_node_left_is_away_for_a_moment() -> None:
    """Its session is broken when the stream loses its own node for good, and comes back."""
    async with cluster("d1", "d2", node_wait_s=WAIT_S) as (router, nodes):
        client, victim, other = await begun(router, nodes)
        await other.stop()
        await router.until(lambda: len(router.registry.records()) == 1)
        await victim.stop()
        await gone(router)
        assert not client.task.done()
        again = await woken(other)
        try:
            await goes_on(client, again, 2)
        finally:
            await again.stop()


async def test_if_none_comes_back_it_ends_after_the_bound() -> None:
    async with cluster("d1", "d2", node_wait_s=SHORT_S) as (router, nodes):
        client, victim, other = await begun(router, nodes)
        await other.stop()
        await router.until(lambda: len(router.registry.records()) == 1)
        lost_at = asyncio.get_running_loop().time()
        await victim.stop()
        error = await client.fails()
        assert isinstance(error, Unavailable)
        assert error.message == "no decode node is available"
        assert asyncio.get_running_loop().time() - lost_at >= SHORT_S
        assert await state_of(router) == (RequestState.FAILED, 2)


# ---- a node that refused it before ----


async def test_a_node_that_was_full_when_it_began_may_have_room_by_now() -> None:
    async with cluster("d1", "d2", node_wait_s=SHORT_S) as (router, nodes):
        client, victim, other = await begun_elsewhere(router, nodes)
        await victim.stop()
        await goes_on(client, other, 3)


async def test_a_node_that_was_full_when_it_began_may_take_it_over() -> None:
    async with cluster("d1", "d2") as (router, nodes):
        client, node, other = await begun_elsewhere(router, nodes)
        move = asyncio.create_task(router.dispatcher.migrate("r"))
        await node.hear(Migrate)
        node.export(replace(node.heard_of(SubmitDecode)[-1].request, output_ids=((41,),)), seq=7)
        request = (await other.hear(SubmitDecode)).request
        other.subscribe(request)
        other.finish(request, 1, 42)
        assert await move
        assert await client.done() == [41, 42]


async def test_a_node_that_refuses_it_in_the_middle_is_not_asked_again() -> None:
    async with cluster("d1", "d2", node_wait_s=SHORT_S) as (router, nodes):
        client, node, full = await begun_elsewhere(router, nodes)
        node.fail(node.heard_of(SubmitDecode)[-1].request, "overloaded", retryable=True)
        await goes_on(client, full, 3)


async def test_if_that_one_is_still_full_the_stream_waits_for_its_own_node() -> None:
    async with cluster("d1", "d2", node_wait_s=WAIT_S) as (router, nodes):
        client, victim, full = await begun_elsewhere(router, nodes)
        await victim.stop()
        full.fail((await full.hear(SubmitDecode)).request, "overloaded", retryable=True)

        async def waits() -> bool:
            return await state_of(router) == (RequestState.QUEUED, 4)

        await eventually(waits)
        assert not client.task.done()
        again = await back(victim)
        try:
            await goes_on(client, again, 4)
        finally:
            await again.stop()


async def test_if_no_other_comes_its_refusal_is_the_end() -> None:
    """The full node is connected all the time, but nobody waits for that one."""
    async with cluster("d1", "d2", node_wait_s=SHORT_S) as (router, nodes):
        client, victim, full = await begun_elsewhere(router, nodes)
        lost_at = asyncio.get_running_loop().time()
        await victim.stop()
        full.fail((await full.hear(SubmitDecode)).request, "overloaded", retryable=True)
        assert isinstance(await client.fails(), Overloaded)
        assert asyncio.get_running_loop().time() - lost_at >= SHORT_S
        assert await state_of(router) == (RequestState.FAILED, 4)


async def test_what_has_not_begun_is_refused_at_once() -> None:
    """Its client has nothing yet, and may ask again."""
    async with cluster("d1", "d2", node_wait_s=WAIT_S) as (router, nodes):
        client = Client(router, make_request())
        full = await first_of(nodes, SubmitDecode)
        other = nodes[full is nodes[0]]
        await other.stop()
        await router.until(lambda: len(router.registry.records()) == 1)
        full.fail((await full.hear(SubmitDecode)).request, "overloaded", retryable=True)
        async with asyncio.timeout(WAIT_S / 2):
            assert isinstance(await client.fails(), Overloaded)
