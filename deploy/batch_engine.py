"""One engine behind the router's own HTTP app, in this process: no network, no nodes, no store.

For `baton batch --model DIR`: every endpoint, check and error is the router's; only the dispatcher
is another. The life: `async with engine_app(...) as app`, then requests by httpx.ASGITransport.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast

from starlette.types import ASGIApp

from baton.chat_template import ChatTemplate
from baton.clock import SystemClock
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.thread import EngineThread, StepReport
from baton.errors import Cancelled, DeadlineExceeded, error_from_code
from baton.events import RequestFailed, TokenEvent
from baton.generation_config import sampling_defaults
from baton.handles import NodeRecord
from baton.node.pooling import PoolingDesk
from baton.request import Request
from baton.timing import Timing
from baton.tokenizer import Tokenizer
from router.aborts import Aborts
from router.app import create_app
from router.config import RouterConfig
from router.dispatcher import Dispatcher
from router.gate.gate import Gate, GateSettings
from router.metrics import RouterMetrics
from router.nodes.registry import NodeRegistry, ServedModel
from router.pooling.pool import PoolAsk, groups
from router.services import RouterServices
from router.store.ledger import StoreGuard
from router.store.memory_store import MemoryStore
from router.trace import RequestTrace

NODE: Final = "engine"


class EngineDispatcher:
    """Dispatcher.run over one local engine. Event loop only, but for `on_step`."""

    def __init__(self, engine: Engine) -> None:
        self._loop = asyncio.get_running_loop()
        self._queues: dict[str, asyncio.Queue[TokenEvent | RequestFailed]] = {}
        self.thread = EngineThread(engine, self._on_step)
        self.gate = Gate(SystemClock(), GateSettings())  # of vectors; tokens wait in the engine
        self.pools = EnginePools(self)

    async def run(
        self, request: Request, trace: RequestTrace | None = None
    ) -> AsyncGenerator[TokenEvent, None]:
        """Yield the request's tokens to the end of every sample; closing it early aborts it."""
        trace = trace or RequestTrace()
        trace.decode_node, trace.local_prefill = NODE, True
        queue: asyncio.Queue[TokenEvent | RequestFailed] = asyncio.Queue()
        self._queues[request.id] = queue
        left = request.params.n
        try:
            async with asyncio.timeout(seconds_left(request.deadline)):
                await self.thread.call(lambda engine: engine.add(request))
                while left:
                    event = await queue.get()
                    if isinstance(event, RequestFailed):
                        raise error_from_code(event.code, event.message, event.field)
                    left -= event.finish_reason is not None
                    trace.cached_tokens = max(trace.cached_tokens, event.num_cached_tokens)
                    yield event
        except TimeoutError as error:
            raise DeadlineExceeded("the request's deadline has passed") from error
        finally:
            del self._queues[request.id]
            if left:
                self.thread.post(lambda engine: self._abort(engine, request.id))

    def abort(self, request_id: str) -> bool:
        """End a request from outside; its `run` raises Cancelled."""
        queue = self._queues.get(request_id)
        if queue is not None:
            queue.put_nowait(RequestFailed(request_id, 1, Cancelled.code, "aborted", False))
        return queue is not None

    def _abort(self, engine: Engine, request_id: str) -> None:
        engine.abort(request_id)
        self._loop.call_soon_threadsafe(self.pools.desk.blocks_freed)

    def _on_step(self, report: StepReport) -> None:
        self._loop.call_soon_threadsafe(self._deliver, report)

    def _deliver(self, report: StepReport) -> None:
        for event in (*report.events, *report.failed):
            queue = self._queues.get(event.request_id)
            if queue is not None:
                queue.put_nowait(event)
        self.pools.desk.blocks_freed()


class EnginePools:
    """Pools over the same engine: vectors between its steps, a group of prompts after the other."""

    def __init__(self, dispatcher: EngineDispatcher) -> None:
        self.desk = PoolingDesk(dispatcher)
        self.num_live = 0

    async def vectors(
        self, ask: PoolAsk, passage: AbstractAsyncContextManager[object] | None = None
    ) -> list[bytes]:
        """See Pools."""
        found: list[bytes] = []
        self.num_live += 1
        try:
            async with passage or nullcontext(), asyncio.timeout(seconds_left(ask.deadline)):
                for prompts in groups(ask.prompts):
                    found += await self.desk.vectors(
                        ask.task(ask.request(ask.id, prompts), prompts)
                    )
        except TimeoutError as error:
            raise DeadlineExceeded("the request's deadline has passed") from error
        finally:
            self.num_live -= 1
        return found


def seconds_left(deadline: float | None) -> float | None:
    return None if deadline is None else deadline - SystemClock().monotonic()


class EngineRegistry:
    """What front doors ask of a NodeRegistry: there is one model, and it can serve."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def model(self) -> ServedModel:
        return self._model

    def can_serve(self) -> bool:
        return True

    def records(self) -> list[NodeRecord]:
        return []


@asynccontextmanager
async def engine_app(config: EngineConfig, api: RouterConfig) -> AsyncIterator[ASGIApp]:
    """The HTTP app over a loaded engine; `api` names the same model. Raises ConfigError,
    ModelRefused."""
    engine = await asyncio.to_thread(partial(Engine.load, config))
    dispatcher = EngineDispatcher(engine)
    info = engine.info
    model = ServedModel(
        config.model_name, info.digest, info.max_model_len, info.vocab_size, info.eos_token_ids
    )
    template = ChatTemplate.load(api.model, api.chat_template)
    clock = SystemClock()
    known = cast(Dispatcher, dispatcher)  # the part of it that front doors use
    services = RouterServices(
        config=replace(api, stored_responses_mb=0),  # nobody could ask for one
        dispatcher=known,
        registry=cast(NodeRegistry, EngineRegistry(model)),
        store=StoreGuard(MemoryStore(NODE, Timing(), clock), Timing()),
        tokenizer=Tokenizer.load(api.model),
        chat_template=template if template.present else None,
        metrics=RouterMetrics(),
        aborts=Aborts(known),
        sampling_defaults=sampling_defaults(api.model) if api.generation_config == "auto" else {},
        clock=clock,
        pools=dispatcher.pools,
    )
    app: Any = create_app(services)
    dispatcher.thread.start()
    try:
        yield app
    finally:
        await asyncio.to_thread(dispatcher.thread.stop)
