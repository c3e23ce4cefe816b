"""The health port: a process's answers to health probes over plain HTTP, and nothing else.

    GET /startupz   the process has started: its model is loaded, its other ports are open
    GET /livez      the process is alive: its event loop turned within `stall_s`, and its engine, if
                    any, makes progress (baton/node/progress.py). If not, only a restart helps
    GET /readyz     the process is alive, has started, does not drain, and would take new work

200 is yes, 503 no. The port is open from the process's first moment, without TLS and keys. Its own
threads answer from what the event loop noted last, so a busy loop, a busy machine or mutual TLS do
not make a healthy process look ill. Not here: grpc.health.v1, and a router's /health and /ready,
which answer clients.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Final
from wsgiref.types import StartResponse, WSGIEnvironment

from baton.protocol.clock import Clock
from baton.protocol.errors import ConfigError
from baton.runtime.wsgi_server import RunningServer

log = logging.getLogger(__name__)
INTERVAL_S: Final = 0.5
Question = Callable[[], bool]
_STATUS: Final = {True: "200 OK", False: "503 Service Unavailable", None: "404 Not Found"}


class Health:
    """The health of a process. Written on its event loop, read from any thread.

    Life: made -> run() as a task -> started(), once the process serves.
    """

    def __init__(self, clock: Clock, stall_s: float) -> None:
        self.port: int | None = None  # the port on which it is served
        self._clock = clock
        self._stall_s = stall_s
        self._questions: tuple[Question, Question] | None = None
        self._looked_at = clock.monotonic()
        self._gets_on, self._takes_work = True, False

    def started(self, gets_on: Question, takes_work: Question) -> None:
        """Note that the process serves; from now on `look` asks both questions on the event
        loop.
        """
        self._questions = gets_on, takes_work
        self.look()

    def look(self) -> None:
        """Ask whether the process makes progress and takes work; keep both answers and the time."""
        self._looked_at = self._clock.monotonic()
        if self._questions is not None:
            gets_on, takes_work = self._questions
            self._gets_on, self._takes_work = gets_on(), takes_work()

    async def run(self) -> None:
        """Call `look` periodically until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(INTERVAL_S)

    def answer(self, path: str) -> bool | None:
        """Return the answer of a path; None if there is no such path."""
        live = self._gets_on and self._clock.monotonic() - self._looked_at < self._stall_s
        match path:
            case "/startupz":
                return self._questions is not None
            case "/livez":
                return live
            case "/readyz":
                return live and self._takes_work
            case _:
                return None

    def page(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer an HTTP request; a WSGI application."""
        known = environ["REQUEST_METHOD"] in ("GET", "HEAD")
        answer = self.answer(environ["PATH_INFO"]) if known else None
        body = b"ok\n" if answer else b"no\n"
        headers = {
            "content-type": "text/plain",
            "content-length": str(len(body)),
            "server": "baton",
        }
        start_response(_STATUS[answer], list(headers.items()))
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]


@asynccontextmanager
async def health_port(health: Health, host: str, port: int | None) -> AsyncGenerator[None, None]:
    """Run `health` and serve it on `port` while the block runs. With None do neither.

    Raises ConfigError if the port cannot be bound.
    """
    if port is None:
        yield
        return
    try:
        server = RunningServer.start(health.page, host, port)
    except OSError as error:
        text = f"cannot bind the health port {host}:{port}: {error}"
        raise ConfigError(text, field="health_port") from error
    health.port = server.port
    log.info("health port: %d", server.port)
    looking = asyncio.create_task(health.run(), name="health port")
    try:
        yield
    finally:
        looking.cancel()
        await asyncio.to_thread(server.stop)
