"""The same core in Python: what core.cpp does, line by line, with protobuf's own messages."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Final, cast

import hiredis
import orjson

from protos import node_pb2

BOUNDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
MOST_LIVE: Final = 4096
KEPT: Final = 2000  # timelines
# The type stub of pack_command wrongly asks for tuples of one item.
_pack: Final = cast("Any", hiredis.pack_command)


@dataclass(slots=True)
class CoreRequest:
    """A request under way."""

    number: int
    id: str
    request: node_pb2.Request
    num_prompt: int
    prefill: int
    decode: int
    arrived: float
    placed: float
    is_decoding: bool = False
    num_tokens: int = 0
    text: str = ""
    first_token: float = 0.0


class PythonCore:
    """See core.cpp. `texts` are of each token id, `params` a plain chat's without `max_tokens`."""

    def __init__(self, texts: list[str], params: bytes, script: str) -> None:
        self._texts = texts
        self._params = params
        self._script = script
        self._live: dict[str, CoreRequest] = {}
        self._num_live = ([0], [0])  # by stage and node
        self._batches = ([node_pb2.RouterBatch()], [node_pb2.RouterBatch()])
        self._redis: list[bytes] = []
        self._asked = self._answered = 0
        self._held: deque[tuple[int, int, bytes]] = deque()
        self._timelines: deque[tuple[str, float, float, float, float]] = deque(maxlen=KEPT)
        self._made = self.prompt_tokens = self.output_tokens = self.refused = 0
        self._histograms = ([0] * 12, [0] * 12)
        self._sums = [0.0, 0.0]

    def begin(self, prompt_ids: list[int], max_tokens: int) -> int:
        """Take a prompt. Return its number; 0 if too many are live."""
        if len(self._live) >= MOST_LIVE:
            self.refused += 1
            return 0
        self._made += 1
        arrived = time.monotonic()
        prefill = min(range(len(self._num_live[0])), key=self._num_live[0].__getitem__)
        decode = min(range(len(self._num_live[1])), key=self._num_live[1].__getitem__)
        name = f"chatcmpl-{self._made}-0.core"
        request = node_pb2.Request(id=name, deadline_ms=600_000, epoch=1, resume="fast")
        request.prompt_ids.extend(prompt_ids)
        request.output_ids.add()
        request.params.MergeFromString(self._params)
        request.params.max_tokens = max_tokens
        placed = time.monotonic()
        it = CoreRequest(
            self._made, name, request, len(prompt_ids), prefill, decode, arrived, placed
        )
        self._live[name] = it
        submit = self._batches[0][prefill].messages.add().submit
        submit.request.CopyFrom(request)
        submit.prefill.SetInParent()
        self._num_live[0][prefill] += 1
        self.prompt_tokens += len(prompt_ids)
        nodes = f"prefill-{prefill} decode-{decode}"
        record = request.SerializeToString()
        self._command(f"{{{name}}}:record", "claim", name, nodes, record, "3600")
        return self._made

    def take(self, stage: int, node: int) -> bytes:
        """Return what waits for a node; b"" if nothing does."""
        batch = self._batches[stage][node]
        if not batch.messages:
            return b""
        self._batches[stage][node] = node_pb2.RouterBatch()
        return node_pb2.RouterMessage(batch=batch).SerializeToString()

    def take_redis(self) -> bytes:
        """Return what waits for Redis; b"" if nothing does."""
        found, self._redis = self._redis, []
        return b"".join(found)

    def receive(self, message: bytes) -> list[tuple[int, bytes]]:
        """Take a message of a node. Return the answers that are ready by it."""
        step = node_pb2.NodeMessage.FromString(message).step
        for ready in step.handles:
            self._on_handle(ready)
        for event in step.tokens:
            self._on_tokens(event)
        return self._ready()

    def receive_redis(self, data: bytes) -> list[tuple[int, bytes]]:
        """Take replies of Redis, each a line. Return the answers that are ready by them."""
        if b"-" in data:
            raise RuntimeError("Redis answered with an error")
        self._answered += data.count(b"\n")
        return self._ready()

    def _on_handle(self, ready: Any) -> None:
        it = self._live.get(ready.request_id)
        if it is None or it.is_decoding:
            return
        submit = self._batches[1][it.decode].messages.add().submit
        submit.request.CopyFrom(it.request)
        submit.decode.handle.CopyFrom(ready.handle)
        self._num_live[0][it.prefill] -= 1
        self._num_live[1][it.decode] += 1
        it.is_decoding = True

    def _on_tokens(self, event: Any) -> None:
        it = self._live.get(event.request_id)
        if it is None or event.position > it.num_tokens:
            return
        fresh = event.token_ids[it.num_tokens - event.position :]
        if fresh:
            if not it.num_tokens:
                it.first_token = time.monotonic()
            it.num_tokens += len(fresh)
            it.text += "".join([self._texts[token] for token in fresh])
            ids = bytes(str(list(fresh)), "ascii")
            self._command(f"{{{it.id}}}:log", "append", str(it.num_tokens), ids)
        if event.finish_reason and it.is_decoding:
            self._finish(it)

    def _finish(self, it: CoreRequest) -> None:
        ended = time.monotonic()
        message = {"role": "assistant", "content": it.text}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
        usage = {
            "prompt_tokens": it.num_prompt, "completion_tokens": it.num_tokens,
            "total_tokens": it.num_prompt + it.num_tokens,
        }  # fmt: skip
        reply = orjson.dumps(
            {
                "id": it.id, "object": "chat.completion", "created": int(time.time()),
                "model": "demo", "choices": [choice], "usage": usage,
            }
        )  # fmt: skip
        self._command(f"{{{it.id}}}:record", "finish", it.id, str(it.num_tokens), "length", "60")
        self._num_live[1][it.decode] -= 1
        self.output_tokens += it.num_tokens
        self._count(0, it.first_token - it.arrived)
        self._count(1, ended - it.arrived)
        self._timelines.append((it.id, it.arrived, it.placed, it.first_token, ended))
        self._held.append((it.number, self._asked, reply))
        del self._live[it.id]

    def _count(self, which: int, value: float) -> None:
        at = 0
        while at < len(BOUNDS) and value > BOUNDS[at]:
            at += 1
        self._histograms[which][at] += 1
        self._sums[which] += value

    def _command(self, key: str, *words: str | bytes) -> None:
        if self._script:
            self._redis.append(_pack(("EVALSHA", self._script, "1", key, *words)))
            self._asked += 1

    def _ready(self) -> list[tuple[int, bytes]]:
        found: list[tuple[int, bytes]] = []
        while self._held and self._held[0][1] <= self._answered:
            number, _, reply = self._held.popleft()
            found.append((number, reply))
        return found
