"""A whole request as bytes, for what keeps it over the life of a process. Not here: who does."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from baton.protocol import wire
from baton.protocol.clock import Clock
from baton.protocol.errors import InvalidRequest
from baton.protocol.request import Request
from protos import node_pb2


def request_to_bytes(request: Request, clock: Clock) -> bytes:
    """Its deadline is kept as what is left of it now."""
    return wire.request_to_wire(request, clock).SerializeToString()


def request_from_bytes(data: bytes, clock: Clock) -> Request:
    """Its deadline as if no time had passed. Raises InvalidRequest."""
    try:
        return wire.request_from_wire(node_pb2.Request.FromString(data), clock)
    except DecodeError as error:
        raise InvalidRequest("not a request", field="request") from error
