"""A real OTLP collector on loopback, over gRPC or HTTP, that keeps all spans it gets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

Attributes = dict[str, Any]


@dataclass(frozen=True)
class SeenSpan:
    """One span as the collector got it. Times: nanoseconds since 1970. `error`: the message of its
    status, None if that is no error."""

    service: str
    instance: str
    scope: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: Attributes
    error: str | None
    is_server: bool
    events: list[str]


@dataclass
class Collector:
    """What has arrived. `endpoint`: where to send it."""

    endpoint: str = ""
    requests: list[trace_service_pb2.ExportTraceServiceRequest] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    arrived: threading.Event = field(default_factory=threading.Event)

    @property
    def spans(self) -> list[SeenSpan]:
        return [span for request in self.requests for span in _spans(request)]

    def trace(self, trace_id: str) -> list[SeenSpan]:
        return [span for span in self.spans if span.trace_id == trace_id]


def assert_connected(spans: list[SeenSpan], above: str = "") -> SeenSpan:
    """Prove that the spans are one tree; return its root, which lies below the span `above`."""
    ids = {span.span_id: span for span in spans}
    assert len(ids) == len(spans), "a span came twice"
    [root] = [span for span in spans if span.parent_id == above]
    for span in spans:
        assert span.start_ns <= span.end_ns
        assert span is root or span.parent_id in ids, f"{span.name} has no parent"
    return root


def edges(spans: list[SeenSpan]) -> set[tuple[str, str, str]]:
    """Of each span: the name of its parent ("" for the root), its service, its name."""
    names = {span.span_id: span.name for span in spans}
    return {(names.get(span.parent_id, ""), span.service, span.name) for span in spans}


def only(spans: list[SeenSpan], name: str) -> SeenSpan:
    [span] = [span for span in spans if span.name == name]
    return span


@contextmanager
def grpc_collector() -> Iterator[Collector]:
    """Receive over gRPC until the end of the block."""
    collector = Collector()

    class Service(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            collector.requests.append(request)
            collector.arrived.set()
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()


@contextmanager
def http_collector() -> Iterator[Collector]:
    """Receive over HTTP until the end of the block."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            request = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
            collector.paths.append(self.path)
            collector.requests.append(request)
            collector.arrived.set()
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _spans(request: trace_service_pb2.ExportTraceServiceRequest) -> Iterator[SeenSpan]:
    for of_resource in request.resource_spans:
        resource = _values(of_resource.resource.attributes)
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                failed = span.status.code == trace_pb2.Status.STATUS_CODE_ERROR
                yield SeenSpan(
                    service=resource["service.name"],
                    instance=resource["service.instance.id"],
                    scope=of_scope.scope.name,
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    attributes=_values(span.attributes),
                    error=span.status.message if failed else None,
                    is_server=span.kind == trace_pb2.Span.SPAN_KIND_SERVER,
                    events=[event.name for event in span.events],
                )


def _values(attributes: Any) -> Attributes:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: common_pb2.AnyValue) -> Any:
    kind = value.WhichOneof("value")
    assert kind is not None
    return getattr(value, kind)
