"""API keys: ASGI middleware that refuses every request without a known key.

Only the probes (OPEN_PATHS) need no key, by exact path and for GET and HEAD. A route that is added
later therefore needs a key by default. Keys are compared in router/tenants/keys.py; the grant of
the key is put into the scope under GRANT_KEY.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from baton.protocol.errors import Unauthenticated
from router.api.http.web_errors import error_response
from router.events import EventRing
from router.request.terms import GRANT_KEY
from router.tenants.keys import KeyRing, keys_of

OPEN_PATHS: Final = frozenset({"/health", "/ready", "/readyz", "/ping"})
MOST_PATH_CHARS: Final = 100
_PROBE_METHODS: Final = frozenset({"GET", "HEAD"})


class ApiKeyGuard:
    """Wraps an ASGI app. Without any keys it lets every request through; the config allows that on
    loopback only."""

    def __init__(
        self, app: ASGIApp, keys: Sequence[str] | KeyRing, events: EventRing | None = None
    ) -> None:
        self._app = app
        self._events = EventRing() if events is None else events
        self._keys = keys if isinstance(keys, KeyRing) else KeyRing.load(keys)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "lifespan" or not len(self._keys) or self._admits(scope):
            return self._app(scope, receive, send)
        return self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self._events.note("refused-key", _told(scope))
            error = Unauthenticated(
                "missing or wrong API key (Authorization: Bearer ..., or x-api-key)"
            )
            await error_response(error)(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _admits(self, scope: Scope) -> bool:
        if scope["type"] != "http":
            return False
        if scope["path"] in OPEN_PATHS and scope["method"] in _PROBE_METHODS:
            return True
        # A proxy may have checked only one of several keys: all must be known, and of one grant.
        grants = [self._keys.match(key) for key in keys_of(scope["headers"])]
        grant = grants[0] if grants else None
        if grant is None or any(other != grant for other in grants):
            return False
        scope[GRANT_KEY] = grant
        return True


def _told(scope: Scope) -> str:
    """Return what the console may show of a refused request: nothing of the key itself."""
    client = scope.get("client")
    who = client[0] if client else "a client"
    how = "a wrong key" if keys_of(scope["headers"]) else "no key"
    return f"{who} asked for {scope['method']} {scope['path'][:MOST_PATH_CHARS]!r} with {how}"
