"""Nodes and routers as forks of a server that has imported everything: a start takes no import.

A process is of its own all the same: what a test kills, stops or asks is real. The fork server
(multiprocessing's) runs none of our code but imports, so no thread and no lock is copied.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from importlib import import_module
from multiprocessing import connection
from pathlib import Path
from typing import Any, Final

from baton.node.main import main as node_main
from router.main import main as router_main

ROLES: Final = ("prefill", "decode", "encode")
_CONTEXT: Final = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [__name__, "pytest", "torch", "transformers", *(f"{name}_node.__main__" for name in ROLES)]
)


class ForkedProcess:
    """What tests use of asyncio's Process, of one fork."""

    def __init__(
        self, module: str, flags: Sequence[str], environ: Mapping[str, str], log: Path
    ) -> None:
        """`module`: prefill_node, decode_node, encode_node or router; its messages go to `log`."""
        reader, writer = _CONTEXT.Pipe(duplex=False)
        self._out = os.fdopen(os.dup(reader.fileno()), "rb")
        given = (module, tuple(flags), dict(environ), str(log), writer)
        self._process = _CONTEXT.Process(target=_main, args=given)
        self._process.start()
        self._looking = threading.Lock()
        writer.close()
        reader.close()

    @property
    def pid(self) -> int:
        """Its number, also after its end."""
        assert self._process.pid is not None, "it was started"
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status; -N after signal N; None while it runs."""
        with self._looking:  # its status can be read only once
            return self._process.exitcode

    @property
    def stdout(self) -> AsyncIterator[bytes]:
        """Its lines."""
        return self._lines()

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    async def wait(self) -> int:
        await asyncio.to_thread(connection.wait, [self._process.sentinel])
        self._out.close()
        assert self.returncode is not None, "it was waited for"
        return self.returncode

    async def _lines(self) -> AsyncIterator[bytes]:
        while line := await asyncio.to_thread(self._out.readline):
            yield line


def _main(module: str, flags: tuple[str, ...], environ: dict[str, str], log: str, out: Any) -> None:
    gc.freeze()  # else a router's first search for garbage takes seconds: all of torch is there
    with Path(log).open("wb") as stream:
        os.dup2(stream.fileno(), 2)
    os.dup2(out.fileno(), 1)
    os.environ.clear()
    os.environ.update(environ)
    if module == "router":
        raise SystemExit(router_main(flags, os.environ))
    program = import_module(f"{module}.__main__").PROGRAM
    raise SystemExit(node_main(program, flags, os.environ))
