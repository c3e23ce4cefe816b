"""Responses in the background with real processes and a real Redis: a router is killed with kill -9
and another one goes on; one is cancelled through a router that does not run it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from tests.clients.agent_model import DEMO
from tests.system.processes import Processes, ServerProcess
from tests.waiting import WAIT_S, eventually

pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.long]

LONG_S = 4 * WAIT_S
BODY: dict[str, Any] = {
    "input": "What is prefill?",
    "temperature": 0,
    "ignore_eos": True,
    "max_output_tokens": 400,
}


async def ended(http: httpx.AsyncClient, url: str) -> dict[str, Any]:
    async def over() -> dict[str, Any] | None:
        reply = await http.get(url)
        if reply.status_code == 503:
            return None  # on a busy machine the store may be late
        assert reply.status_code == 200, reply.text
        found = reply.json()
        return None if found["status"] in ("queued", "in_progress") else found

    found = await eventually(over, LONG_S)
    assert found is not None
    return found


async def test_another_router_cancels_one_and_goes_on_with_one(
    tmp_path: Path, redis_url: str
) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    async with (
        Processes(DEMO, tmp_path, redis_url) as processes,
        httpx.AsyncClient(trust_env=False, timeout=LONG_S) as http,
    ):
        prefill, decode = await processes.nodes(1, 1, ["--num-kv-blocks", "256"])
        routers: list[ServerProcess] = list(
            await asyncio.gather(*(processes.router(prefill, decode) for _ in range(2)))
        )
        one, two = (f"http://{router.address}" for router in routers)

        async def can_serve() -> bool:
            urls = (f"{one}/ready", f"{two}/ready")
            return all([(await http.get(url)).status_code == 200 for url in urls])

        async def begin() -> str:
            """Where router two tells of a response that router one runs."""
            begun = (
                await http.post(f"{one}/v1/responses", json={**BODY, "background": True})
            ).json()
            place = f"{two}/v1/responses/{begun['id']}"

            async def running() -> bool:
                return (await http.get(place)).json()["status"] == "in_progress"

            await eventually(running)
            return place

        async def idle() -> bool:
            return (await http.get(f"{one}/load")).json()["server_load"] == 0

        await eventually(can_serve)
        plain = (await http.post(f"{two}/v1/responses", json=BODY)).json()
        place = await begin()
        assert (await http.post(f"{place}/cancel")).json()["status"] == "cancelled"
        await eventually(idle)
        assert (await http.get(place)).json()["status"] == "cancelled"
        place = await begin()
        await routers[0].kill()
        found = await ended(http, place)
        assert found["status"] == "incomplete"
        assert _text(found) == _text(plain)
        again = {"input": "Go on.", "previous_response_id": found["id"], "max_output_tokens": 4}
        reply = await http.post(f"{two}/v1/responses", json=again)
        assert reply.json()["usage"]["input_tokens"] > found["usage"]["total_tokens"]


def _text(response: dict[str, Any]) -> str:
    return response["output"][0]["content"][0]["text"]
