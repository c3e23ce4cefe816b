"""Whoever scrapes gets the same page: every name as declared, whatever format he prefers."""

from __future__ import annotations

import shutil
import subprocess

import httpx
import pytest
from starlette.responses import Response
from starlette.routing import Route

from baton.engine.state.stats import EngineStats
from baton.node.metrics import NodeFigures, NodeMetrics
from baton.node.metrics_server import MetricsPlace, start_metrics
from baton.protocol.handles import NodeLoad
from kv_transfer.stats import TransferStats
from router.metrics.metric_list import ROUTER
from router.metrics.router import RouterMetrics
from router.server.exchanges import OTHER, HttpMeter
from tests.front.fakes import Front
from tests.front.test_metrics_pages import Page

# What the scrapers send, by their sources (scrape/scrape.go).
ACCEPT = {
    "prometheus 2": "application/openmetrics-text;version=1.0.0,application/openmetrics-text;"
    "version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "prometheus 3": "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;"
    "escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
    "prometheus 3, escaping": "application/openmetrics-text;version=1.0.0;escaping=underscores,"
    "text/plain;version=1.0.0;escaping=underscores;q=0.5",
    "curl": "*/*",
    "nobody": "",
}
PLAIN = "text/plain; version=0.0.4; charset=utf-8"
# promtool finds fault with vLLM's names. They are what boards ask for.
VLLM_NAMES = ("metric names should not contain ':'", "vllm:iteration_tokens_total non-counter")


@pytest.mark.parametrize("accept", ACCEPT.values(), ids=ACCEPT)
def test_a_node_keeps_its_names(accept: str) -> None:
    now = NodeFigures(NodeLoad(), EngineStats(), TransferStats())
    metrics = NodeMetrics("m", "d", "decode", lambda: now)
    server = start_metrics(metrics.registry, MetricsPlace("127.0.0.1", 0))
    try:
        url = f"http://127.0.0.1:{server.port}/metrics"
        reply = httpx.get(url, headers={"accept": accept})
    finally:
        server.stop()
    assert reply.headers["content-type"] == PLAIN
    assert reply.content == metrics.render()


@pytest.mark.parametrize("accept", ACCEPT.values(), ids=ACCEPT)
async def test_a_router_keeps_its_names(accept: str) -> None:
    async with Front().client() as client:
        reply = await client.get("/metrics", headers={"accept": accept})
    assert reply.headers["content-type"] == PLAIN
    assert 'vllm:request_success_total{finished_reason="stop",model_name="tiny"} 0.0' in reply.text


async def test_answers_are_counted_by_route_and_status() -> None:
    async with Front().client() as client:
        for path in ("/v1/models", "/v1/models/tiny", "/v1/models/none", "/made/up", "/made/up2"):
            await client.get(path)
        await client.request("BREW", "/health")
        await client.post("/v1/completions", content=b"{")
        text = (await client.get("/metrics")).text
    found = {
        line.removeprefix("baton_http_requests_total")
        for line in text.splitlines()
        if line.startswith("baton_http_requests_total{")
    }
    assert found == {
        '{method="GET",route="/v1/models",status="200"} 1.0',
        '{method="GET",route="/v1/models/{name}",status="200"} 1.0',
        '{method="GET",route="/v1/models/{name}",status="404"} 1.0',
        f'{{method="GET",route="{OTHER}",status="404"}} 2.0',
        f'{{method="{OTHER}",route="/health",status="405"}} 1.0',
        '{method="POST",route="/v1/completions",status="415"} 1.0',
    }


def test_made_up_methods_and_paths_make_no_series() -> None:
    metrics = RouterMetrics()
    asked = metrics.instruments
    route = Route("/v1/models/{name:path}", lambda _: Response())
    meter = HttpMeter(asked.http_requests, asked.http_seconds, [route])
    for index in range(100):
        scope = {"method": f"M{index}", "path": f"/v1/models/{index}", "endpoint": route.endpoint}
        meter.tally(scope, 405)[0].inc()
        meter.tally({"method": "GET", "path": f"/{index}"}, 404)[0].inc()
    assert meter.known == {}
    text = metrics.render().decode()
    name = ROUTER["baton_http_requests"].names[0]
    assert f'{name}{{method="{OTHER}",route="/v1/models/{{name}}",status="405"}} 100.0' in text
    assert f'{name}{{method="GET",route="{OTHER}",status="404"}} 100.0' in text
    assert text.count(f"{name}{{") == 2


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is in Debian's prometheus")
@pytest.mark.parametrize("page", Page)
def test_promtool_finds_no_fault_but_in_names_of_vllm(page: Page) -> None:
    told = subprocess.run(
        ["promtool", "check", "metrics"],
        input=page.file.read_bytes(),
        capture_output=True,
        timeout=60,
        check=False,
    )
    lines = (told.stdout + told.stderr).decode().splitlines()
    assert [line for line in lines if not any(known in line for known in VLLM_NAMES)] == []
