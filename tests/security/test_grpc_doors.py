"""Default deny: every gRPC method of routers and nodes, known or not; and the limits of a call."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from baton.client import AsyncClient, GenerateOptions
from baton.protocol import wire
from baton.protocol.clock import SystemClock
from baton.protocol.errors import InvalidRequest
from baton.protocol.kv_spec import PROTOCOL_VERSION
from baton.protocol.messages import (
    ROUTER_METADATA,
    SECRET_METADATA,
    SessionHello,
    session_mac,
    session_metadata,
)
from baton.protocol.sampling import SamplingParams
from baton.runtime.log import LineFormatter
from baton.runtime.timing import MAX_STREAMS, Timing, server_options
from kv_transfer.lanes.grpc_stream import METHOD, SERVICE, GrpcLane
from kv_transfer.lanes.memory import MemoryFabric
from kv_transfer.protocol.base import Lane
from protos import kv_pb2, node_pb2, serve_pb2
from router.api.grpc.inference import GrpcServer
from router.api.http.reading import MAX_BODY_BYTES
from router.config import RouterConfig
from router.request.request_ids import names
from router.store.guard import StoreGuard
from router.store.memory_store import MemoryStore
from tests.front.fakes import Front
from tests.node.fakes import DECODE, PATIENCE_S, PREFILL, Setup, running_node

KEY = "the-key"
SECRET = "the deployment's secret"
HEALTH = "/grpc.health.v1.Health/"
Metadata = Sequence[tuple[str, str | bytes]]


def methods(*files: Any) -> list[str]:
    """Every method that these .proto files declare, as the wire names it."""
    return [
        f"/{service.full_name}/{method.name}"
        for file in files
        for service in file.services_by_name.values()
        for method in service.methods
    ]


REFLECTION = "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
ALL = [
    *methods(serve_pb2.DESCRIPTOR, node_pb2.DESCRIPTOR, kv_pb2.DESCRIPTOR),
    *methods(health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR),
    "/baton.serve.v1.Inference/Unknown", "/nobody/knows", "/", f"//{REFLECTION}",
    "/grpc.health.v1.Health", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/x/grpc.health.v1.Health/Check", "/GRPC.health.v1.Health/Check",
]  # fmt: skip


async def outcome(address: str, method: str, metadata: Metadata = (), sent: bytes = b"") -> str:
    """The status of a call with raw bytes; "OK" if it answers."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream(method)(metadata=tuple(metadata), timeout=PATIENCE_S)
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(sent)
            await call.done_writing()
        with suppress(grpc.aio.AioRpcError):
            answer = await call.read()
            if answer is not grpc.aio.EOF:
                call.cancel()
                return "OK"
        return (await call.code()).name


# ---- routers ----


@asynccontextmanager
async def door(front: Front) -> AsyncIterator[str]:
    server = GrpcServer(front.services)
    port = server.bind()
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def guarded(**options: Any) -> Front:
    return Front(config=RouterConfig(api_key=(KEY,), grpc_port=0, **options))


async def test_every_method_of_a_router_but_health_wants_the_key() -> None:
    wrong: list[Metadata] = [
        (),
        (("authorization", "Bearer wrong"),),
        (("authorization", KEY),),
        (("authorization", "Bearer "),),
        (("authorization", f"Bearer {KEY}"), ("authorization", f"Bearer {KEY}")),
        (("x-api-key", KEY),),
        (("authorization-bin", f"Bearer {KEY}".encode()),),
    ]
    async with door(guarded()) as address:
        for method in ALL:
            for metadata in wrong:
                found = await outcome(address, method, metadata)
                if method.startswith(HEALTH):
                    assert found == "OK", method
                else:
                    assert found == "UNAUTHENTICATED", (method, metadata)
        right = (("authorization", f"Bearer {KEY}"),)
        assert await outcome(address, "/baton.serve.v1.Inference/Models", right) == "OK"
        assert await outcome(address, "/nobody/knows", right) == "UNIMPLEMENTED"


