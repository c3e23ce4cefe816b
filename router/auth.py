"""API keys: ASGI middleware that denies every route by default, however its path is spelled.

Only the probes are open, by exact path and for GET and HEAD; a route added later is closed without
anybody thinking of it. Keys are kept and compared as SHA-256 digests, in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from baton.errors import Unauthenticated
from router.key_headers import keys_of
from router.web_errors import error_response

OPEN_PATHS: Final = frozenset({"/health", "/ready", "/readyz", "/ping"})
_PROBE_METHODS: Final = frozenset({"GET", "HEAD"})


class ApiKeyGuard:
    """Wraps an ASGI app. No keys = open (the config allows that on loopback only)."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = tuple(_digest(key.encode()) for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or not self._digests or self._admits(scope):
            await self._app(scope, receive, send)
            return
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
        keys = keys_of(scope["headers"])
        # Whichever of two a proxy has looked at: all must be good.
        return bool(keys) and all(self._is_known(key) for key in keys)

    def _is_known(self, key: bytes) -> bool:
        digest = _digest(key)
        # Every key is compared, so that the time tells nothing about which one was close.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
