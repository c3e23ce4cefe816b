"""Yardsticks for a router: `python -m bench.router_yardsticks`, one plain Starlette program.

    POST /echo                  reads the body and sends it back: what uvicorn and Starlette cost
    POST /relay                 sends the body through two open gRPC streams, one after the other,
                                and back to the client
    POST /least                 the same as /relay, after what libraries do with a chat: the body is
                                parsed, rendered by its template, encoded; no checks, no choice, no
                                Redis
    POST /v1/chat/completions   streams tokens as vLLM's server does: a queue per request, a
                                pydantic object per token, Starlette's StreamingResponse

It has the router's uvicorn settings. Prints one JSON line when ready; SIGTERM ends it.
Source: vllm/entrypoints/openai/serving_chat.py, chat_completion_stream_generator.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

import grpc
import msgspec
import orjson
import uvicorn
import uvloop
from pydantic import BaseModel, Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from baton.text.chat_template import Chat, ChatTemplate
from baton.text.tokenizer import Tokenizer
from bench.children import say_ready
from bench.router_relay import STEP
from router.server.http_guard import HttpLimits, uvicorn_settings

_BATCH: Final = msgspec.msgpack.Decoder(list[tuple[int, bytes]])
WORDS: Final = tuple(f" word{index}" for index in range(64))


class DeltaMessage(BaseModel):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, str]] = Field(default_factory=list[dict[str, str]])


class StreamChoice(BaseModel):
    index: int
    delta: DeltaMessage
    logprobs: dict[str, float] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class StreamChunk(BaseModel):
    id: str
    object: str = "chat.completion.chunk"
    created: int = Field(default_factory=lambda: int(time.time()))
    model: str
    choices: list[StreamChoice]
    usage: dict[str, int] | None = None


class YardstickEngine:
    """Puts one token per step into the queue of every running request, as fast as it can."""

    def __init__(self) -> None:
        self._running: dict[asyncio.Queue[int], int] = {}
        self._work = asyncio.Event()

    def add(self, num_tokens: int) -> asyncio.Queue[int]:
        queue: asyncio.Queue[int] = asyncio.Queue()
        self._running[queue] = num_tokens
        self._work.set()
        return queue

    async def run(self) -> None:
        while True:
            if not self._running:
                self._work.clear()
                await self._work.wait()
            for queue, left in list(self._running.items()):
                queue.put_nowait(left)
                if left == 1:
                    del self._running[queue]
                else:
                    self._running[queue] = left - 1
            while any(queue.qsize() > 1 for queue in self._running):  # noqa: ASYNC110
                await asyncio.sleep(0)
            await asyncio.sleep(0)


class Relay:
    """Sends bodies, each with a number, through a stream to bench/router_relay.py and back.

    Bodies that come while a message is on its way go with the next message, as in a router's
    sessions.
    """

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._stream: Any = self._channel.stream_stream(STEP)()
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._waiting: list[tuple[int, bytes]] = []
        self._work = asyncio.Event()

    async def ask(self, body: bytes) -> bytes:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._waiting.append((number, body))
        self._work.set()
        return await answer

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._write())
            group.create_task(self._read())

    async def _write(self) -> None:
        while True:
            await self._work.wait()
            await asyncio.sleep(0)  # whatever else this turn of the loop brings goes along
            batch, self._waiting = self._waiting, []
            self._work.clear()
            await self._stream.write(msgspec.msgpack.encode(batch))

    async def _read(self) -> None:
        while (message := await self._stream.read()) is not grpc.aio.EOF:
            for number, body in _BATCH.decode(message):
                self._answers.pop(number).set_result(body)


class Least:
    """/relay and /least: what a router cannot do without. Call `start` on the event loop."""

    def __init__(self, addresses: Sequence[str], model: Path) -> None:
        self._addresses = addresses
        self._tokenizer = Tokenizer.load(model)
        self._template = ChatTemplate.load(model)
        self._relays: list[Relay] = []

    def start(self) -> list[asyncio.Task[None]]:
        self._relays = [Relay(address) for address in self._addresses]
        return [asyncio.create_task(each.run()) for each in self._relays]

    async def relay(self, request: Request) -> Response:
        return await self._through(await request.body())

    async def least(self, request: Request) -> Response:
        text = self._template.render(Chat(orjson.loads(await request.body())["messages"]))
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return await self._through(orjson.dumps(ids))

    async def _through(self, body: bytes) -> Response:
        for each in self._relays:
            body = await each.ask(body)
        return Response(body, media_type="application/json")


def build_app(engine: YardstickEngine, router: Least) -> Starlette:
    async def echo(request: Request) -> Response:
        return Response(await request.body(), media_type="application/json")

    async def chat(request: Request) -> StreamingResponse:
        body = json.loads(await request.body())
        return StreamingResponse(chunks(body["max_tokens"]), media_type="text/event-stream")

    async def chunks(num_tokens: int) -> AsyncGenerator[str, None]:
        queue = engine.add(num_tokens)
        yield frame(DeltaMessage(role="assistant", content=""))
        while (left := await queue.get()) > 1:
            yield frame(DeltaMessage(content=WORDS[left % len(WORDS)]))
        yield frame(DeltaMessage(content=WORDS[0]))
        yield frame(DeltaMessage(), "length")
        yield "data: [DONE]\n\n"

    def frame(delta: DeltaMessage, finish_reason: str | None = None) -> str:
        choice = StreamChoice(index=0, delta=delta, finish_reason=finish_reason)
        chunk = StreamChunk(id="chatcmpl-0", model="demo", choices=[choice])
        return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(engine.run()), *router.start()]
        yield
        for task in tasks:
            task.cancel()

    routes = [
        Route("/echo", echo, methods=["POST"]),
        Route("/relay", router.relay, methods=["POST"]),
        Route("/least", router.least, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.router_yardsticks")
    parser.add_argument("--relay-node", action="append", default=[], help="of /relay, in order")
    parser.add_argument("--model", type=Path, default=Path("demo_model"), help="of /least")
    given = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", 0))
    say_ready(address=f"127.0.0.1:{listener.getsockname()[1]}")
    app = build_app(YardstickEngine(), Least(given.relay_node, given.model))
    config = uvicorn.Config(app, log_config=None, **uvicorn_settings(HttpLimits()))
    server = uvicorn.Server(config)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(server.serve([listener]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
