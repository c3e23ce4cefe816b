"""Waiting for redis-py in a way that ends at once when the waiting task is cancelled.

redis-py was seen to lose a cancellation that comes while it reads: the task then waits on, and
whoever stops a router waits with it. So its calls run in tasks of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def promptly(work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns or raises. Cancelled, it leaves `work` behind, cancelled too."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task})
    finally:
        if not task.done():
            task.add_done_callback(_ignored)
            task.cancel()
    return task.result()


def _ignored(task: asyncio.Task[Any]) -> None:
    """Nobody waits for its end any more."""
    if not task.cancelled():
        task.exception()
