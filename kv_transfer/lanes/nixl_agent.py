"""What the `nixl` lane needs of NIXL (optional extra `nixl`): one agent, its memory, its reads.

Only this module makes NIXL's untyped calls and sees its exceptions. NIXL has no blocking wait, so
only this module polls states, with a pause that a cancellation ends at once. NIXL's own progress
thread spins (a whole core when idle), so it stays off; `Pump` drives our agent while peers read.

NIXL can pickle descriptor lists: those two functions are never called. Any peer that has an agent's
metadata can read what is registered: only the KV pool and a scratch buffer of ours are.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from baton.protocol.clock import Clock, SystemClock
from baton.protocol.errors import ConfigError, KVCorrupt, KVLost, KVTimeout

MODULES: Final = ("nixl_cu12._api", "nixl_cu13._api")
POLL_S: Final = 0.0002
PUMP_S: Final = 0.0005
BATCH: Final = 1024  # descriptors in one request
DONE: Final = "DONE"
BUSY: Final = "PROC"


@dataclass(frozen=True, slots=True)
class PageRun:
    """A copy: `num_bytes` at address `remote` of the peer go to address `local` of this process."""

    local: int
    remote: int
    num_bytes: int


def load() -> Any | None:
    """Return NIXL's Python module, or None where it is not installed or cannot run."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # NIXL reads this once, when it is imported
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


class Agent:
    """One NIXL agent over UCX. Any thread: NIXL does its own locking."""

    def __init__(self, name: str, devices: str, clock: Clock | None = None) -> None:
        """`devices`: network devices for UCX, comma-separated. Raises ConfigError without NIXL."""
        module = load()
        if module is None:
            raise ConfigError("lane nixl needs the extra baton[nixl]", field="kv_lanes")
        # UCX listens on every interface unless its environment names some; it has no other setting
        # for it.
        os.environ["UCX_NET_DEVICES"] = devices
        config = module.nixl_agent_config(
            enable_prog_thread=False,
            backends=["UCX"],
            sync_mode=module.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        self.name = name
        self._clock = clock or SystemClock()
        try:
            self._agent = module.nixl_agent(name, config)
        except Exception as error:
            raise ConfigError(f"NIXL does not start: {error}") from error
        self._registered: list[Any] = []

    def register(self, memory: torch.Tensor) -> None:
        """Let peers read `memory` (uint8, contiguous), and let NIXL write to it. Raises
        ConfigError.
        """
        kind, device = _place_of(memory)
        try:
            rows = [(memory.data_ptr(), memory.nbytes, device, "")]
            self._registered.append(self._agent.register_memory(rows, kind))
        except Exception as error:
            raise ConfigError(f"NIXL cannot register the KV pool: {error}") from error

    def metadata(self) -> bytes:
        return self._agent.get_agent_metadata()

    def add_peer(self, name: str, metadata: bytes) -> None:
        """Make a peer known. Raises KVCorrupt if `metadata` is not that of agent `name`."""
        try:
            found = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise KVCorrupt(f"no metadata of a NIXL agent: {error}") from error
        if found not in (name, name.encode()):
            raise KVCorrupt(f"metadata of NIXL agent {found!r}, not {name}")

    def drop_peer(self, name: str) -> None:
        """Close the connection to a peer: reads under way fail. Idempotent."""
        try:
            self._agent.remove_remote_agent(name)
        except Exception as error:  # noqa: BLE001 - NIXL's own; unknown by now is what we want
            del error

    def read(self, peer: str, runs: Sequence[PageRun], kinds: tuple[str, str]) -> Read:
        """Begin to read. `kinds`: the memory kinds of our side and of the peer's. Raises KVLost."""
        table = np.array([(run.local, run.remote, run.num_bytes) for run in runs], np.uint64)
        zeros = np.zeros(len(runs), np.uint64)
        local = np.stack([table[:, 0], table[:, 2], zeros], axis=1)
        remote = np.stack([table[:, 1], table[:, 2], zeros], axis=1)
        agent = self._agent
        try:
            ours = agent.get_xfer_descs(local, kinds[0])
            theirs = agent.get_xfer_descs(remote, kinds[1])
            handle = agent.initialize_xfer("READ", ours, theirs, peer)
            return Read(self, handle, agent.transfer(handle))
        except Exception as error:
            raise KVLost(f"NIXL read failed: {error}") from error

    def progress(self) -> None:
        self._agent.get_new_notifs()

    def close(self) -> None:
        """Unregister all memory: peers can read nothing of ours any more. Idempotent."""
        for registered in self._registered:
            self._agent.deregister_memory(registered)
        self._registered.clear()

    # For Read only.
    def state(self, handle: Any) -> str:
        try:
            return self._agent.check_xfer_state(handle)
        except Exception as error:
            raise KVLost(f"NIXL peer lost: {error}") from error

    def release(self, handle: Any) -> bool:
        """Release a read's handle. Return False if the read is still running and cannot be
        stopped.
        """
        try:
            self._agent.release_xfer_handle(handle)
        except Exception:  # noqa: BLE001 - NIXL's own
            return False
        return True

    def now(self) -> float:
        return self._clock.monotonic()


class Read:
    """A read under way. It is `over` once it cannot touch our memory any more."""

    def __init__(self, agent: Agent, handle: Any, state: str) -> None:
        self._agent = agent
        self._handle = handle
        self._state = state

    @property
    def over(self) -> bool:
        return self._handle is None

    def wait(self, timeout_s: float, cancelled: threading.Event) -> None:
        """Wait until the bytes are there. Raises KVLost (also if cancelled) and KVTimeout."""
        deadline = self._agent.now() + timeout_s
        while self._state == BUSY:
            if cancelled.wait(POLL_S):
                raise KVLost("cancelled")
            if self._agent.now() >= deadline:
                raise KVTimeout(f"a NIXL read takes more than {timeout_s} s")
            self._state = self._agent.state(self._handle)
        if self._state != DONE:
            raise KVLost(f"NIXL read ended as {self._state}")
        self.release()

    def release(self) -> bool:
        """Stop the read if it still runs; return whether it is over now."""
        if self._handle is not None and self._agent.release(self._handle):
            self._handle = None
        return self.over


class Pump:
    """Drives the agent while peers may be reading.

    Reads over TCP need both processes to run, and so does the first read of every peer. The thread
    sleeps when `poke` has not been called for `linger_s`.
    """

    def __init__(self, agent: Agent, linger_s: float, clock: Clock | None = None) -> None:
        self._agent = agent
        self._linger_s = linger_s
        self._clock = clock or SystemClock()
        self._changed = threading.Condition()
        self._until = 0.0
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="kv-nixl", daemon=True)
        self._thread.start()

    def poke(self) -> None:
        """Drive the agent from now on: a peer may read. Any thread."""
        with self._changed:
            asleep = self._until == 0.0
            self._until = self._clock.monotonic() + self._linger_s
            if asleep:
                self._changed.notify()

    def stop(self) -> None:
        """End the thread. Idempotent."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._stopped and self._clock.monotonic() >= self._until:
                    self._until = 0.0
                    self._changed.wait_for(lambda: self._stopped or self._until)
                if self._stopped or self._changed.wait_for(lambda: self._stopped, PUMP_S):
                    return
            self._agent.progress()


def _place_of(memory: torch.Tensor) -> tuple[str, int]:
    return ("VRAM", memory.device.index or 0) if memory.is_cuda else ("DRAM", 0)


def kind_of(memory: torch.Tensor) -> str:
    """Return NIXL's name for the memory in which a tensor lies: "DRAM" or "VRAM"."""
    return _place_of(memory)[0]
