"""Clients that leave, dawdle, or mean harm: nothing leaks, and nobody else notices.

Raw sockets, because a decent HTTP client would refuse to send most of this. Beside each case runs
an honest stream, which must be untouched.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from tests.chaos.cases import Case, World
from tests.chaos.cluster import Cluster
from tests.chaos.kills import EARLY
from tests.chaos.oracle import Broken, check_all

LEAVERS = 2000
AT_ONCE = 100
DRIPPERS = 30
DRIP_S = 0.25
ANSWER_S = 20.0
HEAD_S = 10.0  # router/server/http_guard.py's limit for a head
RST = struct.pack("ii", 1, 0)
Attack = Callable[[World], Awaitable[str]]


def place_of(cluster: Cluster) -> tuple[str, int]:
    host, _, port = cluster.servers["r0"].address.rpartition(":")
    return host, int(port)


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096


def post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def completion(prompt: tuple[int, ...], max_tokens: int) -> bytes:
    body = {"prompt": list(prompt), "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    return post("/v1/completions", json.dumps(body).encode())


@asynccontextmanager
async def connection(
    cluster: Cluster,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(*place_of(cluster))
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer_to(cluster: Cluster, data: bytes) -> str:
    """The status that `data` gets, "closed" for a connection that is just ended."""
    async with connection(cluster) as (reader, writer):
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            async with asyncio.timeout(ANSWER_S):
                await writer.drain()
                line = await reader.readline()
                return line.split()[1].decode() if line.startswith(b"HTTP/") else "closed"
        return "closed"


# ---- who leaves ----


async def _leave(world: World, draw: random.Random, limit: asyncio.Semaphore) -> str:
    """One who leaves at a random point: within the request, while queued, in mid-stream."""
    data = completion(world.specs["greedy"].prompt, 200)
    async with limit, connection(world.cluster) as (reader, writer):
        with contextlib.suppress(ConnectionError, TimeoutError):
            if draw.random() < 0.2:
                writer.write(data[: draw.randrange(1, len(data))])
                return "in mid-request"
            writer.write(data)
            async with asyncio.timeout(draw.uniform(0.0, 1.5)):
                await reader.readexactly(draw.randrange(1, 20_000))
        if draw.random() < 0.5:
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)
            writer.transport.abort()
            return "by RST"
        return "by FIN"


async def storm(world: World) -> str:
    limit = asyncio.Semaphore(AT_ONCE)
    leavers = (_leave(world, random.Random(world.draw.random()), limit) for _ in range(LEAVERS))
    counts = Counter(await asyncio.gather(*leavers))
    return f"{LEAVERS} left: " + ", ".join(f"{n} {how}" for how, n in sorted(counts.items()))


# ---- who hardly writes ----


async def slowloris(world: World) -> str:
    """A byte of a head now and then: each is turned away in time."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-slow: " + b"a" * 2000

    async def drip() -> str:
        async with connection(world.cluster) as (reader, writer):
            answer = asyncio.create_task(reader.read(64))
            for byte in head:
                done, _ = await asyncio.wait({answer}, timeout=DRIP_S)
                if done:
                    break
                with contextlib.suppress(ConnectionError):
                    writer.write(bytes([byte]))
                    await writer.drain()
            with contextlib.suppress(ConnectionError):
                return (await asyncio.wait_for(answer, ANSWER_S))[:12].decode() or "closed"
            return "closed"

    async with asyncio.timeout(HEAD_S + ANSWER_S):
        counts = Counter(await asyncio.gather(*(drip() for _ in range(DRIPPERS))))
    return f"{DRIPPERS} dripping heads: {dict(counts)}"


# ---- who means harm ----

BOMBS = {
    "a header of 1 MB": b"GET /health HTTP/1.1\r\nhost: x\r\na: " + b"b" * (1 << 20) + b"\r\n\r\n",
    "10,000 headers": b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 10_000 + b"\r\n",
    "a header of 20 KB": b"GET /health HTTP/1.1\r\nhost: x\r\na: " + b"b" * 20_000 + b"\r\n\r\n",
    "a target of 8 KB": b"GET /" + b"a" * 8192 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "CL and TE": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n"
    b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n"
    b"content-length: 5\r\n\r\nabcde",
    "garbage": bytes(range(256)) * 8 + b"\r\n\r\n",
}


async def bombs(world: World) -> str:
    answers = {name: await answer_to(world.cluster, data) for name, data in BOMBS.items()}
    wrong = {name: word for name, word in answers.items() if word != "closed" and word[0] != "4"}
    if wrong:
        raise Broken(f"not refused: {wrong}")
    return ", ".join(f"{name}: {word}" for name, word in answers.items())


def hostile_bodies() -> dict[str, bytes]:
    """Bodies that no engine must see. All are refused with 400 (or 413)."""
    return {
        "not JSON": b"{",
        "NaN": b'{"prompt":[1,2],"temperature":NaN}',
        "infinite": b'{"prompt":[1,2],"temperature":1e999}',
        "100,000 deep": b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "lone surrogate": b'{"prompt":"\\ud800"}',
        "invalid UTF-8": b'{"prompt":"\xff\xfe"}',
        "n of a billion": b'{"prompt":[1,2],"n":1000000000}',
        "n = true": b'{"prompt":[1,2],"n":true}',
        "negative tokens": b'{"prompt":[1,2],"max_tokens":-1}',
        "ids beyond the vocabulary": b'{"prompt":[1,99999999]}',
        "negative ids": b'{"prompt":[-1]}',
        "bias beyond the vocabulary": b'{"prompt":[1,2],"logit_bias":{"99999999":1}}',
        "bias of a word": b'{"prompt":[1,2],"logit_bias":{"x":1}}',
        "a prompt of everything": b'{"prompt":[' + b"1," * 200_000 + b"1]}",
        "a schema that never ends": b'{"prompt":[1,2],"guided_regex":"((((a*)*)*)*"}',
        "a body of 64 MB": b'{"prompt":"' + b"a" * (64 << 20) + b'"}',
    }


async def hostile_json(world: World) -> str:
    answers: dict[str, str] = {}
    for name, body in hostile_bodies().items():
        answers[name] = await answer_to(world.cluster, post("/v1/completions", body))
    wrong = {name: word for name, word in answers.items() if word not in ("400", "413", "closed")}
    if wrong:
        raise Broken(f"not refused: {wrong}")
    return f"{len(answers)} bodies: {dict(Counter(answers.values()))}"


async def beside_an_honest_stream(world: World, attack: Attack) -> str:
    cluster = world.cluster
    honest = [cluster.begin(world.specs[kind], "honest") for kind in ("beside", "seeded")]
    await honest[0].at_least(EARLY)
    proof = await attack(world)
    honest.append(cluster.begin(world.specs["greedy"], "after"))
    for stream in honest:
        await stream.finish()
    await check_all(cluster, honest)
    return proof


def client_cases() -> list[Case]:
    attacks: dict[str, Attack] = {
        "disconnect storm": storm,
        "slowloris": slowloris,
        "header bombs": bombs,
        "hostile JSON": hostile_json,
    }
    return [
        Case("clients", name, lambda w, a=attack: beside_an_honest_stream(w, a))
        for name, attack in attacks.items()
    ]
