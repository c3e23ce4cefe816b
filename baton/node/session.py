"""One router's session with this node: its bounded outbox, and what that router has been told.

The life: opened by the service after the router's hello, attached to the shell (which sends a
snapshot of all block hashes), fed by the shell, read by the service's writer, cut when the router
does not read or goes away. A broken session is not resynchronised: its requests are aborted.
Event loop only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, replace

from baton.errors import BatonError, Overloaded
from baton.events import NodeStep
from baton.handles import NodeLoad
from baton.node.step_parts import in_parts


@dataclass(eq=False)
class RouterSession:
    """`synced`: the snapshot of block hashes was sent, so block events may follow."""

    router_id: str
    max_messages: int
    synced: bool = False
    last_load: NodeLoad | None = None

    def __post_init__(self) -> None:
        self._outbox: deque[NodeStep] = deque()
        self._wake = asyncio.Event()
        self._next_seq = 1
        self._cut: BatonError | None = None
        self._cut_event = asyncio.Event()

    @property
    def closed(self) -> BatonError | None:
        """Why nothing more is sent, None while the session lives."""
        return self._cut

    @property
    def unread(self) -> int:
        """Messages that wait to be written."""
        return len(self._outbox)

    def send(self, step: NodeStep) -> None:
        """Queue a message, several for a very long one; cuts the session if too many are unread.

        Never blocks.
        """
        for part in in_parts(step):
            self._send(part)

    def _send(self, step: NodeStep) -> None:
        if self._cut is not None:
            return
        if len(self._outbox) >= self.max_messages:
            self.cut(Overloaded(f"{self.max_messages} messages unread by router {self.router_id}"))
            return
        if step.block_events:
            # Numbered per session, from its snapshot on: a router sees a gap only if one was lost.
            step = replace(step, block_events_seq=self._next_seq)
            self._next_seq += len(step.block_events)
        if step.load is not None:
            self.last_load = step.load
        self._outbox.append(step)
        self._wake.set()

    def changed_load(self, load: NodeLoad) -> NodeLoad | None:
        """`load` if this router was last told another state.

        Counters alone are no news: they travel with the next state, at the latest with a heartbeat.
        """
        told = self.last_load
        known = told is not None and told.without_counters() == load.without_counters()
        return None if known else load

    def cut(self, reason: BatonError) -> None:
        """Send nothing more and forget what is unread. The first reason stays."""
        if self._cut is None:
            self._cut = reason
            self._outbox.clear()
            self._wake.set()
            self._cut_event.set()

    async def next(self) -> NodeStep:
        """The next message to write, in order. Raises the reason of the cut."""
        while not self._outbox:
            if self._cut is not None:
                raise self._cut
            self._wake.clear()
            await self._wake.wait()
        return self._outbox.popleft()

    async def wait_cut(self) -> None:
        """Returns once the session is cut, whatever its writer is waiting for."""
        await self._cut_event.wait()
