"""Sessions: hello, proof of the secret, what belongs to whom, and what breaks one."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.node.main import NodeProgram
from baton.node.session import RouterSession
from baton.protocol import wire
from baton.protocol.clock import SystemClock
from baton.protocol.errors import Overloaded
from baton.protocol.events import BlockEvent, BlockEventKind, NodeStep, TokenEvent
from baton.protocol.handles import NodeLoad
from baton.protocol.messages import (
    SECRET_METADATA,
    DrainNode,
    SessionHello,
    SubmitPrefill,
    session_mac,
)
from baton.protocol.request import Request
from kv_transfer.lanes.memory import MemoryFabric
from protos import node_pb2
from tests.fakes import expected_output, request
from tests.node.fakes import (
    DECODE,
    PATIENCE_S,
    PREFILL,
    TIMING,
    Setup,
    TestNode,
    connected,
    open_call,
    running_node,
    status_of,
)

SECRET = "a deployment's secret"


async def ending(node: TestNode, first: node_pb2.RouterMessage | None, mac: str = "") -> str:
    """The gRPC status name with which the node ends a session that begins like this."""
    metadata = ((SECRET_METADATA, mac),) if mac else ()
    channel, call = await open_call(node.node.address, metadata)
    async with channel, asyncio.timeout(PATIENCE_S):
        if first is not None:
            await call.write(first)
        return await status_of(call)


def hello(router_id: str = "router-1", version: int = 1) -> node_pb2.RouterMessage:
    return wire.router_message_to_wire(SessionHello(router_id, version), SystemClock())


async def test_only_routers_that_prove_the_secret_get_a_session() -> None:
    setup = Setup(options={"secret": SECRET})
    async with running_node(PREFILL, MemoryFabric(), setup) as node:
        assert await ending(node, hello()) == "UNAUTHENTICATED"
        for mac in ("0" * 64, session_mac("other", "router-1"), session_mac(SECRET, "router-2")):
            assert await ending(node, hello(), mac) == "UNAUTHENTICATED"
        async with connected(node, "router-1", SECRET) as router:
            assert router.record.node_id == node.node.shell.node_id
            assert router.record.endpoint == node.node.shell.connector.endpoint()


@pytest.mark.parametrize("program", [PREFILL, DECODE])
async def test_the_record_names_the_adapters_that_requests_may_ask_for(
    program: NodeProgram,
) -> None:
    setup = Setup(model_options={"adapters": ("sql", "chat")})
    async with running_node(program, MemoryFabric(), setup) as node, connected(node) as router:
        assert router.record.adapters == ("sql", "chat")
        assert router.record == node.node.shell.record()
        assert (router.record.precision, router.record.deterministic) == ("float32", False)
    async with running_node(program, MemoryFabric()) as node, connected(node) as router:
        assert router.record.adapters == ()


async def test_a_session_begins_with_a_hello_of_this_version() -> None:
    timing = replace(TIMING, connect_s=0.05)
    async with running_node(PREFILL, MemoryFabric(), Setup(timing=timing)) as node:
        assert await ending(node, hello(version=99)) == "INVALID_ARGUMENT"
        assert await ending(node, node_pb2.RouterMessage()) == "INVALID_ARGUMENT"
        drain = wire.router_message_to_wire(DrainNode(), SystemClock())
        assert await ending(node, drain) == "INVALID_ARGUMENT"
        assert await ending(node, None) == "UNAUTHENTICATED", "no hello within the deadline"


async def test_routers_hear_of_their_own_requests_only() -> None:
    async with (
        running_node(DECODE, MemoryFabric()) as node,
        connected(node, "one") as one,
        connected(node, "two") as two,
    ):
        asked = [request(name, max_tokens=6) for name in ("a", "b")]
        await one.decode(asked[0])
        await two.decode(asked[1])
        for router, mine in ((one, asked[0]), (two, asked[1])):
            expected = expected_output(mine.prompt_ids, mine.params)
            assert await router.all_tokens(mine.id) == expected
            assert {e.request_id for step in router.steps for e in step.tokens} == {mine.id}


async def test_a_bad_submission_fails_alone_and_a_bad_message_ends_the_session() -> None:
    async with running_node(PREFILL, MemoryFabric()) as node, connected(node) as router:
        message = wire.router_message_to_wire(SubmitPrefill(request("bad")), SystemClock())
        message.submit.request.ClearField("prompt_ids")
        await router._call.write(message)
        failed = await router.failure_of("bad")
        assert (failed.code, failed.field, failed.retryable) == (
            "invalid_request",
            "prompt_ids",
            False,
        )
        await router.prefill(request("good"))
        await router.until(lambda: router.events("good"))
        await router._call.write(node_pb2.RouterMessage())
        assert await router.ending() == "INVALID_ARGUMENT"


async def test_what_the_engine_refuses_is_told_by_field() -> None:
    async with running_node(PREFILL, MemoryFabric()) as node, connected(node) as router:
        await router.prefill(request("r", prompt=(1, 96, 97)))  # the vocabulary ends at 96
        failed = await router.failure_of("r")
        assert (failed.code, failed.field) == ("invalid_request", "prompt")
        await router.prefill(request("long", prompt=tuple([5] * 300)))
        assert (await router.failure_of("long")).code == "context_length_exceeded"
        await node.until_idle()


async def test_each_role_refuses_the_other_roles_task() -> None:
    fabric = MemoryFabric()
    async with (
        running_node(PREFILL, fabric) as p,
        running_node(DECODE, fabric) as d,
        connected(p) as to_p,
        connected(d) as to_d,
    ):
        await to_p.decode(request("a"))
        await to_d.prefill(request("b"))
        assert (await to_p.failure_of("a")).code == "unsupported_feature"
        assert (await to_d.failure_of("b")).code == "unsupported_feature"


async def test_a_broken_session_aborts_its_requests_and_no_other() -> None:
    async with running_node(DECODE, MemoryFabric()) as node, connected(node, "stays") as stays:
        async with connected(node, "goes") as goes:
            node.runner.hold_after(2)
            await goes.decode(request("lost", max_tokens=200))
            await goes.until(lambda: goes.events("lost"))
            await stays.decode(request("kept", max_tokens=30))
            await node.runner.step_gate.reached()
        node.runner.step_gate.open()
        kept = request("kept", max_tokens=30)
        assert await stays.all_tokens("kept") == expected_output(kept.prompt_ids, kept.params)
        await node.until_idle()
        assert node.engine.stats.num_aborted == 1


async def test_a_finished_export_survives_its_session() -> None:
    async with running_node(PREFILL, MemoryFabric()) as node:
        async with connected(node, "goes") as goes:
            await goes.prefill(request("r"))
            handle = await goes.handle_of("r")
            await goes.until(lambda: goes.events("r"))
        async with connected(node, "comes") as comes:
            assert node.node.shell.connector.active_exports == 1
            await comes.release(handle)
            await node.until_idle()


async def test_a_router_that_does_not_read_is_cut_and_its_requests_aborted() -> None:
    setup = Setup(options={"outbox_messages": 16})
    async with (
        running_node(DECODE, MemoryFabric(), setup) as node,
        connected(node, "reads"),
        connected(node, "sleeps") as sleeps,
    ):
        node.runner.hold_after(2)
        await sleeps.decode(request("r", max_tokens=200))
        await sleeps.until(lambda: sleeps.events("r"))
        await node.runner.step_gate.reached()
        shell = node.node.shell
        session = next(s for s in shell._sessions if s.router_id == "sleeps")
        big = NodeStep(block_events=(BlockEvent(BlockEventKind.STORED, (bytes(16),) * 20_000),))
        for _ in range(64):  # 20 MB: more than the stream's window holds
            session.send(big)
            await asyncio.sleep(0)  # the writer's turn
        assert isinstance(session.closed, Overloaded)
        node.runner.step_gate.open()
        await node.until_idle()
        assert node.engine.stats.num_aborted == 1
        assert await sleeps.ending() == "RESOURCE_EXHAUSTED"


def test_the_outbox_keeps_order_and_numbers_block_events() -> None:
    async def scenario() -> None:
        session = RouterSession("router", 3)
        stored = BlockEvent(BlockEventKind.STORED, (b"h",))
        session.send(NodeStep(block_events=(stored, stored)))
        session.send(NodeStep(tokens=(TokenEvent("r", 1, 0, (5,)),)))
        session.send(NodeStep(block_events=(stored,)))
        assert [(await session.next()).block_events_seq for _ in range(3)] == [1, 0, 3]
        for _ in range(4):
            session.send(NodeStep())
        with pytest.raises(Overloaded):
            await session.next()

    asyncio.run(scenario())


async def test_too_many_requests_are_refused_not_queued() -> None:
    setup = Setup(options={"max_requests": 1})
    async with running_node(DECODE, MemoryFabric(), setup) as node, connected(node) as router:
        node.runner.step_gate.close()
        await router.decode(request("a"))
        await router.decode(request("b"))
        failed = await router.failure_of("b")
        assert (failed.code, failed.retryable) == ("overloaded", True)
        node.runner.step_gate.open()
        await router.all_tokens("a")


async def test_a_newer_epoch_takes_over_and_an_older_one_is_refused() -> None:
    asked = request("r", max_tokens=30)
    whole = expected_output(asked.prompt_ids, asked.params)
    newer = asked.retried((tuple(whole[:2]),))
    async with (
        running_node(DECODE, MemoryFabric()) as node,
        connected(node, "one") as one,
        connected(node, "two") as two,
    ):
        node.runner.step_gate.close()
        await one.decode(asked)
        await node.runner.step_gate.reached()
        await two.decode(newer)
        assert (await one.failure_of("r")).code == "fenced"
        await one.decode(asked)
        await one.until(lambda: len(one.failures("r")) == 2)
        assert one.failures("r")[1].code == "fenced"
        node.runner.step_gate.open()
        assert await two.all_tokens("r") == whole[2:]
        assert not one.tokens("r")
        await node.until_idle()


async def test_a_failing_step_fails_its_requests_and_the_node_lives_on() -> None:
    fabric = MemoryFabric()
    async with running_node(PREFILL, fabric) as node, connected(node) as router:
        node.runner.fail_for.add("bad")
        await router.prefill(request("bad"))
        failed = await router.failure_of("bad")
        assert (failed.code, failed.retryable) == ("internal", False)
        await router.prefill(request("good"))
        await router.until(lambda: router.events("good"))
        await router.release(await router.handle_of("good"))
        await node.until_idle()


@pytest.mark.parametrize("program", [PREFILL, DECODE])
async def test_a_deadline_ends_a_request_and_frees_its_blocks(program) -> None:
    async with running_node(program, MemoryFabric()) as node, connected(node) as router:
        node.runner.step_gate.close()
        asked: Request = replace(request("r"), deadline=SystemClock().monotonic() + 0.05)
        await (router.prefill(asked) if program is PREFILL else router.decode(asked))
        failed = await router.failure_of("r")
        assert (failed.code, failed.retryable) == ("deadline_exceeded", False)
        node.runner.step_gate.open()
        await node.until_idle()


async def test_what_waits_for_a_message_hears_once_that_it_is_written_or_never_will_be() -> None:
    session, heard = RouterSession("r", 3), list[str]()
    for name in ("first", "second", "third"):
        session.send(NodeStep(), partial(heard.append, name))
    await session.next()
    assert heard == [], "it is being written"
    await session.next()
    assert heard == ["first"]
    session.cut(Overloaded("too slow"))
    assert heard == ["first", "second", "third"]
    session.send(NodeStep(), partial(heard.append, "late"))
    with pytest.raises(Overloaded):
        await session.next()
    assert heard == ["first", "second", "third", "late"]


async def test_a_load_whose_counters_alone_moved_waits_for_the_heartbeat() -> None:
    session = RouterSession("r", 16)
    load = NodeLoad(running=1, kv_sent_bytes=5)
    assert session.changed_load(load) == load, "the first is always news"
    session.send(NodeStep(load=load))
    moved = replace(load, kv_sent_bytes=9, preemptions=1, mbu=0.5, mfu=0.1)
    assert session.changed_load(moved) is None
    busier = replace(moved, running=2)
    assert session.changed_load(busier) == busier, "counters travel along"
    async with running_node(PREFILL, MemoryFabric()) as node, connected(node) as router:
        node.node.shell.connector.stats.sent("lane", 4096)
        await router.until_load(lambda load: load.kv_sent_bytes == 4096)


async def test_drain_refuses_new_requests_and_lets_the_running_ones_end() -> None:
    async with running_node(DECODE, MemoryFabric()) as node, connected(node) as router:
        node.runner.step_gate.close()
        await router.decode(request("old"))
        await node.runner.step_gate.reached()
        await router.send(DrainNode())
        await router.until_load(lambda load: load.draining)
        await router.decode(request("new"))
        failed = await router.failure_of("new")
        assert (failed.code, failed.retryable) == ("unavailable", True)
        draining = asyncio.ensure_future(node.node.drain())
        channel = grpc.aio.insecure_channel(node.node.address)
        async with channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            await asyncio.sleep(0)
            status = await stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
            assert status.status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert not draining.done()
        node.runner.step_gate.open()
        old = request("old")
        assert await router.all_tokens("old") == expected_output(old.prompt_ids, old.params)
        await router.part()
        async with asyncio.timeout(PATIENCE_S):
            await draining
        await node.node.stop()
        await node.node.stop()  # twice is safe
