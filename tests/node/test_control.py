"""An operator's orders to a node: what it answers, and what it waits for."""

from __future__ import annotations

from typing import Any

import pytest

from baton.engine.core import sleeping
from baton.engine.core.engine import Engine
from baton.node.main import NodeProgram
from baton.protocol.events import BlockEventKind, Controlled
from baton.protocol.messages import ControlAction, ControlNode, SubmitDecode, SubmitPrefill
from kv_transfer.lanes.memory import MemoryFabric
from tests.fakes import expected_output, request
from tests.node.fakes import (
    DECODE,
    PREFILL,
    RawRouter,
    Setup,
    connected,
    running_node,
    running_pair,
)


async def answer(router: RawRouter, number: int) -> Controlled:
    found: list[Controlled] = []

    def there() -> bool:
        found.extend(
            each for step in router.steps for each in step.controlled if each.number == number
        )
        return bool(found)

    await router.until(there)
    return found[0]


async def order(router: RawRouter, number: int, action: ControlAction, **values: Any) -> Controlled:
    await router.send(ControlNode(number, action, **values))
    return await answer(router, number)


@pytest.mark.parametrize("program", [PREFILL, DECODE], ids=["prefill", "decode"])
async def test_what_a_node_cannot_do_is_answered(program: NodeProgram) -> None:
    """This one's engine has no model of its own."""
    async with running_node(program, MemoryFabric()) as node, connected(node) as router:
        for number, (action, values) in enumerate(
            (("sleep", {}), ("load_adapter", {"name": "x", "path": "/"}),
             ("unload_adapter", {"name": "x"})), 5
        ):  # fmt: skip
            told = await order(router, number, action, **values)  # type: ignore[arg-type]
            assert (told.code, told.number) == ("unsupported_feature", number)
        assert await order(router, 9, "wake") == Controlled(9)
        assert not node.node.shell.control.asleep
        await router.heard()


async def test_a_pause_is_told_with_the_load_and_holds_decode_nodes() -> None:
    async with running_pair() as pair:
        one = request("one", max_tokens=8)
        for router in (pair.to_p, pair.to_d):
            assert await order(router, 1, "pause", mode="hold") == Controlled(1)
            await router.until_load(lambda load: load.pause == "hold")
        await pair.to_p.prefill(one)
        handle = await pair.to_p.handle_of("one")  # a prefill node ends what it is given
        await pair.to_d.decode(one, handle)
        await pair.to_d.until(lambda: pair.to_d.subscribed("one"))
        before = pair.d.runner.num_steps
        beats = pair.d.node.shell.progress.beats
        await pair.to_d.until(lambda: pair.d.node.shell.progress.beats > beats + 4)
        assert pair.d.runner.num_steps == before == 0
        assert not pair.d.node.shell.progress.stalled
        assert await order(pair.to_d, 2, "resume") == Controlled(2)
        assert await pair.to_d.all_tokens("one") == expected_output(one.prompt_ids, one.params)
        await pair.to_d.until_load(lambda load: not load.pause)


async def test_a_forgotten_cache_is_told() -> None:
    async with running_node(DECODE, MemoryFabric()) as node, connected(node) as router:
        await router.decode(request("r", max_tokens=4))
        await router.all_tokens("r")
        await node.until_idle()
        assert node.engine.pool.num_cached > 0
        assert await order(router, 1, "reset_prefix_cache") == Controlled(1)
        kinds = [event.kind for step in router.steps for event in step.block_events]
        assert kinds[-1] is BlockEventKind.CLEARED
        assert node.engine.pool.num_cached == 0
        assert node.engine.pool.num_free == node.total_blocks
        again = request("again", max_tokens=4)
        await router.decode(again)
        assert await router.all_tokens("again") == expected_output(again.prompt_ids, again.params)
        await node.until_idle()


async def test_a_node_sleeps_when_its_exports_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    fallen: list[Engine] = []
    monkeypatch.setattr(sleeping, "check", lambda _: None)
    monkeypatch.setattr(sleeping, "fall_asleep", fallen.append)
    async with running_node(PREFILL, MemoryFabric()) as node, connected(node) as router:
        await router.send(SubmitPrefill(request("r", max_tokens=4)))
        handle = await router.handle_of("r")
        await router.send(ControlNode(1, "sleep"))
        await router.until_load(lambda load: load.asleep)
        await router.send(SubmitPrefill(request("late")))
        refused = await router.failure_of("late")
        assert (refused.code, refused.retryable) == ("unavailable", True)
        assert not fallen
        await router.release(handle)
        assert await answer(router, 1) == Controlled(1)
        assert fallen == [node.engine]
        assert router.load.asleep


async def test_requests_that_do_not_end_keep_a_node_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleeping, "check", lambda _: None)
    setup = Setup(options={"drain_s": 0.2})
    async with running_node(DECODE, MemoryFabric(), setup) as node, connected(node) as router:
        node.runner.hold_after(2)
        await router.send(SubmitDecode(request("r", max_tokens=6), None))
        await router.until(lambda: router.events("r"))
        told = await order(router, 1, "sleep")
        assert (told.code, told.message) == ("unavailable", "requests are still under way")
        await router.until_load(lambda load: not load.asleep)
        node.runner.step_gate.open()
        await router.all_tokens("r")
        await node.until_idle()
