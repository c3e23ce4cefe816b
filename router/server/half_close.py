"""A client that has ended its side of the connection: it waits for its answer, or it has gone.

Both send the same FIN. Only what is sent to them tells them apart: the kernel of one who has gone
answers with a reset. So something is sent that every client reads past, an interim response (100
Continue) or a comment between the events of a stream, and the kernel is asked what became of it.
Where neither can be done (HTTP/1.0, no TCP_INFO) the client is believed. Not here: a client that
ends its side in the middle of a request, or under TLS, has gone (router/server/http_guard.py).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final

INTERIM: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
COMMENT: Final = b":\n\n"  # of server-sent events
COMMENT_CHUNK: Final = b"%x\r\n%b\r\n" % (len(COMMENT), COMMENT)
LOOKS_S: Final = (0.01, 0.1, 0.5, 1.0)  # after a probe: a reset takes a round trip
EVERY_S: Final = 5.0  # from one probe to the next: it may go later
_CLOSED: Final = 7  # TCP_CLOSE of Linux's tcp_states.h: what a reset makes of a connection


class HalfClosed:
    """`probe`: what may be sent now, empty for nothing. The life: made at the FIN -> probes until
    then -> stop()."""

    def __init__(self, transport: asyncio.Transport, probe: Callable[[], bytes]) -> None:
        self._transport = transport
        self._probe_now = probe
        self._loop = asyncio.get_running_loop()
        self._timers: list[asyncio.TimerHandle] = []
        self._probe()

    def stop(self) -> None:
        """Twice is safe."""
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
