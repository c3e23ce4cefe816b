"""A trace of a real engine's steps over the metrics port; off unless it is asked for."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
from prometheus_client import CollectorRegistry

from baton.node.metrics_server import MetricsPlace, start_metrics
from baton.node.profiling import EngineProfiler
from baton.protocol.sampling import SamplingParams
from tests.cluster import Plan, cluster
from tests.tiny_models import make_tiny_model
from tests.waiting import eventually


async def test_a_profile_shows_the_operators_of_the_steps(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path, max_position_embeddings=512, seed=3)
    params = SamplingParams(temperature=0.0, seed=1, max_tokens=300, ignore_eos=True)
    async with cluster(Plan(tmp_path)) as c:
        thread = c.decode[0].node.shell.thread
        profiler = EngineProfiler(thread, asyncio.get_running_loop())
        server = start_metrics(CollectorRegistry(), MetricsPlace("127.0.0.1", 0), profiler)
        try:
            base = f"http://127.0.0.1:{server.port}"
            async with httpx.AsyncClient(base_url=base, timeout=60.0) as client:
                for query in ("seconds=0", "seconds=11", "seconds=x", "seconds=nan"):
                    bad = await client.post(f"/debug/profile?{query}")
                    assert bad.status_code == 400, query
                assert (await client.get("/debug/profile")).status_code == 400
                web = {"origin": "http://elsewhere"}
                assert (await client.post("/debug/profile", headers=web)).status_code == 400
                assert (await client.post("/debug/other")).status_code == 404
                assert (await client.get("/metrics")).status_code == 200

                stop = asyncio.Event()

                async def work() -> None:
                    while not stop.is_set():
                        await c.generate([[5, 6, 7]], params)

                busy = asyncio.create_task(work())
                trace = asyncio.create_task(client.post("/debug/profile?seconds=1"))

                async def is_made() -> bool:
                    return profiler._one.locked()

                await eventually(is_made)
                second = await client.post("/debug/profile?seconds=1")
                assert second.status_code == 429
                reply = await trace
                stop.set()
                await busy
                assert reply.status_code == 200
                events = json.loads(reply.content)["traceEvents"]
                names = {str(each.get("name")) for each in events}
                assert any(name.startswith("aten::") for name in names)
                assert (await client.post("/debug/profile?seconds=0.01")).status_code == 200
        finally:
            server.stop()


def test_without_the_option_there_is_no_such_route() -> None:
    server = start_metrics(CollectorRegistry(), MetricsPlace("127.0.0.1", 0, lambda: ["token"]))
    try:
        url = f"http://127.0.0.1:{server.port}/debug/profile"
        assert httpx.post(url).status_code == 401
        headers = {"authorization": "Bearer token"}
        assert httpx.post(url, headers=headers).status_code == 404
    finally:
        server.stop()
