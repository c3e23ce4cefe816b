"""The lanes of the transfer benchmark, some of them in two ways, and the memory they need.

A way is a lane and how it is set up. Between processes of one host, `stream` picks a Unix socket,
so there are two more ways: TCP alone, and TCP under TLS. TLS needs the `openssl` command for its
certificates. Direct lanes (`shm`, `nixl`) read the pool of the other process, so the pool must lie
in a `LanePlace`. By `shm` the bytes are copied once, or (`shm adopted`) used where they lie.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from baton.engine.memory.kv_cache import KVArena
from baton.node.lanes import MAKERS, LaneSettings
from baton.protocol.errors import ConfigError
from baton.runtime.timing import Timing
from baton.runtime.tls import TlsFiles
from kv_transfer.lanes.dist import DistLane
from kv_transfer.lanes.shm import ShmLane
from kv_transfer.lanes.shm_arena import DEFAULT_DIRECTORY, ShmArena
from kv_transfer.lanes.stream import StreamLane, StreamLaneOptions
from kv_transfer.pool.memory_map import map_of
from kv_transfer.protocol.base import Lane

log = logging.getLogger(__name__)

TCP: Final = "stream tcp"
ADOPTED: Final = "shm adopted"
DIRECT: Final = ("shm", ADOPTED, "nixl")
TLS_WAYS: Final = {"stream tls": TCP, "grpc tls": "grpc"}  # and what each is compared with
OPENSSL_S: Final = 30


class LanePlace:
    """Where the benchmark's pool lies: in a shared file if that is possible.

    Then all lanes can use the pool.
    """

    def __init__(self, directory: Path = DEFAULT_DIRECTORY) -> None:
        self._directory = directory
        self._shared: ShmArena | None = None
        self._memory: torch.Tensor | None = None

    def memory(self, num_bytes: int, page_bytes: int) -> torch.Tensor:
        """Return the pool's memory; KVArena calls this."""
        try:
            self._shared = ShmArena(os.urandom(16).hex(), num_bytes, page_bytes, self._directory)
        except ConfigError as error:
            log.warning("no shared memory for the pool: %s", error)
            self._memory = torch.zeros(num_bytes, dtype=torch.uint8)
        else:
            self._memory = self._shared.memory()
            return self._shared.reach()
        return self._memory

    def lane(self, name: str, arena: KVArena, timing: Timing) -> Lane:
        """Return a direct lane over the pool in this place. Raises ConfigError if there is none."""
        memory = self._memory
        if memory is None:
            raise ConfigError(f"lane {name}: the pool lies elsewhere")
        inner = StreamLane(timing, StreamLaneOptions())
        if lane_of(name) == "shm":
            if self._shared is None:
                raise ConfigError("the pool lies in no shared file")
            size = self._shared.place.num_bytes
            pool_map = map_of(arena, self._shared.address, size, arena.num_blocks)
            return ShmLane(inner, self._shared, pool_map)
        from kv_transfer.lanes.nixl import NixlLane, NixlPool  # the package is optional

        pool_map = map_of(arena, memory.data_ptr(), memory.nbytes, arena.num_blocks)
        return NixlLane(inner, NixlPool(memory, pool_map), timing)

    def pages(self, ids: Sequence[int]) -> memoryview:
        """Return a copy of these pages, one after the other. They may belong to another pool."""
        assert self._shared is not None, "only shared pools have pages in reach"
        return self._shared.pages()[list(ids)].flatten().numpy().data

    def close(self) -> None:
        """Remove the shared file. A second call does nothing."""
        if self._shared is not None:
            self._shared.close()


def all_ways() -> list[str]:
    """Return every way, the best lane first."""
    two_sided = ["stream", TCP, "stream tls", "grpc", "grpc tls", "dist"]
    known = {lane_of(way) for way in two_sided} | set(DIRECT)
    return ["shm", ADOPTED, *two_sided, "nixl", *(name for name in MAKERS if name not in known)]


def lane_of(way: str) -> str:
    """Return the lane of `way`: the name under which nodes announce it."""
    return way.partition(" ")[0]


def make_way(way: str, timing: Timing, tls: Path | None) -> Lane:
    """Return the lane of a two-sided `way`. `tls` is the folder of `write_certificates`.

    Raises ConfigError if this machine cannot have it.
    """
    name = lane_of(way)
    if way not in all_ways():
        raise ConfigError(f"no KV lane {way!r}")
    files = None
    if way in TLS_WAYS:
        if tls is None:
            raise ConfigError("no certificates: the openssl command is missing")
        files = TlsFiles(tls / "node.pem", tls / "node.key", tls / "ca.pem")
    if name == "dist":
        return DistLane(timing)
    if way == name:
        return MAKERS[name](LaneSettings(timing))
    if name == "stream":
        return StreamLane(timing, StreamLaneOptions(unix=False, tls=files))
    return MAKERS[name](LaneSettings(timing, tls=files))


def write_certificates(folder: Path) -> Path | None:
    """Write a CA and one certificate for 127.0.0.1 into `folder`.

    Return the folder, or None without the openssl command.
    """
    openssl = shutil.which("openssl")
    if openssl is None:
        return None
    ca, node = folder / "ca", folder / "node"
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    commands = [
        ["req", "-x509", *key, "-keyout", f"{ca}.key", "-out", f"{ca}.pem", "-subj", "/CN=ca"],
        ["req", *key[:-2], "-keyout", f"{node}.key", "-out", f"{node}.csr", "-subj", "/CN=node"],
        [
            "x509", "-req", "-in", f"{node}.csr", "-CA", f"{ca}.pem", "-CAkey", f"{ca}.key",
            "-CAcreateserial", "-days", "2", "-out", f"{node}.pem", "-extfile", f"{node}.ext",
        ],
    ]  # fmt: skip
    Path(f"{node}.ext").write_text("subjectAltName=IP:127.0.0.1\n")
    for command in commands:
        done = subprocess.run(
            [openssl, *command], capture_output=True, timeout=OPENSSL_S, check=False
        )
        if done.returncode != 0:
            raise ConfigError(f"openssl {command[0]}: {done.stderr.decode(errors='replace')}")
    return folder
