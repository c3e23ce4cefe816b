"""A prefill node and decode nodes that compute nothing: `python -m bench.router_nodes`.

Real sessions (baton/node/service.py) in a process of their own, for bench/router.py. The prefill
node answers a prompt with handle and token 1 in one message. The decode node answers with all its
tokens at once, or step by step as an engine's batch would: one token per running request, one
message per step. Steps come as fast as routers read, or every `--step-ms`. With several decode
nodes (`--decode-nodes`) their steps come one after the other. Prints one JSON line when ready.
SIGTERM ends it; with --times it then writes when each step left, for the lag that a client sees.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import uvloop

from baton.node.config import NodeConfig
from baton.node.service import NodeServer
from baton.node.session import RouterSession
from baton.protocol.clock import Clock, SystemClock
from baton.protocol.events import HandleReady, NodeStep, Subscribed, TokenEvent
from baton.protocol.handles import Endpoint, KVHandle, LaneAddress, NodeLoad, NodeRecord, Role
from baton.protocol.kv_spec import PoolFormat
from baton.protocol.messages import AbortRequest, RouterMessage, SubmitDecode, SubmitPrefill
from baton.protocol.request import FinishReason, Request
from baton.runtime.timing import Timing
from baton.text.tokenizer import Tokenizer
from bench.children import say_ready

VOCAB_SIZE: Final = 4096
NUM_WORDS: Final = 64
_WORD: Final = re.compile(" [a-z]{2,}")
UNREAD: Final = 2  # steps that may wait for a router before the next one is computed
UNREAD_S: Final = 0.0002  # between two looks; not at once, this core has others to serve


@dataclass(slots=True)
class Running:
    """A request in the decode node's batch, with its next position."""

    request: Request
    session: RouterSession
    position: int


@dataclass(frozen=True, slots=True)
class StepPace:
    """When steps come.

    `step_s` None: all tokens of a request at once; 0: a step as soon as routers have read.
    `phase_s`: when steps begin, in [0, step_s).
    """

    step_s: float | None
    words: tuple[int, ...]
    phase_s: float = 0.0

    def token(self, position: int) -> int:
        return self.words[position % len(self.words)]


@dataclass(slots=True)
class StepTimes:
    """When each step left (seconds, monotonic), and the positions in it: request -> position."""

    steps: list[tuple[float, dict[str, int]]] = field(
        default_factory=list[tuple[float, dict[str, int]]]
    )


