"""The KV lanes that a node opens: `--kv-lanes` names them, best first, and this module
makes them.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from baton.engine.memory import huge_pages
from baton.engine.memory.kv_cache import KVArena, MakeMemory
from baton.engine.running.sizing import HostMemory
from baton.node.config import NodeConfig
from baton.protocol.errors import ConfigError
from baton.runtime.config import AUTO
from baton.runtime.timing import Timing
from baton.runtime.tls import TlsFiles
from kv_transfer.lanes.grpc_stream import GrpcLane
from kv_transfer.lanes.nixl import NixlLane, NixlPool
from kv_transfer.lanes.shm import ShmLane
from kv_transfer.lanes.shm_arena import ShmArena, sweep
from kv_transfer.lanes.stream import StreamLane, StreamLaneOptions
from kv_transfer.pool.memory_map import map_of
from kv_transfer.protocol.base import Lane

log = logging.getLogger(__name__)

SHM: Final = "shm"
# Rows of images are sent in frames: nobody reads the memory in which they lie.
ROW_LANES: Final = ("stream", "grpc")
TAKE_AFTER_S: Final = 2.0  # first a node answers
LEAST_PRIORITY: Final = 19
# The distance of a lane's port from that of the stream lane.
_NO_POOL: Final = "this node has none that it could read (tensor_parallel_size above 1 has several)"
AFTER_STREAM: Final = {SHM: 1, "nixl": 2, "dist": 3}


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """What lanes are made from.

    `port`: of the grpc lane. `stream_port`: of the stream lane; the ports of other lanes follow it
    (see `own_port`); 0 = any free one. `unix_dir`: directory of sockets, None = a private one.
    `pool`: for lanes that read the pool themselves. `shared`: the pool's shared memory, None if
    PoolPlace has not put the pool there.
    """

    timing: Timing
    host: str = "127.0.0.1"
    port: int = 0
    stream_port: int = 0
    advertise_host: str = ""
    unix_dir: Path | None = None
    tls: TlsFiles | None = None
    pool: KVArena | None = None
    shared: ShmArena | None = None
    nixl_devices: str = "lo"

    def own_port(self, name: str) -> int:
        """Return the port of lane `name`, counted from the stream lane's; 0 = any free one."""
        return self.stream_port and self.stream_port + AFTER_STREAM[name]

    @staticmethod
    def of(config: NodeConfig, timing: Timing) -> LaneSettings:
        """Return the settings of a checked configuration."""
        return LaneSettings(
            timing=timing,
            host=config.host,
            port=config.kv_port,
            stream_port=config.kv_stream_port,
            advertise_host=config.announced_host,
            unix_dir=Path(config.kv_unix_dir) if config.kv_unix_dir else None,
            tls=config.kv_tls,
            nixl_devices=config.kv_nixl_devices,
        )


