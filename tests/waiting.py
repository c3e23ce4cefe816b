"""Waiting for what another process or thread does, where it offers no event to wait on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")
WAIT_S = 60.0


async def eventually(look: Callable[[], Awaitable[T]], timeout_s: float = WAIT_S) -> T:
    """The first truthy answer of `look`. Raises TimeoutError after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while True:
            answer = await look()
            if answer:
                return answer
            await asyncio.sleep(0.01)


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel them until they have ended."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=0.2)
