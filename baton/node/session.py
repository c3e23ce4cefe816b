"""One router's session with this node: its bounded outbox, and the load last sent to the router.

Life: the service opens it after the router's hello and attaches it to the shell, which sends a
snapshot of all block hashes. The shell fills the outbox, and the service's writer empties it. A
session is cut when the router does not read or leaves. A broken session is not resynchronised: its
requests are aborted. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from baton.node.step_parts import in_parts
from baton.protocol.errors import BatonError, Overloaded
from baton.protocol.events import NodeStep
from baton.protocol.handles import NodeLoad


@dataclass(eq=False)
class RouterSession:
    """One session. `synced`: block events may follow, because the snapshot of hashes was sent."""

    router_id: str
    max_messages: int
    synced: bool = False
    last_load: NodeLoad | None = None

    def __post_init__(self) -> None:
        self._outbox: deque[tuple[NodeStep, Callable[[], object] | None]] = deque()
        # Called when the message that is being written has been sent.
        self._written: Callable[[], object] | None = None
        self._wake = asyncio.Event()
        self._next_seq = 1
        self._cut: BatonError | None = None
        self._cut_event = asyncio.Event()

    @property
    def closed(self) -> BatonError | None:
        """The reason why nothing more is sent; None while the session lives."""
        return self._cut

    @property
    def unread(self) -> int:
        """The number of messages that wait to be written."""
        return len(self._outbox)

    def send(self, step: NodeStep, written: Callable[[], object] | None = None) -> None:
        """Queue a message, or several if it is very long; cut the session if too many are unread.

        Never blocks. `written` is called once: when the whole message is on the wire, or never will
        be.
        """
        *parts, last = in_parts(step)
        for part in parts:
            self._send(part, None)
        self._send(last, written)

    def _send(self, step: NodeStep, written: Callable[[], object] | None) -> None:
        if self._cut is None and len(self._outbox) >= self.max_messages:
            self.cut(Overloaded(f"{self.max_messages} messages unread by router {self.router_id}"))
        if self._cut is not None:
            if written is not None:
                written()
            return
        if step.block_events:
            # Numbers count per session, from its snapshot on, so a router sees a gap only if an
            # event was lost.
            step = replace(step, block_events_seq=self._next_seq)
            self._next_seq += len(step.block_events)
        if step.load is not None:
            self.last_load = step.load
        self._outbox.append((step, written))
        self._wake.set()

    def changed_load(self, load: NodeLoad) -> NodeLoad | None:
        """Return `load` if it is news to this router, else None.

        Counters and small changes are sent with the next news, at the latest with a heartbeat.
        """
        last = self.last_load
        return load if last is None or load.is_news_after(last) else None

    def cut(self, reason: BatonError) -> None:
        """Send nothing more and drop the unread messages. The first reason is kept."""
        if self._cut is None:
            self._cut = reason
            self._end_writing()
            while self._outbox:
                _, self._written = self._outbox.popleft()
                self._end_writing()
            self._wake.set()
            self._cut_event.set()

    async def next(self) -> NodeStep:
        """Return the next message to write, in order. Raises the reason of a cut.

        A call means that the previous message has been written.
        """
        self._end_writing()
        while not self._outbox:
            if self._cut is not None:
                raise self._cut
            self._wake.clear()
            await self._wake.wait()
        step, self._written = self._outbox.popleft()
        return step

    def _end_writing(self) -> None:
        written, self._written = self._written, None
        if written is not None:
            written()

    async def wait_cut(self) -> None:
        """Return once the session is cut, whatever its writer is waiting for."""
        await self._cut_event.wait()
