"""Ids of an HTTP exchange, of its reply, and of each request of it in the engine.

x-request-id   the client's own, if it is a plain one, else drawn; echoed in the answer
reply id       PREFIX-<x-request-id>
engine id      <reply id>-<number of the prompt>.<random>: a client may send an id twice;
               req-<x-request-id>-0.<digest> of a resumable request (router/resumable/canonical.py)
"""

from __future__ import annotations

import re
import secrets
from typing import Any, Final

from starlette.requests import Request as HttpRequest
from starlette.types import Scope

_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_SCOPE_KEY: Final = "baton.request_id"


def note_request_id(scope: Scope) -> str:
    """The id of this exchange, kept in its scope for the routes."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    given = next((value for name, value in headers if name == b"x-request-id"), b"")
    known = given.decode() if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)
    scope[_SCOPE_KEY] = known
    return known


def pin_request_id(scope: Scope, name: str) -> None:
    """Mutates `scope`: the reply is to be called so, whatever its request was."""
    scope[_SCOPE_KEY] = name


def known_id(request: HttpRequest) -> str:
    """The id of this exchange, as `note_request_id` found or drew it."""
    known: Any = request.scope.get(_SCOPE_KEY)
    return known or secrets.token_hex(12)


def reply_id(prefix: str, request: HttpRequest) -> str:
    """What the reply to `request` calls itself."""
    known: Any = request.scope.get(_SCOPE_KEY)
    return f"{prefix}-{known or secrets.token_hex(12)}"


def engine_id(reply: str, index: int = 0) -> str:
    """A new id of prompt `index` of a call, for dispatcher and nodes."""
    return f"{reply}-{index}.{secrets.token_hex(4)}"


def names(asked: str, engine: str) -> bool:
    """Whether a client means this request: by its engine id, reply id or `x-request-id`."""
    reply = engine.rpartition("-")[0]
    head, _, name = reply.partition("-")
    if head == "req":  # a resumable one: its name is that of all its replies
        asked = asked.removeprefix("chatcmpl-").removeprefix("cmpl-")
    return asked in (engine, reply, name)
