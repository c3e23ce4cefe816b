"""Threads for work on prompts: what they are to the kernel."""

from __future__ import annotations

import os
import threading

from router.prompts.off_loop import NICENESS, SHORT_CHARS, OffLoop
from router.tenants.keys import EVERYBODY


async def test_long_work_gives_way_to_whoever_shares_its_core() -> None:
    def look() -> tuple[int, int]:
        thread = threading.get_native_id()
        return thread, os.getpriority(os.PRIO_PROCESS, thread)

    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    off_loop = OffLoop()
    try:
        thread, niceness = await off_loop.text(EVERYBODY, SHORT_CHARS + 1, look)
    finally:
        off_loop.close()
    assert thread != threading.get_native_id()
    assert niceness == min(19, max(own, NICENESS))
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own
