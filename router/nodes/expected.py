"""ExpectedNodes: nodes that may serve soon though they do not now, so that requests wait for them.

A node is expected while it is connected or its record lives, and for `wait_s` after that: it is
started again, it drains and another takes its place, or this router itself was paused and has not
dialled it again. With `wait_s` 0 nobody is expected. Not here: which requests wait, and where
(router/request/dispatch.py, router/request/gate/gate.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from baton.protocol.clock import Clock
from baton.protocol.handles import NodeRecord
from router.nodes.policy import NodeSnapshot

CouldServe = Callable[[NodeSnapshot], bool]


class ExpectedNodes:
    """Event loop only."""

    def __init__(self, clock: Clock, wait_s: float) -> None:
        self._clock = clock
        self._wait_s = wait_s
        self._until: dict[str, tuple[float, NodeSnapshot]] = {}  # by boot id

    def here(self, records: Iterable[NodeRecord]) -> None:
        """These nodes are here now: they are expected for `wait_s` from now on."""
        until = self._clock.monotonic() + self._wait_s
        for record in records:
            self._until[record.boot_id] = until, NodeSnapshot.of(record)

    def refused(self, record: NodeRecord) -> None:
        """This router does not use it: nobody waits for it."""
        self._until.pop(record.boot_id, None)

    def left_s(self, could_serve: CouldServe) -> float:
        """For how long a node that could serve is still expected; 0 if there is none.

        `could_serve` is asked of each as if it were connected and idle.
        """
        now = self._clock.monotonic()
        self._until = {boot: kept for boot, kept in self._until.items() if kept[0] > now}
        ends = [until for until, node in self._until.values() if could_serve(node)]
        return max(ends) - now if ends else 0.0
