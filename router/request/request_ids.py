"""Ids of an HTTP exchange, of its reply, and of each of its requests in the engine.

x-request-id   the client's header if it matches ID_PATTERN, else the body's `request_id`, else a
               random id; echoed in the answer
reply id       PREFIX-<x-request-id>; resp_<x-request-id>, msg_<x-request-id>
engine id      <reply id>-<number of the prompt>.<random>: a client may send an id twice;
               req-<x-request-id>-0.<digest> of a resumable request (router/resumable/canonical.py)
"""

from __future__ import annotations

import os
import re
from typing import Any, Final

from starlette.requests import Request as HttpRequest
from starlette.types import Scope

from baton.protocol.errors import InvalidRequest
from baton.runtime.log import bind_request

ID_PATTERN: Final = "[A-Za-z0-9._:-]{1,128}"
_PLAIN: Final = re.compile(ID_PATTERN)
_PLAIN_BYTES: Final = re.compile(ID_PATTERN.encode())
_REPLY: Final = re.compile("^(chatcmpl-|cmpl-|resp_|msg_)")
_SCOPE_KEY: Final = "baton.request_id"
_DRAWN_KEY: Final = "baton.request_id_drawn"


def note_request_id(scope: Scope) -> str:
    """Determine the id of this exchange from its headers, store it in `scope`, and return it."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    given = b""
    for name, value in headers:
        if name == b"x-request-id":
            given = value
            break
    drawn = _PLAIN_BYTES.fullmatch(given) is None
    known = os.urandom(12).hex() if drawn else given.decode()
    scope[_SCOPE_KEY], scope[_DRAWN_KEY] = known, drawn
    return known


def note_body_id(request: HttpRequest, given: object) -> None:
    """Use the body's `request_id` (`given`) as the exchange's id, if the headers had none.

    `given` None: the body has no `request_id`; nothing changes. Mutates the scope. Raises
    InvalidRequest if `given` does not match ID_PATTERN.
    """
    if given is None:
        return
    if not isinstance(given, str) or not _PLAIN.fullmatch(given):
        message = "request_id: 1 to 128 letters, digits, dots, colons, dashes, underscores"
        raise InvalidRequest(message, field="request_id")
    if request.scope.get(_DRAWN_KEY):
        request.scope[_SCOPE_KEY], request.scope[_DRAWN_KEY] = given, False
        bind_request(given)


def pin_request_id(scope: Scope, name: str) -> None:
    """Make `name` the id of this exchange, whatever its client gave. Mutates `scope`."""
    scope[_SCOPE_KEY], scope[_DRAWN_KEY] = name, False


def known_id(scope: Scope) -> str:
    """Return the id of this exchange as it is now; a random one if none was stored."""
    known: Any = scope.get(_SCOPE_KEY)
    return known or os.urandom(12).hex()


def given_id(scope: Scope) -> str | None:
    """Return the id that the client gave to this exchange; None if the id is a random one."""
    return None if scope.get(_DRAWN_KEY, True) else known_id(scope)


def reply_id(prefix: str, request: HttpRequest, given: object = None) -> str:
    """Return the id of the reply to `request`, with `prefix`. `given`: see note_body_id."""
    if given is not None:
        note_body_id(request, given)
    return prefix + (request.scope.get(_SCOPE_KEY) or os.urandom(12).hex())


def engine_id(reply: str, index: int = 0) -> str:
    """Return a new engine id for prompt `index` of a call."""
    return f"{reply}-{index}.{os.urandom(4).hex()}"


def names(asked: str, engine: str) -> bool:
    """Whether `asked` names the request with the engine id `engine`.

    A request is named by its engine id, its reply id or its `x-request-id`.
    """
    reply = engine.rpartition("-")[0]
    head, *rest = re.split("[-_]", reply, maxsplit=1)
    if head == "req":  # a resumable request: replies to it have several prefixes
        asked = _REPLY.sub("", asked)
    return asked in (engine, reply, *rest)
