"""A TCP proxy that breaks what passes through it, as told, and counts what it broke.

    async with FaultProxy(("127.0.0.2", port), ("127.0.0.1", port)) as proxy:
        proxy.set(Fault.BLACKHOLE, Way.UP)      # from now on, for all connections, old and new
        proxy.set(Fault.NONE)

UP is from the one that dialled to the one that listens, DOWN the way back. Faults: DELAY (each
piece waits), THROTTLE (bytes per second), BLACKHOLE (is read and thrown away), STALL (is not read
at all), FLIP (one bit of the piece after `after` bytes), DUPLICATE (that piece twice: only where
frames are numbered), and, at once: cut (both ends closed), half_close (one way ended), reset (RST).
Either end may be a Unix socket: a path in place of (host, port).
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import socket
import struct
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

Place = tuple[str, int] | Path
PIECE = 1 << 16
CONNECT_S = 5.0
_RST = struct.pack("ii", 1, 0)  # SO_LINGER of zero seconds: close() sends RST


class Way(enum.Enum):
    UP = "up"
    DOWN = "down"


class Fault(enum.Enum):
    NONE = "none"
    DELAY = "delay"
    THROTTLE = "throttle"
    BLACKHOLE = "blackhole"
    STALL = "stall"
    FLIP = "flip"
    DUPLICATE = "duplicate"


@dataclass(slots=True)
class Proof:
    """What was done, per direction; `bytes_passed` includes what was damaged or sent twice."""

    connections: int = 0
    bytes_passed: dict[Way, int] = field(default_factory=lambda: dict.fromkeys(Way, 0))
    bytes_dropped: dict[Way, int] = field(default_factory=lambda: dict.fromkeys(Way, 0))
    delayed: int = 0
    stalled: int = 0
    flipped: int = 0
    duplicated: int = 0
    cut: int = 0
    half_closed: int = 0
    reset: int = 0

    def __str__(self) -> str:
        dropped = sum(self.bytes_dropped.values())
        words = {
            "connections": self.connections, "bytes": sum(self.bytes_passed.values()),
            "dropped": dropped, "delayed": self.delayed, "stalled": self.stalled,
            "flipped": self.flipped, "duplicated": self.duplicated, "cut": self.cut,
            "half-closed": self.half_closed, "reset": self.reset,
        }  # fmt: skip
        return ", ".join(f"{name} {value}" for name, value in words.items() if value)


@dataclass(slots=True)
class Rule:
    """What happens to one direction. `amount`: seconds of DELAY, bytes per second of THROTTLE,
    bytes that FLIP and DUPLICATE let pass before they act, once."""

    fault: Fault = Fault.NONE
    amount: float = 0.0


@dataclass(eq=False)
class _Link:
    """One connection through the proxy."""

    ends: dict[Way, asyncio.StreamWriter]  # where bytes of that direction go
    passed: dict[Way, int] = field(default_factory=lambda: dict.fromkeys(Way, 0))
    ended: set[Way] = field(default_factory=set[Way])  # half-closed by us


class FaultProxy:
    """Listens at `here`, dials `there`. Event loop only; use as an async context manager."""

    def __init__(self, here: Place, there: Place) -> None:
        self.here = here
        self.there = there
        self.proof = Proof()
        self._rules = {way: Rule() for way in Way}
        self._changed = asyncio.Condition()
        self._links: set[_Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> FaultProxy:
        if isinstance(self.here, Path):
            self._server = await asyncio.start_unix_server(self._accept, self.here)
        else:
            self._server = await asyncio.start_server(self._accept, *self.here)
            self.here = self._server.sockets[0].getsockname()[:2]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server is not None, "it was entered"
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def num_links(self) -> int:
        return len(self._links)

    async def settled(self) -> None:
        """Until all connections there are have ended by themselves."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- faults ----

    async def set(self, fault: Fault, way: Way | None = None, amount: float = 0.0) -> None:
        """From now on; `way` None: in both directions."""
        async with self._changed:
            for each in [way] if way else list(Way):
                self._rules[each] = Rule(fault, amount)
            self._changed.notify_all()

    def cut(self) -> int:
        """Close both ends of all connections; how many there were."""
        for link in self._links:
            for writer in link.ends.values():
                writer.close()
        self.proof.cut += len(self._links)
        return len(self._links)

    def half_close(self, way: Way) -> int:
        """End one direction of all connections (FIN), leave the other."""
        count = 0
        for link in self._links:
            if link.ends[way].can_write_eof() and not link.ends[way].is_closing():
                link.ended.add(way)
                link.ends[way].write_eof()
                count += 1
        self.proof.half_closed += count
        return count

    def reset(self) -> int:
        """RST to both ends of all connections."""
        for link in self._links:
            for writer in link.ends.values():
                raw = writer.get_extra_info("socket")
                if raw is not None and raw.family != socket.AF_UNIX:
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST)
                writer.transport.abort()
        self.proof.reset += len(self._links)
        return len(self._links)

    # ---- traffic ----

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a callback of the server runs in a task"
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, TimeoutError):
            pass  # nobody there, or gone: the other end learns it by the close below
        except asyncio.CancelledError:
            pass  # the proxy closes; a server's own task must not end as cancelled
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(CONNECT_S):
            if isinstance(self.there, Path):
                far_reader, far_writer = await asyncio.open_unix_connection(self.there)
            else:
                far_reader, far_writer = await asyncio.open_connection(*self.there)
        link = _Link({Way.UP: far_writer, Way.DOWN: writer})
        self._links.add(link)
        self.proof.connections += 1
        ways = [
            asyncio.create_task(self._carry(link, reader, Way.UP)),
            asyncio.create_task(self._carry(link, far_reader, Way.DOWN)),
        ]
        try:
            await asyncio.gather(*ways)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            self._links.discard(link)
            far_writer.close()

    async def _carry(self, link: _Link, reader: asyncio.StreamReader, way: Way) -> None:
        """One direction of one connection, until it ends; its end is passed on."""
        writer = link.ends[way]
        while piece := await self._read(reader, way):
            for part in await self._treat(link, piece, way):
                if way in link.ended:
                    self.proof.bytes_dropped[way] += len(part)
                    continue
                writer.write(part)
                self.proof.bytes_passed[way] += len(part)
            link.passed[way] += len(piece)
            await writer.drain()
        if writer.can_write_eof() and not writer.is_closing():
            with contextlib.suppress(OSError):
                writer.write_eof()

    async def _read(self, reader: asyncio.StreamReader, way: Way) -> bytes:
        async with self._changed:
            self.proof.stalled += self._rules[way].fault is Fault.STALL
            await self._changed.wait_for(lambda: self._rules[way].fault is not Fault.STALL)
        return await reader.read(PIECE)

    async def _treat(self, link: _Link, piece: bytes, way: Way) -> list[bytes]:
        """What leaves of `piece`."""
        rule, proof = self._rules[way], self.proof
        match rule.fault:
            case Fault.BLACKHOLE:
                proof.bytes_dropped[way] += len(piece)
                return []
            case Fault.DELAY:
                proof.delayed += 1
                await asyncio.sleep(rule.amount)
            case Fault.THROTTLE:
                proof.delayed += 1
                await asyncio.sleep(len(piece) / rule.amount)
            case Fault.FLIP if link.passed[way] + len(piece) > rule.amount:
                self._rules[way] = Rule()
                proof.flipped += 1
                damaged = bytearray(piece)
                damaged[max(0, int(rule.amount) - link.passed[way])] ^= 0x10
                return [bytes(damaged)]
            case Fault.DUPLICATE if link.passed[way] + len(piece) > rule.amount:
                self._rules[way] = Rule()
                proof.duplicated += 1
                return [piece, piece]
            case _:
                pass
        return [piece]
