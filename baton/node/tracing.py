"""Traces of requests on a node: what it did with a request becomes spans below its router's.

    prefill node     from the submission to token 1      (decode node: to its last token)
        queue        until the first step with its prompt, or until blocks for the KV were free
        compute      the prompt; an event per chunk
        prefilling   decode nodes: a small export is fetched only after token 1
        kv fetch     decode nodes: the KV comes from another node; an event per group of layers
        decode       from the KV's arrival, or from token 1, to the last token here
        kv export    from the offer to the release: as long as the KV's blocks are pinned

The life of `NodeTracing`: made -> begin() per request, RequestSpans.end() -> close(). A request has
RequestSpans only if its `traceparent` says that it is sampled.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Final

import msgspec

from baton.node.config import NodeConfig
from baton.protocol.clock import Clock
from baton.protocol.events import LayersCame, TokenEvent, layers_came
from baton.protocol.handles import KVHandle, Role
from baton.protocol.request import Request
from baton.runtime.tracing.sender import ExportPlan, SpanSender, SpanSink
from baton.runtime.tracing.spans import Attributes, SpanEvent, TraceContext, TraceSpan
from kv_transfer.exports import LEASE_OVER
from kv_transfer.protocol.base import KVReady

TRANSFER: Final = "baton.kv_transfer"  # the scope of both halves of a transfer
MOST_EVENTS: Final = 128  # chunks of a span; OpenTelemetry's own limit
MOST_EXPORTS: Final = 4096  # traced exports at once; the oldest are forgotten
QUEUE: Final = "queue"
COMPUTE: Final = "compute"
PREFILLING: Final = "prefilling"
FETCH: Final = "kv fetch"
DECODE: Final = "decode"


@dataclass(slots=True)
class SpanStage:
    """What a request is busy with from `start` on, until its next stage. Seconds of the clock."""

    name: str
    start: float
    attributes: Attributes
    chunks: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    layers: tuple[int, ...] = ()  # of a fetch: see NodeSpan


@dataclass(slots=True)
class RequestSpans:
    """What one request went through on this node: `stages`, each of which ends where the next one
    begins. Event loop only, but `chunk`: engine thread."""

    tracing: NodeTracing
    context: TraceContext  # of this node's span
    request: Request
    stages: list[SpanStage] = field(default_factory=list[SpanStage])
    error: str | None = None  # the code of what it failed of
    num_chunks: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0

    def enter(self, name: str, attributes: Attributes | None = None) -> None:
        """Begin the next stage. `attributes`: of the stage that ends now."""
        if attributes is not None:
            self.stages[-1].attributes.update(attributes)
        self.stages.append(SpanStage(name, self.tracing.now(), {}))

    def exported(self, handle: KVHandle, num_bytes: int) -> None:
        """Note that `handle` offers this request's KV, which has `num_bytes`."""
        self.tracing.offered(handle, self.context, num_bytes)

    def fetched(self, ready: KVReady) -> None:
        """Note that the KV is here: decoding can begin."""
        self.enter(
            DECODE,
            {
                "baton.kv.tokens": ready.num_tokens,
                "baton.kv.bytes": ready.num_bytes,
                "baton.kv.lane": ready.lane,
                "baton.kv.adopted": bool(ready.adopted),
            },
        )
        self.stages[-2].layers = ready.layers

    def chunk(self, upto_token: int) -> None:
        """Note that a step computes the prompt up to `upto_token`. Engine thread."""
        if self.stages[-1].name == QUEUE:
            self.enter(COMPUTE)
        self.num_chunks += 1
        if len(self.stages[-1].chunks) < MOST_EVENTS:
            self.stages[-1].chunks.append((self.tracing.now(), upto_token))

    def saw(self, event: TokenEvent) -> None:
        """Note a step's tokens."""
        if not self.num_steps and self.tracing.role is Role.DECODE:
            if self.stages[-1].name == COMPUTE:  # the prompt is computed here
                self.enter(DECODE)
            self.stages[-1].chunks.append((self.tracing.now(), event.position))
        self.num_steps += 1
        self.num_tokens += len(event.token_ids)
        self.cached_tokens = max(self.cached_tokens, event.num_cached_tokens)
        self.preemptions = max(self.preemptions, event.preemptions)

    def end(self, cancelled: bool) -> None:
        """Send the spans: the request has left this node."""
        self.tracing.send(spans_of(self, self.tracing.now(), cancelled))


