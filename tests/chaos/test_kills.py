"""Of the processes that may pass a stage only the first stays stopped, however late others stop."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from tests.chaos.counts import is_stopped
from tests.chaos.kills import keep_awake
from tests.system.processes import ServerProcess
from tests.waiting import end, eventually


def stop(server: ServerProcess) -> None:
    """Returns when it is stopped; nothing else has run meanwhile."""
    server.signal(signal.SIGSTOP)
    assert os.waitid(os.P_PID, server.process.pid, os.WSTOPPED) is not None
    assert is_stopped(server.process.pid)


async def test_who_stops_itself_late_is_woken_each_time(tmp_path: Path) -> None:
    child = await asyncio.create_subprocess_exec("sleep", "600")
    server = ServerProcess("d1", child, {}, tmp_path)
    keeper = asyncio.create_task(keep_awake([server]))

    async def runs() -> bool:
        return not is_stopped(child.pid)

    try:
        await asyncio.sleep(0)  # it has looked before: a single SIGCONT would be over
        for _ in range(3):
            stop(server)
            await eventually(runs)
        await server.kill()
        assert not is_stopped(child.pid)
        assert not keeper.done(), "those that are dead are none of its business"
    finally:
        await end(keeper)
        if child.returncode is None:
            await server.kill()
