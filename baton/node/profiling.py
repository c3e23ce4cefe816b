"""POST /debug/profile?seconds= on a node's metrics port: a trace of its engine's steps.

Off unless `--profiling`. The answer is torch's trace in Chrome's format, for chrome://tracing or
Perfetto: names of operators with their times, nothing of a request. One at a time, and short: the
profiler slows the steps down, and makes its events on the engine thread at the end.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs
from wsgiref.types import StartResponse, WSGIEnvironment

import torch
from torch.profiler import ProfilerActivity, profile

from baton.engine.core.engine import Engine
from baton.engine.thread import EngineThread
from baton.protocol.errors import BatonError, InvalidRequest, Overloaded

log = logging.getLogger(__name__)
PATH: Final = "/debug/profile"
MOST_S: Final = 10.0
DEFAULT_S: Final = 2.0
END_S: Final = 60.0  # for the step under way, and for the events
_STATUS: Final = {400: "400 Bad Request", 429: "429 Too Many Requests", 503: "503 Unavailable"}


class EngineProfiler:
    """Traces the steps of one engine. `loop`: the node's event loop."""

    def __init__(self, thread: EngineThread, loop: asyncio.AbstractEventLoop) -> None:
        self._thread = thread
        self._loop = loop
        self._one = threading.Lock()

    def trace(self, seconds: float) -> bytes:
        """Return the gzipped trace of the next `seconds`. Blocks; any thread but the loop's.

        Raises Overloaded while another trace is made, Unavailable when the engine is stopped.
        """
        if not self._one.acquire(blocking=False):
            raise Overloaded("another profile is being made")
        try:
            done = asyncio.run_coroutine_threadsafe(self._record(seconds), self._loop)
            recorded = done.result(seconds + END_S)
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "trace.json.gz"
                recorded.export_chrome_trace(str(file))
                return _zipped(file.read_bytes())
        finally:
            self._one.release()

    async def _record(self, seconds: float) -> profile:
        recorder = await self._thread.call(_start)
        log.info("profiling for %g s", seconds)
        try:
            await asyncio.sleep(seconds)
        finally:
            await self._thread.call(lambda _: recorder.stop())
        return recorder

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer as a WSGI app: the trace, or the error's message."""
        try:
            body = self.trace(_asked(environ))
        except BatonError as error:
            status = _STATUS.get(error.http_status, "500 Internal Server Error")
            start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
            return [error.message.encode()]
        headers = [("Content-Type", "application/json"), ("Content-Encoding", "gzip")]
        start_response("200 OK", [*headers, ("Content-Length", str(len(body)))])
        return [body]


def _asked(environ: WSGIEnvironment) -> float:
    """Return the seconds that a request asks for. Raises InvalidRequest."""
    if environ.get("REQUEST_METHOD") != "POST" or environ.get("HTTP_ORIGIN"):
        raise InvalidRequest(f"POST {PATH}, and not from a web page")
    text = parse_qs(str(environ.get("QUERY_STRING", ""))).get("seconds", [str(DEFAULT_S)])[0]
    try:
        seconds = float(text)
    except ValueError as error:
        raise InvalidRequest("seconds: a number", field="seconds") from error
    if not 0 < seconds <= MOST_S:
        raise InvalidRequest(f"seconds: above 0, at most {MOST_S:g}", field="seconds")
    return seconds


def _start(_: Engine) -> profile:
    """Begin to record on the engine thread, whose operators are those of the steps."""
    activities: list[Any] = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    recorder = profile(activities=activities)
    recorder.start()
    return recorder


def _zipped(data: bytes) -> bytes:
    return data if data.startswith(b"\x1f\x8b") else gzip.compress(data, 1)
