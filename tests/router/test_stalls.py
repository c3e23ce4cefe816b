"""Nobody waits at the gate for work that no node has: real dispatcher, gate and sessions, scripted
nodes that never report again. Each of these waited for ever once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from baton.protocol.clock import SystemClock
from baton.protocol.handles import NodeLoad, Role
from baton.protocol.messages import SubmitDecode, SubmitPrefill
from baton.protocol.request import Request
from router.request.gate.admission import Bounds
from router.request.gate.gate import Gate, GateSettings
from tests.router.clients import Client
from tests.router.fakes import (
    FakeNode,
    FakeRouter,
    make_record,
    make_request,
    running_router,
)

# 0.5 s at 1,000 tokens/s: with one prompt of these on a node, the window has no room for another.
PROMPT = 450
LOAD = NodeLoad(running=1, free_blocks=4096, total_blocks=4096, prefill_tokens_per_s=1000.0)


@contextlib.asynccontextmanager
async def gated(*names: str) -> AsyncIterator[tuple[FakeRouter, list[FakeNode]]]:
    """As router/main.py puts them together: the gate looks whenever a node reports."""
    roles = {"p": Role.PREFILL, "d": Role.DECODE}
    async with contextlib.AsyncExitStack() as stack:
        nodes = [
            FakeNode(make_record(name, roles[name[0]], load=LOAD, max_model_len=4096))
            for name in names
        ]
        for node in nodes:
            await node.start()
            stack.push_async_callback(node.stop)
        router = await stack.enter_async_context(running_router(nodes))
        gate = Gate(SystemClock(), GateSettings(Bounds(10, 10)), router.registry.snapshots)
        router.registry.watch_reports(gate.poke)
        router.dispatcher.gate = gate
        yield router, nodes


async def submitted(node: FakeNode) -> Request:
    return (await node.hear(SubmitPrefill)).request


async def test_a_refused_prompt_does_not_hold_back_the_next_one() -> None:
    """The node refuses it before it counted it, and an idle node tells no load."""
    async with gated("p", "d") as (router, (p, d)):
        refused = Client(router, make_request("a", PROMPT))
        request = await submitted(p)
        waits = Client(router, make_request("b", PROMPT))
        await waiting(router)
        p.fail(request, "invalid_request", retryable=False)
        assert "says invalid_request" in str(await refused.fails())
        await served(waits, p, d)


async def served(client: Client, p: FakeNode, d: FakeNode) -> None:
    """Prefilled by `p`, ended by `d`."""
    request = await submitted(p)
    p.export(request)
    d_request = (await d.hear(SubmitDecode)).request
    d.subscribe(d_request)
    p.tokens(request, 0, 7)
    d.finish(d_request, 0, 7, 8)
    assert await client.done() == [7, 8]


async def test_a_prompt_that_went_elsewhere_leaves_its_place_to_the_next_one() -> None:
    """It still runs, so nothing leaves the gate; its first node has room again, and never says."""
    async with gated("p1", "p2", "d") as (router, (p1, p2, d)):
        first = Client(router, make_request("a", PROMPT))
        second = Client(router, make_request("b", PROMPT))
        on_p1, on_p2 = await submitted(p1), await submitted(p2)
        waits = Client(router, make_request("c", PROMPT))
        await waiting(router)
        p1.fail(on_p1, "overloaded", retryable=True)
        moved = await submitted(p2)
        assert moved.id == on_p1.id
        await served(waits, p1, d)
        for client in (first, second):
            client.task.cancel()
        assert {on_p1.id, on_p2.id} == {"a", "b"}


async def test_a_client_that_leaves_makes_room() -> None:
    async with gated("p", "d") as (router, (p, d)):
        leaves = Client(router, make_request("a", PROMPT))
        await submitted(p)
        waits = Client(router, make_request("b", PROMPT))
        await waiting(router)
        leaves.task.cancel()
        await served(waits, p, d)


async def waiting(router: FakeRouter) -> None:
    """Until somebody waits at the gate."""
    for _ in range(100):
        if router.dispatcher.waiting():
            return
        await asyncio.sleep(0)
    raise AssertionError("nobody waits")
