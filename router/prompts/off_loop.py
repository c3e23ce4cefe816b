"""OffLoop: work on prompts in a few threads, so that every stream goes on meanwhile.

Fair between tenants (router/tenants/turns.py), in lanes by how long a piece of work may take: short
work never waits behind long work, whose ever it is.

    SHORT      texts of up to SHORT_CHARS: ~20 ms
    LONG       longer ones: seconds
    TEMPLATE   chats that a child renders (baton/text/rendering.py)
    GRAMMAR    grammars that a child builds (router/prompts/grammar_checks.py)
"""

from __future__ import annotations

import asyncio
import enum
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from baton.protocol.clock import Clock, SystemClock
from router.tenants.keys import Grant
from router.tenants.turns import Turns

T = TypeVar("T")
SHORT_CHARS: Final = 64 << 10
CHARS_PER_S: Final = 2_000_000  # of tokenizing, about; what it took is settled afterwards


# Of these threads, for the kernel: where a core is shared, events and engines come first.
NICENESS: Final = 10


class WorkLane(enum.Enum):
    """`value`: name of its threads; `places`: how many work at once."""

    SHORT = ("short", 2)
    LONG = ("long", 2)
    TEMPLATE = ("template", 2)
    GRAMMAR = ("grammar", 2)

    @property
    def places(self) -> int:
        return self.value[1]


class OffLoop:
    """Owns its threads: `close` ends them, twice is safe."""

    def __init__(self, clock: Clock | None = None) -> None:
        threads = sum(lane.places for lane in WorkLane)
        self._threads = ThreadPoolExecutor(
            threads, thread_name_prefix="off-loop", initializer=_give_way
        )
        clock = clock or SystemClock()
        self._turns = {lane: Turns(lane.places, clock) for lane in WorkLane}

    async def text(self, grant: Grant, num_chars: int, work: Callable[[], T]) -> T:
        """Work on so many characters. Raises what it raises; Overloaded."""
        lane = WorkLane.SHORT if num_chars <= SHORT_CHARS else WorkLane.LONG
        return await self.run(lane, grant, num_chars / CHARS_PER_S, work)

    async def run(self, lane: WorkLane, grant: Grant, cost_s: float, work: Callable[[], T]) -> T:
        """The same in a lane. Whoever is cancelled meanwhile leaves the work to end by itself; its
        place is free when it has."""

        place = await self._turns[lane].take(grant, cost_s)
        try:
            working = asyncio.get_running_loop().run_in_executor(self._threads, work)
        except BaseException:
            place.give_back()
            raise

        def ended(done: asyncio.Future[T]) -> None:
            place.give_back()
            _ = done.cancelled() or done.exception()  # seen, even if nobody waits any more

        working.add_done_callback(ended)
        return await asyncio.shield(working)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _give_way() -> None:
    """This thread alone (Linux): work of seconds lets a stream's milliseconds pass."""
    thread = threading.get_native_id()
    # Never less than it is: only the privileged may take that back.
    niceness = max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread))
    os.setpriority(os.PRIO_PROCESS, thread, niceness)
