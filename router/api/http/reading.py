"""Read the bodies of HTTP requests, within limits. router/api/openai/bodies.py parses them."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from email.message import Message
from functools import lru_cache
from typing import Any, Final, cast

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.routing import Route
from starlette.types import Scope

from baton.protocol.errors import Cancelled
from router.api.http.preparing import wait_to_read

MAX_BODY_BYTES: Final = 8 << 20
MAX_OBJECTS: Final = 1 << 16  # objects and lists of a body; parsing so many takes some 50 ms
MAX_VALUES: Final = 1 << 20
_LIMIT: Final = "baton.most_body_bytes"
_TEXT: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')


@lru_cache(maxsize=64)  # the parser of email.message is slow, and clients send few different types
def _fault_of(content_type: str, content_encoding: str) -> HTTPException | None:
    """Return the error (415) for a body that is not declared as plain JSON in UTF-8, else None."""
    # For application/json a browser sends a CORS preflight before a foreign web page may post.
    if content_type.partition(";")[0].strip().lower() != "application/json":
        return HTTPException(415, "the content-type must be application/json")
    if content_encoding.strip().lower() not in ("", "identity"):
        # RFC 9110, 15.5.16: accept-encoding says which encodings are supported.
        headers = {"accept-encoding": "identity"}
        return HTTPException(415, "the content-encoding is not supported: send it plain", headers)
    message = Message()
    message["content-type"] = content_type
    if message.get_content_charset("utf-8") not in ("utf-8", "utf8", "us-ascii"):
        return HTTPException(415, "the charset must be utf-8")
    return None


def with_body_limit(route: Route, most_bytes: int) -> Route:
    """Return a POST route whose bodies may have so many bytes, instead of MAX_BODY_BYTES."""
    endpoint = cast("Callable[[HttpRequest], Awaitable[Any]]", route.endpoint)
    if route.methods != {"POST"}:
        return route

    def limited(request: HttpRequest) -> Awaitable[Any]:
        request.scope[_LIMIT] = most_bytes
        return endpoint(request)

    return Route(route.path, limited, methods=["POST"])


def most_body_bytes(scope: Scope) -> int:
    """Return how many bytes a request's body may have."""
    found: int = scope.get(_LIMIT, MAX_BODY_BYTES)
    return found


async def read_body(request: HttpRequest) -> bytes:
    """Return the complete body of a request, unparsed.

    Raises HTTPException (413 too large, 415 not JSON), Cancelled, Overloaded."""
    kind = encoding = length = b""
    for name, value in request.scope["headers"]:  # Starlette's Headers decodes all of them
        if name == b"content-type":
            kind = value
        elif name == b"content-encoding":
            encoding = value
        elif name == b"content-length":
            length = value
    fault = _fault_of(kind.decode("latin-1"), encoding.decode("latin-1"))
    if fault is not None:
        raise HTTPException(fault.status_code, fault.detail, fault.headers)
    if length.isdigit():
        await wait_to_read(request.scope, int(length))
    parts: list[bytes] = []
    most_bytes: int = request.scope.get(_LIMIT, MAX_BODY_BYTES)
    num_bytes, more = 0, True
    while more:  # not request.stream(): its asynchronous generator would cost more than this loop
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client went away")
        parts.append(message.get("body", b""))
        num_bytes += len(parts[-1])
        more = message.get("more_body", False)
        if num_bytes > most_bytes:
            raise HTTPException(
                413, f"the body exceeds {most_bytes} bytes", {"connection": "close"}
            )
    raw = parts[0] if len(parts) == 1 else b"".join(parts)
    if num_bytes > MAX_OBJECTS:
        _check_values(raw)
    return raw


def _check_values(raw: bytes) -> None:
    """Raise HTTPException (413) if the body has so many values that parsing would block the event
    loop for long."""
    counts = _counts(raw)
    if counts[0] > MAX_OBJECTS or counts[1] > MAX_VALUES:
        counts = _counts(_TEXT.sub(b"", raw))  # count again without the contents of strings
    for what, count, most in zip(
        ("objects and lists", "values"), counts, (MAX_OBJECTS, MAX_VALUES), strict=True
    ):
        if count > most:
            raise HTTPException(413, f"the body has more than {most} {what}")


def _counts(raw: bytes) -> tuple[int, int]:
    return raw.count(b"{") + raw.count(b"["), raw.count(b",")
