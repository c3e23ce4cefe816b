"""Admission seen by HTTP and gRPC clients: real dispatcher and gate, scripted nodes."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from baton.protocol.clock import SystemClock
from baton.protocol.messages import AbortRequest, SubmitDecode
from protos import serve_pb2, serve_pb2_grpc
from router.api.grpc.inference import GrpcServer
from router.config import RouterConfig
from router.request.dispatch_parts import DispatchParts
from router.request.dispatcher import Dispatcher
from router.request.gate.admission import Bounds, Reason
from router.request.gate.gate import Gate, GateSettings
from router.request.timeline import TimelineRing
from tests.front.fakes import Front
from tests.front.test_http_api import COMPLETIONS
from tests.router.clients import cluster
from tests.router.fakes import PATIENCE_S, FakeNode
from tests.timelines import assert_whole

KEYS = """
[[keys]]
name = "alice"
key = "a"
max_concurrency = 1

[[keys]]
name = "bob"
key = "b"
tokens_per_minute = 60
"""
PASSES = 10_000
ASK: dict[str, Any] = {"prompt": [3, 4, 5], "max_tokens": 4, "temperature": 0}


@dataclass
class Served:
    """A front door before one decode node, with room for one request and a queue of two."""

    front: Front
    gate: Gate
    node: FakeNode

    async def finish_next(self) -> None:
        request = (await self.node.hear(SubmitDecode)).request
        self.node.finish(request, 0, 41)

    def post(self, client: httpx.AsyncClient, key: str, **body: Any) -> asyncio.Task[Any]:
        headers = {"authorization": f"Bearer {key}"} | body.pop("headers", {})
        call = client.post(COMPLETIONS, json={**ASK, **body}, headers=headers)
        return asyncio.create_task(call)

    async def queued(self, count: int) -> None:
        """In process: a few passes of the loop bring a call to the gate."""
        for _ in range(PASSES):
            if self.gate.queue.num_queued == count:
                return
            await asyncio.sleep(0)
        raise AssertionError(f"{self.gate.queue.num_queued} wait, not {count}")


@asynccontextmanager
async def serving(tmp_path: Path, live: int = 1) -> AsyncIterator[Served]:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    clock = SystemClock()
    async with cluster("d") as (router, (node,)):
        gate = Gate(clock, GateSettings(Bounds(live, 2)), router.registry.snapshots)
        router.registry.watch_reports(gate.poke)
        ring = TimelineRing(9)
        parts = DispatchParts(router.registry, router.guard, clock, gate=gate, timelines=ring)
        dispatcher = Dispatcher(parts)
        config = RouterConfig(api_keys=str(path), api_key=("open",), grpc_port=0)
        doors: dict[str, Any] = {"dispatcher": dispatcher, "registry": router.registry}
        yield Served(Front(config=config, timelines=ring, **doors), gate, node)
        await dispatcher.stop()
        for entry in ring.newest():
            assert_whole(entry)


async def test_limits_of_a_key_are_429_with_retry_after(tmp_path: Path) -> None:
    async with serving(tmp_path, live=9) as served, served.front.client() as client:
        first = served.post(client, "a")
        await served.node.has_heard(SubmitDecode)
        second = await served.post(client, "a")
        assert second.status_code == 429
        assert second.headers["retry-after"] == "1"
        error = second.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
        await served.finish_next()
        assert (await first).status_code == 200
        greedy = served.post(client, "b", max_tokens=57)
        await served.finish_next()
        assert (await greedy).status_code == 200
        # 60 were charged, 4 were used: 56 are left, and answers have one token of late.
        late = await served.post(client, "b", prompt=list(range(3, 61)))
        assert late.status_code == 429
        assert int(late.headers["retry-after"]) == 3
        assert served.gate.queue.stats.refused[Reason.TOKEN_RATE] == 1


async def test_a_refusal_at_the_gate_is_logged_with_tenant_and_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "router.request")
    async with serving(tmp_path, live=9) as served, served.front.client() as client:
        first = served.post(client, "a")
        await served.node.has_heard(SubmitDecode)
        await served.post(client, "a")
        await served.finish_next()
        await first
        greedy = served.post(client, "b", max_tokens=57)
        await served.finish_next()
        await greedy
        await served.post(client, "b", prompt=list(range(3, 61)))
    busy = "tenant alice; 429 overloaded: as many requests of this key are under way as it may have"
    spent = "tenant bob; 429 overloaded: this key has used its tokens per minute"
    unread, finished, _, refused = (
        each.getMessage() for each in caplog.records if "tenant" in each.getMessage()
    )
    assert unread.startswith(f"refused before its body is read, {busy}")
    assert refused.startswith("request cmpl-")
    assert ": failed in " in refused
    assert refused.endswith(spent)
    assert finished.endswith("0 retries, tenant alice")


async def test_a_wait_then_a_turn_and_a_full_queue(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.front.client() as client:
        running = served.post(client, "open")
        await served.node.has_heard(SubmitDecode)
        waiting = [served.post(client, "open", baton_timing=True) for _ in range(2)]
        await served.queued(2)
        full = await served.post(client, "open")
        assert (full.status_code, full.headers["retry-after"]) == (429, "1")
        for _ in range(3):
            await served.finish_next()
        assert (await running).status_code == 200
        for call in waiting:
            receipt = (await call).json()["baton_timing"]
            assert receipt["decode_node"] == "d"
            assert receipt["placement"] == "local"
            assert 0 < receipt["admission_ms"] <= receipt["queue_ms"] <= receipt["ttft_ms"]
            assert [score["node"] for score in receipt["scores"]] == ["d"]


async def test_a_deadline_that_passes_in_the_queue_is_503(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.front.client() as client:
        running = served.post(client, "open")
        await served.node.has_heard(SubmitDecode)
        late = served.post(client, "open", headers={"x-request-timeout-ms": "30"})
        hopeless = served.post(client, "open", headers={"x-slo-ttft-ms": "40"}, stream=True)
        for call in (late, hopeless):
            reply = await call
            assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
            assert reply.json()["error"]["code"] == "unavailable"
        assert served.gate.queue.stats.refused[Reason.DEADLINE] == 1
        assert served.gate.queue.stats.refused[Reason.SLO] == 1
        assert served.gate.stats.ttft.refused == 1
        await served.finish_next()
        assert (await running).status_code == 200
        assert len(served.node.heard_of(SubmitDecode)) == 1, "no work for those"


async def test_a_client_that_leaves_the_queue_is_forgotten(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.front.client() as client:
        running = served.post(client, "open")
        await served.node.has_heard(SubmitDecode)
        leaving = served.post(client, "open")
        await served.queued(1)
        leaving.cancel()
        await served.queued(0)
        await served.finish_next()
        assert (await running).status_code == 200
        assert served.gate.queue.num_live == 0
        assert not served.node.heard_of(AbortRequest)


async def test_too_large_a_request_is_named(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.front.client() as client:
        gate = Gate(SystemClock(), GateSettings(Bounds(9), max_request_tokens=6))
        served.front.dispatcher.gate = gate  # type: ignore[attr-defined]
        reply = await served.post(client, "open")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "max_tokens")


@pytest.mark.parametrize(("key", "code"), [("a", grpc.StatusCode.RESOURCE_EXHAUSTED)])
async def test_grpc_has_the_same_terms(tmp_path: Path, key: str, code: grpc.StatusCode) -> None:
    async with serving(tmp_path, live=9) as served:
        server = GrpcServer(served.front.services)
        port = server.bind()
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = serve_pb2_grpc.InferenceStub(channel)
                ids = {"ids": [3, 4, 5]}
                ask = serve_pb2.GenerateRequest(token_ids=ids, max_tokens=4)
                metadata = (("authorization", f"Bearer {key}"), ("x-request-priority", "7"),
                            ("x-baton-receipt", "1"))  # fmt: skip
                first: Any = stub.Generate(ask, metadata=metadata, timeout=PATIENCE_S)
                reading = asyncio.create_task(first.read())
                request = (await served.node.hear(SubmitDecode)).request
                assert request.priority == 7
                assert len(request.tenant_salt) == 64
                second: Any = stub.Generate(ask, metadata=metadata, timeout=PATIENCE_S)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await second.read()
                assert caught.value.code() is code
                wrong: Any = stub.Generate(
                    ask, metadata=(("authorization", "Bearer open"), ("x-slo-ttft-ms", "0"))
                )
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await wrong.read()
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                served.node.finish(request, 0, 41)
                assert (await reading).token_ids == [41]
                assert await first.read() is grpc.aio.EOF
                told = dict(await first.trailing_metadata())["x-baton-receipt"]
                assert json.loads(told)["decode_node"] == "d"
        finally:
            await server.stop(0)
