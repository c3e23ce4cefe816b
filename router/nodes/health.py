"""NodeHealth: which nodes a router puts in quarantine, and when it disregards that.

    flapping     a node whose sessions broke `deaths` times within `window_s` is in quarantine: it
                 gets no new requests for `first_s`, twice as long after each relapse
    failing      the same for a node that answered `failures` requests in a row with an internal
                 error
    panic        when fewer than `panic_share` of a model's nodes of a role are healthy, their
                 quarantine is disregarded: most likely the judgement is wrong, and the few nodes
                 that are left must not get all of the load

Requests that run on a node in quarantine stay there. A node whose engine makes no progress gets no
new requests, with or without panic. The node reports that itself; Watchdog finds nodes that cannot.
Nodes are known by address and by name, because a restart may change either.
Not here: what becomes of requests whose node is lost (router/request/dispatch.py).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from baton.protocol.clock import Clock
from baton.protocol.errors import InternalError
from baton.protocol.events import NodeStep
from baton.protocol.handles import Role
from router.events import EventRing


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """When nodes get into quarantine and for how long; the module's docstring explains each.

    `longest_s`: the longest quarantine.
    """

    deaths: int = 3
    window_s: float = 60.0
    failures: int = 5
    first_s: float = 5.0
    longest_s: float = 60.0
    panic_share: float = 0.5


@dataclass(slots=True)
class HealthStats:
    """Counters for metrics and tests."""

    deaths: int = 0  # sessions that broke, stalls among them
    stalls: int = 0  # sessions ended because their node made no progress
    quarantines: int = 0
    panics: int = 0  # times that the nodes of a role fell below the share
    stale_events: int = 0  # events whose request or epoch is not on that session any more


@dataclass(slots=True)
class _Case:
    """What is known of one node. `until`: when its last quarantine ends or has ended."""

    deaths: deque[float] = field(default_factory=deque[float])
    failures: int = 0  # in a row
    relapses: int = 0
    until: float = 0.0


NodePool = tuple[str, Role]  # the nodes of one model and role, which stand in for each other


@dataclass(frozen=True, slots=True)
class Known:
    """One node that the registry knows. `fit`: it is connected and its engine makes progress.
    `model`: see NodeSnapshot."""

    keys: tuple[str, ...]
    role: Role
    fit: bool
    model: str = ""

    @property
    def pool(self) -> NodePool:
        return self.model, self.role


class NodeHealth:
    def __init__(
        self,
        clock: Clock,
        settings: HealthSettings | None = None,
        events: EventRing | None = None,
    ) -> None:
        self._clock = clock
        self._settings = settings or HealthSettings()
        self._events = EventRing() if events is None else events
        self._cases: dict[str, _Case] = {}
        self._last_until = 0.0  # when the last quarantine of all ends
        self._panicking: frozenset[NodePool] = frozenset()
        self.stats = HealthStats()

    # ---- evidence ----

    def died(self, keys: Iterable[str], *, stalled: bool = False) -> None:
        """Note that a node's session broke, other than by draining. May begin a quarantine."""
        now, settings = self._clock.monotonic(), self._settings
        self.stats.deaths += 1
        self.stats.stalls += stalled
        due: dict[str, _Case] = {}
        for key in keys:
            case = self._cases.setdefault(key, _Case())
            case.failures = 0
            case.deaths.append(now)
            while now - case.deaths[0] > settings.window_s:
                case.deaths.popleft()
            if len(case.deaths) >= settings.deaths:
                due[key] = case
        self._quarantine(due, now)

    def heard(self, keys: Sequence[str], step: NodeStep) -> None:
        """Count the internal errors in a node's step; may begin a quarantine.

        Other errors do not count against the node: they are faults of other nodes, full pools or
        bad requests. A step with tokens and without such errors sets its count back to 0.
        """
        faults = sum(failed.code == InternalError.code for failed in step.failed)
        if not faults:
            if step.tokens and self._cases:
                for key in keys:
                    if key in self._cases:
                        self._cases[key].failures = 0
            return
        due: dict[str, _Case] = {}
        for key in keys:
            case = self._cases.setdefault(key, _Case())
            case.failures += faults
            if case.failures >= self._settings.failures:
                case.failures = 0
                due[key] = case
        self._quarantine(due, self._clock.monotonic())

    def _quarantine(self, cases: Mapping[str, _Case], now: float) -> None:
        """Put the cases of one node into quarantine; its several names count as one quarantine."""
        if not cases:
            return
        settings = self._settings
        self.stats.quarantines += 1
        if now >= self._last_until:
            self._panicking = frozenset()  # the last panic ended with the last quarantine
        seconds = 0.0
        for case in cases.values():
            if now - case.until > settings.window_s:
                case.relapses = 0  # the node has behaved since its last quarantine
            seconds = min(settings.longest_s, settings.first_s * 2**case.relapses)
            case.relapses += 1
            case.until = now + seconds
            self._last_until = max(self._last_until, case.until)
        text = f"no new requests for {seconds:g} s: it failed too often"
        self._events.note("quarantine", text, node=[*cases][-1])

    # ---- judgement ----

    @property
    def holds_any(self) -> bool:
        """Whether any node is in quarantine."""
        return self._clock.monotonic() < self._last_until

    def in_quarantine(self, keys: Iterable[str]) -> bool:
        now = self._clock.monotonic()
        return now < self._last_until and any(
            key in self._cases and now < self._cases[key].until for key in keys
        )

    def panicking(self, known: Callable[[], Sequence[Known]]) -> frozenset[NodePool]:
        """Return the models and roles whose quarantines are disregarded now.

        `known` is called only if a node is in quarantine.
        """
        if not self.holds_any:
            self._panicking = frozenset()
            return self._panicking
        nodes = known()
        pools = {node.pool for node in nodes}
        found = frozenset(pool for pool in pools if self._panics(pool, nodes))
        self.stats.panics += len(found - self._panicking)
        self._panicking = found
        return found

    def _panics(self, pool: NodePool, nodes: Sequence[Known]) -> bool:
        mine = [node for node in nodes if node.pool == pool]
        healthy = sum(node.fit and not self.in_quarantine(node.keys) for node in mine)
        return healthy < self._settings.panic_share * len(mine)


class Watchdog:
    """Ends the session of a node that is silent though it has requests of this router.

    A node sends a message with each step that has news, and once a heartbeat, however long its step
    takes. If its engine hangs, the node reports that (baton/node/progress.py). So silence means
    that the node's event loop hangs, although gRPC's own threads still answer pings. A node without
    requests of this router may be silent.

    `busy`: returns whether the node has requests of this router. Call heard() for each message, and
    when the node gets its first request after a pause. Run `bite` as a task of each session.
    """

    def __init__(self, clock: Clock, stall_s: float, busy: Callable[[], bool]) -> None:
        self._clock = clock
        self._stall_s = stall_s
        self._busy = busy
        self._since = clock.monotonic()  # the last message, or the first request after a pause

    def heard(self) -> None:
        self._since = self._clock.monotonic()

    async def bite(self) -> None:
        """Wait until the node has been silent for `stall_s` while it was busy, then return."""
        while True:
            left = self._stall_s
            if self._busy():
                left -= self._clock.monotonic() - self._since
            if left <= 0:
                return
            await asyncio.sleep(left)
