"""kill -9 of a decode node, a prefill node and a router: each request is one connected trace.

What a killed process had not exported is missing: its spans of what was under way. Whoever goes on
makes the spans above them, so nothing that was exported hangs in the air.
"""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.collector import Collector, SeenSpan, assert_connected, http_collector, only
from tests.front.resumable import Reader
from tests.system.processes import Processes, ServerProcess
from tests.system.test_kill import metric
from tests.system.test_traces import BODY, CLIENT, arrived, traced
from tests.tiny_models import make_wide_model
from tests.waiting import WAIT_S, eventually

pytestmark = [pytest.mark.slow, pytest.mark.long]

NUM_TOKENS = 300
NODE_FLAGS = ("--num-kv-blocks", "96", "--metrics-port", "0")
STREAM = BODY | {
    "max_tokens": NUM_TOKENS, "stream": True, "stream_options": {"include_usage": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wide_model(tmp_path_factory.mktemp("wide"))


def traces_to(collector: Collector) -> list[str]:
    given = ["--otlp-traces-endpoint", collector.endpoint]
    return [*given, "--otlp-traces-protocol", "http/protobuf"]


def attempts_of(spans: list[SeenSpan]) -> list[SeenSpan]:
    attempts = [span for span in spans if span.name == "attempt"]
    return sorted(attempts, key=lambda span: span.attributes["baton.epoch"])


def above_nodes(spans: list[SeenSpan]) -> list[tuple[str, str]]:
    """(name, id of the span above it) of each node's span."""
    return [(span.name, span.parent_id) for span in spans if span.name.endswith(" node")]


async def test_a_decode_node_dies_in_mid_stream(model: Path, tmp_path: Path) -> None:
    with http_collector() as collector:
        flags = traces_to(collector)
        async with Processes(model, tmp_path) as processes:
            prefill, decode = await processes.nodes(1, 2, [*NODE_FLAGS, *flags])
            router = await processes.router(prefill, decode, flags)
            await stream_through_a_kill(router, decode)
            await arrived(collector, 4, attempt=2)
    spans = collector.trace(f"{4:032x}")
    root = assert_connected(spans, CLIENT)
    assert root.error is None
    assert {span.service for span in spans} == {"baton-router", "baton-prefill", "baton-decode"}
    first, last = attempts_of(spans)
    assert ["lost" in (span.error or "") for span in (first, last)] == [True, False]
    above = [parent for _, parent in above_nodes(spans)]
    assert above.count(first.span_id) == 1, "the prefill node; the dead one tells nothing"
    assert last.span_id in above
    assert only(spans, "retry").parent_id == root.span_id
    exported = [span for span in spans if span.name == "kv export" and not span.error]
    fetched = [span for span in spans if span.name == "kv fetch"]
    assert len(exported) >= 1
    assert len(fetched) <= 1


async def stream_through_a_kill(router: ServerProcess, decode: list[ServerProcess]) -> None:
    """Stream to the end; kill the node that decodes after some tokens."""
    chunks: list[dict[str, Any]] = []
    async with (
        httpx.AsyncClient(base_url=f"http://{router.address}", timeout=WAIT_S) as http,
        http.stream("POST", "/v1/completions", json=STREAM, headers=traced(4)) as answer,
    ):
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                chunks.append(json.loads(line.removeprefix("data: ")))
                if len(chunks) == 10:
                    await kill_the_busy_one(decode)
    assert chunks[-1]["usage"]["completion_tokens"] == NUM_TOKENS


async def kill_the_busy_one(decode: list[ServerProcess]) -> None:
    async def busy() -> list[ServerProcess]:
        running = [await metric(server, "vllm:num_requests_running") for server in decode]
        return [server for server, count in zip(decode, running, strict=True) if count]

    [victim] = await eventually(busy)
    await victim.kill()


async def test_a_prefill_node_dies_in_mid_prompt(model: Path, tmp_path: Path) -> None:
    """Of three chunks it has begun one. The second prefill node computes all."""
    number = 4
    with http_collector() as collector:
        flags = traces_to(collector)
        chunked = [*NODE_FLAGS, "--max-num-batched-tokens", "64", "--max-num-seqs", "8", *flags]
        async with Processes(model, tmp_path) as processes:
            dying = {"BATON_FAILPOINT": "p.mid_chunk:1:kill9"}
            doomed, spare, *decode = await asyncio.gather(
                processes.start("prefill_node", "p0", chunked, dying),
                processes.start("prefill_node", "p1", chunked),
                processes.start("decode_node", "d0", [*NODE_FLAGS, *flags]),
            )
            router = await processes.router([doomed, spare], decode, flags)
            async with httpx.AsyncClient(timeout=WAIT_S) as http:
                while doomed.process.returncode is None:  # whoever is chosen first
                    number += 1
                    url = f"http://{router.address}/v1/completions"
                    other = BODY | {"prompt": [number, *BODY["prompt"]]}  # cached nowhere
                    answer = await http.post(url, json=other, headers=traced(number))
                    assert answer.status_code == 200, answer.text
            assert await doomed.process.wait() == -signal.SIGKILL

            async def retried() -> list[int]:
                traces = ((each, collector.trace(f"{each:032x}")) for each in range(number + 1))
                return [each for each, spans in traces if len(attempts_of(spans)) == 2]

            [number] = await eventually(retried)
            await arrived(collector, number, attempt=2)
    spans = collector.trace(f"{number:032x}")
    root = assert_connected(spans, CLIENT)
    assert root.error is None
    assert root.attributes["baton.retries"] == 1
    first, last = attempts_of(spans)
    assert ["lost" in (span.error or "") for span in (first, last)] == [True, False]
    assert only(spans, "retry").parent_id == root.span_id
    [computed] = [span for span in spans if span.name == "prefill node"]
    assert (computed.instance, computed.parent_id) == ("p1", last.span_id)
    assert "p0" not in {span.instance for span in spans}, "it could not tell"
    assert only(spans, "compute").attributes["baton.chunks"] == 3
    stages = [span for span in spans if (span.service, span.name) == ("baton-router", "prefill")]
    assert {span.parent_id for span in stages} == {first.span_id, last.span_id}


@pytest.mark.redis
@pytest.mark.parametrize("headers", [traced(30), {}], ids=["of a client", "of its own"])
async def test_a_router_dies_in_mid_stream(
    model: Path, tmp_path: Path, redis_url: str, headers: dict[str, str]
) -> None:
    """Another router adopts the request, and goes on with the trace of the dead one."""
    named = {"x-baton-resumable": "60", "x-request-id": f"traced-{len(headers)}"}
    with http_collector() as collector:
        flags = traces_to(collector)
        async with (
            Processes(model, tmp_path, redis_url) as processes,
            httpx.AsyncClient(trust_env=False, timeout=WAIT_S) as http,
        ):
            await processes.nodes(1, 1, [*NODE_FLAGS, *flags])
            routers = [await processes.router([], [], flags) for _ in range(2)]

            async def can_serve() -> bool:
                urls = [f"http://{router.address}/ready" for router in routers]
                return all([(await http.get(url)).status_code == 200 for url in urls])

            await eventually(can_serve)
            url = f"http://{routers[0].address}/v1/completions"
            asked = STREAM | {"max_tokens": 150}
            reader = Reader(http, "POST", url, json=asked, headers=headers | named)
            await reader.at_least(20)
            await routers[0].kill()
            await reader.done()
            assert reader.cut
            assert len(reader.events) < 150, "the kill came too late to prove anything"
            again = f"http://{routers[1].address}/v1/requests/{named['x-request-id']}/stream"
            after = {"last-event-id": reader.events[-1][0]}

            async def read_to_its_end() -> bool:  # until it is adopted, the reader may be cut off
                rest = await Reader(http, "GET", again, headers=after).done()
                return bool(rest) and rest[-1][2] == "[DONE]"

            await eventually(read_to_its_end, 4 * WAIT_S)

            async def whole() -> bool:
                names = [name for name, _ in above_nodes(collector.spans)]
                return names.count("decode node") == len(attempts_of(collector.spans)) == 2

            await eventually(whole)
    [trace_id] = {span.trace_id for span in collector.spans}
    assert trace_id == f"{30:032x}" or not headers
    root = assert_connected(collector.spans, CLIENT if headers else "")
    assert root.error is None
    first, last = attempts_of(collector.spans)
    assert [span.error for span in (first, last)] == ["its router is gone or gave it up", None]
    above = above_nodes(collector.spans)
    assert ("prefill node", first.span_id) in above
    assert [("decode node", span.span_id) in above for span in (first, last)] == [True, True]
    routers_spans = [span for span in collector.spans if span.service == "baton-router"]
    assert len({span.instance for span in routers_spans}) == 1, "the dead one could not tell"