async def test_what_operators_ask_wants_their_key() -> None:
    """Nodes, their addresses and the load of all are told to no tenant."""
    timing = Timing()
    store = StoreGuard(MemoryStore("router-1", timing, SystemClock()), timing)
    asked = "/baton.serve.v1.Inference/ServerInfo"
    models = "/baton.serve.v1.Inference/Models"
    tenant = (("authorization", f"Bearer {KEY}"),)
    operator = (("authorization", "Bearer lever"),)
    async with door(replace(guarded(), store=store)) as address:  # no admin key: off
        assert await outcome(address, asked, tenant) == "UNAUTHENTICATED"
        assert await outcome(address, asked, operator) == "UNAUTHENTICATED"
    async with door(replace(guarded(admin_key=("lever",)), store=store)) as address:
        assert await outcome(address, asked, tenant) == "UNAUTHENTICATED"
        assert await outcome(address, asked, operator) == "OK"
        assert await outcome(address, models, operator) == "UNAUTHENTICATED"
        assert await outcome(address, models, tenant) == "OK"
    config = RouterConfig(admin_key=("lever",), grpc_port=0)
    async with door(Front(config=config, store=store)) as address:  # on loopback, without API keys
        assert await outcome(address, asked) == "UNAUTHENTICATED"
        assert await outcome(address, asked, operator) == "OK"
        assert await outcome(address, models) == "OK"
    config = RouterConfig(grpc_port=0)
    async with door(Front(config=config, store=store)) as address:  # no keys at all
        assert await outcome(address, asked) == "OK"


async def test_a_request_can_be_aborted_by_its_own_tenant_alone() -> None:
    front = Front(config=RouterConfig(api_key=("a", "b"), grpc_port=0))
    front.dispatcher.stall_at = 1
    aborted: list[str] = []
    fake: Any = front.dispatcher
    fake.live = lambda: list(zip(front.dispatcher.requests, front.dispatcher.traces, strict=True))
    fake.waiting = list
    fake.abort = lambda request_id, by_operator: aborted.append(request_id) is None
    async with door(front) as address, AsyncClient(address, "a") as owner:
        reading = asyncio.create_task(
            owner.generate("hello", SamplingParams(), GenerateOptions(request_id="mine"))
        )
        async with asyncio.timeout(PATIENCE_S):
            await front.dispatcher.stalled.wait()
        async with AsyncClient(address, "b") as other:
            assert not await other.abort("mine")
        assert aborted == []
        assert await owner.abort("mine")
        assert aborted == [front.dispatcher.requests[0].id]
        reading.cancel()


async def test_a_request_id_of_one_key_is_not_anothers() -> None:
    """Whoever guesses it can neither take it nor learn that it is there."""
    front = Front(config=RouterConfig(api_key=("a", "b"), grpc_port=0))
    options = GenerateOptions(request_id="job-1")
    async with door(front) as address:
        for key in ("a", "b", "a"):
            async with AsyncClient(address, key) as client:
                await client.generate("hello", SamplingParams(), options)
    first, other, again = (request.id for request in front.dispatcher.requests)
    assert first == again != other
    assert all(names("job-1", each) for each in (first, other)), "an operator's name for both"


# ---- nodes ----


def hello(router_id: str) -> bytes:
    message = wire.router_message_to_wire(SessionHello(router_id, PROTOCOL_VERSION), SystemClock())
    return message.SerializeToString()


@pytest.mark.parametrize("program", [PREFILL, DECODE])
async def test_every_method_of_a_node_but_health_wants_the_secret(program: Any) -> None:
    proof = session_mac(SECRET, "r")
    wrong: list[Metadata] = [
        (),
        ((SECRET_METADATA, proof),),
        ((ROUTER_METADATA, b"r"),),
        session_metadata("another", "r"),
        session_metadata("", "r"),
        ((ROUTER_METADATA, b"other"), (SECRET_METADATA, proof)),
        ((ROUTER_METADATA, b"\xff"), (SECRET_METADATA, proof)),
        ((ROUTER_METADATA, b"r"), (SECRET_METADATA, proof.upper())),
        ((ROUTER_METADATA, b"r"), (SECRET_METADATA, SECRET)),
        (*session_metadata(SECRET, "r"), (SECRET_METADATA, proof)),
        (*session_metadata(SECRET, "r"), (ROUTER_METADATA, b"r")),
    ]
    setup = Setup(options={"secret": SECRET})
    async with running_node(program, MemoryFabric(), setup) as node:
        address = node.node.address
        for method in ALL:
            for metadata in wrong:
                found = await outcome(address, method, metadata, hello("r"))
                if method.startswith(HEALTH):
                    assert found != "UNAUTHENTICATED", method
                else:
                    assert found == "UNAUTHENTICATED", (method, metadata)
        session, right = "/baton.node.v1.Node/Session", session_metadata(SECRET, "r")
        assert await outcome(address, session, right, hello("r")) == "OK"
        assert await outcome(address, session, right, hello("x")) == "UNAUTHENTICATED"


