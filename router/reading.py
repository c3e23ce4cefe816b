"""Bodies of HTTP requests, read within their limit; parsing is router/openai.py's."""

from __future__ import annotations

from email.message import Message
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest

from baton.errors import Cancelled

MAX_BODY_BYTES: Final = 8 << 20


def _check_encodings(request: HttpRequest, content_type: str) -> None:
    """Raise HTTPException (415) for bytes that are not JSON's own UTF-8."""
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        # RFC 9110, 15.5.16: says what would be understood.
        headers = {"accept-encoding": "identity"}
        raise HTTPException(415, "the content-encoding is not supported: send it plain", headers)
    message = Message()
    message["content-type"] = content_type
    charset = message.get_content_charset("utf-8")
    if charset not in ("utf-8", "utf8", "us-ascii"):
        raise HTTPException(415, "the charset must be utf-8")


async def read_body(request: HttpRequest) -> bytes:
    """The whole JSON body. Raises HTTPException (413, 415), Cancelled."""
    content_type = request.headers.get("content-type", "")
    # Only JSON by name: a foreign web page then cannot post here without a CORS preflight.
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "the content-type must be application/json")
    _check_encodings(request, content_type)
    raw, more = b"", True
    while more:  # not request.stream(): an asynchronous generator costs more than what is read
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client went away")
        raw += message.get("body", b"")
        more = message.get("more_body", False)
        if len(raw) > MAX_BODY_BYTES:
            raise HTTPException(
                413, f"the body exceeds {MAX_BODY_BYTES} bytes", {"connection": "close"}
            )
    return raw
