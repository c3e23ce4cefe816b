"""The end of the HTTP server: what clients asked while the event loop was busy is answered."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send

from router.server.http_guard import HttpLimits, uvicorn_settings
from router.server.listeners import HttpServer

REQUEST = b"GET / HTTP/1.1\r\nHost: router\r\n\r\n"
NUM_CLIENTS = 8


async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
    length = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": length})
    await send({"type": "http.response.body", "body": b"ok"})


async def started(date_s: float = 1.0) -> tuple[HttpServer, asyncio.Task[None], tuple[str, int]]:
    settings = uvicorn_settings(HttpLimits())
    server = HttpServer(uvicorn.Config(app, log_config=None, lifespan="off", **settings))
    server.date_s = date_s
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server.serve([listener]))
    await server.began.wait()
    return server, serving, listener.getsockname()


def connect(address: tuple[str, int]) -> socket.socket:
    """Connect while the event loop stands still: the kernel alone accepts."""
    client = socket.create_connection(address)
    client.setblocking(False)
    return client


async def answer(client: socket.socket) -> bytes:
    """Return all bytes until the server closes."""
    loop, got = asyncio.get_running_loop(), b""
    with client:
        while part := await loop.sock_recv(client, 4096):
            got += part
    return got


def on_each_loop(check: Callable[[], Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a test of `check`, on asyncio's loop and on the router's."""

    @pytest.mark.parametrize(
        "make_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
    )
    def test(make_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
        with asyncio.Runner(loop_factory=make_loop) as runner:
            runner.run(asyncio.wait_for(check(), 30))

    return test


@on_each_loop
async def test_requests_that_nobody_has_read_are_answered() -> None:
    server, serving, address = await started()
    clients = [connect(address) for _ in range(NUM_CLIENTS)]
    for client in clients:
        client.sendall(REQUEST)
    server.should_exit = True
    time.sleep(0.2)  # noqa: ASYNC251 - the loop stands still; its timers are due afterwards
    answers = await asyncio.gather(*map(answer, clients))
    assert all(each.startswith(b"HTTP/1.1 200") for each in answers)
    await serving


@on_each_loop
async def test_a_request_that_comes_after_the_listener_closed_is_answered() -> None:
    server, serving, address = await started()
    client = connect(address)
    server.should_exit = True
    while True:  # until nobody listens
        try:
            late = socket.create_connection(address)
        except OSError:
            break
        late.close()
        await asyncio.sleep(0.01)
    client.sendall(REQUEST)
    assert (await answer(client)).startswith(b"HTTP/1.1 200")
    await serving


@on_each_loop
async def test_a_connection_that_asks_nothing_does_not_hold_the_server() -> None:
    server, serving, address = await started()
    client = connect(address)
    server.should_exit = True
    await serving
    assert await answer(client) == b""


@on_each_loop
async def test_it_sleeps_until_it_must_end() -> None:
    server, serving, address = await started(date_s=1e6)  # only the wish to end wakes it
    client = connect(address)
    client.sendall(REQUEST)
    assert b"\r\ndate: " in await asyncio.get_running_loop().sock_recv(client, 4096)
    client.close()
    server.should_exit = True
    await serving
