"""Bodies of HTTP requests, read within their limit; parsing is router/api/openai/bodies.py's."""

from __future__ import annotations

import re
from email.message import Message
from functools import lru_cache
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest

from baton.protocol.errors import Cancelled
from router.api.http.preparing import wait_to_read

MAX_BODY_BYTES: Final = 8 << 20
MAX_OBJECTS: Final = 1 << 16  # and lists: some 50 ms to read
MAX_VALUES: Final = 1 << 20
_TEXT: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')


@lru_cache(maxsize=64)  # parsed by the library of mails, and clients say one of very few
def _fault_of(content_type: str) -> str:
    """What is wrong with it, empty for nothing."""
    # Only JSON by name: a foreign web page then cannot post here without a CORS preflight.
    if content_type.partition(";")[0].strip().lower() != "application/json":
        return "the content-type must be application/json"
    message = Message()
    message["content-type"] = content_type
    charset = message.get_content_charset("utf-8")
    return "" if charset in ("utf-8", "utf8", "us-ascii") else "the charset must be utf-8"


def _check_head(request: HttpRequest) -> None:
    """Raise HTTPException (415) for bytes that are not JSON, or not in its own UTF-8."""
    kind = encoding = ""
    for name, value in request.scope["headers"]:  # Starlette's Headers decodes all of them
        if name == b"content-type":
            kind = value.decode("latin-1")
        elif name == b"content-encoding":
            encoding = value.decode("latin-1").strip().lower()
    fault = _fault_of(kind)
    if encoding not in ("", "identity") and not fault.startswith("the content-type"):
        # RFC 9110, 15.5.16: says what would be understood.
        headers = {"accept-encoding": "identity"}
        raise HTTPException(415, "the content-encoding is not supported: send it plain", headers)
    if fault:
        raise HTTPException(415, fault)


async def read_body(request: HttpRequest) -> bytes:
    """The whole JSON body. Raises HTTPException (413, 415), Cancelled, Overloaded."""
    _check_head(request)
    await wait_to_read(request.scope)
    parts: list[bytes] = []
    num_bytes, more = 0, True
    while more:  # not request.stream(): an asynchronous generator costs more than what is read
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client went away")
        parts.append(message.get("body", b""))
        num_bytes += len(parts[-1])
        more = message.get("more_body", False)
        if num_bytes > MAX_BODY_BYTES:
            raise HTTPException(
                413, f"the body exceeds {MAX_BODY_BYTES} bytes", {"connection": "close"}
            )
    raw = parts[0] if len(parts) == 1 else b"".join(parts)
    if num_bytes > MAX_OBJECTS:
        _check_values(raw)
    return raw


def _check_values(raw: bytes) -> None:
    """Raise HTTPException (413) for what would take long to read: no stream goes on meanwhile."""
    counts = _counts(raw)
    if counts[0] > MAX_OBJECTS or counts[1] > MAX_VALUES:
        counts = _counts(_TEXT.sub(b"", raw))  # what stands in texts is no structure
    for what, count, most in zip(
        ("objects and lists", "values"), counts, (MAX_OBJECTS, MAX_VALUES), strict=True
    ):
        if count > most:
            raise HTTPException(413, f"the body has more than {most} {what}")


def _counts(raw: bytes) -> tuple[int, int]:
    return raw.count(b"{") + raw.count(b"["), raw.count(b",")