class NodeTracing:
    """Makes the spans of a node's requests and exports, and sends them to `sink`."""

    def __init__(self, sink: SpanSink, role: Role, node_id: str, clock: Clock) -> None:
        self.role = role
        self.node_id = node_id
        self.now: Callable[[], float] = clock.monotonic
        self._sink = sink
        self._encode = msgspec.msgpack.Encoder().encode
        self._lock = threading.Lock()
        self._exports: OrderedDict[tuple[str, int], tuple[TraceContext, float, int]] = OrderedDict()

    @classmethod
    def of(cls, config: NodeConfig, role: Role, node_id: str, clock: Clock) -> NodeTracing | None:
        """Return a node's tracing, with the child that exports; None if nobody wants traces."""
        if config.otlp_traces_endpoint is None:
            return None
        plan = ExportPlan(
            config.otlp_traces_endpoint,
            config.otlp_traces_protocol,
            service=f"baton-{role.value}",
            instance=node_id,
            log_level=config.log_level,
            log_format=config.log_format,
        )
        return cls(SpanSender(plan), role, node_id, clock)

    def begin(self, request: Request, handed_over: bool) -> RequestSpans | None:
        """Return what notes the request's times; None if its trace is not wanted. `handed_over`:
        its KV comes from another node."""
        above = TraceContext.parse(request.traceparent)
        if above is None or not above.sampled:
            return None
        seen = RequestSpans(self, above.child(), request)
        # Nobody says when a decode node begins with a prompt: its wait counts as computing.
        seen.enter(COMPUTE if self.role is Role.DECODE and not handed_over else QUEUE)
        return seen

    def offered(self, handle: KVHandle, above: TraceContext, num_bytes: int) -> None:
        """Note an export that begins; its span ends with `released`."""
        with self._lock:
            key = handle.request_id, handle.export_seq
            self._exports[key] = above, self.now(), num_bytes
            if len(self._exports) > MOST_EXPORTS:
                self._exports.popitem(last=False)

    def released(self, handle: KVHandle, why: str) -> None:
        """Send the span of an export that is over. Any thread."""
        with self._lock:
            found = self._exports.pop((handle.request_id, handle.export_seq), None)
        if found is None:
            return
        above, began_at, num_bytes = found
        attributes: Attributes = {
            "baton.node": self.node_id,
            "baton.epoch": handle.epoch,
            "baton.kv.tokens": handle.num_tokens,
            "baton.kv.bytes": num_bytes,
            "baton.kv.released": why,
        }
        error = why if why == LEASE_OVER else None  # nobody wanted it
        lasted_ns = round((self.now() - began_at) * 1e9)
        end = time.time_ns()
        span = TraceSpan(
            "kv export", TRANSFER, above.child(), end - lasted_ns, end, attributes, error
        )
        self.send([span])

    def at_ns(self, at: float) -> int:
        """Return a time of the node's clock as nanoseconds since 1970."""
        return time.time_ns() - round((self.now() - at) * 1e9)

    def send(self, spans: list[TraceSpan]) -> None:
        """Send finished spans. Any thread; never waits."""
        self._sink.send(self._encode(spans))

    def close(self) -> None:
        """Wait until the child has sent what it has got. Twice is safe."""
        self._sink.close()


def spans_of(seen: RequestSpans, end: float, cancelled: bool) -> list[TraceSpan]:
    """Return the spans of a request that left its node at `end`, the node's span first."""
    tracing, stages = seen.tracing, seen.stages
    since_ns = tracing.at_ns(0.0)
    error = seen.error

    def span(context: TraceContext, name: str, start: float, until: float) -> TraceSpan:
        scope = TRANSFER if name == FETCH else f"baton.{tracing.role.value}"
        start_ns, until_ns = since_ns + round(start * 1e9), since_ns + round(until * 1e9)
        return TraceSpan(
            name, scope, context, start_ns, until_ns, error=error if until == end else None
        )

    whole = span(seen.context, f"{tracing.role.value} node", stages[0].start, end)
    attributes = _attributes(seen) | ({"baton.aborted": True} if cancelled else {})
    found = [msgspec.structs.replace(whole, attributes=attributes, server=True)]
    for stage, after in zip_longest(stages, stages[1:]):
        until = end if after is None else after.start
        told = span(seen.context.child(), stage.name, stage.start, until)
        about = stage.attributes | _progress(seen, stage.name)
        event = "first token" if stage.name == DECODE else "chunk"
        events = tuple(
            SpanEvent(event, since_ns + round(at * 1e9), {"baton.position": position})
            for at, position in stage.chunks
        )
        events += tuple(_came(each, told.start_ns) for each in layers_came(stage.layers))
        found.append(msgspec.structs.replace(told, attributes=about, events=events))
    return found


def _came(layers: LayersCame, fetch_ns: int) -> SpanEvent:
    """Return the event that the last KV of a group of layers is here, of a fetch that began at
    `fetch_ns`."""
    about: Attributes = {
        "baton.layers.first": layers.first,
        "baton.layers.last": layers.last,
        "baton.layers.seconds": (layers.end_us - layers.start_us) / 1e6,
        "baton.kv.bytes": layers.kv_bytes,
    }
    return SpanEvent("layers", fetch_ns + layers.end_us * 1000, about)


def _attributes(seen: RequestSpans) -> Attributes:
    stages, request = seen.stages, seen.request
    found: Attributes = {
        "baton.node": seen.tracing.node_id,
        "baton.epoch": request.epoch,
        "gen_ai.request.id": request.id,
        "gen_ai.usage.input_tokens": len(request.prompt_ids),
        "gen_ai.usage.output_tokens": seen.num_tokens,
        "gen_ai.usage.cache_read.input_tokens": seen.cached_tokens,
    }
    if len(stages) > 1 and stages[0].name == QUEUE:
        found["gen_ai.latency.time_in_queue"] = stages[1].start - stages[0].start
    return found


def _progress(seen: RequestSpans, stage: str) -> Attributes:
    if stage == DECODE:
        return {
            "baton.steps": seen.num_steps,
            "baton.preemptions": seen.preemptions,
            "gen_ai.usage.output_tokens": seen.num_tokens,
        }
    return {"baton.chunks": seen.num_chunks} if stage == COMPUTE and seen.num_chunks else {}
