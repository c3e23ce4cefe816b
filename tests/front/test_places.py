"""Where the front door stands: below a prefix (--root-path), on a Unix socket (--uds)."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from baton.protocol.errors import ConfigError
from router.config import RouterConfig
from router.main import http_server
from router.server.listeners import listen, release
from tests.front.fakes import Front

BODY = {"prompt": "x", "max_tokens": 2}


async def test_everything_is_there_with_the_prefix_and_without() -> None:
    front = Front(config=RouterConfig(root_path="/a/llm", api_key=("key",)))
    async with front.client() as stranger, front.client(authorization="Bearer key") as client:
        for prefix in ("", "/a/llm"):
            reply = await client.post(f"{prefix}/v1/completions", json=BODY)
            assert reply.status_code == 200
            assert (await stranger.post(f"{prefix}/v1/completions", json=BODY)).status_code == 401
            assert (await stranger.get(f"{prefix}/health")).status_code == 200
            wrong = await client.post(f"{prefix}/v1/messages", json={})
            assert wrong.json()["type"] == "error", "in Anthropic's words"
        for path in ("/a/llmx/health", "/a/llm", "/a/llm/a/llm/health", "/llm/health"):
            assert (await stranger.get(path)).status_code == 401
            assert (await client.get(path)).status_code == 404
        document = (await client.get("/a/llm/openapi.json")).json()
    assert document["servers"] == [{"url": "/a/llm"}]


@pytest.mark.parametrize("prefix", ["llm", "/llm/", "/", "/a b", "/a?b"])
def test_what_is_no_prefix(prefix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RouterConfig(root_path=prefix).check()
    assert caught.value.field == "root_path"


async def ask_over(path: str, body: dict[str, Any]) -> httpx.Response:
    transport = httpx.AsyncHTTPTransport(uds=path)
    async with httpx.AsyncClient(transport=transport, base_url="http://baton") as client:
        return await client.post("/v1/completions", json=body)


async def serve_on(path: str) -> list[httpx.Response]:
    config = RouterConfig(uds=path)
    listener = listen(config)
    server = http_server(config, Front(config=config).app())
    serving = asyncio.create_task(server.serve([listener]))
    try:
        await asyncio.wait_for(server.began.wait(), 30)
        return [await ask_over(path, BODY), await ask_over(path, {**BODY, "stream": True})]
    finally:
        server.should_exit = server.force_exit = True
        await serving
        release(config)


def test_a_unix_socket_serves_as_a_port_does(tmp_path: Path) -> None:
    path = str(tmp_path / "baton.sock")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        whole, streamed = runner.run(asyncio.wait_for(serve_on(path), 60))
    assert whole.json()["choices"][0]["finish_reason"] == "length"
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert not Path(path).exists()


def test_a_socket_of_a_dead_router_makes_room_and_one_in_use_does_not(tmp_path: Path) -> None:
    path = str(tmp_path / "baton.sock")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    config = RouterConfig(uds=path)
    with listen(config), pytest.raises(ConfigError, match="somebody listens") as caught:
        listen(config)
    assert caught.value.field == "uds"
    release(config)
    release(config)
    (tmp_path / "baton.sock").write_text("a file of somebody's")
    with pytest.raises(ConfigError):
        listen(config)
    assert (tmp_path / "baton.sock").read_text() == "a file of somebody's"
    with pytest.raises(ConfigError, match="one worker"):
        RouterConfig(uds=path, workers=2, redis_url="redis://h").check()
