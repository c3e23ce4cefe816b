"""Clients that read the beginning of a long answer and no more: what waits for them has bounds.

The served model's name is long, and in every frame: so an answer is many times what the kernel and
the router may hold of it, without a long computation. A reader that is behind finds its frames
joined (router/request/output_stream.py), so a bounded router has to hold little
of all of them.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from tests.chaos.cases import Case, World
from tests.chaos.clients import beside_an_honest_stream, place_of, post, resident_bytes
from tests.chaos.cluster import Cluster, Layout
from tests.chaos.oracle import Broken

READERS = 200
READ_ON = 20  # of these, when all is computed; the others leave in mid-stream
NAME_BYTES = 16_000  # a frame is hardly more
TOKENS = 200
ANSWER_BYTES = NAME_BYTES * TOKENS  # of one who keeps up
RECEIVE_BYTES = 64 << 10
# 64 KiB in each transport, a frame on its way, and much more for the rest. Unbounded it would be
# 600 MB less what the kernel takes, 0.6 MB each at most.
MAX_GROWTH = 64 << 20
WAIT_S = 28.0  # shorter than router/api/exchange.py's patience with a client that does not read
LOOK_S = 0.2
END = b"data: [DONE]"
LAYOUT = Layout(
    nodes=("p0", "d0"),
    routers=("r0",),
    node_flags=("--num-kv-blocks", "1024", "--max-num-seqs", "64",
                "--max-num-batched-tokens", "256"),
    router_flags=("--served-model-name", "m" * NAME_BYTES),
)  # fmt: skip


@dataclass
class Reader:
    """One answer over a socket that takes nothing that is not asked for."""

    raw: socket.socket
    data: bytearray = field(default_factory=bytearray)

    async def ask(self, cluster: Cluster, body: bytes) -> None:
        """Returns with the first bytes of the answer."""
        loop = asyncio.get_running_loop()
        self.raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        self.raw.setblocking(False)
        await loop.sock_connect(self.raw, place_of(cluster))
        await loop.sock_sendall(self.raw, body)
        self.data += await loop.sock_recv(self.raw, NAME_BYTES)

    async def read_on(self) -> None:
        """To the end of the answer, or of the connection."""
        loop = asyncio.get_running_loop()
        while END not in self.data[-NAME_BYTES:]:
            more = await loop.sock_recv(self.raw, RECEIVE_BYTES)
            if not more:
                return
            self.data += more

    def frames(self) -> list[str]:
        """The texts of those that are whole."""
        rows = [row for row in self.data.split(b"\n")[:-1] if row.startswith(b"data: {")]
        return [json.loads(row[len("data: ") :])["choices"][0]["text"] for row in rows]


@contextmanager
def reader() -> Generator[Reader, None, None]:
    with socket.socket() as raw:
        yield Reader(raw)


async def _peak(cluster: Cluster) -> int:
    """The most memory that the router has until the nodes have computed all."""
    most = 0
    while True:
        most = max(most, resident_bytes(cluster.pid("r0")))
        loads = [record.load for record in (await cluster.records()).values()]
        if not any(load.running + load.waiting + load.fetching for load in loads):
            return most
        await asyncio.sleep(LOOK_S)


async def slow_readers(world: World) -> str:
    cluster = world.cluster
    asked = {"prompt": list(world.specs["greedy"].prompt[:8]), "max_tokens": TOKENS}
    asked |= {"stream": True, "ignore_eos": True, "temperature": 1.0, "seed": 5}
    asked["return_token_ids"] = True  # so each token is a frame, half a character, too
    body = post("/v1/completions", json.dumps(asked).encode())
    with ExitStack() as stack:
        brisk, late, *slow = (stack.enter_context(reader()) for _ in range(2 + READERS))
        await brisk.ask(cluster, body)
        await brisk.read_on()
        before = resident_bytes(cluster.pid("r0"))
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*(each.ask(cluster, body) for each in slow))
            grown = await _peak(cluster) - before
            await late.ask(cluster, body)
            await late.read_on()
        # On a crowded machine some were joined so much that the kernel holds all of their answer.
        stalled = await cluster.metric("r0", "baton_live_requests")
        grown = max(grown, resident_bytes(cluster.pid("r0")) - before)
        await asyncio.gather(*(each.read_on() for each in slow[:READ_ON]))
        text = "".join(brisk.frames())
        wrong = sum("".join(each.frames()) != text for each in (late, *slow[:READ_ON]))
        read = max(len(each.data) for each in slow[:READ_ON])
        told = (
            f"{stalled:.0f} stalled in answers of {ANSWER_BYTES >> 10} KiB while another's ended; "
            f"router +{grown >> 20} MiB; {READ_ON} read on, {read >> 10} KiB at most"
        )
        if stalled < READERS // 2 or wrong or grown > MAX_GROWTH or 2 * read > ANSWER_BYTES:
            raise Broken(f"{wrong} answers are wrong; {told}")
    return told


def slow_reader_cases() -> list[Case]:
    name = f"slow readers ({READERS})"
    return [Case("clients", name, lambda w: beside_an_honest_stream(w, slow_readers), LAYOUT)]
