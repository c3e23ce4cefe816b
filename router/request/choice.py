"""NodeChoice: the policy, asked on behalf of one request, and what the request knows of nodes.

Boots that refused it are not used again; those that failed it only when nobody else is left.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Final

from baton.protocol.errors import BatonError, Unavailable
from baton.protocol.handles import KVHandle, Role
from baton.protocol.request import Request
from router.nodes.policy import (
    Ask,
    NodeSnapshot,
    PolicySettings,
    Route,
    choose_decode,
    choose_route,
    is_usable,
)
from router.nodes.registry import NodeRegistry
from router.request.scores import scores_of
from router.request.sessions import SessionMap, tie_of
from router.request.trace import RequestTrace

MAX_LOST: Final = 1  # hand-overs of one request whose KV is lost on the way, before it needs none
MOST_LOGPROBS: Final = 1 << 15  # of token 1, that a hand-over carries (END has 1 MiB)


class NodeChoice:
    """`trace` says on what terms, and is told the scores if a receipt is among them."""

    def __init__(
        self,
        registry: NodeRegistry,
        settings: PolicySettings,
        sessions: SessionMap,
        trace: RequestTrace,
    ) -> None:
        self._registry = registry
        self._settings = settings
        self._sessions = sessions
        self._trace = trace
        self._excluded: set[str] = set()
        self._avoided: set[str] = set()
        self._num_lost = 0
        self._refusal: BatonError | None = None
        self._model_digest: str | None = None

    def refused(self, boot_id: str, error: BatonError) -> None:
        """That node will not serve it; `error` is the answer when nobody else will."""
        self._excluded.add(boot_id)
        self._refusal = error

    def avoid(self, boot_id: str) -> None:
        """That node failed it, or is to be left alone."""
        self._avoided.add(boot_id)

    def lost_kv(self, boot_id: str) -> None:
        """KV was lost on the way from that node: another exporter avoids both, node and way. Who
        loses it there again has the prompt computed where it decodes."""
        self.avoid(boot_id)
        self._num_lost += 1

    def route(self, request: Request) -> Route:
        """Nodes for a whole journey. Raises Unavailable, ContextLengthExceeded."""
        nodes = self._registry.snapshots()
        ask = self._ask(request)
        try:
            route = choose_route(ask, nodes, self._settings, self._tie())
        except Unavailable as error:
            raise (self._refusal or error) from error
        self._model_digest = route.decode.model_digest
        self._chose(ask, nodes, route.prefill, route.decode)
        return route

    def decode(self, request: Request, fingerprint: str, leaving: str = "") -> NodeSnapshot:
        """A decode node for KV of that layout; `leaving`: boot id of one that must not have it.

        Raises Unavailable, ContextLengthExceeded.
        """
        ask, nodes = self._ask(request), self._but(leaving)
        node = self._decode(ask, nodes, fingerprint)
        self._chose(ask, nodes, None, node)
        return node

    def check_move(self, request: Request, leaving: str) -> None:
        """Raise what `decode` would for KV of the node `leaving`; nothing is chosen."""
        source = next((n for n in self._registry.snapshots() if n.boot_id == leaving), None)
        fingerprint = "" if source is None else source.fingerprint
        self._decode(self._ask(request), self._but(leaving), fingerprint)

    def serve(self, request: Request) -> bool:
        """Is there a decode node for it now, whatever KV of it exists?"""
        ask = self._ask(request)
        nodes = self._registry.snapshots()
        return any(node.role is Role.DECODE and is_usable(node, ask) for node in nodes)

    async def may_come(self, request: Request, export: KVHandle | None) -> bool:
        """Wait for news of the nodes; False, at once: no decode node is expected that could serve
        the request, or fetch its `export`."""
        ask = replace(self._ask(request), excluded=frozenset())  # another boot may take it

        def could_serve(node: NodeSnapshot) -> bool:
            if export is not None and node.boot_id == export.boot_id:
                return False
            fits = export is None or node.fingerprint == export.endpoint.layout_fingerprint
            return node.role is Role.DECODE and fits and is_usable(node, ask)

        return await self._registry.may_come(could_serve)

    def _but(self, leaving: str) -> list[NodeSnapshot]:
        return [node for node in self._registry.snapshots() if node.boot_id != leaving]

    def _decode(self, ask: Ask, nodes: list[NodeSnapshot], fingerprint: str) -> NodeSnapshot:
        try:
            return choose_decode(ask, nodes, fingerprint, self._settings, self._tie())
        except Unavailable as error:
            raise (self._refusal or error) from error

    def _tie(self) -> float:
        session = self._trace.terms.session
        return tie_of(session) if session else random.random()

    def _chose(
        self,
        ask: Ask,
        nodes: list[NodeSnapshot],
        prefill: NodeSnapshot | None,
        decode: NodeSnapshot,
    ) -> None:
        """Remember where the session is now, and why there."""
        terms = self._trace.terms
        if terms.session:
            self._sessions.served_by(terms.session, decode.boot_id)
        if terms.receipt:
            self._trace.scores = scores_of(ask, nodes, self._settings, (prefill, decode))

    def _ask(self, request: Request) -> Ask:
        return Ask(
            known_ids=request.known_ids,
            tenant_salt=request.tenant_salt,
            adapter=request.adapter,
            model_digest=self._model_digest,
            excluded=frozenset(self._excluded),
            avoided=frozenset(self._avoided),
            session_boot=self._session_boot(),
            slo=self._trace.terms.slo,
            width=request.params.width,
            local=self._num_lost > MAX_LOST or _tells_much(request),
        )

    def _session_boot(self) -> str:
        session = self._trace.terms.session
        return self._sessions.node_of(session) if session else ""


def _tells_much(request: Request) -> bool:
    """Are the log-probabilities of token 1 too many to travel with the KV?"""
    params = request.params
    return params.num_samples * ((params.logprobs or 0) + 1) > MOST_LOGPROBS
