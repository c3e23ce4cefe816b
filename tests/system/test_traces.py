"""Traces over OTLP: one connected trace per request, whatever happened to it, in a real collector.

A process that stops waits only some seconds for its child, so the tests wait for the spans first.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from baton.protocol.sampling import SamplingParams
from router.server.app import create_app
from tests.cluster import Cluster, Plan, cluster
from tests.collector import (
    Collector,
    SeenSpan,
    assert_connected,
    edges,
    grpc_collector,
    http_collector,
    only,
)
from tests.system.references import prompts
from tests.tiny_models import make_tiny_model
from tests.waiting import WAIT_S, eventually

pytestmark = pytest.mark.slow

CLIENT: Final = "cd" * 8  # the client's span
PROMPT = list(prompts([150], seed=4)[0])
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
BODY: Final[dict[str, Any]] = {
    "prompt": PROMPT, "temperature": 0, "max_tokens": 20, "ignore_eos": True,
}  # fmt: skip
CHUNKED: Final = {"max_num_batched_tokens": 64, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tiny_model("llama", path, max_position_embeddings=512)
    return path


def traced(number: int, flags: str = "01") -> dict[str, str]:
    return {"traceparent": f"00-{number:032x}-{CLIENT}-{flags}"}


async def ask(c: Cluster, headers: dict[str, str], **changes: Any) -> httpx.Response:
    transport = httpx.ASGITransport(create_app(c.router.services))
    async with httpx.AsyncClient(transport=transport, base_url="http://b", timeout=WAIT_S) as http:
        return await http.post("/v1/completions", json=BODY | changes, headers=headers)


def of(spans: list[SeenSpan], service: str) -> list[SeenSpan]:
    return [span for span in spans if span.service == f"baton-{service}"]


# (parent, service, name) of every request whose prompt is computed on a prefill node
WHOLE: Final = {
    ("ROOT", "baton-router", "intake"),
    ("ROOT", "baton-router", "gate"),
    ("ROOT", "baton-router", "placement"),
    ("ROOT", "baton-router", "attempt"),
    ("attempt", "baton-router", "prefill"),
    ("attempt", "baton-router", "kv transfer"),
    ("attempt", "baton-router", "hand-over"),
    ("attempt", "baton-router", "decode"),
    ("attempt", "baton-prefill", "prefill node"),
    ("prefill node", "baton-prefill", "queue"),
    ("prefill node", "baton-prefill", "compute"),
    ("prefill node", "baton-prefill", "kv export"),
    ("attempt", "baton-decode", "decode node"),
    ("decode node", "baton-decode", "queue"),
    ("decode node", "baton-decode", "kv fetch"),
    ("decode node", "baton-decode", "decode"),
}


def whole(root: SeenSpan) -> set[tuple[str, str, str]]:
    rows = {
        (root.name if above == "ROOT" else above, service, name) for above, service, name in WHOLE
    }
    return rows | {("", "baton-router", root.name)}


async def arrived(collector: Collector, number: int, **counts: int) -> None:
    """Wait until a trace has a root, the spans that end last, and so many of other names."""
    wanted = {"prefill_node": 1, "decode_node": 1, "kv_export": 1} | counts

    async def look() -> bool:
        spans = collector.trace(f"{number:032x}")
        names = Counter(span.name.replace(" ", "_") for span in spans)
        has_root = any(span.parent_id == CLIENT for span in spans)
        return has_root and all(names[name] >= count for name, count in wanted.items())

    await eventually(look)


@pytest.mark.parametrize("collecting", [grpc_collector, http_collector])
async def test_a_trace_goes_through_router_prefill_transfer_and_decode(
    model: Path, collecting: Any
) -> None:
    protocol = "grpc" if collecting is grpc_collector else "http/protobuf"
    with collecting() as collector:
        plan = Plan(model, [CHUNKED], traces=collector.endpoint, traces_protocol=protocol)
        async with cluster(plan) as c:
            cached = {"prompt": PROMPT[::-1]}
            answers = [await ask(c, {}, **cached), await ask(c, traced(2, "00"), **cached)]
            answers.append(await ask(c, traced(1)))
            assert [answer.status_code for answer in answers] == [200, 200, 200]
            await c.settle()
            await arrived(collector, 1)  # and so what was asked before
    assert set(collector.paths) <= {"/v1/traces"}
    assert not collector.trace(f"{2:032x}"), "its client wants no trace"
    spans = collector.trace(f"{1:032x}")
    root = assert_connected(spans, CLIENT)
    assert root.is_server
    # The first if token 1 is late; the second if the answer is written before the spans are sent.
    may = {("decode node", "baton-decode", "prefilling"), (root.name, "baton-router", "reply")}
    assert edges(spans) - may == whole(root)
    [own] = {span.trace_id for span in collector.spans} - {root.trace_id}
    assert_connected(collector.trace(own))  # the router began this trace
    check_attributes(spans, root)


def check_attributes(spans: list[SeenSpan], root: SeenSpan) -> None:
    """What a trace says beside times; no text of the prompt or of the answer."""
    told = root.attributes
    assert told["gen_ai.operation.name"] == "text_completion"
    assert told["gen_ai.usage.input_tokens"] == len(PROMPT)
    assert told["gen_ai.usage.output_tokens"] == 20
    assert told["gen_ai.request.max_tokens"] == 20
    total_s = (root.end_ns - root.start_ns) / 1e9
    assert told["gen_ai.latency.e2e"] == pytest.approx(total_s, abs=1e-6)
    first_s = told["gen_ai.latency.time_to_first_token"]
    assert 0 < told["gen_ai.latency.time_in_queue"] < first_s < total_s
    assert only(spans, "compute").attributes["baton.chunks"] == 3
    assert only(spans, "compute").events == ["chunk"] * 3
    fetch, export = only(spans, "kv fetch"), only(spans, "kv export")
    assert fetch.scope == export.scope == "baton.kv_transfer"
    assert fetch.attributes["baton.kv.bytes"] == export.attributes["baton.kv.bytes"] > 0
    assert fetch.attributes["baton.kv.lane"] == "grpc"
    assert set(fetch.events) == {"layers"}
    assert "subscribed" in only(spans, "kv transfer").events
    assert export.error is None
    [decode] = [span for span in of(spans, "decode") if span.name == "decode"]
    assert decode.attributes["baton.steps"] == 20  # token 1, which it repeats, and 19 more
    assert decode.attributes["gen_ai.usage.output_tokens"] == 20
    stages = ("intake", "gate", "placement", "prefill", "hand-over", "decode", "reply")
    own = [span for span in of(spans, "router") if span.name in stages]
    own.sort(key=lambda span: stages.index(span.name))
    assert (own[0].start_ns, own[-1].end_ns) == (root.start_ns, root.end_ns)
    assert all(a.end_ns == b.start_ns for a, b in pairwise(own))


async def test_the_grpc_front_door_and_a_migration(model: Path) -> None:
    with grpc_collector() as collector:
        plan = Plan(model, decode=[{}, {}], traces=collector.endpoint)
        async with cluster(plan) as c:
            go_on = c.hold_after(8)
            params = replace(GREEDY, max_tokens=100)
            c.client._metadata = tuple(traced(3).items())  # as a client's own tracing adds it
            task = asyncio.create_task(c.client.generate(PROMPT, params))
            dispatcher = c.router.services.dispatcher

            async def decoding() -> list[str]:
                return [found.request_id for found in dispatcher.candidates() if found.decoding]

            [request_id] = await eventually(decoding)
            move = asyncio.create_task(dispatcher.migrate(request_id))
            go_on.set()
            assert await asyncio.wait_for(move, WAIT_S)
            await asyncio.wait_for(task, WAIT_S)
            await c.settle()
            await arrived(collector, 3, decode_node=2, kv_export=2)
    spans = collector.trace(f"{3:032x}")
    root = assert_connected(spans, CLIENT)
    assert root.attributes["baton.migrations"] == 1
    attempts = [span for span in spans if span.name == "attempt"]
    assert [span.error for span in attempts] == [None, None]
    nodes = [span for span in of(spans, "decode") if span.name == "decode node"]
    assert {span.attributes["baton.epoch"] for span in nodes} == {1, 2}
    assert {span.parent_id for span in nodes} == {span.span_id for span in attempts}
    exports = [span.service for span in spans if span.name == "kv export"]
    assert sorted(exports) == ["baton-decode", "baton-prefill"]
    assert ("", "migration") not in {(span.parent_id, span.name) for span in spans}
    assert only(spans, "migration").parent_id == root.span_id


async def test_a_collector_that_is_away_hurts_nobody(model: Path) -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        plan = Plan(model, traces=f"http://127.0.0.1:{taken.getsockname()[1]}")
        async with cluster(plan) as c:
            answers = await asyncio.gather(*(ask(c, traced(1)) for _ in range(8)))
            assert {answer.status_code for answer in answers} == {200}
            await c.settle()
