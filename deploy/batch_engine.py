"""One engine behind the router's own HTTP app, in this process: no network, no nodes, no store.

It is for `baton batch --model DIR`. Every endpoint, check and error is the router's; only the
dispatcher is replaced. Use: `async with engine_app(...) as app`, then requests by
httpx.ASGITransport.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Any, Final, cast

from starlette.types import ASGIApp

from baton.async_llm import TokenStreams
from baton.engine.config import EngineConfig
from baton.engine.core.assembly import build_engine
from baton.engine.core.engine import Engine
from baton.engine.thread import EngineThread
from baton.node.pooling import PoolingDesk
from baton.protocol.clock import SystemClock
from baton.protocol.errors import DeadlineExceeded
from baton.protocol.events import TokenEvent
from baton.protocol.handles import Endpoint, NodeRecord, Role
from baton.protocol.kv_spec import PoolFormat
from baton.protocol.request import Request
from baton.runtime.timing import Timing
from router.config import RouterConfig
from router.metrics.router import RouterMetrics
from router.models import Models, ServedModel
from router.nodes.registry import NodeRegistry, ReportedModel
from router.request.aborts import Aborts
from router.request.dispatcher import Dispatcher
from router.request.gate.gate import Gate, GateSettings
from router.request.pool import GROUP_TOKENS, PoolAsk
from router.request.trace import RequestTrace
from router.server.app import create_app
from router.services import RouterServices
from router.store.guard import StoreGuard
from router.store.memory_store import MemoryStore

NODE: Final = "engine"


class EngineDispatcher:
    """The methods of a Dispatcher that front doors use, over one local engine. Event loop only."""

    def __init__(self, engine: Engine) -> None:
        self.streams = TokenStreams(engine, self._blocks_freed)
        self.gate = Gate(SystemClock(), GateSettings())  # for vectors; tokens wait in the engine
        self.pools = EnginePools(self)

    @property
    def thread(self) -> EngineThread:
        return self.streams.thread

    async def run(
        self, request: Request, trace: RequestTrace | None = None
    ) -> AsyncGenerator[TokenEvent, None]:
        """Yield the request's tokens to the end of every sample; closing it early aborts the
        request.
        """
        trace = trace or RequestTrace()
        trace.decode_node, trace.local_prefill = NODE, True
        try:
            async with (
                asyncio.timeout(seconds_left(request.deadline)),
                aclosing(self.streams.run(request)) as events,
            ):
                async for event in events:
                    trace.cached_tokens = max(trace.cached_tokens, event.num_cached_tokens)
                    yield event
        except TimeoutError as error:
            raise DeadlineExceeded("the request's deadline has passed") from error

    @asynccontextmanager
    async def passage(self, request: Request, trace: RequestTrace) -> AsyncIterator[None]:
        """See Dispatcher; no timeline is kept."""
        ticket = await self.gate.enter(request, trace)
        try:
            yield
        finally:
            self.gate.leave(ticket)

    def _blocks_freed(self) -> None:
        self.pools.desk.blocks_freed()

    def stop_sample(self, request_id: str, sample: int) -> None:
        """See Dispatcher."""
        self.streams.stop_sample(request_id, sample)

    def abort(self, request_id: str) -> bool:
        """End a request from outside; its `run` then raises Cancelled."""
        return self.streams.cancel(request_id)


class EnginePools:
    """Computes vectors on the same engine: between its steps, one group of prompts after the
    other.
    """

    def __init__(self, dispatcher: EngineDispatcher) -> None:
        self.desk = PoolingDesk(dispatcher)
        self.num_live = 0

    async def vectors(
        self,
        ask: PoolAsk,
        trace: RequestTrace | None = None,
        passage: AbstractAsyncContextManager[object] | None = None,
    ) -> list[bytes]:
        """See Pools."""
        found: list[bytes] = []
        self.num_live += 1
        try:
            async with passage or nullcontext(), asyncio.timeout(seconds_left(ask.deadline)):
                for part in ask.parts(GROUP_TOKENS):
                    found += await self.desk.vectors(part.task(part.request(part.id)))
        except TimeoutError as error:
            raise DeadlineExceeded("the request's deadline has passed") from error
        finally:
            self.num_live -= 1
        return found


def seconds_left(deadline: float | None) -> float | None:
    return None if deadline is None else deadline - SystemClock().monotonic()


class EngineRegistry:
    """What front doors ask of a NodeRegistry.

    There is one model, and one node, which can serve the model and its adapters.
    """

    def __init__(self, model: ReportedModel, record: NodeRecord) -> None:
        self._model = model
        self._record = record

    def model(self, _: str = "") -> ReportedModel:
        return self._model

    def can_serve(self) -> bool:
        return True

    def records(self, _: str | None = None) -> list[NodeRecord]:
        return [self._record]


def record_of(engine: Engine, model: ReportedModel) -> NodeRecord:
    """Return the record of a decode node with this engine. Nobody ever fetches its KV."""
    block_size = engine.pool.block_size
    return NodeRecord(
        node_id=NODE,
        boot_id=NODE,
        role=Role.DECODE,
        address="",
        model=model.name,
        model_digest=model.digest,
        block_size=block_size,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        endpoint=Endpoint(NODE, "", PoolFormat(block_size, engine.info.kv_dtype), ()),
        adapters=engine.info.adapters,
        encodes=engine.info.encodes,
    )


@asynccontextmanager
async def engine_app(config: EngineConfig, api: RouterConfig) -> AsyncIterator[ASGIApp]:
    """Load an engine and yield the HTTP app over it; `api` must name the same model.

    Raises ConfigError, ModelRefused.
    """
    engine = await asyncio.to_thread(build_engine, config)
    dispatcher = EngineDispatcher(engine)
    info = engine.info
    model = ReportedModel(
        config.model_name, info.digest, info.max_model_len, info.vocab_size, info.eos_token_ids
    )
    clock = SystemClock()
    known = cast(Dispatcher, dispatcher)  # it has the methods that front doors use
    services = RouterServices(
        config=replace(api, stored_responses_mb=0),  # nobody could ask for a stored response
        dispatcher=known,
        registry=cast(NodeRegistry, EngineRegistry(model, record_of(engine, model))),
        store=StoreGuard(MemoryStore(NODE, Timing(), clock), Timing()),
        models=Models(replace(ServedModel.load(api), images=None)),
        metrics=RouterMetrics(),
        aborts=Aborts(known),
        clock=clock,
        pools=dispatcher.pools,
    )
    app: Any = create_app(services)
    dispatcher.thread.start()
    try:
        yield app
    finally:
        await dispatcher.streams.stop()
