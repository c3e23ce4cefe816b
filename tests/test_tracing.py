"""What every process needs for traces: the endpoint's check, the way to the child, the exporter."""

from __future__ import annotations

import importlib.util
import logging
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from baton.node.config import NodeConfig
from baton.protocol.errors import ConfigError
from baton.runtime.tracing.exporter import QueuedSpan, SpanPump, decode_spans, exporter_of
from baton.runtime.tracing.otlp import OtlpEncoder
from baton.runtime.tracing.sender import ExportPlan, SpanSender, check_endpoint
from baton.runtime.tracing.spans import Attributes, SpanEvent, TraceContext, TraceSpan
from router.config import RouterConfig
from tests.collector import grpc_collector, only
from tests.waiting import WAIT_S

ROOT = TraceContext("ab" * 16, "cd" * 8)
PLAN = ExportPlan("http://127.0.0.1:4317", None, "baton-test", "test-0", stop_s=WAIT_S)


def span(name: str, **more: Any) -> TraceSpan:
    return TraceSpan(name, "baton.test", ROOT.child(), 5_000, 9_000, **more)


@pytest.mark.parametrize("endpoint", ["localhost:4317", "ftp://x", "http://", "http://x:port", ""])
def test_an_endpoint_that_is_none(endpoint: str) -> None:
    for config in (RouterConfig(otlp_traces_endpoint=endpoint),
                   NodeConfig(otlp_traces_endpoint=endpoint)):  # fmt: skip
        with pytest.raises(ConfigError, match="http://localhost:4317") as failed:
            config.check()
        assert failed.value.field == "otlp_traces_endpoint"


def test_the_extra_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    check_endpoint(None)
    check_endpoint("http://localhost:4317")

    def gone(name: str) -> None:
        raise ModuleNotFoundError(name)

    for find in (gone, lambda _: None):
        monkeypatch.setattr(importlib.util, "find_spec", find)
        check_endpoint(None)
        with pytest.raises(ConfigError, match=r"baton\[otel\]"):
            check_endpoint("http://localhost:4317")


@pytest.mark.parametrize("ratio", [-0.1, 1.1])
def test_a_ratio_that_is_none(ratio: float) -> None:
    with pytest.raises(ConfigError, match="otlp_traces_ratio"):
        RouterConfig(otlp_traces_ratio=ratio).check()


def test_which_exporter() -> None:
    assert isinstance(exporter_of(PLAN), GrpcExporter)
    assert isinstance(exporter_of(PLAN, [None, "grpc"]), GrpcExporter)
    http = msgspec.structs.replace(PLAN, protocol="http/protobuf")
    assert isinstance(exporter_of(http, ["grpc"]), HttpExporter)
    assert isinstance(exporter_of(PLAN, ["http/protobuf", "grpc"]), HttpExporter)
    for path, full in (("", "/v1/traces"), ("/", "/v1/traces"), ("/mine", "/mine")):
        plan = msgspec.structs.replace(http, endpoint=f"http://127.0.0.1:4318{path}")
        made = exporter_of(plan)
        assert isinstance(made, HttpExporter)
        assert made._endpoint == f"http://127.0.0.1:4318{full}"


