"""Two engines that compute nothing, over HTTP: `python -m bench.router_peer_engines`.

They stand behind routers of others for bench/router_peers.py: a prefill and a decode engine in one
process, with raw asyncio protocols. Each is an HTTP server with the few paths that the router asks
for. A chat is answered at once; a streamed chat with an event per token, every `--step-ms`. The
prefill engine answers with one token, which the router drops. Prints one JSON line when ready;
SIGTERM ends it.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from typing import Any, Final, cast

import orjson
import uvloop

from bench.children import say_ready

_LENGTH: Final = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n%b\r\n\r\n"
_INFO: Final = {"model_path": "demo", "served_model_name": "demo", "is_generation": True}


class FakeEngine(asyncio.Protocol):
    """One connection of an engine. `prefill`: it answers with one token, whatever is asked."""

    def __init__(self, prefill: bool, step_s: float) -> None:
        self._prefill = prefill
        self._step_s = step_s
        self._data = b""
        self._transport: asyncio.Transport | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        for task in self._tasks:
            task.cancel()

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            length = _LENGTH.search(self._data, 0, end)
            whole = end + 4 + (int(length[1]) if length else 0)
            if len(self._data) < whole:
                return
            path, body = self._data.split(b" ", 2)[1], self._data[end + 4 : whole]
            self._data = self._data[whole:]
            self._answer(path, body)

    def _answer(self, path: bytes, body: bytes) -> None:
        if not path.startswith(b"/v1/chat"):
            self._whole(orjson.dumps(_INFO))
            return
        asked: dict[str, Any] = orjson.loads(body)
        tokens = asked.get("max_completion_tokens") or asked.get("max_tokens") or 1
        tokens = 1 if self._prefill else int(tokens)
        if asked.get("stream"):
            task = asyncio.create_task(self._stream(tokens))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            message = {"role": "assistant", "content": " word" * tokens}
            self._whole(_reply("chat.completion", {"message": message, "finish_reason": "length"}))

    def _whole(self, body: bytes) -> None:
        framing = b"content-length: %d" % len(body)
        self._write(_HEAD % (b"application/json", framing) + body)

    async def _stream(self, tokens: int) -> None:
        self._write(_HEAD % (b"text/event-stream", b"transfer-encoding: chunked"))
        for left in reversed(range(tokens)):
            await asyncio.sleep(self._step_s)
            choice = {"delta": {"content": " word"}, "finish_reason": None if left else "length"}
            self._event(_reply("chat.completion.chunk", choice))
        self._event(b"[DONE]")
        self._write(b"0\r\n\r\n")

    def _event(self, data: bytes) -> None:
        event = b"data: %b\n\n" % data
        self._write(b"%x\r\n%b\r\n" % (len(event), event))

    def _write(self, data: bytes) -> None:
        assert self._transport is not None, "connected"
        self._transport.write(data)


def _reply(kind: str, choice: dict[str, Any]) -> bytes:
    head = {"id": "chatcmpl-0", "object": kind, "created": 1, "model": "demo"}
    return orjson.dumps({**head, "choices": [{"index": 0, **choice}]})


async def serve(step_s: float) -> None:
    loop = asyncio.get_running_loop()
    servers = [
        await loop.create_server(lambda prefill=prefill: FakeEngine(prefill, step_s), "127.0.0.1")
        for prefill in (True, False)
    ]
    prefill, decode = (f"127.0.0.1:{each.sockets[0].getsockname()[1]}" for each in servers)
    say_ready(prefill=prefill, decode=decode)
    await asyncio.gather(*(each.serve_forever() for each in servers))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.router_peer_engines")
    parser.add_argument("--step-ms", type=float, default=20.0, help="between tokens of a stream")
    given = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(given.step_ms / 1000))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
