"""ASGI middleware that turns errors on Anthropic's routes into Anthropic's error objects.

All errors (of keys, limits, routes, bodies, nodes) are made as OpenAI's error object. Below PREFIX
this middleware replaces that by `{"type": "error", "error": {"type", "message"}, "request_id"}` and
keeps the status. Other answers pass unchanged. All answers get the header `request-id`, where
Anthropic's SDK looks for the id.
"""

from __future__ import annotations

from typing import Any, Final, cast

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.request.request_ids import known_id

PREFIX: Final = "/v1/messages"
_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(status: int, message: str, request_id: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": message}}
    return body if request_id is None else {**body, "request_id": request_id}


class AnthropicErrors:
    """Wraps an ASGI app. router/server/exchanges.py sends the requests below PREFIX through it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start: Message | None = None  # the start of an error's answer, until its body is complete
        body = bytearray()

        async def translated(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                message = _named(message, known_id(scope))
                if message["status"] >= 400:
                    start = message
                    return
            if start is None or message["type"] != "http.response.body":
                await send(message)
                return
            body.extend(message.get("body", b""))
            if not message.get("more_body", False):
                await _send_error(start, bytes(body), send)

        await self._app(scope, receive, translated)


def _named(start: Message, known: str) -> Message:
    """Return the message that starts an answer, with the header `request-id` added."""
    return {**start, "headers": [*start.get("headers", ()), (b"request-id", known.encode())]}


async def _send_error(start: Message, body: bytes, send: Send) -> None:
    request_id = _header(start, b"request-id")
    content = orjson.dumps(error_body(start["status"], _message_of(body), request_id))
    headers = [pair for pair in start.get("headers", ()) if pair[0].lower() != b"content-length"]
    headers.append((b"content-length", b"%d" % len(content)))
    await send({**start, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def _header(start: Message, name: bytes) -> str | None:
    found = (value for key, value in start.get("headers", ()) if key.lower() == name)
    value = next(found, None)
    return None if value is None else value.decode("latin-1")


def _message_of(body: bytes) -> str:
    """Return the message of OpenAI's error object in `body`; the body's text if it is not JSON."""
    try:
        content: object = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode("utf-8", "replace")
    error = cast("dict[str, Any]", content).get("error") if isinstance(content, dict) else None
    told = cast("dict[str, Any]", error).get("message") if isinstance(error, dict) else None
    return told if isinstance(told, str) else "the request failed"
