"""A whole request as bytes, for code that keeps requests longer than a process lives."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from baton.protocol import wire
from baton.protocol.clock import Clock
from baton.protocol.errors import InvalidRequest
from baton.protocol.request import Request
from protos import node_pb2


def request_to_bytes(request: Request, clock: Clock) -> bytes:
    """Serialize a request; its deadline is kept as the time that is left now."""
    return wire.request_to_wire(request, clock).SerializeToString()


def request_from_bytes(data: bytes, clock: Clock) -> Request:
    """Rebuild a request from bytes; the time left until its deadline is that of their making.

    Raises InvalidRequest for bytes that are no valid request.
    """
    try:
        return wire.request_from_wire(node_pb2.Request.FromString(data), clock)
    except DecodeError as error:
        raise InvalidRequest("not a request", field="request") from error