def test_an_unknown_protocol_of_the_environment(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert isinstance(exporter_of(PLAN, ["http/json"]), HttpExporter)
    assert "http/json is not known" in caplog.text


def test_messages_become_spans(caplog: pytest.LogCaptureFixture) -> None:
    memory = InMemorySpanExporter()
    pump = SpanPump(PLAN, memory, decode_spans)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        reading = threading.Thread(target=pump.run, args=(theirs,))
        reading.start()
        event = SpanEvent("chunk", 6_000, {"baton.position": 3})
        good = span("decode", attributes={"baton.steps": 2}, events=(event,))
        failed = span("attempt", error="node d was lost", server=True)
        ours.send(msgspec.msgpack.encode([good]))
        ours.send(b"nonsense")
        ours.send(msgspec.msgpack.encode([failed]))
        ours.shutdown(socket.SHUT_WR)
        reading.join()
    pump.close()
    assert "cannot be read" in caplog.text
    queued: Any = memory.get_finished_spans()
    assert [type(each) for each in queued] == [QueuedSpan, QueuedSpan]
    assert [each.span for each in queued] == [good, failed]


def test_spans_are_encoded_as_by_the_sdk() -> None:
    events = (SpanEvent("chunk", 6_000, {"baton.position": 3}), SpanEvent("none", 7_000))
    values: Attributes = {"a": True, "b": -3, "c": 0.5, "d": "naïve", "e": 1 << 40}
    spans = [
        span("decode", attributes=values, events=events),
        span("attempt", error="node d was lost", server=True),
        TraceSpan("kv export", "baton.kv_transfer", TraceContext("ab" * 16, "ef" * 8), 1, 2),
        TraceSpan("chat", "baton.test", TraceContext("ab" * 16, "ee" * 8), 1, 2, server=True),
    ]
    resource = Resource.create({"service.name": "baton-test", "baton.number": 4})
    made = OtlpEncoder(dict(resource.attributes), "1.2").request(spans)
    theirs = encode_spans([as_the_sdk_has_it(each, resource, "1.2") for each in spans])
    assert made == theirs
    listed = OtlpEncoder({"process.command_args": ("a", "b")}, "1.2").request(spans[:1])
    [value] = listed.resource_spans[0].resource.attributes
    assert value.value.string_value == "('a', 'b')"


def as_the_sdk_has_it(made: TraceSpan, resource: Resource, version: str) -> ReadableSpan:
    context = made.context
    trace_id, flags = int(context.trace_id, 16), TraceFlags(TraceFlags.SAMPLED)
    parent = None
    if context.parent_id:
        parent = SpanContext(trace_id, int(context.parent_id, 16), is_remote=made.server)
    failed = made.error is not None
    return ReadableSpan(
        name=made.name,
        context=SpanContext(trace_id, int(context.span_id, 16), False, flags),
        parent=parent,
        resource=resource,
        attributes=made.attributes,
        events=[Event(each.name, each.attributes, each.at_ns) for each in made.events],
        kind=SpanKind.SERVER if made.server else SpanKind.INTERNAL,
        status=Status(StatusCode.ERROR, made.error) if failed else Status(StatusCode.UNSET),
        start_time=made.start_ns,
        end_time=made.end_ns,
        instrumentation_scope=InstrumentationScope(made.scope, version),
    )


def test_the_child_sends_what_it_has_got() -> None:
    with grpc_collector() as collector:
        plan = msgspec.structs.replace(PLAN, endpoint=collector.endpoint)
        made = SpanSender(plan)
        made.send(msgspec.msgpack.encode([span("one")]))
        assert collector.arrived.wait(WAIT_S), "it has begun"
        made._child.send_signal(signal.SIGTERM)  # from a service manager
        made._child.send_signal(signal.SIGINT)
        made.send(msgspec.msgpack.encode([span("two")]))
        made.close()
        made.close()
        assert only(collector.spans, "one").instance == "test-0"
        assert len(collector.spans) == 2
        made.send(b"")  # too late
    assert made.num_dropped == 1


def test_a_child_that_is_busy_or_gone_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "deaf.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = SpanSender(msgspec.structs.replace(PLAN, stop_s=0.1), "deaf")
    for _ in range(1000):  # more than a socket holds
        made.send(b"x" * 4096)
    assert 0 < made.num_dropped < 1000
    assert len(caplog.records) <= 10, "a line per power of two"
    made.close()
    assert made._child.returncode is not None


def test_nothing_is_imported_without_an_endpoint() -> None:
    # redis-py looks for OpenTelemetry's API by itself; exporters are ours.
    code = (
        "import sys, router.main, baton.node.main, prefill_node.role, decode_node.role;"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry.exporter')];"
        "assert 'baton.runtime.tracing.exporter' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
