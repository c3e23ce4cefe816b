"""What a router is held against: `python -m bench.router_yardsticks`, one plain Starlette program.

    POST /echo                  reads the body and sends it back: what uvicorn and Starlette cost
    POST /v1/chat/completions   streams tokens as vLLM's server does: a queue per request, a
                                pydantic object per token, Starlette's StreamingResponse

Same uvicorn settings as the router's. Prints one JSON line when ready; SIGTERM ends it.
Source: vllm/entrypoints/openai/serving_chat.py, chat_completion_stream_generator.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final

import uvicorn
import uvloop
from pydantic import BaseModel, Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from router.http_guard import HttpLimits, uvicorn_settings

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


class Engine:
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


def build_app(engine: Engine) -> Starlette:
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
        task = asyncio.create_task(engine.run())
        yield
        task.cancel()

    routes = [
        Route("/echo", echo, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


def main() -> int:
    listener = socket.create_server(("127.0.0.1", 0))
    ready = {"ready": True, "address": f"127.0.0.1:{listener.getsockname()[1]}"}
    sys.stdout.write(json.dumps(ready) + "\n")
    sys.stdout.flush()
    config = uvicorn.Config(build_app(Engine()), log_config=None, **uvicorn_settings(HttpLimits()))
    server = uvicorn.Server(config)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(server.serve([listener]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
