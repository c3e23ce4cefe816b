"""A decode node lets go of its requests: with their KV where there is some, without where not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from baton.engine.state.sequence import count_blocks
from baton.protocol.errors import GivenBack, KVStale
from baton.protocol.handles import KVHandle
from baton.protocol.messages import Migrate
from baton.protocol.request import Request
from kv_transfer.lanes.memory import MemoryFabric
from tests.fakes import expected_output, request
from tests.node.fakes import (
    DECODE,
    PATIENCE_S,
    PREFILL,
    TIMING,
    RawRouter,
    Setup,
    TestNode,
    connected,
    running_node,
)
from tests.waiting import eventually

PROMPT = tuple(range(10, 29))  # 19 tokens: 4 full blocks of 4 and 3 more


def ask(name: str = "r", max_tokens: int = 200) -> Request:
    asked = request(name, PROMPT, max_tokens=max_tokens)
    return replace(asked, params=replace(asked.params, ignore_eos=True))


def whole(asked: Request) -> list[int]:
    return expected_output(asked.prompt_ids, asked.params)


@dataclass
class TwoNodes:
    """Two decode nodes and one router connected to both."""

    a: TestNode
    b: TestNode
    to_a: RawRouter
    to_b: RawRouter

    async def leave(self, asked: Request) -> KVHandle:
        """Ask A to let go of `asked`, which has KV; the export that it answers with."""
        await self.to_a.send(Migrate(asked.id, asked.epoch))
        await self.heard(asked.id)
        self.a.runner.step_gate.open()
        return await self.to_a.handle_of(asked.id)

    async def heard(self, request_id: str, *, abort: bool = False) -> None:
        """A has heard that it is to let go of the request (and of its abort)."""
        entry = self.a.node.shell.requests.find(request_id)
        assert entry is not None

        async def look() -> bool:
            return entry.leaving and (entry.cancelled or not abort)

        await eventually(look)
        await asyncio.sleep(0)  # the engine's thread has been asked as well

    async def until_idle(self) -> None:
        await self.a.until_idle()
        await self.b.until_idle()


@asynccontextmanager
async def two_nodes(a: Setup | None = None, b: Setup | None = None) -> AsyncIterator[TwoNodes]:
    fabric = MemoryFabric()
    async with (
        running_node(DECODE, fabric, a or Setup(num_blocks=128)) as first,
        running_node(DECODE, fabric, b or Setup(num_blocks=128)) as second,
        connected(first) as to_a,
        connected(second) as to_b,
    ):
        yield TwoNodes(first, second, to_a, to_b)


async def start(nodes: TwoNodes, asked: Request, num_tokens: int = 3) -> None:
    """`asked` decodes on A and has told some tokens; A's engine is held before its next step."""
    nodes.a.runner.hold_after(num_tokens + 2)
    await nodes.to_a.decode(asked)
    await nodes.to_a.until(lambda: len(nodes.to_a.tokens(asked.id)) >= num_tokens)
    await nodes.a.runner.step_gate.reached()


