"""NodeChoice: the policy, asked on behalf of one request, and what the request knows of nodes.

Boots that refused it are not used again; those that failed it only when nobody else is left.
"""

from __future__ import annotations

import random

from baton.errors import BatonError, Unavailable
from baton.request import Request
from router.policy import Ask, NodeSnapshot, PolicySettings, Route, choose_decode, choose_route
from router.registry import NodeRegistry


class NodeChoice:
    def __init__(self, registry: NodeRegistry, settings: PolicySettings) -> None:
        self._registry = registry
        self._settings = settings
        self._excluded: set[str] = set()
        self._avoided: set[str] = set()
        self._refusal: BatonError | None = None
        self._model_digest: str | None = None

    def refused(self, boot_id: str, error: BatonError) -> None:
        """That node will not serve it; `error` is the answer when nobody else will."""
        self._excluded.add(boot_id)
        self._refusal = error

    def avoid(self, boot_id: str) -> None:
        """That node failed it, or is to be left alone."""
        self._avoided.add(boot_id)

    def route(self, request: Request) -> Route:
        """Nodes for a whole journey. Raises Unavailable, ContextLengthExceeded."""
        nodes = self._registry.snapshots()
        try:
            route = choose_route(self._ask(request), nodes, self._settings, random.random())
        except Unavailable as error:
            raise (self._refusal or error) from error
        self._model_digest = route.decode.model_digest
        return route

    def decode(self, request: Request, fingerprint: str, leaving: str = "") -> NodeSnapshot:
        """A decode node for KV of that layout; `leaving`: boot id of one that must not have it.

        Raises Unavailable, ContextLengthExceeded.
        """
        nodes = [node for node in self._registry.snapshots() if node.boot_id != leaving]
        ask = self._ask(request)
        try:
            return choose_decode(ask, nodes, fingerprint, self._settings, random.random())
        except Unavailable as error:
            raise (self._refusal or error) from error

    def _ask(self, request: Request) -> Ask:
        return Ask(
            known_ids=request.known_ids,
            tenant_salt=request.tenant_salt,
            adapter=request.adapter,
            model_digest=self._model_digest,
            excluded=frozenset(self._excluded),
            avoided=frozenset(self._avoided),
        )
