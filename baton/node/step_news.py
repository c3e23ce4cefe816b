"""StepNews: what one engine step brings, by the router session that it concerns. Event loop only.

NodeShell fills it from a StepReport and makes one message of it per session.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from baton.engine.state.sequence import RequestGroup
from baton.node.requests import RequestTable
from baton.node.session import RouterSession
from baton.protocol.events import BlockEvent, NodeStep, NodeTimings, RequestFailed, TokenEvent
from baton.protocol.handles import NodeLoad

T = TypeVar("T")
OfSession: TypeAlias = defaultdict[RouterSession, list[T]]


@dataclass(slots=True)
class StepNews:
    """`block_events` concern all sessions that know the prefix map, everything else only one."""

    block_events: tuple[BlockEvent, ...] = ()
    tokens: OfSession[TokenEvent] = field(default_factory=lambda: defaultdict(list))
    failures: OfSession[RequestFailed] = field(default_factory=lambda: defaultdict(list))
    timings: OfSession[NodeTimings] = field(default_factory=lambda: defaultdict(list))

    @property
    def sessions(self) -> set[RouterSession]:
        return {*self.tokens, *self.failures, *self.timings}

    def add_timings(self, begun: list[RequestGroup], requests: RequestTable, now: float) -> None:
        """Add where the time of those requests went that have got their first token."""
        for each in begun:
            entry = requests.find(each.request.id, each.request.epoch)
            if entry is not None:
                self.timings[entry.session].append(entry.timings(each, now))

    def message(self, session: RouterSession, load: NodeLoad) -> NodeStep | None:
        """Return the message for one session; None if there is nothing to say."""
        step = NodeStep(
            tokens=tuple(self.tokens.get(session, ())),
            failed=tuple(self.failures.get(session, ())),
            load=session.changed_load(load),
            block_events=self.block_events if session.synced else (),
            timings=tuple(self.timings.get(session, ())),
        )
        told = step.tokens or step.failed or step.load or step.block_events or step.timings
        return step if told else None