class InstantNode:
    """The shell behind sessions; see the module. `pace.words` are its tokens. Event loop only."""

    def __init__(
        self, role: Role, name: str, pace: StepPace, times: StepTimes | None = None
    ) -> None:
        self.config = NodeConfig(outbox_messages=100_000)
        self.timing = Timing()
        self.clock: Clock = SystemClock()
        self._role = role
        self._name = name
        self._pace = pace
        self._times = times
        self._exports = 0
        self._sessions: set[RouterSession] = set()
        self._running: dict[str, Running] = {}
        self._work = asyncio.Event()
        self._answers: dict[RouterSession, list[NodeStep]] = {}
        self.address = ""

    # ---- for the service ----

    def record(self) -> NodeRecord:
        return NodeRecord(
            node_id=self._name,
            boot_id=f"boot-{self._name}",
            role=self._role,
            address=self.address,
            model="demo",
            model_digest="0" * 64,
            block_size=16,
            max_model_len=2048,
            vocab_size=VOCAB_SIZE,
            endpoint=self._endpoint(),
            load=NodeLoad(free_blocks=100_000, total_blocks=100_000),
            eos_token_ids=(2,),
        )

    def attach(self, session: RouterSession) -> None:
        self._sessions.add(session)

    def detach(self, session: RouterSession) -> None:
        self._sessions.discard(session)
        for request_id in [k for k, v in self._running.items() if v.session is session]:
            del self._running[request_id]

    def receive(self, session: RouterSession, message: RouterMessage) -> None:
        match message:
            case SubmitPrefill():
                self._answer(session, self._prefilled(message.request))
            case SubmitDecode():
                self._decode(session, message.request)
            case AbortRequest():
                self._running.pop(message.request_id, None)
            case _:
                pass  # leases: nothing is held here

    # ---- the work ----

    async def run(self) -> None:
        """Make steps until cancelled."""
        step_s, due = self._pace.step_s or 0.0, 0.0
        while True:
            if not self._running:
                self._work.clear()
                await self._work.wait()
            if step_s:
                now = time.monotonic()
                # Not earlier than a step after the last: timers may fire a moment too soon.
                due = max(due + step_s, now + (self._pace.phase_s - now) % step_s)
                await asyncio.sleep(due - now)
            self._step()
            await asyncio.sleep(0)
            while any(session.unread > UNREAD for session in self._sessions):  # noqa: ASYNC110
                await asyncio.sleep(UNREAD_S)

    def _step(self) -> None:
        """Send one token for every running request, in one message per router."""
        steps: dict[RouterSession, list[TokenEvent]] = {}
        positions: dict[str, int] = {}
        for request_id, it in list(self._running.items()):
            last = it.position + 1 >= it.request.params.max_tokens
            event = TokenEvent(
                request_id,
                it.request.epoch,
                it.position,
                (self._pace.token(it.position),),
                finish_reason=FinishReason.LENGTH if last else None,
            )
            positions[request_id] = it.position
            it.position += 1
            if last:
                del self._running[request_id]
            steps.setdefault(it.session, []).append(event)
        if self._times is not None:
            self._times.steps.append((time.monotonic(), positions))
        for session, events in steps.items():
            session.send(NodeStep(tokens=tuple(events)))

    def _prefilled(self, request: Request) -> NodeStep:
        """Return handle and token 1 in one message."""
        self._exports += 1
        record = self.record()
        handle = KVHandle(
            boot_id=record.boot_id,
            export_seq=self._exports,
            request_id=request.id,
            epoch=request.epoch,
            num_tokens=len(request.prompt_ids),
            secret=b"secret of an export",
            endpoint=record.endpoint,
            lease_ms=10_000,
        )
        last = request.params.max_tokens == 1
        token = TokenEvent(
            request.id, request.epoch, 0, (self._pace.token(0),),
            finish_reason=FinishReason.LENGTH if last else None,
        )  # fmt: skip
        ready = HandleReady(request.id, request.epoch, handle)
        return NodeStep(handles=(ready,), tokens=(token,))

    def _decode(self, session: RouterSession, request: Request) -> None:
        """Repeat token 1, as real decode nodes do, and begin what follows."""
        subscribed = (Subscribed(request.id, request.epoch),)
        if self._pace.step_s is not None:
            self._answer(session, NodeStep(subscribed=subscribed))
            self._running[request.id] = Running(request, session, 0)
            self._work.set()
            return
        count = request.params.max_tokens
        ids = tuple(map(self._pace.token, range(count)))
        event = TokenEvent(
            request.id, request.epoch, 0, ids, finish_reason=FinishReason.LENGTH
        )  # fmt: skip
        self._answer(session, NodeStep(subscribed=subscribed, tokens=(event,)))

    def _answer(self, session: RouterSession, step: NodeStep) -> None:
        """Send `step` together with other answers of this turn of the loop, as an engine would."""
        waiting = self._answers.setdefault(session, [])
        waiting.append(step)
        if len(waiting) == 1:
            asyncio.get_running_loop().call_soon(self._flush, session)

    def _flush(self, session: RouterSession) -> None:
        steps = self._answers.pop(session)
        session.send(
            NodeStep(
                tokens=tuple(event for step in steps for event in step.tokens),
                handles=tuple(ready for step in steps for ready in step.handles),
                subscribed=tuple(item for step in steps for item in step.subscribed),
            )
        )

    def _endpoint(self) -> Endpoint:
        lanes = (LaneAddress("stream", "127.0.0.1:1"), LaneAddress("grpc", "127.0.0.1:1"))
        return Endpoint(f"boot-{self._name}", "layout", PoolFormat(16, "bfloat16"), lanes)


async def serve(pace: StepPace, num_decode: int, times_file: Path | None) -> None:
    """Serve all nodes until SIGTERM."""
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    times = StepTimes() if times_file is not None else None
    nodes = [InstantNode(Role.PREFILL, "prefill", pace)]
    for index in range(num_decode):
        own = replace(pace, phase_s=(pace.step_s or 0.0) * index / num_decode)
        nodes.append(InstantNode(Role.DECODE, f"decode-{index}", own, times))
    servers = [NodeServer(node) for node in nodes]
    for node, server in zip(nodes, servers, strict=True):
        node.address = f"127.0.0.1:{server.bind()}"
        await server.start()
    tasks = [asyncio.create_task(node.run()) for node in nodes]
    _announce(nodes)
    await stopped.wait()
    for task in tasks:
        task.cancel()
    for server in servers:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(server.stop(), 5.0)
    if times is not None and times_file is not None:
        await asyncio.to_thread(times_file.write_text, json.dumps(times.steps))


def _announce(nodes: Sequence[InstantNode]) -> None:
    prefill, *decode = (node.address for node in nodes)
    say_ready(prefill=prefill, decode=decode)


def some_words(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return tokens that are one word after one space: bench/router_load.py counts the spaces."""
    texts = ((token_id, tokenizer.decode([token_id])) for token_id in range(tokenizer.vocab_size))
    return tuple(token_id for token_id, text in texts if _WORD.fullmatch(text))[:NUM_WORDS]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.router_nodes")
    parser.add_argument("--step-ms", type=float, help="a token per step and request, so often")
    parser.add_argument("--model", type=Path, required=True, help="whose tokenizer to speak")
    parser.add_argument("--decode-nodes", type=int, default=1)
    parser.add_argument("--times", type=Path, help="file for the times of all steps")
    given = parser.parse_args(arguments)
    step_s = None if given.step_ms is None else given.step_ms / 1000
    pace = StepPace(step_s, some_words(Tokenizer.load(given.model)))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(pace, given.decode_nodes, given.times))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
