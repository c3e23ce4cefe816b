"""SessionMap: which decode node served a session last, so that its next turn finds its KV there.

Bounded: the sessions unused for longest are forgotten. It is one router's memory; routers agree on
new sessions all the same, for the session's own digest decides between equal nodes.
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
        """Boot id of the node that served it last, "" if none is known."""
        return self._nodes.get(session, "")

    def served_by(self, session: bytes, boot_id: str) -> None:
        self._nodes[session] = boot_id
        self._nodes.move_to_end(session)
        if len(self._nodes) > self._capacity:
            self._nodes.popitem(last=False)


def session_key(tenant: str, session_id: str) -> bytes:
    """A tenant's sessions are its own, whatever ids others choose; empty for no session."""
    if not session_id:
        return b""
    body = f"{len(tenant)}:{tenant}{session_id}".encode()
    return hashlib.blake2b(body, digest_size=16).digest()


def tie_of(session: bytes) -> float:
    """Where a session goes among equal nodes: the same number in [0, 1) on every router."""
    return int.from_bytes(session[:6]) / 2**48
