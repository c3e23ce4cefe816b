"""An answer's head leaves with what follows it, or at the end of the turn."""

from __future__ import annotations

import asyncio
from typing import Any

from router.server.http_writes import HeadFirst

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


class Wire(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.wrote: list[Any] = []

    def write(self, data: Any) -> None:
        self.wrote.append(data)

    def close(self) -> None:
        self.wrote.append(None)


async def test_a_head_goes_with_its_body() -> None:
    wire = Wire()
    first = HeadFirst(wire, asyncio.get_running_loop())
    first.write(HEAD)
    assert wire.wrote == []
    first.write(b"body")
    first.write(b"more")
    await asyncio.sleep(0)
    assert wire.wrote == [HEAD + b"body", b"more"]


async def test_a_head_alone_waits_for_one_turn() -> None:
    wire = Wire()
    first = HeadFirst(wire, asyncio.get_running_loop())
    first.write(HEAD)
    await asyncio.sleep(0)
    assert wire.wrote == [HEAD]
    first.write(b"body")
    assert wire.wrote == [HEAD, b"body"]


async def test_heads_keep_their_order_and_leave_before_the_end() -> None:
    wire = Wire()
    first = HeadFirst(wire, asyncio.get_running_loop())
    first.write(HEAD)
    first.write(HEAD)
    first.write(HEAD)
    first.close()
    assert wire.wrote == [HEAD + HEAD, HEAD, None]
    await asyncio.sleep(0)
    assert wire.wrote[-1] is None
