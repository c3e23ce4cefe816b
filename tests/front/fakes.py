"""A front door without a cluster: scripted dispatcher, one model, the real uvicorn on port 0."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from starlette.types import ASGIApp

from baton.protocol.clock import SystemClock
from baton.protocol.errors import BatonError
from baton.protocol.events import TokenEvent, TokenLogprob
from baton.protocol.handles import Endpoint, NodeLoad, NodeRecord, Role
from baton.protocol.kv_spec import PoolFormat
from baton.protocol.request import FinishReason, Request
from baton.runtime.timing import Timing
from baton.text.chat_template import ChatTemplate
from baton.text.generation_config import SamplingDefaults
from baton.text.tokenizer import Tokenizer
from router.config import RouterConfig
from router.metrics.router import RouterMetrics
from router.models import Models, ServedModel
from router.nodes.migration import MigrationStats
from router.nodes.policy import NodeSnapshot
from router.request.aborts import Aborts
from router.request.gate.gate import Gate, GateSettings
from router.request.texts import TextRing
from router.request.timeline import TimelineRing
from router.request.trace import RequestTrace
from router.server.app import create_app
from router.server.http_guard import HttpLimits, uvicorn_settings
from router.services import Lifecycle, RouterServices
from router.store.guard import StoreGuard
from router.store.memory_store import MemoryStore
from tests.front.tokenizers_built import TEMPLATE, byte_level

BACKEND = byte_level()
TOKENIZER = Tokenizer(BACKEND, {"bos_token": "<s>", "eos_token": "</s>"})
CHAT_TEMPLATE = ChatTemplate(TEMPLATE, TOKENIZER.special_tokens)
EOS = 1
MAX_MODEL_LEN = 128
MODEL = "tiny"


@dataclass(frozen=True, slots=True)
class FakeModel:
    name: str = MODEL
    digest: str = "d"
    max_model_len: int = MAX_MODEL_LEN
    vocab_size: int = TOKENIZER.vocab_size
    eos_token_ids: tuple[int, ...] = (EOS,)


@dataclass
class FakeRegistry:
    served: FakeModel | None = field(default_factory=FakeModel)

    def model(self, _: str = "") -> FakeModel | None:
        return self.served

    def can_serve(self) -> bool:
        return self.served is not None

    def snapshots(self, *, encoding: bool = False) -> Sequence[NodeSnapshot]:
        return ()  # nobody computes vectors here

    def watch_reports(self, watcher: Callable[[], None]) -> None:
        """No node reports anything."""

    def records(self, _: str | None = None) -> Sequence[NodeRecord]:
        endpoint = Endpoint("b", "f", PoolFormat(16, "float32"), ())
        load = NodeLoad(
            running=2,
            waiting=1,
            swapped=1,
            free_blocks=3,
            total_blocks=4,
            kv_received_bytes=4096,
            kv_sent_bytes=512,
            kv_fetches=3,
            kv_fetch_failures=1,
            preemptions=5,
            steps=9,
            step_tokens=90,
            prefix_query_tokens=70,
            prefix_hit_tokens=60,
        )
        node = NodeRecord(
            "decode-0", "b", Role.DECODE, "x:1", MODEL, "d", 16, 128, 400, endpoint, load
        )
        return [node]


@dataclass
class FakeDispatcher:
    """Answers every request with `answer`'s tokens, or a prompt's own script, then end-of-sequence.

    `fail_at` raises before the token of that index; `stall_at` waits there until closed.
    `tokens_per_event` cuts the output into events. `samples`: the answers of a request that wants
    several; their events take turns.
    """

    answer: str = "hello world"
    scripts: dict[tuple[int, ...], str] = field(default_factory=dict[tuple[int, ...], str])
    tokens_per_event: int = 1
    samples: Sequence[str] = ()
    stopped: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    fail_at: int | None = None
    failure: Exception | None = None
    stall_at: int | None = None
    requests: list[Request] = field(default_factory=list[Request])
    traces: list[RequestTrace] = field(default_factory=list[RequestTrace])
    closed: int = 0
    exhausted: int = 0
    stalled: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    gate: Gate = field(default_factory=lambda: Gate(SystemClock(), GateSettings()))
    migrations: MigrationStats = field(default_factory=MigrationStats)
    texts: TextRing | None = None

    @asynccontextmanager
    async def passage(self, request: Request, trace: RequestTrace) -> AsyncIterator[None]:
        ticket = await self.gate.enter(request, trace)
        trace.dispatched_at = SystemClock.monotonic()
        self.traces.append(trace)
        try:
            yield
        finally:
            self.gate.leave(ticket)

    async def run(self, request: Request, trace: RequestTrace) -> AsyncGenerator[TokenEvent, None]:
        self.requests.append(request)
        self.traces.append(trace)
        trace.prefill_node, trace.decode_node = "prefill-0", "decode-0"
        trace.cached_tokens, trace.preemptions = 2, 2
        ended = False
        try:
            async for event in self._events(request):
                yield event
            ended = True
            self.exhausted += 1
        finally:
            if not ended:
                self.closed += 1
                self.aborted.set()

    def stop_sample(self, request_id: str, sample: int) -> None:
        self.stopped.append((request_id, sample))

    def live(self) -> list[tuple[Request, RequestTrace]]:
        return []

    def waiting(self) -> list[tuple[Request, RequestTrace]]:
        return []

    def abort(self, request_id: str, by_operator: bool = False) -> bool:
        return False

    async def _events(self, request: Request) -> AsyncIterator[TokenEvent]:
        if request.params.num_outputs == 1:
            text = self.scripts.get(request.prompt_ids, self.answer)
            async for event in self._sample(request, text, 0):
                yield event
            return
        running = [
            self._sample(request, text, sample)
            for sample, text in enumerate(self.samples[: request.params.num_outputs])
        ]
        while running:
            for each in list(running):
                event = await anext(each, None)
                if event is None:
                    running.remove(each)
                elif (request.id, event.sample) not in self.stopped:
                    yield event

    async def _sample(
        self, request: Request, text: str, sample: int
    ) -> AsyncGenerator[TokenEvent, None]:
        ids = TOKENIZER.encode(text, add_special_tokens=False)
        limit = request.params.max_tokens
        count = request.params.logprobs
        if count is None and request.params.num_outputs > request.params.n:
            count = 0  # as engines do for best_of
        output = [*ids, EOS][:limit] if not request.params.ignore_eos else (ids * limit)[:limit]
        step = self.tokens_per_event
        for position in range(0, len(output), step):
            if self.fail_at is not None and position >= self.fail_at:
                assert self.failure is not None
                raise self.failure
            if self.stall_at is not None and position >= self.stall_at:
                self.stalled.set()
                await asyncio.Event().wait()
            piece = tuple(output[position : position + step])
            last = position + step >= len(output)
            by_eos = last and piece[-1] == EOS
            reason = FinishReason.STOP if by_eos else FinishReason.LENGTH
            yield TokenEvent(
                request_id=request.id,
                epoch=1,
                position=position,
                token_ids=piece,
                sample=sample,
                finish_reason=reason if last else None,
                stop_token_id=EOS if by_eos else None,
                num_cached_tokens=2,
                logprobs=told(piece, count),
                prompt_logprobs=told(request.prompt_ids[1:], request.params.prompt_logprobs)
                if position == 0 and sample == 0
                else (),
            )
            await asyncio.sleep(0)


def told(ids: Sequence[int], count: int | None) -> tuple[tuple[TokenLogprob, ...], ...]:
    """Made-up log-probabilities, as an engine would tell them: each token is its row's second best,
    so with `count` 1 it comes with the best, and with 0 alone."""
    if count is None:
        return ()
    best = range(2, 2 + count + 1)
    return tuple(
        (
            TokenLogprob(token, -token / 100, 2),
            *(
                TokenLogprob(other, -rank / 1000, rank)
                for rank, other in enumerate([o for o in best if o != token], 1)
                if rank != 2 and rank <= count
            ),
        )
        for token in ids
    )


@dataclass
class Front:
    """One front door under test."""

    dispatcher: FakeDispatcher = field(default_factory=FakeDispatcher)
    registry: FakeRegistry = field(default_factory=FakeRegistry)
    config: RouterConfig = field(default_factory=lambda: RouterConfig(request_timeout_s=20.0))
    chat_template: ChatTemplate | None = CHAT_TEMPLATE
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    metrics: RouterMetrics = field(default_factory=RouterMetrics)
    tokenizer: Tokenizer = TOKENIZER
    sampling_defaults: SamplingDefaults = field(default_factory=dict[str, int | float])
    store: StoreGuard = field(
        default_factory=lambda: StoreGuard(MemoryStore("r", Timing(), SystemClock()), Timing())
    )
    timelines: TimelineRing | None = None

    @property
    def model(self) -> ServedModel:
        return ServedModel(self.config, self.tokenizer, self.chat_template, self.sampling_defaults)

    @property
    def services(self) -> RouterServices:
        parts: dict[str, Any] = {
            "config": self.config,
            "dispatcher": self.dispatcher,
            "registry": self.registry,
            "store": self.store,
            "models": Models(self.model),
            "metrics": self.metrics,
            "aborts": Aborts(self.dispatcher),
            "lifecycle": self.lifecycle,
            "timelines": self.timelines,
        }
        return RouterServices(**parts)

    def app(self) -> ASGIApp:
        return create_app(self.services)

    def client(self, **headers: str) -> httpx.AsyncClient:
        """In-process: no socket, no parser."""
        transport = httpx.ASGITransport(self.app(), raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://baton", headers=headers)

    def failing(self, error: BatonError | Exception, at: int = 0) -> Front:
        self.dispatcher.fail_at, self.dispatcher.failure = at, error
        return self


def serving(
    front: Front, limits: HttpLimits | None = None
) -> AbstractAsyncContextManager[int, bool | None]:
    """The front door behind a real server, as `listening`."""
    limits = limits if limits is not None else HttpLimits()
    return listening(create_app(front.services, limits), limits)


@asynccontextmanager
async def listening(app: ASGIApp, limits: HttpLimits) -> AsyncIterator[int]:
    """The app behind a real server on a free loopback port; yields the port."""
    settings = uvicorn_settings(limits)
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, **settings)
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        server.force_exit = True
        await server.shutdown()
