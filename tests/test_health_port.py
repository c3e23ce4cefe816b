"""The health port: three answers, by plain HTTP, whatever the event loop does meanwhile."""

from __future__ import annotations

import asyncio
import http.client
import socket
from contextlib import ExitStack, closing

import pytest

from baton.protocol.clock import SystemClock
from baton.protocol.errors import ConfigError
from baton.runtime.health_port import Health, health_port
from baton.runtime.wsgi_server import MAX_CONNECTIONS
from tests.fakes import FakeClock

PATIENCE_S = 10.0
PATHS = ("/startupz", "/livez", "/readyz")


def answers(health: Health) -> tuple[bool | None, ...]:
    return tuple(health.answer(path) for path in PATHS)


def ask(port: int | None, method: str, path: str) -> tuple[int, bytes]:
    """Synchronously: asked on the event loop's own thread, the loop stands still meanwhile."""
    assert port is not None
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as connection:
        connection.request(method, path)
        reply = connection.getresponse()
        return reply.status, reply.read()


def test_what_a_process_says_over_its_life() -> None:
    health, state = Health(FakeClock(), 10.0), {"gets_on": True, "takes_work": False}
    assert answers(health) == (False, True, False), "it loads"
    health.started(lambda: state["gets_on"], lambda: state["takes_work"])
    assert answers(health) == (True, True, False), "it serves, and takes nothing yet"
    state["takes_work"] = True
    health.look()
    assert answers(health) == (True, True, True)
    state["takes_work"] = False  # it drains
    health.look()
    assert answers(health) == (True, True, False)
    state.update(gets_on=False, takes_work=True)  # its engine hangs
    health.look()
    assert answers(health) == (True, False, False)
    assert health.answer("/metrics") is None


@pytest.mark.parametrize("serves", [False, True])
def test_a_loop_that_stands_still_is_not_live(serves: bool) -> None:
    clock = FakeClock()
    health = Health(clock, 10.0)
    if serves:
        health.started(lambda: True, lambda: True)
    clock.advance(9.9)
    assert answers(health) == (serves, True, serves)
    clock.advance(0.1)
    assert answers(health) == (serves, False, False)
    health.look()
    assert answers(health) == (serves, True, serves)


async def test_it_is_answered_while_the_event_loop_stands_still() -> None:
    health = Health(SystemClock(), 60.0)
    async with health_port(health, "127.0.0.1", 0):
        assert ask(health.port, "GET", "/livez") == (200, b"ok\n")
        assert ask(health.port, "GET", "/startupz") == (503, b"no\n")
        health.started(lambda: True, lambda: True)
        for path in PATHS:
            assert ask(health.port, "GET", path) == (200, b"ok\n")
            assert ask(health.port, "HEAD", path) == (200, b"")
    with pytest.raises(OSError, match="refused"):
        ask(health.port, "GET", "/livez")


async def test_it_says_nothing_else_and_waits_for_nobody() -> None:
    health = Health(SystemClock(), 60.0)
    health.started(lambda: True, lambda: True)
    async with health_port(health, "127.0.0.1", 0):
        for path in ("/", "/metrics", "/health", "/livez/", "/LIVEZ", "/v1/models"):
            assert ask(health.port, "GET", path)[0] == 404
        for method in ("POST", "PUT", "DELETE"):
            assert ask(health.port, method, "/livez")[0] == 404
        assert health.port is not None
        with socket.create_connection(("127.0.0.1", health.port), timeout=PATIENCE_S) as silent:
            assert ask(health.port, "GET", "/livez")[0] == 200
            silent.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
            told = silent.makefile("rb").read()
        assert b"python" not in told.lower(), "nor what it is made of"


async def test_connections_are_bounded() -> None:
    health = Health(SystemClock(), 60.0)
    async with health_port(health, "127.0.0.1", 0):
        assert health.port is not None
        address = ("127.0.0.1", health.port)
        with ExitStack() as silent:
            for _ in range(MAX_CONNECTIONS):
                silent.enter_context(socket.create_connection(address, timeout=PATIENCE_S))
            with socket.create_connection(address, timeout=PATIENCE_S) as one_more:
                assert one_more.recv(1) == b""


async def test_it_looks_again_and_again() -> None:
    looked = asyncio.Event()
    health = Health(SystemClock(), 60.0)

    def gets_on() -> bool:
        if answers(health)[0]:
            looked.set()
        return True

    async with health_port(health, "127.0.0.1", 0):
        health.started(gets_on, lambda: True)
        looked.clear()
        async with asyncio.timeout(PATIENCE_S):
            await looked.wait()


async def test_without_a_port_nothing_looks() -> None:
    before = asyncio.all_tasks()
    async with health_port(health := Health(SystemClock(), 60.0), "127.0.0.1", None):
        assert health.port is None
        assert asyncio.all_tasks() == before


async def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(ConfigError) as caught:
            async with health_port(Health(SystemClock(), 1.0), "127.0.0.1", taken.getsockname()[1]):
                raise AssertionError("it has no port")
        assert caught.value.field == "health_port"
