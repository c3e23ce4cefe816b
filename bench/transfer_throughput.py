"""Figures 1 and 7 of the transfer benchmark: a whole export at line rate, and the cost of guards.

There are two processes with an arena each. Several rounds take every way in turn, so a slow moment
of the machine meets all of them: memcpy, bare sockets, a bare gRPC stream (transfer_raw.py), then
each lane. A lane's time is a whole fetch: open, handshake, every digest, END, ACK.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.transfer_lanes import ADOPTED
from bench.transfer_link import ShapedLink, spread
from bench.transfer_raw import KINDS

MEMCPY: Final = "memcpy"
HAND_OVERS: Final = 15  # of those that copy nothing, per round: each is over in no time
ONE_SIDED: Final = ("shm", ADOPTED, "nixl")  # digests over what is said, not over the bytes


@dataclass(frozen=True, slots=True)
class LoadShape:
    """The shape of what is transferred: all layers of `tokens` tokens, in bfloat16."""

    tokens: int = 2048
    layers: int = 28
    heads: int = 8
    dim: int = 128


@dataclass(frozen=True, slots=True)
class Contested:
    """What to measure, and where: `cores` are those of P and those of D."""

    shape: LoadShape
    rounds: int
    cores: tuple[list[int], list[int]]


@dataclass(slots=True)
class LoadWay:
    """One way of moving the bytes: per round, seconds of wall clock and of both processes' CPUs."""

    name: str
    seconds: list[float] = field(default_factory=list[float])
    cpu_s: list[float] = field(default_factory=list[float])
    moved: int = 0  # most bytes that were copied at a time; 0 = handed over in place

    def row(self, num_bytes: int) -> dict[str, Any]:
        """Return GB/s, CPU seconds per GB and milliseconds, each with its spread."""
        gigabytes = num_bytes / 1e9
        return {
            "way": self.name,
            "gb_per_s": spread([gigabytes / each for each in self.seconds]),
            "cpu_s_per_gb": spread([each / gigabytes for each in self.cpu_s]),
            "ms": spread([each * 1e3 for each in self.seconds]),
            "copied_bytes": self.moved,
        }


@dataclass(frozen=True, slots=True)
class Moved:
    """One move: its seconds and the bytes that were copied.

    `digest` is set instead if the bytes can be read in place.
    """

    seconds: float
    num_bytes: int
    digest: str | None = None


class Contest:
    """P and D, and every way between them."""

    def __init__(self, p: ShapedLink, d: ShapedLink, shape: LoadShape) -> None:
        self._p = p
        self._d = d
        self._shape = shape
        self.num_bytes = 0
        self.ways: dict[str, LoadWay] = {}
        self.missing: dict[str, str] = {}
        self.intact: dict[str, bool] = {}
        self._addresses: dict[str, str] = {}

    async def prepare(self, ways: list[str], tls: Path | None) -> None:
        """Make memory on both sides, start all servers, check that each lane carries the bytes."""
        shape = self._shape
        for link in (self._p, self._d):
            made = await link.ask(
                "pool", layers=shape.layers, heads=shape.heads, dim=shape.dim, tokens=shape.tokens
            )
            self.num_bytes = made["bytes"]
        self._addresses = (await self._p.ask("raw_serve"))["addresses"]
        lanes, self.missing = await open_ways(self._p, self._d, ways, tls)
        self.ways = {name: LoadWay(name) for name in (MEMCPY, *KINDS, *lanes)}
        await self._d.ask("memcpy")  # has its target from now on
        sent = (await self._p.ask("digest"))["digest"]
        for name in (*KINDS, *lanes):  # the first use of each warms it up, too
            await self._d.ask("fill", seed=7)
            moved = await self._move(name, look=True)
            there = moved.digest or (await self._d.ask("digest"))["digest"]
            self.intact[name] = there == sent

    async def round(self) -> None:
        """Take each way once."""
        for name, way in self.ways.items():
            for _ in range(HAND_OVERS if name == ADOPTED else 1):
                before = await self._cpu_s()
                moved = await self._move(name)
                way.seconds.append(moved.seconds)
                way.cpu_s.append(await self._cpu_s() - before)
                way.moved = max(way.moved, moved.num_bytes)

    async def digest_s(self) -> float:
        """Return the seconds to digest everything once on one side."""
        return (await self._d.ask("digest_rate"))["seconds"]

    async def _move(self, name: str, look: bool = False) -> Moved:
        if name == MEMCPY:
            return Moved((await self._d.ask("memcpy"))["seconds"], self.num_bytes)
        if name in KINDS:
            answer = await self._d.ask("raw_read", kind=name, address=self._addresses[name])
            return Moved(answer["seconds"], self.num_bytes)
        export = await self._p.ask("export", way=name, tokens=self._shape.tokens)
        fetched = await self._d.ask("fetch", way=name, handle=export["handle"], look=look)
        seconds = fetched["ended_at"] - fetched["began_at"]
        return Moved(seconds, fetched["bytes"], fetched.get("digest"))

    async def _cpu_s(self) -> float:
        return sum([(await link.ask("usage"))["cpu_s"] for link in (self._p, self._d)])


async def open_ways(
    p: ShapedLink, d: ShapedLink, ways: list[str], tls: Path | None
) -> tuple[list[str], dict[str, str]]:
    """Return those of `ways` that both sides have, and why the others are missing."""
    folder = None if tls is None else str(tls)
    offered = await p.ask("open", ways=ways, tls=folder)
    wanted = await d.ask("open", ways=offered["ways"], tls=folder)
    return wanted["ways"], offered["missing"] | wanted["missing"]


async def measure(ways: list[str], tls: Path | None, plan: Contested) -> dict[str, Any]:
    """Run the whole contest and return JSON-ready values."""
    async with ShapedLink.spawn(plan.cores[0]) as p, ShapedLink.spawn(plan.cores[1]) as d:
        contest = Contest(p, d, plan.shape)
        await contest.prepare(ways, tls)
        rounds = plan.rounds
        for _ in range(rounds):
            await contest.round()
        digest_s = spread([await contest.digest_s() for _ in range(rounds)])["median"]
        rows = [way.row(contest.num_bytes) for way in contest.ways.values()]
    for row in rows:
        if row["way"] in (MEMCPY, *KINDS, *ONE_SIDED):
            continue
        # Both sides digest every byte that travels, one after the other for the last frame only.
        digested = 2 * digest_s * row["copied_bytes"] / contest.num_bytes
        cpu_s = row["cpu_s_per_gb"]["median"] * contest.num_bytes / 1e9
        row["digest_share_of_cpu"] = digested / cpu_s if cpu_s else 0.0
    return {
        "bytes": contest.num_bytes,
        "rounds": rounds,
        "rows": rows,
        "missing": contest.missing,
        "intact": contest.intact,
        "digest_gb_per_s": contest.num_bytes / 1e9 / digest_s,
        "digest_s": digest_s,
    }
