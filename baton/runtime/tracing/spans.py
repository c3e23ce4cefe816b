"""Spans of requests, and the W3C trace context that joins those of several processes. Values only.

The ids of a request's root span follow from the request, so a router that adopts it goes on with
the same trace. Each epoch of the request is a span, too, whose id follows from the root's: so the
nodes get their parent (`traceparent`) before any span has ended.
Source: https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import hashlib
import os
import re
from typing import Final, TypeAlias

import msgspec

Attributes: TypeAlias = dict[str, str | bool | int | float]
_TRACEPARENT: Final = re.compile(
    "(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)
_SAMPLED: Final = 1  # of the flags
_LAST_ID: Final = (1 << 64) - 1
_SHARE_DIGITS: Final = 8  # of a trace's id: whether it is one of the share that is sampled
_SHARES: Final = 16**_SHARE_DIGITS


class TraceContext(msgspec.Struct, frozen=True, gc=False):
    """A span as other processes know it. Ids are lowercase hex, of 32 and 16 digits.

    `sampled`: whether spans below it are exported. `parent_id`: of the span above; "" if there is
    none, or if it is not known here.
    """

    trace_id: str
    span_id: str
    sampled: bool = True
    parent_id: str = ""

    @classmethod
    def parse(cls, traceparent: str) -> TraceContext | None:
        """Return the span that a `traceparent` header names; None if there is no valid one."""
        found = _TRACEPARENT.fullmatch(traceparent)
        if found is None:
            return None
        return cls(found[1], found[2], bool(int(found[3], 16) & _SAMPLED))

    @classmethod
    def root(cls, parent: TraceContext | None, name: str, ratio: float = 1.0) -> TraceContext:
        """Return the span of what is called `name`: below `parent`, which decides whether it is
        sampled, or a trace of its own, of which the share `ratio` is sampled."""
        above = "" if parent is None else parent.traceparent
        drawn = hashlib.blake2b(f"{above} {name}".encode(), digest_size=24).digest()
        # One bit less: the ids of the epochs are sums, and must not overflow or be 0.
        span_id = f"{(int.from_bytes(drawn[:8]) >> 1) + 1:016x}"
        if parent is None:
            trace_id = drawn[8:].hex()
            return cls(trace_id, span_id, int(trace_id[:_SHARE_DIGITS], 16) < ratio * _SHARES)
        return cls(parent.trace_id, span_id, parent.sampled, parent.span_id)

    def epoch(self, number: int) -> TraceContext:
        """Return the span of the request's epoch `number`, of which this is the root span."""
        span_id = f"{(int(self.span_id, 16) + number) & _LAST_ID:016x}"
        return TraceContext(self.trace_id, span_id, self.sampled, self.span_id)

    def child(self) -> TraceContext:
        """Return a new span below this one."""
        return TraceContext(self.trace_id, os.urandom(8).hex(), self.sampled, self.span_id)

    @property
    def traceparent(self) -> str:
        """The header with which another process makes spans below this one."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.sampled):02x}"


class SpanEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A moment within a span. `at_ns`: nanoseconds since 1970."""

    name: str
    at_ns: int
    attributes: Attributes = {}


class TraceSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One finished span. Times: nanoseconds since 1970. `scope`: the part of Baton that made it.

    `server`: it is a process's answer to another process. `error`: why it failed; None if it did
    not.
    """

    name: str
    scope: str
    context: TraceContext
    start_ns: int
    end_ns: int
    attributes: Attributes = {}
    error: str | None = None
    server: bool = False
    events: tuple[SpanEvent, ...] = ()
