"""A whole router as router/main.py puts it together: its gate looks when a node reports."""

from __future__ import annotations

import asyncio
from pathlib import Path

from baton.protocol.handles import NodeLoad, Role
from baton.protocol.messages import SubmitDecode
from router.config import RouterConfig
from router.main import Router
from tests.router.clients import Client
from tests.router.fakes import PATIENCE_S, FakeNode, FakeRouter, make_record, make_request

MODEL = Path(__file__).resolve().parents[2] / "demo_model"
FULL = NodeLoad(running=4, waiting=9, free_blocks=64, total_blocks=64)
FREE = NodeLoad(running=4, free_blocks=64, total_blocks=64)


async def test_a_report_lets_the_waiting_in() -> None:
    node = FakeNode(make_record("d", Role.DECODE))
    await node.start()
    config = RouterConfig(
        model=str(MODEL), decode_node=(node.address,), max_live_requests=7, max_queued_requests=1
    )
    router = Router(config)
    services, registry = router.services, router.registry
    await router.start()
    try:
        async with asyncio.timeout(PATIENCE_S):
            await registry.wait_until(registry.can_serve)
        gate = services.dispatcher.gate
        whole = FakeRouter(router.guard._store, router.guard, registry, services.dispatcher)  # pyright: ignore[reportPrivateUsage]
        first = Client(whole, make_request("a"))
        await node.hear(SubmitDecode)
        node.say(load=FULL)
        node.tokens(make_request("a"), 0, 41)  # read after the load: the router knows it by now
        await first.next()
        second = Client(whole, make_request("b"))
        third = Client(whole, make_request("c"))
        assert "queue is full" in str(await third.fails())
        assert gate.queue.num_queued == 1
        text = services.metrics.render().decode()
        assert 'baton_admission_queue_length{tenant=""} 1.0' in text
        assert 'baton_admission_refused_total{reason="queue_full"} 1.0' in text
        assert 'vllm:admission_rejections_total{reason="queue_full"} 1.0' in text
        node.say(load=FREE)
        assert (await node.hear(SubmitDecode)).request.id == "b"
        for name, start in (("a", 1), ("b", 0)):
            node.finish(make_request(name), start, 42)
        assert (await first.done(), await second.done()) == ([41, 42], [42])
        assert (gate.queue.num_live, gate.queue.num_queued) == (0, 0)
    finally:
        await router.stop()
        await node.stop()
