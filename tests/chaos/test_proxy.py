"""The fault proxy does what it says, in the direction it was told, and counts it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.chaos.proxy import Fault, FaultProxy, Place, Way

ANSWER_S = 5.0
SILENCE_S = 0.1  # how long "nothing comes" is watched


@dataclass
class Talk:
    proxy: FaultProxy
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def ask(self, data: bytes) -> bytes:
        self.writer.write(data)
        return await asyncio.wait_for(self.reader.readexactly(len(data)), ANSWER_S)

    async def end(self) -> bytes:
        return await asyncio.wait_for(self.reader.read(), ANSWER_S)


@asynccontextmanager
async def talk(tmp_path: Path, *, unix: bool = False) -> AsyncIterator[Talk]:
    """A connection through the proxy to a server that answers each piece with itself."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
            writer.close()

    place: Place
    if unix:
        place = tmp_path / "echo.sock"
        server = await asyncio.start_unix_server(echo, place)
    else:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        place = server.sockets[0].getsockname()[:2]
    async with server, FaultProxy(("127.0.0.1", 0), place) as proxy:
        assert isinstance(proxy.here, tuple)
        host, port = proxy.here
        reader, writer = await asyncio.open_connection(host, port)
        try:
            yield Talk(proxy, reader, writer)
        finally:
            writer.close()


@pytest.mark.parametrize("unix", [False, True])
async def test_without_a_fault_bytes_pass(tmp_path: Path, unix: bool) -> None:
    async with talk(tmp_path, unix=unix) as t:
        assert await t.ask(b"hello") == b"hello"
        t.writer.write_eof()
        assert await t.end() == b""
        assert t.proxy.proof.bytes_passed == {Way.UP: 5, Way.DOWN: 5}
        assert t.proxy.proof.connections == 1


async def test_a_bit_is_flipped_once_at_its_place(tmp_path: Path) -> None:
    async with talk(tmp_path) as t:
        await t.proxy.set(Fault.FLIP, Way.DOWN, amount=6)
        assert await t.ask(b"aaaa") == b"aaaa"
        assert await t.ask(b"aaaa") == b"aaqa"
        assert await t.ask(b"aaaa") == b"aaaa"
        assert t.proxy.proof.flipped == 1


async def test_a_piece_comes_twice(tmp_path: Path) -> None:
    async with talk(tmp_path) as t:
        await t.proxy.set(Fault.DUPLICATE, Way.UP)
        t.writer.write(b"twice")
        assert await asyncio.wait_for(t.reader.readexactly(10), ANSWER_S) == b"twicetwice"
        assert t.proxy.proof.duplicated == 1


async def test_a_black_hole_swallows_one_direction(tmp_path: Path) -> None:
    async with talk(tmp_path) as t:
        assert await t.ask(b"before") == b"before"
        await t.proxy.set(Fault.BLACKHOLE, Way.DOWN)
        t.writer.write(b"gone")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(t.reader.read(1), SILENCE_S)
        assert t.proxy.proof.bytes_dropped == {Way.UP: 0, Way.DOWN: 4}
        await t.proxy.set(Fault.NONE)
        assert await t.ask(b"after") == b"after"


async def test_a_stall_loses_nothing(tmp_path: Path) -> None:
    async with talk(tmp_path) as t:
        assert await t.ask(b"a") == b"a"
        await t.proxy.set(Fault.STALL, Way.UP)
        assert await t.ask(b"x") == b"x", "the read that was under way"
        t.writer.write(b"later")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(t.reader.read(1), SILENCE_S)
        assert t.proxy.proof.stalled == 1
        await t.proxy.set(Fault.NONE)
        assert await asyncio.wait_for(t.reader.readexactly(5), ANSWER_S) == b"later"


@pytest.mark.parametrize(("fault", "amount"), [(Fault.DELAY, 0.05), (Fault.THROTTLE, 100.0)])
async def test_slow_is_slow(tmp_path: Path, fault: Fault, amount: float) -> None:
    async with talk(tmp_path) as t:
        await t.proxy.set(fault, Way.UP, amount)
        loop = asyncio.get_running_loop()
        before = loop.time()
        assert await t.ask(b"12345") == b"12345"
        assert loop.time() - before >= 0.05
        assert t.proxy.proof.delayed == 1


async def test_cut_half_close_and_reset(tmp_path: Path) -> None:
    async with talk(tmp_path) as t:
        assert await t.ask(b"a") == b"a"
        assert t.proxy.half_close(Way.DOWN) == 1
        assert await t.end() == b""
        t.writer.write(b"said")  # heard, but the answer has no way back
        t.writer.write_eof()
        await t.proxy.settled()
        assert t.proxy.proof.bytes_dropped == {Way.UP: 0, Way.DOWN: 4}
        assert t.proxy.proof.half_closed == 1
    async with talk(tmp_path) as t:
        assert await t.ask(b"a") == b"a"
        assert t.proxy.cut() == 1
        assert await t.end() == b""
        assert t.proxy.proof.cut == 1
    async with talk(tmp_path) as t:
        assert await t.ask(b"a") == b"a"
        assert t.proxy.reset() == 1
        with pytest.raises(ConnectionResetError):
            await t.end()
        assert str(t.proxy.proof) == "connections 1, bytes 2, reset 1"