def quiet_lane() -> Lane:
    return GrpcLane(Timing())


async def test_the_kv_lane_offers_one_method_and_answers_nothing_else() -> None:
    lane = quiet_lane()
    served: list[str] = []

    def serve(name: str, peer: Any) -> Any:
        served.append(name)
        # To the end of what the client sends: a call that ends before that ends by a reset of its
        # stream, which a client may read as INTERNAL.
        while peer.receive(PATIENCE_S) is not None:
            pass
        return iter(())

    try:
        place = lane.start("0a" * 16, serve)
        for method in ALL:
            found = await outcome(place.address, method)
            if method == f"/{SERVICE}/{METHOD}":
                assert found == "OK"
            else:
                assert found in ("UNIMPLEMENTED", "INTERNAL"), method
    finally:
        lane.stop()
    assert served == ["grpc"], (
        "its handshake (kv_transfer/protocol/identity.py) is what lets a peer in"
    )


# ---- limits of a call ----


@pytest.mark.parametrize("num_bytes", [9 << 10, 12 << 10, 1 << 20])
async def test_metadata_beyond_8_kib_is_refused(num_bytes: int) -> None:
    large = (("authorization", f"Bearer {KEY}"), ("x-note", "a" * num_bytes))
    setup = Setup(options={"secret": SECRET})
    async with (
        door(guarded()) as address,
        running_node(DECODE, MemoryFabric(), setup) as node,
    ):
        for _ in range(5):  # between a soft and a hard limit gRPC would draw lots
            found = await outcome(address, "/baton.serve.v1.Inference/Models", large)
            assert found in ("RESOURCE_EXHAUSTED", "UNAVAILABLE", "INTERNAL")
        proven = (*session_metadata(SECRET, "r"), ("x-note", "a" * num_bytes))
        session = "/baton.node.v1.Node/Session"
        assert await outcome(node.node.address, session, proven, hello("r")) != "OK"


async def test_a_message_beyond_the_body_limit_is_refused() -> None:
    message = serve_pb2.GenerateRequest(text="a" * (MAX_BODY_BYTES + 1))
    metadata = (("authorization", f"Bearer {KEY}"),)
    async with door(guarded()) as address:
        method = "/baton.serve.v1.Inference/Generate"
        found = await outcome(address, method, metadata, message.SerializeToString())
        assert found == "RESOURCE_EXHAUSTED"


async def test_streams_of_one_connection_are_bounded_and_the_rest_waits() -> None:
    """The bound is a setting of gRPC's: that it is passed on, and what it does there."""
    assert dict(server_options(Timing()))["grpc.max_concurrent_streams"] == MAX_STREAMS
    released = asyncio.Event()

    async def hold(request: Any, context: Any) -> bytes:
        await released.wait()
        return b""

    options = {**dict(server_options(Timing())), "grpc.max_concurrent_streams": 2}
    server = grpc.aio.server(options=list(options.items()))
    handlers = {"Hold": grpc.unary_unary_rpc_method_handler(hold)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            calls = [asyncio.ensure_future(channel.unary_unary("/s/Hold")(b"")) for _ in range(3)]
            done, _ = await asyncio.wait(calls, timeout=0.3)
            assert not done
            released.set()
            assert await asyncio.gather(*calls) == [b""] * 3
    finally:
        await server.stop(0)


async def test_a_request_id_writes_no_lines_into_the_log() -> None:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(LineFormatter("router"))
    log = logging.getLogger("router")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        async with door(guarded()) as address, AsyncClient(address, KEY) as client:
            options = GenerateOptions(request_id="r\n2026-01-01 ERROR forged" + "x" * 10_000)
            with pytest.raises(InvalidRequest, match="printable"):
                await client.generate("hello", SamplingParams(), options)
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    (line,) = written.getvalue().splitlines()
    assert "refused" in line
    assert len(line) < 1000
