"""A plain chat through a compiled core: `python -m bench.router_core.server`.

Python does what libraries do for it: HTTP by uvicorn with the router's settings, the chat's body,
its template and tokens, gRPC sessions with the nodes of bench/router_nodes.py, and the connection
to Redis. Everything between is core.cpp, which is compiled at the start. Prints one JSON line when
ready; SIGTERM ends it.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import socket
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, cast

import grpc
import msgspec
import redis
import uvicorn
import uvloop

from baton.protocol.clock import SystemClock
from baton.protocol.messages import SessionHello, session_metadata
from baton.protocol.sampling import SamplingParams
from baton.protocol.wire import router_messages_to_bytes
from baton.protocol.wire_sampling import write_sampling
from baton.text.chat_template import Chat, ChatTemplate
from baton.text.tokenizer import Tokenizer
from bench.children import say_ready
from bench.router_core.core import PythonCore
from protos import node_pb2
from router.nodes.session import SESSION_METHOD
from router.server.http_guard import HttpLimits, uvicorn_settings

SOURCE: Final = Path(__file__).with_name("core.cpp")
ROUTER_ID: Final = "core"
HEADERS: Final = [(b"content-type", b"application/json")]
SCRIPT: Final = """
if ARGV[1] == 'append' then return redis.call('RPUSH', KEYS[1], ARGV[2], ARGV[3]) end
redis.call('HSET', KEYS[1], 'id', ARGV[2], 'what', ARGV[3], 'more', ARGV[4])
return redis.call('EXPIRE', KEYS[1], ARGV[5])
"""


class RouterCore(Protocol):
    """core.cpp, as Python sees it, and core.py."""

    def begin(self, prompt_ids: list[int], max_tokens: int) -> int: ...
    def take(self, stage: int, node: int) -> bytes: ...
    def take_redis(self) -> bytes: ...
    def receive(self, message: bytes) -> list[tuple[int, bytes]]: ...
    def receive_redis(self, data: bytes) -> list[tuple[int, bytes]]: ...


class ChatAsked(msgspec.Struct):
    """The fields of a body that the prototype knows."""

    messages: list[dict[str, Any]]
    max_tokens: int


def build(folder: Path) -> Any:
    """Compile core.cpp into `folder`, and import it."""
    library = folder / "router_core.so"
    include = sysconfig.get_path("include")
    command = ["g++", "-O2", "-std=c++17", "-shared", "-fPIC", f"-I{include}"]
    subprocess.run([*command, str(SOURCE), "-o", str(library)], check=True)
    spec = importlib.util.spec_from_file_location("router_core", library)
    assert spec is not None, "it names a file"
    assert spec.loader is not None, "of a library"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sampling_bytes() -> bytes:
    """Return the parameters of a plain chat without its `max_tokens`, which the core adds."""
    message = node_pb2.SamplingParams()
    write_sampling(message, SamplingParams(max_tokens=1, ignore_eos=True, seed=1))
    message.ClearField("max_tokens")
    return message.SerializeToString()


class RedisPipe(asyncio.Protocol):
    """The connection to Redis: its answers go to `on_data`."""

    def __init__(self, on_data: Callable[[bytes], None]) -> None:
        self._on_data = on_data

    def data_received(self, data: bytes) -> None:
        self._on_data(data)


class CoreServer:
    """The shell around the core. `start` once on the event loop; then it is an ASGI application."""

    def __init__(self, core: RouterCore, addresses: Sequence[str], model: Path) -> None:
        self._core = core
        self._addresses = addresses  # the prefill node's, the decode node's
        self._tokenizer = Tokenizer.load(model)
        self._template = ChatTemplate.load(model)
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._decoder = msgspec.json.Decoder(ChatAsked)
        self._redis: asyncio.Transport | None = None
        self._flushing = False
        self._calls: list[Any] = []
        self._work = [asyncio.Event(), asyncio.Event()]

    async def start(self, redis_socket: str) -> list[Coroutine[Any, Any, None]]:
        """Connect to the nodes and to Redis ("" is none). Return what must run from now on."""
        loop = asyncio.get_running_loop()
        if redis_socket:
            pipe = RedisPipe(lambda data: self._answer(self._core.receive_redis(data)))
            made, _ = await loop.create_unix_connection(lambda: pipe, redis_socket)
            self._redis = made
        hello = router_messages_to_bytes([SessionHello(ROUTER_ID)], SystemClock(), 1 << 20)
        for address in self._addresses:
            channel = grpc.aio.insecure_channel(address)
            call: Any = channel.stream_stream(SESSION_METHOD)(
                metadata=session_metadata("", ROUTER_ID)
            )
            await call.write(hello)
            self._calls.append(call)
        stages = range(len(self._calls))
        return [work(at) for at in stages for work in (self._read, self._write)]

    async def _read(self, stage: int) -> None:
        call = self._calls[stage]
        while (message := await call.read()) is not grpc.aio.EOF:
            self._answer(self._core.receive(message))
            self._wake()

    def _answer(self, ready: list[tuple[int, bytes]]) -> None:
        for number, answer in ready:
            self._answers.pop(number).set_result(answer)

    async def _write(self, stage: int) -> None:
        call, work = self._calls[stage], self._work[stage]
        while True:
            await work.wait()
            work.clear()
            if message := self._core.take(stage, 0):
                await call.write(message)

    def _wake(self) -> None:
        """At the end of this turn of the loop, write what the core has."""
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        for work in self._work:
            work.set()
        if self._redis is not None and (commands := self._core.take_redis()):
            self._redis.write(commands)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        assert scope["type"] == "http", "uvicorn is told to start without a lifespan"
        body = b""
        while True:
            part = await receive()
            body += part.get("body", b"")
            if not part.get("more_body"):
                break
        asked = self._decoder.decode(body)
        text = self._template.render(Chat(asked.messages))
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        number = self._core.begin(list(ids), asked.max_tokens)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._wake()
        reply = await answer
        length = (b"content-length", b"%d" % len(reply))
        await send({"type": "http.response.start", "status": 200, "headers": [*HEADERS, length]})
        await send({"type": "http.response.body", "body": reply})


async def serve(given: argparse.Namespace, core: RouterCore) -> None:
    shell = CoreServer(core, given.node, given.model)
    listener = socket.create_server(("127.0.0.1", 0))
    settings: dict[str, Any] = {**uvicorn_settings(HttpLimits()), "lifespan": "off"}
    server = uvicorn.Server(uvicorn.Config(cast("Any", shell), log_config=None, **settings))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work) for work in await shell.start(given.redis_socket)]
        say_ready(address=f"127.0.0.1:{listener.getsockname()[1]}")
        await server.serve([listener])
        for task in tasks:
            task.cancel()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="python -m bench.router_core.server")
    parser.add_argument("--node", action="append", required=True, help="prefill, then decode")
    parser.add_argument("--redis-socket", default="", help="a path; without it no Redis")
    parser.add_argument("--core", choices=("compiled", "python"), default="compiled")
    parser.add_argument("--model", type=Path, required=True)
    given = parser.parse_args(arguments)
    tokenizer = Tokenizer.load(given.model)
    texts = [tokenizer.decode([at]) for at in range(tokenizer.vocab_size)]
    script = ""
    if given.redis_socket:
        with redis.Redis(unix_socket_path=given.redis_socket) as client:
            script = str(client.script_load(SCRIPT))
    core: RouterCore
    if given.core == "python":
        core = PythonCore(texts, sampling_bytes(), script)
    else:
        with tempfile.TemporaryDirectory() as folder:
            module = build(Path(folder))
        encoded = [text.encode() for text in texts]
        core = module.Core(encoded, sampling_bytes(), b"demo", script.encode(), 1, 1)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(given, core))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
