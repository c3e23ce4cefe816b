"""API keys: ASGI middleware that denies every route by default, however its path is spelled.

Only the probes are open, by exact path and for GET and HEAD; a route added later is closed without
anybody thinking of it. Keys are compared in router/tenants/keys.py; the grant of the one that fits
goes on in the scope.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from baton.protocol.errors import Unauthenticated
from router.api.http.web_errors import error_response
from router.request.terms import GRANT_KEY
from router.tenants.keys import KeyRing, keys_of

OPEN_PATHS: Final = frozenset({"/health", "/ready", "/readyz", "/ping"})
_PROBE_METHODS: Final = frozenset({"GET", "HEAD"})


class ApiKeyGuard:
    """Wraps an ASGI app. No keys = open (the config allows that on loopback only)."""

    def __init__(self, app: ASGIApp, keys: Sequence[str] | KeyRing) -> None:
        self._app = app
        self._keys = keys if isinstance(keys, KeyRing) else KeyRing.load(keys)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "lifespan" or not len(self._keys) or self._admits(scope):
            return self._app(scope, receive, send)
        return self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
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
        # Whichever of two a proxy has looked at: all must be good, and one bearer's.
        grants = [self._keys.match(key) for key in keys_of(scope["headers"])]
        grant = grants[0] if grants else None
        if grant is None or any(other != grant for other in grants):
            return False
        scope[GRANT_KEY] = grant
        return True