class PoolPlace:
    """Where the KV pool of a node lies: in shared memory if lane `shm` is wanted, else elsewhere.

    `optional`: if shared memory has no room, the pool lies elsewhere and lane `shm` is left out.
    Life: the engine gets `memory` and may call it once; afterwards `shared` is set, unless there
    was no room. `take` lets a thread take the memory that the pool does not have yet, until
    `stop_taking`. `close` unlinks the file.
    """

    def __init__(self, names: Sequence[str], directory: Path, *, optional: bool = False) -> None:
        self.shared: ShmArena | None = None
        self._wanted = SHM in names
        self._optional = optional
        self._directory = directory
        self._stopped = threading.Event()
        self._taker: threading.Thread | None = None

    @property
    def memory(self) -> MakeMemory | None:
        return self._make if self._wanted else None

    def usable(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return those of `names` that can be opened, once the pool has its place."""
        without = self._optional and self.shared is None
        return tuple(name for name in names if not (without and name == SHM))

    def take(self, lost: Callable[[], object]) -> None:
        """Take the pool's whole memory on a thread, TAKE_AFTER_S from now and after everything else
        that wants this core. If there is no room any more, call `lost`, on that thread."""
        shared = self.shared
        if shared is None or self._taker is not None:
            return

        def work() -> None:
            if self._stopped.wait(TAKE_AFTER_S):
                return
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST_PRIORITY)
            try:
                shared.take_rest(self._stopped.is_set)
            except ConfigError as error:
                log.error("the node ends: %s", error.message)
                lost()

        self._taker = threading.Thread(target=work, name="kv-memory", daemon=True)
        self._taker.start()

    def stop_taking(self) -> None:
        """Take no more, from when this returns. Idempotent."""
        self._stopped.set()
        if self._taker is not None:
            self._taker.join()

    def close(self) -> None:
        """Unlink the shared file. Idempotent."""
        self._stopped.set()
        if self.shared is not None:
            self.shared.close()

    def remove_all(self) -> None:
        """As `close`, and unlink the files of nodes that have died. From any thread."""
        self.close()
        if self._wanted:
            sweep(self._directory)

    def _make(self, num_bytes: int, page_bytes: int) -> torch.Tensor:
        """Allocate the pool's memory.

        If the directory has no room, use other memory when shared memory is optional, else raise
        ConfigError.
        """
        try:
            if self._optional:
                sweep(self._directory)  # else pools of killed nodes would count as used
                check_room(self._directory, num_bytes)
            self.shared = ShmArena(secrets.token_hex(16), num_bytes, page_bytes, self._directory)
        except ConfigError as error:
            if not self._optional:
                raise
            log.info("no KV lane shm: %s", error.message)
            return huge_pages.zeros(num_bytes, dtype=torch.uint8, alone=True)
        return self.shared.reach()


def check_room(directory: Path, num_bytes: int) -> None:
    """Raise ConfigError unless two pools of `num_bytes` fit: this node's and that of a second node.

    A pool in shared memory takes all its memory soon, not page by page as it is used.
    """
    try:
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise ConfigError(f"cannot look into {directory}: {error.strerror}") from error
    free = min(free, HostMemory().available())
    if free < 2 * num_bytes:
        raise ConfigError(f"{directory} has no room for two KV pools of {num_bytes:,} bytes")


def _grpc(settings: LaneSettings) -> Lane:
    return GrpcLane(
        settings.timing, settings.host, settings.port, settings.advertise_host, settings.tls
    )


def _stream(settings: LaneSettings) -> Lane:
    options = StreamLaneOptions(
        host=settings.host,
        port=settings.stream_port,
        advertise_host=settings.advertise_host,
        unix_dir=settings.unix_dir,
        tls=settings.tls,
    )
    return StreamLane(settings.timing, options)


def _inner(settings: LaneSettings, name: str) -> Lane:
    """Return the stream lane that carries the frames of lane `name`.

    It gets its own port and its own folder for sockets, because a socket's name contains only the
    boot id.
    """
    folder = settings.unix_dir / name if settings.unix_dir is not None else None
    return _stream(replace(settings, stream_port=settings.own_port(name), unix_dir=folder))


def _dist(settings: LaneSettings) -> Lane:
    if settings.tls is not None:
        raise ConfigError("KV lane dist knows no TLS; leave it out of --kv-lanes", field="kv_lanes")
    # A late import: some builds of torch have no torch.distributed.
    from kv_transfer.lanes.dist import DistLane, DistSettings

    return DistLane(
        settings.timing,
        DistSettings(settings.host, settings.own_port("dist"), settings.advertise_host),
    )


def _shm(settings: LaneSettings) -> Lane:
    pool, shared = settings.pool, settings.shared
    if pool is None or shared is None:
        message = "KV lane shm reads one KV pool in main memory: " + _NO_POOL
        raise ConfigError(message, field="kv_lanes")
    return ShmLane(
        _inner(settings, SHM),
        shared,
        map_of(pool, shared.address, shared.place.num_bytes, pool.num_blocks),
    )


def _nixl(settings: LaneSettings) -> Lane:
    if settings.pool is None:
        raise ConfigError(f"KV lane nixl reads one KV pool: {_NO_POOL}", field="kv_lanes")
    if settings.shared is not None:
        memory = settings.shared.memory()
    else:  # the whole allocation of the pool
        rows, _ = settings.pool.layer(0)
        memory = rows.new_empty(0, dtype=torch.uint8).set_(rows.untyped_storage())
    pool = NixlPool(
        memory,
        map_of(settings.pool, memory.data_ptr(), memory.nbytes, settings.pool.num_blocks),
        settings.nixl_devices,
    )
    return NixlLane(_inner(settings, "nixl"), pool, settings.timing)


MAKERS: Final[Mapping[str, Callable[[LaneSettings], Lane]]] = {
    "stream": _stream,
    "grpc": _grpc,
    "dist": _dist,
    SHM: _shm,
    "nixl": _nixl,
}


def parse_lanes(text: str) -> tuple[str, ...]:
    """Return the lanes of "stream,grpc", in that order, or of "auto".

    Raises ConfigError for no lane, an unknown or a repeated one.
    """
    if text.strip() == AUTO:  # shm where there is room for the pool
        return (SHM, "stream", "grpc")
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in MAKERS]
    if unknown:
        known = ", ".join(MAKERS)
        raise ConfigError(f"no KV lane {unknown[0]!r}; there are {known}", field="kv_lanes")
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"kv_lanes {text!r} must name each lane once", field="kv_lanes")
    return names


def row_lanes(names: Sequence[str]) -> tuple[str, ...]:
    """Return the lanes of an encode node: those of `names` that rows of images take, or all of
    them if `names` has none."""
    return tuple(name for name in names if name in ROW_LANES) or ROW_LANES


def make_lanes(names: Sequence[str], settings: LaneSettings) -> list[Lane]:
    """Return the lanes, not yet started. Raises ConfigError for TLS files that cannot be used."""
    return [MAKERS[name](settings) for name in names]
