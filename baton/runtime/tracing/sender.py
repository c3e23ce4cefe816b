"""SpanSender: hands finished spans to a child process, which exports them. Never waits.

An exporter in this process would take the interpreter from the event loop and from the engine's
thread: encoding a span takes 30 us. So the child (exporter.py) encodes and sends. It gets messages
over a socket that keeps their bounds; if that is full, a message is dropped and counted. The child
ends when the socket closes, also if this process was killed, and sends what it has got before that.
"""

from __future__ import annotations

import importlib.util
import logging
import socket
import subprocess
import sys
from typing import Final, Protocol
from urllib.parse import urlsplit

import msgspec

import baton
from baton.protocol.errors import ConfigError

log = logging.getLogger(__name__)
PROTOCOLS: Final = ("grpc", "http/protobuf")
SCHEMES: Final = ("http", "https", "grpc")
EXPORTER: Final = "baton.runtime.tracing.exporter"
PACKAGES: Final = (
    "opentelemetry.sdk",
    "opentelemetry.exporter.otlp.proto.grpc",
    "opentelemetry.exporter.otlp.proto.http",
)
STOP_S: Final = 3.0


class ExportPlan(msgspec.Struct, frozen=True):
    """Where a process's spans go, and whose they are.

    `protocol` None: as OTEL_EXPORTER_OTLP_TRACES_PROTOCOL says, else grpc. `service` and `instance`
    name the process in traces. `stop_s`: how long a stopping process waits for its child, which
    gives up sending a little earlier.
    """

    endpoint: str
    protocol: str | None
    service: str
    instance: str
    version: str = baton.__version__
    log_level: str = "info"
    log_format: str = "text"
    stop_s: float = STOP_S


def check_endpoint(endpoint: str | None) -> None:
    """Raise ConfigError if traces are wanted, but cannot be exported to `endpoint`."""
    if endpoint is None:
        return
    field = "otlp_traces_endpoint"
    try:
        parts = urlsplit(endpoint)
        known = parts.scheme in SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:
        known = False
    if not known:
        text = f"--otlp-traces-endpoint: {endpoint!r} is not like http://localhost:4317"
        raise ConfigError(text, field=field)
    if not all(map(_is_installed, PACKAGES)):
        text = "--otlp-traces-endpoint needs OpenTelemetry: pip install 'baton[otel]'"
        raise ConfigError(text, field=field)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # not even the package around it
        return False


class SpanSink(Protocol):
    """Whatever takes messages with spans."""

    def send(self, message: bytes) -> None: ...

    def close(self) -> None: ...


class SpanSender:
    """The child and the way to it. The life: made (starts the child) -> send() -> close()."""

    def __init__(self, plan: ExportPlan, module: str = EXPORTER) -> None:
        """Start `python -m module`, which reads messages and exports their spans as `plan` says."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self.num_dropped = 0
        self._stop_s = plan.stop_s
        with theirs:
            command = [sys.executable, "-m", module, msgspec.json.encode(plan).decode()]
            self._child = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL
            )

    def send(self, message: bytes) -> None:
        """Hand a message to the child, or drop it. Any thread; never waits, never raises."""
        try:
            self._socket.send(message)
        except (BlockingIOError, OSError) as error:
            self._dropped(error)

    def _dropped(self, error: OSError) -> None:
        self.num_dropped += 1
        # Not at each one: a child that is busy or gone would fill the log.
        if self.num_dropped & (self.num_dropped - 1) == 0:
            log.warning("%d messages of traces were dropped so far: %s", self.num_dropped, error)

    def close(self) -> None:
        """Let the child send what it has got, and wait for its end. Calling it twice is safe."""
        self._socket.close()
        try:
            self._child.wait(self._stop_s)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
