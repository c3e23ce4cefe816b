"""Find out whether a client that closed its sending side still waits for its answer, or is gone.

Both kinds of client send the same FIN. Only data sent to them tells them apart: if the client is
gone, its kernel answers with a reset. So this file sends data that every client ignores: an interim
response (100 Continue), or a comment between the events of a stream. Then it asks the own kernel
whether the connection was reset. Where this is impossible (HTTP/1.0, no TCP_INFO), the client is
taken to wait. Not here: a client that sends FIN in the middle of a request, or under TLS, counts as
gone (router/server/http_guard.py).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final

INTERIM: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
COMMENT: Final = b":\n\n"  # a comment in server-sent events
COMMENT_CHUNK: Final = b"%x\r\n%b\r\n" % (len(COMMENT), COMMENT)
LOOKS_S: Final = (0.01, 0.1, 0.5, 1.0)  # when to look after a probe: a reset takes a round trip
EVERY_S: Final = 5.0  # from one probe to the next, for a client that goes away later
_CLOSED: Final = 7  # TCP_CLOSE of Linux's tcp_states.h: the state after a reset


class HalfClosed:
    """Probes a half-closed connection, and aborts it once it was reset. `probe` returns the bytes
    to send now, or b"" if nothing may be sent. The life: made at the FIN -> probes -> stop()."""

    def __init__(self, transport: asyncio.Transport, probe: Callable[[], bytes]) -> None:
        self._transport = transport
        self._probe_now = probe
        self._loop = asyncio.get_running_loop()
        self._timers: list[asyncio.TimerHandle] = []
        self._probe()

    def stop(self) -> None:
        """Stop probing. Calling it twice is safe."""
        for timer in self._timers:
            timer.cancel()

    def _probe(self) -> None:
        probe = self._probe_now()
        if probe:
            self._transport.write(probe)
        self._timers = [self._loop.call_later(delay_s, self._look) for delay_s in LOOKS_S]
        self._timers.append(self._loop.call_later(EVERY_S, self._probe))

    def _look(self) -> None:
        if _is_reset(self._transport):
            self.stop()
            self._transport.abort()


def _is_reset(transport: asyncio.Transport) -> bool:
    option: int | None = getattr(socket, "TCP_INFO", None)  # Linux's
    sock = transport.get_extra_info("socket")
    if option is None or sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, option, 1)[0] == _CLOSED
    except OSError:
        return True