@pytest.mark.parametrize("b_block", [4, 8, 2])
async def test_a_running_request_goes_on_elsewhere(b_block: int) -> None:
    asked = ask()
    async with two_nodes(b=Setup(num_blocks=512 // b_block, block_size=b_block)) as nodes:
        await start(nodes, asked)
        handle = await nodes.leave(asked)
        told = nodes.to_a.tokens("r")
        assert handle.num_tokens == len(PROMPT) + len(told) - 1, "the last token has no KV yet"
        assert nodes.a.engine.stats.num_handed_on == 1
        again = asked.retried((tuple(told),))
        await nodes.to_b.decode(again, handle)
        rest = await nodes.to_b.all_tokens("r")
        assert told + rest == whole(asked)
        assert nodes.b.engine.stats.num_prompt_tokens == 0, "nothing was computed again"
        assert not nodes.to_a.failures("r")
        assert nodes.to_a.tokens("r") == told, "nothing came behind the handle"
        await nodes.until_idle()


async def test_tokens_that_the_router_lacks_come_with_the_end_of_the_transfer() -> None:
    """Its session broke in between: what A told last was lost."""
    asked = ask()
    async with two_nodes() as nodes:
        await start(nodes, asked)
        handle = await nodes.leave(asked)
        told = nodes.to_a.tokens("r")
        again = asked.retried((tuple(told[:-1]),))
        await nodes.to_b.decode(again, handle)
        assert told[:-1] + await nodes.to_b.all_tokens("r") == whole(asked)
        assert nodes.b.engine.stats.num_prompt_tokens == 0
        await nodes.until_idle()


async def test_asked_twice_it_leaves_once() -> None:
    asked = ask()
    async with two_nodes() as nodes:
        await start(nodes, asked)
        await nodes.to_a.send(Migrate("r", 1))
        await nodes.to_a.send(Migrate("r", 1))
        await nodes.to_a.send(Migrate("r", 2))  # another epoch is not here
        await nodes.to_a.send(Migrate("nobody", 1))
        nodes.a.runner.step_gate.open()
        handle = await nodes.to_a.handle_of("r")
        await nodes.to_a.send(Migrate("r", 1))
        await nodes.to_a.release(handle)
        await nodes.until_idle()
        assert len(nodes.to_a.handles("r")) == 1
        assert not nodes.to_a.failures("r")
        assert nodes.a.node.shell.connector.stats.exports == 1


async def test_what_has_no_kv_is_given_back() -> None:
    """Waiting behind another request, and in the middle of its prefill."""
    setup = Setup(num_blocks=128, engine_options={"max_num_seqs": 1, "max_num_batched_tokens": 4})
    first, second = ask("first"), ask("second")
    async with two_nodes(a=setup) as nodes:
        nodes.a.runner.step_gate.close()
        await nodes.to_a.decode(first)
        await nodes.a.runner.step_gate.reached()  # four tokens of its prompt
        await nodes.to_a.decode(second)
        for asked in (first, second):
            await nodes.to_a.send(Migrate(asked.id, 1))
            await nodes.heard(asked.id)
        nodes.a.runner.step_gate.open()
        for asked in (first, second):
            failed = await nodes.to_a.failure_of(asked.id)
            assert (failed.code, failed.retryable) == (GivenBack.code, True)
        await nodes.until_idle()
        assert nodes.a.engine.stats.num_handed_on == 0
        assert nodes.a.node.shell.connector.stats.exports == 0


async def test_a_swapped_request_is_given_back_and_its_copy_dropped() -> None:
    """One request alone fills the pool at its end."""
    setup = Setup(num_blocks=50, engine_options={"preemption_mode": "swap"})
    asked = [replace(ask(name, 197), prompt_ids=PROMPT[:3]) for name in ("x", "y")]
    async with two_nodes(a=setup) as nodes:
        nodes.a.runner.hold_after(150)  # one was swapped out at 100, the other goes on to 197
        nodes.a.runner.step_gate.close()
        for one in asked:
            await nodes.to_a.decode(one)
        await nodes.to_a.heard()
        nodes.a.runner.step_gate.open()
        await nodes.to_a.until_load(lambda load: load.swapped == 1)
        await nodes.a.runner.step_gate.reached()
        swapped = swapped_out(nodes)
        await nodes.to_a.send(Migrate(swapped, 1))
        await nodes.heard(swapped)
        nodes.a.runner.step_gate.open()
        other = next(one for one in asked if one.id != swapped)
        failed = await nodes.to_a.failure_of(swapped)
        assert failed.code == GivenBack.code
        assert await nodes.to_a.all_tokens(other.id) == whole(other)
        await nodes.until_idle()


def swapped_out(nodes: TwoNodes) -> str:
    """Who is swapped out; the engine stands in its gate."""
    scheduler = nodes.a.engine.scheduler
    groups = scheduler.groups()
    [swapped] = [each.request.id for each in groups if not count_blocks(each.sequences)]
    return swapped


async def test_several_samples_go_on_elsewhere_from_their_prompt() -> None:
    asked = ask()
    asked = replace(asked, params=replace(asked.params, n=2), output_ids=((), ()))
    setup = Setup(num_blocks=160)
    async with two_nodes(a=setup, b=setup) as nodes:
        await start(nodes, asked, 9)
        handle = await nodes.leave(asked)
        assert handle.num_tokens == len(PROMPT)
        told = [nodes.to_a.sample("r", sample) for sample in range(2)]
        await nodes.to_b.decode(asked.retried(tuple(map(tuple, told))), handle)
        await nodes.to_b.all_ended("r", 2)
        for sample in range(2):
            whole_sample = expected_output(PROMPT, asked.params, sample=sample)
            assert told[sample] + nodes.to_b.sample("r", sample) == whole_sample
        assert nodes.b.node.shell.connector.stats.fetches == 1
        recomputed = sum(map(len, told))
        assert nodes.b.engine.stats.num_prompt_tokens <= recomputed, "the prompt came as KV"
        await nodes.until_idle()


async def test_an_abort_finds_the_request_at_any_stage_of_leaving() -> None:
    """Aborted while A exports it, and after, when its router never heard of the handle."""
    async with two_nodes() as nodes:
        for name in ("during", "after"):
            asked = ask(name)
            await start(nodes, asked)
            await nodes.to_a.send(Migrate(name, 1))
            if name == "during":
                await nodes.to_a.abort(name)
                await nodes.heard(name, abort=True)
                nodes.a.runner.step_gate.open()
            else:
                nodes.a.runner.step_gate.open()
                await nodes.to_a.handle_of(name)
                await nodes.to_a.abort(name)
            await nodes.until_idle()  # the lease is 60 s: it was released
        assert not nodes.to_a.handles("during")
        assert nodes.a.node.shell.connector.stats.expired_leases == 0


async def test_an_export_that_nobody_fetches_ends_with_its_lease() -> None:
    short = replace(TIMING, kv_lease_s=0.2)
    asked = ask()
    async with two_nodes(a=Setup(num_blocks=128, timing=short)) as nodes:
        await start(nodes, asked)
        handle = await nodes.leave(asked)
        await nodes.a.until_idle()
        assert nodes.a.node.shell.connector.stats.expired_leases == 1
        again = asked.retried((tuple(nodes.to_a.tokens("r")),))
        await nodes.to_b.decode(again, handle)
        failed = await nodes.to_b.failure_of("r")
        assert (failed.code, failed.retryable) == (KVStale.code, True)
        await nodes.until_idle()


async def test_the_old_owner_is_fenced_once_a_newer_epoch_has_fetched() -> None:
    asked = ask()
    async with two_nodes() as nodes:
        await start(nodes, asked)
        handle = await nodes.leave(asked)
        tokens = (tuple(nodes.to_a.tokens("r")),)
        connector = nodes.a.node.shell.connector
        await connector.renew(handle, 3)  # somebody speaks for epoch 3
        await nodes.to_b.decode(asked.retried(tokens), handle)  # epoch 2 came too late
        assert (await nodes.to_b.failure_of("r")).code == KVStale.code
        await nodes.to_a.release(handle)
        await nodes.until_idle()


async def test_a_drain_waits_until_what_left_was_fetched() -> None:
    asked = ask()
    async with two_nodes(a=Setup(num_blocks=128, options={"drain_s": PATIENCE_S})) as nodes:
        await start(nodes, asked)
        handle = await nodes.leave(asked)
        draining = asyncio.create_task(nodes.a.node.drain())
        await nodes.to_a.until_load(lambda load: load.draining)
        assert not draining.done(), "its KV is still to be fetched"
        again = asked.retried((tuple(nodes.to_a.tokens("r")),))
        await nodes.to_b.decode(again, handle)
        await nodes.to_b.until(lambda: nodes.to_b.events("r"))
        await nodes.to_a.part()
        async with asyncio.timeout(PATIENCE_S):
            await draining
        await nodes.to_b.abort("r", 2)
        await nodes.until_idle()


async def test_a_drain_ends_when_its_last_words_are_written() -> None:
    """Whoever stops a drained node cuts its sessions: nothing may be left unwritten by then."""
    asked = ask(max_tokens=30)
    async with two_nodes(a=Setup(num_blocks=128, options={"drain_s": PATIENCE_S})) as nodes:
        await start(nodes, asked)
        nodes.a.runner.step_gate.open()
        async with asyncio.timeout(PATIENCE_S):
            await nodes.a.node.drain()
        stopping = asyncio.create_task(nodes.a.node.stop())
        assert await nodes.to_a.all_tokens("r") == whole(asked)
        await stopping


async def test_a_prefill_node_gives_back_what_it_has_not_exported() -> None:
    setup = Setup(engine_options={"max_num_seqs": 1, "max_num_batched_tokens": 4})
    async with running_node(PREFILL, MemoryFabric(), setup) as node, connected(node) as router:
        node.runner.step_gate.close()
        await router.prefill(replace(ask(max_tokens=2), prompt_ids=PROMPT * 10))  # 48 steps
        await node.runner.step_gate.reached()
        await router.send(Migrate("r", 1))
        entry = node.node.shell.requests.find("r")
        assert entry is not None

        async def heard() -> bool:
            return entry.leaving

        await eventually(heard)
        node.runner.step_gate.open()
        assert (await router.failure_of("r")).code == GivenBack.code
        await node.until_idle()
