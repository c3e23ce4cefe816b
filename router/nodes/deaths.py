"""Deaths: how many nodes have died of one request, or hung; after MAX_NODE_DEATHS it is FAILED."""

from __future__ import annotations

import asyncio
import contextlib

from baton.protocol.request import MAX_NODE_DEATHS
from router.nodes.registry import NodeRegistry


class Deaths:
    """`note` the deaths that the request may have caused (router/nodes/attachments.py says which).
    `count`: how many these are. `guilty`: whether they were too many, by the last verdict."""

    def __init__(self, registry: NodeRegistry) -> None:
        self._registry = registry
        self._lost: set[str] = set()  # boot ids
        self._hung: set[str] = set()
        self.count = 0
        self.guilty = False

    def note(self, boot_id: str, *, hung: bool = False) -> None:
        self.count += 1
        (self._hung if hung else self._lost).add(boot_id)

    async def are_enough(self) -> bool:
        """Has the request caused too many deaths? A node that comes back as the same boot has not
        died: the network was away, or this router stood still. So such nodes are waited for before
        the verdict."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._registry.connect_s):
                await self._registry.wait_until(lambda: not self._seem_enough())
        self.guilty = self._seem_enough()
        return self.guilty

    def _seem_enough(self) -> bool:
        self._lost = {boot for boot in self._lost if self._registry.session(boot) is None}
        return len(self._lost | self._hung) >= MAX_NODE_DEATHS
