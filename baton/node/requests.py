"""The requests that a node serves now, by id, each with its session. Event loop only.

Epochs fence: a submission takes over from an older epoch of the same request (whose router lost
it), and is refused when a newer or equal one is here already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from baton.node.session import RouterSession
from baton.protocol.errors import BatonError, Fenced
from baton.protocol.events import NodeStep, RequestFailed
from baton.protocol.handles import KVHandle
from baton.protocol.messages import SubmitPool
from baton.protocol.request import Request


@dataclass(eq=False)
class NodeRequest:
    """One request here. `ended` is done when its last event was sent, or it cannot go on.

    `prefilled`: token 1 is there, or nobody will report it. `cancelled`: nobody wants it any more.
    `leaving`: it was asked to go to another node. `export`: of a prompt, as long as it ends with
    the request.
    """

    request: Request
    handle: KVHandle | None
    session: RouterSession
    ended: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    prefilled: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    cancelled: bool = False
    leaving: bool = False
    pool: SubmitPool | None = None  # vectors are asked for, not tokens
    export: KVHandle | None = None
    live: set[int] = field(init=False)  # samples (of a search, results) that have not ended here
    stopped: set[int] = field(default_factory=set[int])  # those that nobody wants any more

    def __post_init__(self) -> None:
        self.live = set(range(self.request.params.num_outputs)) - set(self.request.ended)

    @property
    def wanted(self) -> Request:
        """The request without the samples that were stopped since. Any thread."""
        if not self.stopped:
            return self.request
        return replace(self.request, ended=(*self.request.ended, *tuple(self.stopped)))

    def sample_ended(self, sample: int) -> bool:
        """The sample's last event is being sent; whether it was the request's last one."""
        self.live.discard(sample)
        return not self.live

    def stop(self, sample: int) -> None:
        """Nobody wants more of this sample; of the last one, of the request."""
        self.stopped.add(sample)
        if self.sample_ended(sample):
            self.end()

    def send(self, step: NodeStep) -> None:
        self.session.send(step)

    def end(self) -> None:
        """Its last event has been sent."""
        if not self.ended.done():
            self.ended.set_result(None)

    def break_off(self, error: BatonError) -> None:
        """It cannot go on; whoever waits for `ended` gets `error`."""
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # retrieved: nobody may be waiting any more

    def cancel(self) -> None:
        """Stop it without an event; its task frees what it holds."""
        self.cancelled = True
        if self.task is not None:
            self.task.cancel()


def failure(request: Request, error: BatonError) -> RequestFailed:
    """What is sent to a router when `request` ends in `error`."""
    return RequestFailed(
        request.id, request.epoch, error.code, error.message, error.retryable, error.field
    )


class RequestTable:
    """Newest epoch of each request; one that still cleans up is known to its successor only."""

    def __init__(self) -> None:
        self._by_id: dict[str, NodeRequest] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[NodeRequest]:
        return iter(list(self._by_id.values()))

    def add(self, entry: NodeRequest) -> NodeRequest | None:
        """Enter `entry`; returns the older epoch that it replaces. Raises Fenced."""
        request = entry.request
        older = self._by_id.get(request.id)
        if older is not None and older.request.epoch >= request.epoch:
            raise Fenced(
                f"request {request.id} runs here under epoch {older.request.epoch}, "
                f"epoch {request.epoch} came too late"
            )
        self._by_id[request.id] = entry
        return older

    def find(self, request_id: str, epoch: int | None = None) -> NodeRequest | None:
        """The request, if it is here (and under `epoch`, if given)."""
        entry = self._by_id.get(request_id)
        if entry is None or epoch not in (None, entry.request.epoch):
            return None
        return entry

    def find_upto(self, request_id: str, epoch: int) -> NodeRequest | None:
        """The request, if it is here under `epoch` or an older one."""
        entry = self._by_id.get(request_id)
        return None if entry is None or entry.request.epoch > epoch else entry

    def remove(self, entry: NodeRequest) -> None:
        """Forget `entry`, unless a newer epoch has its place."""
        if self._by_id.get(entry.request.id) is entry:
            del self._by_id[entry.request.id]

    def of(self, session: RouterSession) -> list[NodeRequest]:
        return [entry for entry in self._by_id.values() if entry.session is session]
