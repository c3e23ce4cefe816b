"""Errors as HTTP clients see them: OpenAI's error object and a status, without internal details.

The error for a fault of the client has the full message and the field. The error for a fault of the
server names only its kind; the log has the details, under the same request id.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from baton.protocol.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    Unauthenticated,
    Unavailable,
)
from router.request.failures import as_baton_error, log_failure

RETRY_AFTER_S: Final = 1
_TYPES: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
# Errors whose message a client may read: it names no node and no path.
_SPOKEN: Final = (
    InvalidRequest, Unauthenticated, Overloaded, Unavailable, DeadlineExceeded, Cancelled
)  # fmt: skip
_HTTP_CODES: Final = {
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    431: "headers_too_large",
}


def error_object(error: BatonError) -> dict[str, Any]:
    """Return OpenAI's error object: `{"error": {"message", "type", "param", "code"}}`."""
    if isinstance(error, _SPOKEN):
        message = error.message
    elif error.retryable:
        message = "the request failed on its way through the cluster; it may be sent again"
    else:
        message = "internal error; the server's log has it under this request's id"
    return _object(message, _type_of(error.http_status), error.field, error.code)


def error_response(error: BatonError) -> Response:
    """Return the HTTP answer to a request that failed before any part of an answer was sent."""
    wait_s = RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
    headers = {"retry-after": str(wait_s)} if error.retryable else {}
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    return _json(error_object(error), error.http_status, headers)


def http_error_response(status: int, message: str) -> Response:
    """Return the answer to an error of HTTP itself: no such route, wrong method, body too large."""
    code = _HTTP_CODES.get(status, "http_error")
    return _json(_object(message, _type_of(status), None, code), status, {})


def raw_error(status: int, message: str) -> bytes:
    """Return the bytes of an HTTP error for a request that could not be parsed, with `connection:
    close`."""
    response = http_error_response(status, message)
    response.headers["connection"] = "close"
    line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()
    head = b"".join(b"%b: %b\r\n" % pair for pair in response.raw_headers)
    return line + head + b"\r\n" + bytes(response.body)


async def on_baton_error(_: HttpRequest, error: Exception) -> Response:
    """Starlette's handler of BatonError, exception groups of it, and unexpected exceptions."""
    found = as_baton_error(error)
    log_failure(found, error)
    return error_response(found)


async def on_http_exception(request: HttpRequest, error: Exception) -> Response:
    """Starlette's handler of its own HTTPException (404, 405, ...)."""
    assert isinstance(error, HTTPException)
    message = error.detail
    if error.status_code == 404:
        message = f"no such route: {request.method} {request.scope['path']}"
    elif error.status_code == 405:
        message = f"{request.method} is not allowed here"
    response = http_error_response(error.status_code, message)
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response


def _type_of(status: int) -> str:
    if status >= 500:
        return "server_error"
    return _TYPES.get(status, "invalid_request_error")


def _object(message: str, kind: str, param: str | None, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _json(content: dict[str, Any], status: int, headers: dict[str, str]) -> Response:
    # A message may quote the client; orjson can write it, since parsing refuses lone surrogates.
    body = orjson.dumps(content)
    return Response(body, status, headers, media_type="application/json")
