"""NodeControl: carries out operators' orders, which reach a node through its routers.

    reset_prefix_cache   forget the cached blocks of the pool; running requests keep theirs
    pause, resume        routers are told with the load: they refuse new requests, or queue them.
                         On "hold" a decode node makes no step; else running requests may end
    sleep, wake          requests and exports end first; then weights and KV memory are given back
    load_adapter, unload_adapter     LoRA; running requests keep the weights they began with
    inspect              changes nothing: answers what the engine holds, as JSON

Orders run one after another; one Controlled answers each. The state ends with the process. Event
loop only.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any, Final, Protocol

from baton.engine.core import adapters, inspection, sleeping
from baton.engine.core.engine import Engine
from baton.engine.thread import EngineThread
from baton.node.config import NodeConfig
from baton.node.requests import RequestTable
from baton.node.session import RouterSession
from baton.protocol.adapters import ids_named
from baton.protocol.clock import Clock
from baton.protocol.errors import (
    BatonError,
    ConfigError,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    Unavailable,
)
from baton.protocol.events import AdapterList, Controlled, NodeStep
from baton.protocol.handles import Role
from baton.protocol.messages import ControlNode
from baton.protocol.wire_control import TAGS

log = logging.getLogger(__name__)
LEAVING_S: Final = 60.0  # how long an adapter's weights stay after the last request that uses them
_TRIES: Final = 100  # attempts to fall asleep: a planned step may still run, or an abort may wait


class ControlledShell(Protocol):
    """What NodeControl needs of the shell."""

    @property
    def thread(self) -> EngineThread: ...
    @property
    def requests(self) -> RequestTable: ...
    @property
    def config(self) -> NodeConfig: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def kind(self) -> Role: ...
    @property
    def sessions(self) -> frozenset[RouterSession]: ...
    async def until_quiet(self) -> None: ...
    def send_load(self) -> None: ...
    def report_blocks(self, engine: Engine) -> None: ...


class NodeControl:
    """Carries out orders. Life: act() for each order; sweep() with each heartbeat; stop()."""

    def __init__(self, shell: ControlledShell, engine: Engine) -> None:
        self.pause = ""
        self._shell = shell
        # Only its frozen values are read here; everything else goes through the thread.
        self._engine = engine
        self._released: set[str] = set()  # those of TAGS whose memory has been given back
        self._falling = False
        self._leaving: dict[str, float] = {}  # adapter id -> when a request last used it
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._reported: AdapterList | None = None

    @property
    def asleep(self) -> bool:
        """True while the node serves nothing: asleep, falling asleep or waking."""
        return self._falling or bool(self._released)

    @property
    def adapters(self) -> AdapterList:
        """The adapters that requests may use now."""
        held = self._engine.info.adapters
        return AdapterList(held, tuple(id_ for id_ in held if id_ in self._leaving))

    def attached(self, session: RouterSession) -> None:
        """Send the adapters to a new session, whose router may have read an older record."""
        if self._reported is not None:
            session.send(NodeStep(adapters=self._reported))

    def act(self, session: RouterSession, order: ControlNode) -> None:
        """Carry out an order and answer it on the session that sent it."""
        inspects = order.action == "inspect"  # also while another order is carried out
        self._spawn(self._tell(session, order) if inspects else self._answer(session, order))

    async def _tell(self, session: RouterSession, order: ControlNode) -> None:
        try:
            copy = await self._shell.thread.call(inspection.look)
            found = await asyncio.to_thread(inspection.detail_of, copy, time.time())
            answer = Controlled(order.number, detail=json.dumps(found).encode())
        except BatonError as error:
            answer = Controlled(order.number, error.code, error.message, error.field)
        session.send(NodeStep(controlled=(answer,)))

    def sweep(self) -> None:
        """Free adapters that are leaving and that no request has used for LEAVING_S."""
        now = self._shell.clock.monotonic()
        wanted = {entry.request.adapter for entry in self._shell.requests}
        for id_, last in list(self._leaving.items()):
            if id_ in wanted:
                self._leaving[id_] = now
            elif now - last >= LEAVING_S and not self._lock.locked():
                self._spawn(self._detach(id_))

    async def stop(self) -> None:
        """Cancel the orders that are being carried out."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _answer(self, session: RouterSession, order: ControlNode) -> None:
        answer = Controlled(order.number)
        try:
            async with self._lock:
                await self._do(order)
            log.info("%s: done", order.action)
        except BatonError as error:
            if isinstance(error, ConfigError):  # the operator named a wrong file
                error = InvalidRequest(error.message, field=error.field)
            log.warning("%s: %s", order.action, error.message)
            answer = Controlled(order.number, error.code, error.message, error.field)
        except Exception:
            log.exception("%s failed", order.action)
            answer = Controlled(order.number, InternalError.code, "internal error")
        session.send(NodeStep(controlled=(answer,)))

    async def _do(self, order: ControlNode) -> None:
        match order.action:
            case "inspect":
                raise InternalError("inspect is no order to the engine")
            case "reset_prefix_cache":
                await self._shell.thread.call(self._clear)
            case "pause":
                self._set_pause(order.mode)
            case "resume":
                self._set_pause("")
            case "sleep":
                await self._sleep()
            case "wake":
                await self._wake(order.tags or TAGS)
            case "load_adapter":
                await self._load_adapter(order.name, Path(order.path), in_place=order.in_place)
            case "unload_adapter":
                await self._unload_adapter(order.name)

    def _clear(self, engine: Engine) -> None:
        engine.clear_prefixes()
        self._shell.report_blocks(engine)

    def _set_pause(self, mode: str) -> None:
        self.pause = mode
        # A prefill node goes on with prompts that it has begun: receivers wait for their KV, and
        # would give up.
        self._shell.thread.hold(mode == "hold" and self._shell.kind is Role.DECODE)
        self._shell.send_load()

    # ---- sleep ----

    async def _sleep(self) -> None:
        """Fall asleep. Raises UnsupportedFeature, and Unavailable if requests do not end in
        time.
        """
        if self._released:
            return
        shell = self._shell
        sleeping.check(self._engine)
        self._falling = True
        shell.send_load()
        try:
            async with asyncio.timeout(shell.config.drain_s):
                await shell.until_quiet()
                for _ in range(_TRIES):
                    if await shell.thread.call(self._fall_asleep):
                        self._released = set(TAGS)
                        break
        except TimeoutError as error:
            raise Unavailable("requests are still under way") from error
        finally:
            self._falling = False
            shell.send_load()
        if not self._released:
            raise Unavailable("requests are still under way")

    def _fall_asleep(self, engine: Engine) -> bool:
        if engine.has_work or engine.pool.num_used:
            return False
        sleeping.fall_asleep(engine)
        self._shell.report_blocks(engine)
        return True

    async def _wake(self, tags: tuple[str, ...]) -> None:
        """Wake what `tags` name. Raises ConfigError if the checkpoint has changed."""
        thread = self._shell.thread
        if "kv_cache" in tags and "kv_cache" in self._released:
            await thread.call(lambda engine: engine.arena.take_again())
            self._released.discard("kv_cache")
        if "weights" in tags and "weights" in self._released:
            config = self._engine.config
            loaded = await asyncio.to_thread(sleeping.reload, config)
            await thread.call(lambda engine: sleeping.wake(engine, loaded))
            self._released.discard("weights")
            self._report_adapters()
        self._shell.send_load()

    # ---- adapters ----

    async def _load_adapter(self, name: str, path: Path, *, in_place: bool) -> None:
        """Load an adapter under `name`. Raises ModelRefused, InvalidRequest, Unavailable."""
        if self._released:
            raise Unavailable("the node is asleep")
        thread = self._shell.thread
        model = adapters.model_of(self._engine)
        if self._named(name) and not in_place:
            raise InvalidRequest(f"the adapter {name!r} is loaded already", field="lora_name")
        adapter = await asyncio.to_thread(adapters.read, model, name, path)
        await thread.call(lambda engine: adapters.attach(engine, adapter, path))
        self._leaving.pop(adapter.id, None)
        self._retire(id_ for id_ in self._named(name) if id_ != adapter.id)

    async def _unload_adapter(self, name: str) -> None:
        """Stop offering the adapters of this name to new requests. Raises ModelNotFound."""
        adapters.model_of(self._engine)
        named = self._named(name)
        if not named:
            raise ModelNotFound(f"there is no adapter {name!r}", field="lora_name")
        await self._shell.thread.call(lambda engine: adapters.forget(engine, name))
        self._retire(named)

    def _named(self, name: str) -> list[str]:
        """Return the adapter ids that new requests may get by this name."""
        return [id_ for id_ in ids_named(name, self.adapters.held) if id_ not in self._leaving]

    def _retire(self, ids: Iterable[str]) -> None:
        now = self._shell.clock.monotonic()
        for id_ in ids:
            self._leaving[id_] = now
        self._report_adapters()

    async def _detach(self, id_: str) -> None:
        async with self._lock:
            if id_ not in self._leaving or self._released:
                return
            if await self._shell.thread.call(lambda engine: adapters.detach(engine, id_)):
                del self._leaving[id_]
                log.info("adapter %s: its weights are released", id_)
                self._report_adapters()

    def _report_adapters(self) -> None:
        self._reported = self.adapters
        for session in self._shell.sessions:
            session.send(NodeStep(adapters=self._reported))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
