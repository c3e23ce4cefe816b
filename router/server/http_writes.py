"""HeadFirst: between uvicorn's protocol and a transport; an answer's head leaves with its body.

uvloop hands a write to the kernel at once, and uvicorn writes a head by itself: two system calls,
two packets, two wake-ups of the client for what is nearly always there at the same time. A head
waits for what is written next, at most to the end of this turn of the loop. Everything else goes
straight through. Event loop only.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from router.server.half_close import COMMENT

_HEAD: Final = b"HTTP/1.1 "  # a body that begins so waits no longer than a head


class HeadFirst(asyncio.Transport):
    """What uvicorn's protocol calls of a transport. `comment`: what may be written between two
    events of the stream that is being answered, empty if it is none."""

    __slots__ = ("_head", "_loop", "_transport", "comment")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""
        self.comment = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head + bytes(data))
        elif data[: len(_HEAD)] == _HEAD:
            self._head = bytes(data)
            self.comment = _comment_in(self._head)
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(data)

    def _flush(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)


def _comment_in(head: bytes) -> bytes:
    """A comment for a stream of events with that head, in the head's framing."""
    if b"text/event-stream" not in head:
        return b""
    chunked = b"\r\ntransfer-encoding: chunked\r\n" in head.lower()
    return b"%x\r\n%b\r\n" % (len(COMMENT), COMMENT) if chunked else COMMENT
