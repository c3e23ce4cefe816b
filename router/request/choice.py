"""Chooses nodes for one request: asks the policy (router/nodes/policy.py) with current snapshots.

Snapshots of the nodes are taken once per decision. Boots that refused the request are not used
again. Boots that failed the request are used only when no other is left (router.nodes.policy.Ask).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Final

from baton.protocol.errors import BatonError
from baton.protocol.handles import KVHandle, Role
from baton.protocol.request import MAX_NODE_DEATHS, Request
from router.nodes.policy import (
    Ask,
    NodeSnapshot,
    Route,
    choose_decode,
    choose_route,
    is_usable,
    preferred,
)
from router.nodes.registry import NodeRegistry
from router.request.dispatch_parts import DispatchParts
from router.request.scores import scores_of
from router.request.sessions import tie_of
from router.request.trace import RequestTrace

# Most log-probabilities of token 1 that a hand-over carries (its END frame has 1 MiB).
MOST_LOGPROBS: Final = 1 << 15


def ask_of(request: Request, trace: RequestTrace) -> Ask:
    """Return what a new request needs of its nodes.

    If token 1 has more log-probabilities than a hand-over carries, the decode node has to compute
    the prompt (`Ask.local`).
    """
    params = request.params
    return Ask(
        known_ids=request.known_ids,
        tenant_salt=request.tenant_salt,
        adapter=request.adapter,
        model=trace.model,
        slo=trace.terms.slo,
        width=params.width,
        behind=trace.behind,
        local=params.num_samples * ((params.logprobs or 0) + 1) > MOST_LOGPROBS,
        images=request.images,
    )


def route(ask: Ask, parts: DispatchParts, trace: RequestTrace) -> Route:
    """Choose the prefill node (if any) and the decode node of a request.

    Mutates `ask` and `trace`. Raises the same exceptions as `choose_route`.
    """
    nodes = parts.registry.snapshots()
    if trace.terms.nodes and parts.settings.named_nodes:
        nodes = preferred(ask, nodes, trace.terms.nodes)
    chosen = choose_route(ask, nodes, parts.settings, _tie(ask, parts, trace.terms.session))
    ask.model_digest = chosen.decode.model_digest
    _note_choice(ask, parts, trace, nodes, chosen)
    return chosen


def preview(ask: Ask, parts: DispatchParts, trace: RequestTrace) -> Route:
    """Return the route that a request would get now; nothing is noted. Raises as `route`."""
    nodes, tie = parts.registry.snapshots(), _tie(ask, parts, trace.terms.session)
    return choose_route(ask, nodes, parts.settings, tie)


def decode_node(ask: Ask, parts: DispatchParts, trace: RequestTrace, kv: KVHandle) -> NodeSnapshot:
    """Choose a decode node that fetches the export `kv`; never the exporter itself.

    Mutates `ask` and `trace`. Raises the same exceptions as `choose_route`.
    """
    nodes = [node for node in parts.registry.snapshots() if node.boot_id != kv.boot_id]
    tie = _tie(ask, parts, trace.terms.session)
    node = choose_decode(ask, nodes, kv.endpoint.layout_fingerprint, parts.settings, tie)
    _note_choice(ask, parts, trace, nodes, Route(node))
    return node


def may_move(ask: Ask, parts: DispatchParts, leaving: str) -> bool:
    """Whether another decode node could take a request over from the boot `leaving`; those that
    refused it at first may have room by now."""
    ask.served(leaving)
    nodes = parts.registry.snapshots()
    layout = next((node.fingerprint for node in nodes if node.boot_id == leaving), "")
    others = [node for node in nodes if node.boot_id != leaving]
    try:
        choose_decode(ask, others, layout, parts.settings, tie=0.0)
    except BatonError:
        return False
    return True


def serve(ask: Ask, registry: NodeRegistry) -> bool:
    """Whether a decode node could serve the request now, if its KV were computed again."""
    return any(node.role is Role.DECODE and is_usable(node, ask) for node in registry.snapshots())


async def may_come(ask: Ask, registry: NodeRegistry, export: KVHandle | None) -> bool:
    """Wait until the nodes change (at most a heartbeat) and return True, if a suitable decode node
    is expected; otherwise return False at once.

    A suitable node could serve the request and, if there is an `export`, fetch it.
    """
    later = ask.later()

    def could_serve(node: NodeSnapshot) -> bool:
        if export is not None and node.boot_id == export.boot_id:
            return False
        fits = export is None or node.fingerprint == export.endpoint.layout_fingerprint
        return node.role is Role.DECODE and fits and is_usable(node, later)

    return await registry.may_come(could_serve)


async def is_guilty(ask: Ask, registry: NodeRegistry) -> bool:
    """Whether the request must end because MAX_NODE_DEATHS nodes have died of it or hung.

    A node that comes back as the same boot has not died: the network was away, or this router stood
    still. So this waits for `registry.connect_s` at most until too few deaths are left. Mutates
    `ask`.
    """

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
    """Return the number in [0, 1) that decides between equal nodes.

    It is random without a session. For a session it is always the same, and the decode node that
    served the session last is noted in `ask`.
    """
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
    """Remember the decode node of the session. If the client wants a receipt, keep the scores of
    all nodes in `trace`."""
    if trace.terms.session:
        parts.sessions.served_by(trace.terms.session, chosen.decode.boot_id)
    if trace.terms.receipt:  # not for every timeline: 20 us for each node
        trace.scores = scores_of(ask, nodes, parts.settings, (chosen.prefill, chosen.decode))
