"""SessionMap: which decode node served a session last, so that its next turn finds its KV there.

The map is bounded: sessions that were unused for longest are forgotten. Each router has its own.
Routers still choose the same node for a new session, because the digest of the session decides
between equal nodes (`tie_of`).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Final

MAX_SESSIONS: Final = 65_536


class SessionMap:
    """Session keys (see `session_key`) -> boot ids of decode nodes."""

    def __init__(self, capacity: int = MAX_SESSIONS) -> None:
        self._capacity = capacity
        self._nodes: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def node_of(self, session: bytes) -> str:
        """Return the boot id of the decode node that served the session last; "" if unknown."""
        return self._nodes.get(session, "")

    def served_by(self, session: bytes, boot_id: str) -> None:
        self._nodes[session] = boot_id
        self._nodes.move_to_end(session)
        if len(self._nodes) > self._capacity:
            self._nodes.popitem(last=False)


def session_key(tenant: str, session_id: str) -> bytes:
    """Return a digest of tenant and session id; empty without a session id.

    Equal session ids of different tenants have different keys.
    """
    if not session_id:
        return b""
    body = f"{len(tenant)}:{tenant}{session_id}".encode()
    return hashlib.blake2b(body, digest_size=16).digest()


def tie_of(session: bytes) -> float:
    """Return the session's number in [0, 1), which decides between equal nodes.

    It is the same on every router.
    """
    return int.from_bytes(session[:6]) / 2**48
