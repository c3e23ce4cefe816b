"""A data-parallel group of nodes: rank 0 is started by hand, and starts the others.

    rank 0 (baton decode --data-parallel-size 4)        rank 1 .. 3 (python -m decode_node RANK FD)
      SETUP: options, rank, cores  ---------------------->  load, as rank 0 does
      <------------------------------- LOADED, or FAILED
      MEET, when all have loaded  ----------------------->  all connect for their collectives
      <-------------------------------------- READY line    each serves as a node of its own
      DRAIN at the first signal  ------------------------>  drain
      <------------------------------------------ DRAINED   go on with rounds for the others
      STOP when all are drained, or at the second signal ->  stop, all together

For routers each rank is a node with its own ports, record and KV. But the experts lie on all ranks.
So all ranks end if one ends unexpectedly or a collective fails. Rank 0 watches the processes, the
others watch their socket to rank 0. Each ends at once, as if it had been killed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol

from baton.engine.config import EngineConfig
from baton.engine.parallel.data_rank import DataRank
from baton.engine.parallel.exchange import FIELD
from baton.engine.parallel.messages import Gone, Link, MessageKind
from baton.engine.parallel.ranks import (
    DEATH_S,
    LOAD_DEADLINE_S,
    STOP_S,
    RankProcess,
    cores_of,
    start_module,
    store,
)
from baton.engine.state.place import RankPlace
from baton.node.config import NodeConfig
from baton.protocol.errors import ConfigError
from baton.protocol.handles import Role
from baton.runtime.socket_folder import SocketFolder

log = logging.getLogger(__name__)

RANK: Final = "data-parallel-rank"  # the private argument of all ranks but the first
PREFIX: Final = "baton-data-ranks-"  # names of the ranks' folders in the temporary directory
LOST_RANK: Final = 3  # exit status if a rank of a data- or tensor-parallel group has ended
KILL_S: Final = 0.25  # how long ranks may take to end by themselves before they are killed
PORTS: Final = ("port", "kv_port", "kv_stream_port", "metrics_port", "health_port")
LANE_PORTS: Final = 4  # how many ports a node uses from kv_stream_port on


@dataclass(frozen=True, slots=True)
class RankOptions:
    """What a rank is started with. `group`: the group's name. `directory`: the folder where the
    ranks meet."""

    place: RankPlace
    group: str
    directory: str
    config: NodeConfig
    engine: EngineConfig

    def to_json(self) -> dict[str, Any]:
        """Return the content of the SETUP message."""
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> RankOptions:
        """Return the options that to_json was called on."""
        engine: dict[str, Any] = values["engine"]
        for name, value in engine.items():  # JSON has no tuples
            engine[name] = tuple(value) if isinstance(value, list) else value
        return RankOptions(
            RankPlace(**values["place"]),
            values["group"],
            values["directory"],
            NodeConfig(**values["config"]),
            EngineConfig(**engine),
        )


def options_of_ranks(
    config: NodeConfig, engine: EngineConfig, role: Role, directory: str
) -> list[RankOptions]:
    """Return the options of each rank. The ranks share the cores and threads of this process.
    Raises ConfigError for ports beyond the last one, and for one that two ranks would have."""
    size, name = engine.data_parallel_size, config.node_id or f"{role.value}-{secrets.token_hex(4)}"
    total = engine.threads or len(os.sched_getaffinity(0))
    engine = replace(engine, threads=max(1, total // size))
    group = f"{name}-{secrets.token_hex(4)}"  # another name at each start
    ranks: list[RankOptions] = []
    for place in (RankPlace(rank, size) for rank in range(size)):
        ports = {
            field: given + place.rank * (LANE_PORTS if field == "kv_stream_port" else 1)
            for field in PORTS
            if (given := getattr(config, field))
        }
        own = replace(
            config,
            node_id=name if place.leads else f"{name}-r{place.rank}",
            cpu_cores=",".join(map(str, cores_of(place))) or None,
            **ports,
        )
        own.check()
        ranks.append(RankOptions(place, group, directory, own, engine))
    _check_ports([each.config for each in ranks])
    return ranks


def _check_ports(ranks: Sequence[NodeConfig]) -> None:
    """Raise ConfigError for a port that is given twice, naming the option that has it second."""
    taken: dict[int, str] = {}
    for field in PORTS:
        for rank, config in enumerate(ranks):
            first = getattr(config, field)
            count = LANE_PORTS if field == "kv_stream_port" else 1
            for port in range(first, first + count) if first else ():
                if port in taken:
                    text = (
                        f"port {port} would be rank {rank}'s {field} and {taken[port]}: "
                        f"{len(ranks)} data-parallel ranks take the ports behind each given one"
                    )
                    raise ConfigError(text, field=field)
                taken[port] = f"rank {rank}'s {field}"


def _nothing() -> None:
    pass


class NodeGroup(Protocol):
    """A node's part in its group. The methods are listed in the order in which they are called.

    `name`: the group's; "" = no group. `data`: what the engine needs of it; None without a group.
    """

    @property
    def name(self) -> str: ...
    @property
    def data(self) -> DataRank | None: ...

    def on_death(self, cleanup: Callable[[], None]) -> None:
        """Call `cleanup` if the group is lost, right before the process ends."""
        ...

    def events(self) -> tuple[asyncio.Event, asyncio.Event]:
        """Return two events: drain, and stop at once. Call it on the event loop."""
        ...

    def meet(self) -> None:
        """Block until all ranks have loaded and are connected. Call it on the thread that has
        loaded the model. Raises ConfigError with a rank's reason; InternalError."""
        ...

    async def ready(self, line: dict[str, object]) -> None:
        """Report that this node serves; `line` is its READY line. Raises what `meet` raises."""
        ...

    async def drain(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `work`, which drains this node, and wait until all ranks have drained."""
        ...

    def stop(self) -> None:
        """Tell all ranks to stop now; only rank 0 does so. Idempotent."""
        ...

    def close(self) -> None:
        """Release the group's resources; rank 0 first waits for the other ranks to end.
        Idempotent."""
        ...


class Alone:
    """Implements NodeGroup for a node without a group."""

    name = ""
    data: DataRank | None = None

    def on_death(self, cleanup: Callable[[], None]) -> None:
        """See NodeGroup. Does nothing: there is no group to lose."""

    def events(self) -> tuple[asyncio.Event, asyncio.Event]:
        """See NodeGroup. The events are the first and the second signal."""
        return signal_events()

    def meet(self) -> None:
        """See NodeGroup."""

    async def ready(self, line: dict[str, object]) -> None:
        """See NodeGroup."""
        write_ready(line)

    async def drain(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """See NodeGroup."""
        await work()

    def stop(self) -> None:
        """See NodeGroup."""

    def close(self) -> None:
        """See NodeGroup."""


class FirstRank:
    """Implements NodeGroup for the rank that starts the others."""

    def __init__(self, config: NodeConfig, engine: EngineConfig, role: Role) -> None:
        """Start the other ranks. Raises ConfigError if one cannot be started."""
        self._folder = SocketFolder(PREFIX)
        self._others: list[RankProcess] = []
        self._cleanup: Callable[[], None] = _nothing
        self._lock = threading.Lock()
        self._died = threading.Event()
        # Whether the end of a rank ends all at once. Before all serve, the code that waits for the
        # rank reports its end instead, because the rank may have sent a reason.
        self._fatal = False
        self._stopping = False
        self.data = DataRank(RankPlace(0, engine.data_parallel_size), self._folder.path)
        self.data.lockstep.on_lost(self._collective_failed)
        try:
            self.options, *others = options_of_ranks(config, engine, role, str(self._folder.path))
            self.name = self.options.group
            for each in others:
                self._others.append(start_rank(each, role))
        except (OSError, Gone) as error:
            self.close()
            raise ConfigError(f"a rank cannot be started: {error}", field=FIELD) from error
        except ConfigError:
            self.close()
            raise
        for each in self._others:
            each.link.limit(max(LOAD_DEADLINE_S, config.drain_s + STOP_S))
            threading.Thread(target=self._watch, args=(each,), daemon=True).start()

    def on_death(self, cleanup: Callable[[], None]) -> None:
        """See NodeGroup."""
        self._cleanup = cleanup

    def events(self) -> tuple[asyncio.Event, asyncio.Event]:
        """See NodeGroup. The events are the first and the second signal; other ranks ignore
        signals."""
        return signal_events()

    def meet(self) -> None:
        """See NodeGroup."""
        self._expect_all(MessageKind.LOADED)
        self._fatal = True  # a rank that ends now could not be noticed while this one connects
        self._send(MessageKind.MEET)
        self.data.meet(store(str(self._folder.path), self.options.place.size))
        self._fatal = False

    async def ready(self, line: dict[str, object]) -> None:
        """See NodeGroup. Writes `line`, with the other ranks' lines in it, once all ranks serve."""
        others = await asyncio.to_thread(self._expect_all, MessageKind.READY)
        self._fatal = True
        write_ready(line | {"ranks": [{**line, "rank": 0}, *others]})

    async def drain(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """See NodeGroup."""
        self._send(MessageKind.DRAIN)
        await work()
        await asyncio.to_thread(self._expect_all, MessageKind.DRAINED)

    def stop(self) -> None:
        """See NodeGroup."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
        self._send(MessageKind.STOP)

    def close(self) -> None:
        """See NodeGroup."""
        self.stop()
        for each in self._others:
            with suppress(subprocess.TimeoutExpired):
                each.process.wait(STOP_S)
            each.link.close()
            each.process.kill()
            each.process.wait()
        self.data.close()
        self._folder.remove()

    def _send(self, kind: MessageKind) -> None:
        for each in self._others:
            with suppress(Gone):  # the rank's watcher handles its end
                each.link.send(kind)

    def _expect_all(self, kind: MessageKind) -> list[dict[str, Any]]:
        """Wait for a message of this kind from each other rank; return their contents. Raises
        ConfigError with a rank's reason, or if a rank has ended."""
        found: list[dict[str, Any]] = []
        gone: list[int] = []
        for each in self._others:
            try:
                what, values = each.link.expect(kind, MessageKind.FAILED)
            except Gone:
                gone.append(each.rank)  # a later rank may have failed and sent the reason
                continue
            if what is MessageKind.FAILED:
                raise ConfigError(f"rank {each.rank}: {values['message']}", field=values["field"])
            found.append({**values, "rank": each.rank})
        if gone:
            raise ConfigError(f"rank {gone[0]} has ended; its log says why", field=FIELD)
        return found

    def _watch(self, each: RankProcess) -> None:
        status = each.process.wait()
        self._died.set()
        if self._fatal:
            self._lose(f"rank {each.rank} has ended with status {status}")
        for other in self._others:
            if not self._stopping and other is not each:
                other.process.kill()

    def _collective_failed(self, reason: str) -> None:
        if not self._died.wait(DEATH_S):
            self._lose(reason)
        threading.Event().wait(DEATH_S)  # meanwhile the watcher ends this process, with its reason
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
        log.error("data-parallel group lost, all ranks end: %s", reason)
        for each in self._others:
            each.link.close()  # each rank then ends by itself, and cleans up
        for each in self._others:
            with suppress(subprocess.TimeoutExpired):
                each.process.wait(KILL_S)
            each.process.kill()
        self._folder.remove()
        end(self._cleanup)


class OtherRank:
    """Implements NodeGroup for a rank that rank 0 has started."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor`: that of the socket to rank 0. Ignores signals, which rank 0 handles. Raises
        Gone."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        self._link = Link(socket.socket(fileno=descriptor))
        self.options = RankOptions.from_json(self._link.expect(MessageKind.SETUP)[1])
        self.name = self.options.group
        self._directory = Path(self.options.directory)
        self.data = DataRank(self.options.place, self._directory)
        self.data.lockstep.on_lost(self._collective_failed)
        self._met, self._gone = threading.Event(), threading.Event()
        self._cleanup: Callable[[], None] = _nothing

    def on_death(self, cleanup: Callable[[], None]) -> None:
        """See NodeGroup."""
        self._cleanup = cleanup

    def events(self) -> tuple[asyncio.Event, asyncio.Event]:
        """See NodeGroup. The events are messages of rank 0; this starts the thread that receives
        them."""
        drain, stop = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def listen() -> None:
            meanings: dict[MessageKind, Callable[[], object]] = {
                MessageKind.MEET: self._met.set,
                MessageKind.DRAIN: lambda: loop.call_soon_threadsafe(drain.set),
                MessageKind.STOP: lambda: loop.call_soon_threadsafe(_set, drain, stop),
            }
            with suppress(Gone, RuntimeError):  # the loop has ended, and so does the process
                while True:
                    meanings[self._link.receive()[0]]()
            self._lose("rank 0 has gone")

        threading.Thread(target=listen, name="rank-0", daemon=True).start()
        return drain, stop

    def meet(self) -> None:
        """See NodeGroup."""
        self._link.send(MessageKind.LOADED)
        self._met.wait()
        self.data.meet(store(str(self._directory), self.options.place.size))

    async def ready(self, line: dict[str, object]) -> None:
        """See NodeGroup. Sends `line` to rank 0, which writes it."""
        self._link.send_json(MessageKind.READY, line)

    async def drain(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """See NodeGroup. Never returns by itself: rank 0's STOP ends the wait."""
        await work()
        self._link.send(MessageKind.DRAINED)
        await asyncio.Event().wait()

    def stop(self) -> None:
        """See NodeGroup. Does nothing: rank 0 stops all ranks."""

    def close(self) -> None:
        """See NodeGroup."""
        self.data.close()

    def failed(self, error: ConfigError) -> None:
        """Tell rank 0 why this rank cannot start."""
        with suppress(Gone):
            self._link.send_json(
                MessageKind.FAILED, {"message": error.message, "field": error.field}
            )

    def _collective_failed(self, reason: str) -> None:
        self._gone.wait(DEATH_S)  # rank 0 logs the reason and closes the socket
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        self._gone.set()
        log.error("rank %d ends: %s", self.options.place.rank, reason)
        shutil.rmtree(self._directory, ignore_errors=True)
        end(self._cleanup)


def start_rank(options: RankOptions, role: Role) -> RankProcess:
    """Start a rank as a process and send it SETUP. Raises OSError, Gone."""
    command = (f"{role.value}_node", RANK)
    return start_module(options.place.rank, command, options.to_json())


def end(cleanup: Callable[[], None] = _nothing) -> NoReturn:
    """Run `cleanup`, then end the process as if it had been killed: without one of its ranks a
    model cannot serve.

    It waits for no thread, because the engine thread may wait in a collective.
    """
    with suppress(Exception):
        cleanup()
    logging.shutdown()
    os._exit(LOST_RANK)


def write_ready(line: Mapping[str, object]) -> None:
    """Write a READY line to stdout, for the process that started this one."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def signal_events() -> tuple[asyncio.Event, asyncio.Event]:
    """Return two events, for the first and for the second SIGTERM or SIGINT."""
    first, second = asyncio.Event(), asyncio.Event()

    def received() -> None:
        (second if first.is_set() else first).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, received)
    return first, second


def _set(*events: asyncio.Event) -> None:
    for event in events:
        event.set()
