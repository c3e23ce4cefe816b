"""The child process that exports spans over OTLP (`python -m baton.runtime.tracing.exporter PLAN`).

It reads messages from the socket that is its stdin until the other side is gone, and gives their
spans to the batches and the exporter of OpenTelemetry's SDK. What that needs beside endpoint and
protocol (headers, certificates, compression, time-outs) it takes from the OTEL_EXPORTER_OTLP_*
variables by itself. If the collector is away, the SDK tries again for a while, then drops; the
queue is bounded. Only the encoding is ours (otlp.py).
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Final, cast
from urllib.parse import urlsplit, urlunsplit

import msgspec
from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc_exporter
from opentelemetry.exporter.otlp.proto.http import trace_exporter as http_exporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanContext, TraceFlags

from baton.runtime import log as logs
from baton.runtime.tracing.otlp import OtlpEncoder
from baton.runtime.tracing.sender import PROTOCOLS, ExportPlan
from baton.runtime.tracing.spans import TraceSpan

log = logging.getLogger(__name__)
MESSAGE_BYTES: Final = 1 << 20  # no message is longer
QUEUED_SPANS: Final = 1 << 14
BATCH_SPANS: Final = 512
DELAY_MS: Final = 1000.0  # the most that a span waits for others
FLUSHING: Final = 2 / 3  # of the time to stop
NICE: Final = 10  # serving goes first
HTTP_PATH: Final = "/v1/traces"
# The SDK's own variables, the more special one first.
PROTOCOL_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")

SpansOf = Callable[[bytes], Iterable[TraceSpan]]
decode_spans: Final = msgspec.msgpack.Decoder(list[TraceSpan]).decode


class QueuedSpan:
    """A span on its way through the SDK, which looks at nothing but the flag of its context."""

    __slots__ = ("span",)
    context: ClassVar = SpanContext(1, 1, False, TraceFlags(TraceFlags.SAMPLED))

    def __init__(self, span: TraceSpan) -> None:
        self.span = span


class SpanPump:
    """Gives the spans of messages to a processor of the SDK."""

    def __init__(self, plan: ExportPlan, exporter: SpanExporter, spans_of: SpansOf) -> None:
        self._stop_s = plan.stop_s
        self._spans_of = spans_of
        self._processor = BatchSpanProcessor(
            exporter,
            max_queue_size=QUEUED_SPANS,
            schedule_delay_millis=DELAY_MS,
            max_export_batch_size=BATCH_SPANS,
        )

    def run(self, messages: socket.socket) -> None:
        """Take messages until the other side is gone."""
        while message := messages.recv(MESSAGE_BYTES):
            try:
                for span in self._spans_of(message):
                    self._processor.on_end(cast("ReadableSpan", QueuedSpan(span)))
            except (msgspec.MsgspecError, ValueError):
                log.exception("a message of traces cannot be read")

    def close(self) -> None:
        """Send what is queued; give up before the parent does."""
        # The SDK's shutdown has no limit below 30 s.
        thread = threading.Thread(target=self._processor.shutdown, daemon=True)
        thread.start()
        thread.join(FLUSHING * self._stop_s)


def exporter_of(plan: ExportPlan, variables: Sequence[str | None] = ()) -> SpanExporter:
    """Return the SDK's exporter, with our encoding. `variables`: the values of PROTOCOL_VARIABLES.

    Changes both modules of the SDK's exporters: they encode with what has this name there.
    """
    resource = Resource.create(
        {
            "service.name": plan.service,
            "service.namespace": "baton",
            "service.instance.id": plan.instance,
            "service.version": plan.version,
        }
    )
    encoder = OtlpEncoder(dict(resource.attributes), plan.version)

    def encode_spans(queued: Sequence[QueuedSpan]) -> ExportTraceServiceRequest:
        return encoder.request([each.span for each in queued])

    for module in (grpc_exporter, http_exporter):
        module.encode_spans = encode_spans  # pyright: ignore[reportAttributeAccessIssue]
    protocol = plan.protocol or next(filter(None, variables), PROTOCOLS[0])
    if protocol == "grpc":
        return grpc_exporter.OTLPSpanExporter(endpoint=plan.endpoint)
    if protocol != "http/protobuf":
        log.warning("protocol %s is not known, http/protobuf is used", protocol)
    parts = urlsplit(plan.endpoint)
    path = HTTP_PATH if parts.path in ("", "/") else parts.path
    return http_exporter.OTLPSpanExporter(endpoint=urlunsplit(parts._replace(path=path)))


def main(argv: Sequence[str], spans_of: SpansOf = decode_spans) -> int:
    """Export what comes on stdin until its end; return the exit status."""
    # Ctrl-C reaches all processes of a terminal, systemd's SIGTERM all of a service: this one goes
    # after its parent.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    plan = msgspec.json.decode(argv[0], type=ExportPlan)
    logs.setup(f"{plan.instance} traces", plan.log_level, plan.log_format)
    exporter = exporter_of(plan, [os.environ.get(name) for name in PROTOCOL_VARIABLES])
    pump = SpanPump(plan, exporter, spans_of)
    with socket.socket(fileno=sys.stdin.fileno()) as messages:
        pump.run(messages)
    pump.close()
    logging.shutdown()
    os._exit(0)  # a thread of the SDK may still try to send


if __name__ == "__main__":
    main(sys.argv[1:])
