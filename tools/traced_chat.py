"""One streamed chat through a whole Baton in this process, with a recorder of what is entered.

Router, prefill node and decode node stand on one event loop, with their engines' threads beside it,
as tests/cluster.py builds them; the chat comes over HTTP. The life: the profiler (before any thread
is started) -> cluster up -> warm chats (connections, caches and channels are there) -> an idle
window -> two chats, one for each recorder. Nothing beats meanwhile: all intervals are an hour long,
so what is entered in a window was entered for its chat; the idle window proves it.

Fixed, so that every machine has the same figures: records in memory instead of Redis, a CPU,
torch's own operations instead of compiled kernels, the demo model's greedy answers.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import uvloop

from baton.runtime.timing import Timing
from router.main import http_server
from router.server.app import create_app
from tests.cluster import Plan, cluster
from tools.trace_counts import Entry
from tools.trace_hooks import ROOT, Entries, Instances, Profiler, Recorder
from tools.trace_types import Made, Marks

FAR_S: Final = 3600.0
# No heartbeat, renewal or ping falls into a window.
SILENT: Final = Timing(
    heartbeat_s=FAR_S, node_record_s=FAR_S, router_lease_s=FAR_S, kv_lease_s=FAR_S,
    kv_progress_s=FAR_S, connect_s=60.0, ping_interval_s=FAR_S, ping_timeout_s=FAR_S, stall_s=FAR_S,
)  # fmt: skip
ENGINE: Final[dict[str, Any]] = {
    "device": "cpu",
    "check_invariants": False,
    "measure_limits": False,
}
KERNELS: Final = {"BATON_CPU_KERNELS": "off"}  # read when a model is loaded
QUIET_S: Final = 0.5  # a chat is over when nothing of ours has been entered for so long
WAIT_S: Final = 60.0
NUM_WARM: Final = 2
NUM_TOKENS: Final = 4


@dataclass(frozen=True, slots=True)
class Traced:
    """What one chat went through."""

    entries: list[Entry]  # without what is in `idle`
    idle: list[Entry]  # entered in a window without a chat: none, as long as SILENT is
    made: list[Made]  # for a second chat
    texts: list[str]  # of the chunks of the first


class Client:
    """One connection to the router, kept alive."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, model: str
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._model = model

    async def prompt_ids(self, number: int) -> tuple[int, ...]:
        """What the router makes of the chat of that number."""
        answer = await self._post("/tokenize", {"messages": messages(number)}, number)
        return tuple(json.loads(answer)["tokens"])

    async def chat(self, number: int) -> list[str]:
        """Stream an answer of NUM_TOKENS; the texts of its chunks. Raises ValueError if it has not
        so many."""
        body = {"messages": messages(number), "stream": True, "max_tokens": NUM_TOKENS}
        answer = await self._post("/v1/chat/completions", body, number)
        lines = [line[len(b"data: ") :] for line in answer.splitlines() if line.startswith(b"data")]
        choices = [json.loads(line)["choices"] for line in lines if line != b"[DONE]"]
        texts = [choice["delta"].get("content") for (choice,) in choices]
        texts = [text for text in texts if text]
        if len(texts) != NUM_TOKENS:
            raise ValueError(f"{NUM_TOKENS} tokens expected: {answer.decode()}")
        return texts

    async def _post(self, path: str, content: Mapping[str, object], number: int) -> bytes:
        body = json.dumps({"model": self._model, **content}).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\nx-request-id: {request_id(number)}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        lines = (await self._reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
        headers = dict(line.split(b": ", 1) for line in lines[1:] if line)
        if b"content-length" in headers:
            answer = await self._reader.readexactly(int(headers[b"content-length"]))
        else:
            answer = b""
            while size := int(await self._reader.readline(), 16):
                answer += (await self._reader.readexactly(size + 2))[:-2]
            await self._reader.readline()
        if b" 200 " not in lines[0]:
            raise ValueError(f"{lines[0].decode()}: {answer.decode()}")
        return answer


def request_id(number: int) -> str:
    return f"traced-chat-{number}"


def phrase(number: int) -> str:
    return f"PagedAttention of chat {number}"


def messages(number: int) -> list[dict[str, str]]:
    """A little more than one block of tokens, so that there is KV to hand over."""
    content = f"Please tell me in one sentence, what is the {phrase(number)}?"
    return [{"role": "user", "content": content}]


def trace(lanes: Sequence[str]) -> Traced:
    """Bring everything up, with these KV lanes (best first), trace, and take it down.

    For a process of its own: it sets the profiler of this one, and KERNELS in its environment.
    """
    os.environ.update(KERNELS)
    plan = Plan(
        ROOT / "demo_model", prefill=(ENGINE,), decode=(ENGINE,), timing=SILENT, lanes=lanes
    )
    profiler = Profiler()
    profiler.install()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_trace(plan, profiler))
    finally:
        profiler.remove()


async def _trace(plan: Plan, profiler: Profiler) -> Traced:
    async with _client(plan) as client:
        for number in range(NUM_WARM):
            await client.chat(number)
        number = NUM_WARM
        ids = await client.prompt_ids(number + 1)
        await _quiet(profiler, Entries())
        idle, entries = Entries(), Entries()
        await _quiet(profiler, idle)
        profiler.recorder = entries
        texts = await client.chat(number)
        await _quiet(profiler, entries)
        number += 1
        instances = Instances(Marks((request_id(number), phrase(number)), ids, tuple(texts)))
        profiler.recorder = instances
        if await client.chat(number) != texts:
            raise ValueError("the two chats have different answers: an answer's pieces are marks")
        await _quiet(profiler, instances)
    background = set(idle.entries)
    return Traced(
        [each for each in entries.entries if each not in background],
        idle.entries,
        instances.end(),
        texts,
    )


async def _quiet(profiler: Profiler, recorder: Recorder) -> None:
    """Record until nothing of ours has been entered for QUIET_S. Raises TimeoutError."""
    profiler.recorder = recorder
    recorder.last_s = time.monotonic()
    async with asyncio.timeout(WAIT_S):
        while True:  # silence is no event that could be waited for
            left_s = recorder.last_s + QUIET_S - time.monotonic()
            if left_s <= 0:
                break
            await asyncio.sleep(left_s)
    profiler.recorder = None


@asynccontextmanager
async def _client(plan: Plan) -> AsyncGenerator[Client, None]:
    """A client of a cluster that serves HTTP."""
    async with cluster(plan) as parts:
        server = http_server(parts.router.config, create_app(parts.router.services))
        server.date_s = FAR_S
        listener = socket.create_server(("127.0.0.1", 0))
        serving = asyncio.create_task(server.serve([listener]))
        await server.began.wait()
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        try:
            yield Client(reader, writer, plan.model.name)
        finally:
            writer.close()
            server.should_exit = True
            await serving
