"""The policy, asked on behalf of one request.

Snapshots of the nodes are taken once per decision. Boots that refused the request are not used
again; those that failed it only when nobody else is left (router.nodes.policy.Ask).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import replace
from typing import Final

from baton.protocol.handles import KVHandle, Role
from baton.protocol.request import MAX_NODE_DEATHS, Request
from router.nodes.policy import Ask, NodeSnapshot, Route, choose_decode, choose_route, is_usable
from router.nodes.registry import NodeRegistry
from router.request.dispatch_parts import DispatchParts
from router.request.scores import scores_of
from router.request.sessions import tie_of
from router.request.terms import Terms
from router.request.trace import RequestTrace

MOST_LOGPROBS: Final = 1 << 15  # of token 1, that a hand-over carries (END has 1 MiB)


def ask_of(request: Request, terms: Terms) -> Ask:
    """What a new request needs of its nodes. Log-probabilities of token 1 that are too many to
    travel with the KV keep the prompt on the decode node."""
    params = request.params
    return Ask(
        known_ids=request.known_ids,
        tenant_salt=request.tenant_salt,
        adapter=request.adapter,
        slo=terms.slo,
        width=params.width,
        local=params.num_samples * ((params.logprobs or 0) + 1) > MOST_LOGPROBS,
    )


def route(ask: Ask, parts: DispatchParts, trace: RequestTrace) -> Route:
    """Nodes for a whole journey. Mutates `ask` and `trace`. Raises as `choose_route`."""
    nodes = parts.registry.snapshots()
    chosen = choose_route(ask, nodes, parts.settings, _tie(ask, parts, trace.terms.session))
    ask.model_digest = chosen.decode.model_digest
    _note_choice(ask, parts, trace, nodes, chosen)
    return chosen


def decode_node(ask: Ask, parts: DispatchParts, trace: RequestTrace, kv: KVHandle) -> NodeSnapshot:
    """A decode node for KV that another one exports. Mutates `ask` and `trace`. Raises as
    `choose_route`."""
    nodes = [node for node in parts.registry.snapshots() if node.boot_id != kv.boot_id]
    tie = _tie(ask, parts, trace.terms.session)
    node = choose_decode(ask, nodes, kv.endpoint.layout_fingerprint, parts.settings, tie)
    _note_choice(ask, parts, trace, nodes, Route(node))
    return node


def check_move(ask: Ask, parts: DispatchParts, leaving: str) -> None:
    """Raise what `decode_node` would for KV of the boot `leaving`; nothing is chosen."""
    nodes = parts.registry.snapshots()
    layout = next((node.fingerprint for node in nodes if node.boot_id == leaving), "")
    others = [node for node in nodes if node.boot_id != leaving]
    choose_decode(ask, others, layout, parts.settings, tie=0.0)


def serve(ask: Ask, registry: NodeRegistry) -> bool:
    """Is there a decode node for it now, whatever KV of it exists?"""
    return any(node.role is Role.DECODE and is_usable(node, ask) for node in registry.snapshots())


async def may_come(ask: Ask, registry: NodeRegistry, export: KVHandle | None) -> bool:
    """Wait for news of the nodes; False, at once: no decode node is expected that could serve the
    request, or fetch its `export`."""
    anybody = replace(ask, excluded=frozenset())  # another boot may take it

    def could_serve(node: NodeSnapshot) -> bool:
        if export is not None and node.boot_id == export.boot_id:
            return False
        fits = export is None or node.fingerprint == export.endpoint.layout_fingerprint
        return node.role is Role.DECODE and fits and is_usable(node, anybody)

    return await registry.may_come(could_serve)


async def is_guilty(ask: Ask, registry: NodeRegistry) -> bool:
    """Have so many nodes died of the request, or hung, that it must end? A node that comes back as
    the same boot has not died: the network was away, or this router stood still. So such nodes are
    waited for before the verdict. Mutates `ask`."""

    def seems_innocent() -> bool:
        dead = [boot for boot, hung in ask.deaths.items() if hung or registry.session(boot) is None]
        ask.deaths = {boot: ask.deaths[boot] for boot in dead}
        return len(ask.deaths) < MAX_NODE_DEATHS

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(registry.connect_s):
            await registry.wait_until(seems_innocent)
    ask.guilty = not seems_innocent()
    return ask.guilty


def _tie(ask: Ask, parts: DispatchParts, session: bytes) -> float:
    """Decides between equal nodes. A session has one of its own, and a node that it had last."""
    if not session:
        return random.random()
    ask.session_boot = parts.sessions.node_of(session)
    return tie_of(session)


def _note_choice(
    ask: Ask,
    parts: DispatchParts,
    trace: RequestTrace,
    nodes: list[NodeSnapshot],
    chosen: Route,
) -> None:
    """Remember where the session is now, and for a receipt why there."""
    if trace.terms.session:
        parts.sessions.served_by(trace.terms.session, chosen.decode.boot_id)
    if trace.terms.receipt:
        trace.scores = scores_of(ask, nodes, parts.settings, (chosen.prefill, chosen.decode))
