"""Which nodes serve a request: filter -> score -> pick. Pure functions over snapshots.

The cost of a prefill node is counted in tokens to compute before token 1, that of a decode node in
running requests. A cached prefix lowers the cost, a queue raises it. So a node with the prefix wins
until its queue costs more than the prefix saves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from baton.protocol.block_hashes import chain, root_hash
from baton.protocol.errors import BatonError, ContextLengthExceeded, Unavailable
from baton.protocol.handles import NodeLoad, NodeRecord, Role
from baton.protocol.images import ImageInput, salt
from router.nodes.placement import Placement, Prompt, placement_costs, requests_on, tokens_ahead
from router.nodes.slo import ANY, Slo, expected_tpot_s, expected_ttft_s, meets

SIMILAR: Final = 0.05  # costs within 5 % of the best count as equal
PREFIX_WORTH: Final = (
    2.0  # a fully cached prompt is worth so many running requests to a decode node
)
NO_ROOM_COST: Final = 1000.0  # a node that must first free blocks comes after all that need not
SESSION_WORTH: Final = 4.0  # a session stays with its decode node up to so many requests more ...
SESSION_SHARE: Final = 0.5  # ... or this share of those that run there, whichever is more
MAX_LOST: Final = 1  # hand-overs of one request whose KV is lost, before it needs none
FEW_WAITING: Final = 2
SHARE_WAITING: Final = 0.125  # of the running requests: more waiting ones make a node full


@dataclass(slots=True)
class NodeSnapshot:
    """A node as this router sees it now. `prefix`: hashes of the blocks that it holds.
    `checkpoints`: those behind which it has a recurrent state; None if its model keeps none. All
    fields are read only; it is not declared frozen because it is made for each request (2 us).

    `assigned` and `assigned_tokens`: requests and uncomputed prompt tokens that this router has
    given the node; they are known at once, while `load` is what the node has told last.
    `unreported_tokens`: those of `assigned_tokens` that were sent after that. `pooling`: groups of
    inputs that the node pools for this router. `model`: the key of the model that it serves, which
    is "" where there is one model (router/models.py).
    """

    node_id: str
    boot_id: str
    role: Role
    model_digest: str
    fingerprint: str
    block_size: int
    kv_dtype: str
    load: NodeLoad = field(default_factory=NodeLoad)
    prefix: Collection[bytes] = frozenset()
    checkpoints: Collection[bytes] | None = None
    assigned: int = 0
    assigned_tokens: int = 0
    unreported_tokens: int = 0
    pooling: int = 0
    adapters: tuple[str, ...] = ()
    max_num_seqs: int = 0  # 0 = not reported
    needs_rows: bool = False  # it computes no image unless encode nodes have encoded it
    shunned: bool = False  # it hangs, or is in quarantine (router/nodes/health.py)
    model: str = ""

    @staticmethod
    def of(record: NodeRecord, model: str = "") -> NodeSnapshot:
        """The node as its record describes it, idle and empty."""
        return NodeSnapshot(
            node_id=record.node_id,
            boot_id=record.boot_id,
            role=record.role,
            model_digest=record.model_digest,
            fingerprint=record.endpoint.layout_fingerprint,
            block_size=record.block_size,
            kv_dtype=record.endpoint.format.dtype,
            adapters=record.adapters,
            max_num_seqs=record.max_num_seqs,
            needs_rows=record.needs_rows,
            model=model,
        )

    @property
    def takes_requests(self) -> bool:
        return not (self.load.draining or self.load.asleep or self.shunned)


@dataclass(slots=True)
class Ask:
    """What a request needs of its nodes, and which nodes have failed it. Its journey writes it, the
    policy reads it.

    `excluded`: boots that refused the request, and why. `avoided`: boots that failed the request,
    so they serve it only if no other can. `refusal`: the error if no node is left. `begun`: its
    client has tokens. `deaths`: boots that may have died of the request and have not come back,
    with whether they hung. `num_deaths`: how often a boot was blamed in all. `guilty`: by the last
    verdict too many nodes have died of the request. `num_lost`: hand-overs whose KV was lost.
    `model`: the key of the model that the client named. `model_digest`: the weights that the
    request began with, None at first. `session_boot`: the decode node that served its session last,
    "" for none. `width`: sequences that decode at once. `behind`: RequestTrace.behind. `local`: the
    KV must not travel, so the decode node computes the prompt. `images`: those of the prompt.
    `encodes`: encode nodes can be asked for their rows.
    """

    known_ids: tuple[int, ...]
    tenant_salt: str = ""
    adapter: str = ""
    model: str = ""
    model_digest: str | None = None
    excluded: Mapping[str, BatonError] = field(default_factory=dict[str, BatonError])
    avoided: AbstractSet[str] = frozenset()
    refusal: BatonError | None = None
    begun: bool = False
    deaths: dict[str, bool] = field(default_factory=dict[str, bool])
    num_deaths: int = 0
    guilty: bool = False
    num_lost: int = 0
    session_boot: str = ""
    slo: Slo = ANY
    width: int = 1
    behind: int = 0
    local: bool = False
    images: tuple[ImageInput, ...] = ()
    encodes: bool = False

    def refused(self, boot_id: str, error: BatonError) -> None:
        """Exclude a node that refused the request; `error` becomes the `refusal`."""
        self.excluded, self.refusal = {**self.excluded, boot_id: error}, error

    def served(self, by: str) -> None:
        """Forget refusals from before the boot `by` decoded the request: others may have room."""
        self.excluded = {boot: why for boot, why in self.excluded.items() if boot == by}
        self.refusal = self.excluded.get(by)

    def later(self) -> Ask:
        """Return what a node must fulfil to be waited for: one that said that it is unavailable may
        come as another boot; every other refusal stands."""
        stands = {b: why for b, why in self.excluded.items() if not isinstance(why, Unavailable)}
        return replace(self, excluded=stands)

    @property
    def unserved(self) -> BatonError:
        """The error if no node can serve it now. One that has begun waits with Unavailable."""
        told = None if self.begun else self.refusal
        return told or Unavailable("no decode node is available")

    def avoid(self, boot_id: str) -> None:
        """Avoid a node that failed the request, or that should get no further requests."""
        self.avoided |= {boot_id}

    def lost_kv(self, boot_id: str) -> None:
        """Note that the KV was lost on its way from a node, and avoid that node as exporter.

        After more than MAX_LOST losses the decode node computes the prompt itself (`local`).
        """
        self.avoid(boot_id)
        self.num_lost += 1
        self.local |= self.num_lost > MAX_LOST

    def blame(self, boot_id: str, *, hung: bool = False) -> None:
        """Note that a node may have died, or hung, because of the request."""
        self.num_deaths += 1
        self.deaths[boot_id] = hung or self.deaths.get(boot_id, False)


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """`prefix_weight` 0: prefixes are ignored (least loaded).

    `placement`: who computes the prompt. "remote": a prefill node, if there is one. "threshold":
    the decode node for prompts with at most `local_prefill_tokens` uncached tokens, else a prefill
    node. "auto": the cheaper of the two (router/nodes/placement.py). `two_choices`: among nodes
    with equal prefixes only two random ones are compared. That is better where many routers share
    nodes that seldom report, and worse elsewhere (docs/admission.md has the figures).
    `named_nodes`: a request may name its nodes, as an endpoint picker chose them (docs/gateway.md).
    """

    prefix_weight: float = 1.0
    local_prefill_tokens: int = 0
    placement: Placement = "threshold"
    two_choices: bool = False
    named_nodes: bool = False


class Route(msgspec.Struct, frozen=True):
    """The nodes chosen for a request. `prefill` None: the decode node computes the prompt.

    `prefill_cached`, `decode_cached`: prompt tokens whose KV the node holds.
    """

    decode: NodeSnapshot
    prefill: NodeSnapshot | None = None
    prefill_cached: int = 0
    decode_cached: int = 0


def choose_route(
    ask: Ask, nodes: Sequence[NodeSnapshot], settings: PolicySettings, tie: float
) -> Route:
    """Pick the nodes for a request. `tie` in [0, 1) decides between nodes of equal cost.

    Raises `ask.unserved` when no decode node can serve, ContextLengthExceeded when the prompt fits
    into no node's pool.
    """
    usable = [node for node in nodes if is_usable(node, ask)]
    decoders = [node for node in usable if node.role is Role.DECODE]
    if not decoders:
        raise ask.unserved
    cached = prefix_lengths(ask, usable) if settings.prefix_weight else {}
    prefill = pick_prefill(ask, usable, settings, tie, cached)
    if prefill is not None:
        decoders = [node for node in decoders if node.fingerprint == prefill.fingerprint]
    decode = pick_decode(ask, decoders, settings, tie, cached)
    decode_cached = cached.get(decode.boot_id, 0)
    if prefill is None:
        return Route(decode, decode_cached=decode_cached)
    route = Route(decode, prefill, cached.get(prefill.boot_id, 0), decode_cached)
    behind = ask.behind and ask.behind / sum(node.role is not Role.DECODE for node in usable)
    if prefills_locally(len(ask.known_ids), route, prefill, settings, behind):
        return Route(decode, decode_cached=decode_cached)
    return route


def prefills_locally(
    num_tokens: int,
    route: Route,
    prefill: NodeSnapshot,
    settings: PolicySettings,
    behind: float = 0.0,
) -> bool:
    """Whether placement lets the route's decode node, not `prefill`, compute the prompt. `behind`:
    requests that wait at the gate, for each prefill node."""
    if settings.placement == "remote":
        return False
    if settings.placement == "threshold":
        return num_tokens - route.decode_cached <= settings.local_prefill_tokens
    prompt = Prompt(num_tokens, route.prefill_cached, route.decode_cached, behind)
    costs = placement_costs(prompt, prefill, route.decode)
    return costs is not None and costs.local_is_cheaper


def choose_decode(
    ask: Ask, nodes: Sequence[NodeSnapshot], fingerprint: str, settings: PolicySettings, tie: float
) -> NodeSnapshot:
    """Pick a decode node that fetches an export whose KV has the layout `fingerprint`.

    Raises the same exceptions as `choose_route`.
    """
    partners = [
        node
        for node in nodes
        if node.role is Role.DECODE and node.fingerprint == fingerprint and is_usable(node, ask)
    ]
    if not partners:
        raise ask.unserved
    cached = prefix_lengths(ask, partners) if settings.prefix_weight else {}
    return pick_decode(ask, partners, settings, tie, cached)


def pick_prefill(
    ask: Ask,
    nodes: Sequence[NodeSnapshot],
    settings: PolicySettings,
    tie: float,
    cached: dict[str, int],
) -> NodeSnapshot | None:
    """Return the cheapest prefill node of those that keep the request's time to token 1; if none
    keeps it, the cheapest of all.

    None if the request's KV must not travel, or if there is no prefill node with the KV layout of a
    decode node. Raises ContextLengthExceeded.
    """
    layouts = {node.fingerprint for node in nodes if node.role is Role.DECODE}
    prefillers = [n for n in nodes if n.role is Role.PREFILL and n.fingerprint in layouts]
    if ask.local or not prefillers:
        return None
    fitting = _fitting(prefillers, ask)
    if ask.slo.ttft_s is not None:
        in_time = [n for n in fitting if _starts_in_time(n, ask, cached.get(n.boot_id, 0))]
        fitting = in_time or fitting
    if settings.two_choices:
        fitting = _drawn(fitting, ask, cached, tie)
    return _cheapest(
        fitting,
        lambda node: prefill_cost(node, ask, cached.get(node.boot_id, 0), settings),
        tie,
    )


def pick_decode(
    ask: Ask,
    decoders: Sequence[NodeSnapshot],
    settings: PolicySettings,
    tie: float,
    cached: dict[str, int],
) -> NodeSnapshot:
    """Return the cheapest decode node of those that keep the request's time per token; if none
    keeps it, the cheapest of all.

    Raises ContextLengthExceeded.
    """
    fitting = _fitting(decoders, ask)
    if ask.slo.tpot_s is not None:
        fitting = [node for node in fitting if _streams_in_time(node, ask)] or fitting
    if settings.two_choices:
        fitting = _drawn(fitting, ask, cached, tie)
    return _cheapest(
        fitting,
        lambda node: decode_cost(node, ask, cached.get(node.boot_id, 0), settings),
        tie,
    )


def is_usable(node: NodeSnapshot, ask: Ask) -> bool:
    """Whether `node` may serve the request at all.

    A decode node must also be able to run all of the request's sequences at once.
    """
    narrow = node.role is Role.DECODE and 0 < node.max_num_seqs < ask.width
    return (
        node.takes_requests
        and node.model == ask.model
        and node.boot_id not in ask.excluded
        and ask.model_digest in (None, node.model_digest)
        and (not ask.adapter or ask.adapter in node.adapters)
        and not narrow
        and not (node.needs_rows and ask.images and not ask.encodes)
    )


def preferred(
    ask: Ask, nodes: Sequence[NodeSnapshot], names: Collection[str]
) -> list[NodeSnapshot]:
    """Return the nodes without those for which a named node of the same role stands in.

    A named node that cannot serve the request, or has failed it, stands in for none.
    """
    named = [
        node
        for node in nodes
        if node.node_id in names and node.boot_id not in ask.avoided and is_usable(node, ask)
    ]
    roles = {node.role for node in named}
    return [node for node in nodes if node in named or node.role not in roles]


def is_full(node: NodeSnapshot) -> bool:
    """Whether `node` has requests swapped out, or more waiting ones than come in during a step."""
    load = node.load
    return load.swapped > 0 or load.waiting > max(FEW_WAITING, SHARE_WAITING * load.running)


def prefill_cost(node: NodeSnapshot, ask: Ask, cached: int, settings: PolicySettings) -> float:
    """Return how many prompt tokens `node` computes before this request's token 1.

    A node that must free blocks first costs more.
    """
    uncached = len(ask.known_ids) - settings.prefix_weight * cached
    short = _blocks_short(node, ask, cached)
    return (
        tokens_ahead(node) + uncached + (NO_ROOM_COST + short * node.block_size if short else 0.0)
    )


def decode_cost(node: NodeSnapshot, ask: Ask, cached: int, settings: PolicySettings) -> float:
    """Return the number of requests that share the steps of `node`, corrected for this request.

    It is lower if the node holds the request's prefix or served its session last, and higher if the
    node must free blocks first.
    """
    requests = requests_on(node)
    hit = cached / max(1, len(ask.known_ids))
    short = _blocks_short(node, ask, cached)
    saved = settings.prefix_weight * PREFIX_WORTH * hit + session_worth(node, ask)
    return requests - saved + (NO_ROOM_COST if short else 0.0)


def session_worth(node: NodeSnapshot, ask: Ask) -> float:
    """Return how many more running requests `node` may have and still keep its session.

    0 if the node did not serve the session last, or is full.
    """
    if node.boot_id != ask.session_boot or is_full(node):
        return 0.0
    return max(SESSION_WORTH, SESSION_SHARE * requests_on(node))


def prefix_lengths(ask: Ask, nodes: Iterable[NodeSnapshot]) -> dict[str, int]:
    """Return, by boot id, how many leading tokens of the request the node need not compute: it
    holds their KV, and the recurrent state behind them if its model keeps one.

    Nodes without a match are absent. Block hashes depend on model, KV precision and block size, so
    they are computed once for each group of nodes that agree in these, and only as far as some node
    of the group still matches.
    """
    groups: dict[tuple[bytes, int], list[NodeSnapshot]] = {}
    for node in nodes:
        if not node.prefix:
            continue  # it holds no blocks
        root = root_hash(node.model_digest, ask.tenant_salt, node.kv_dtype, ask.adapter)
        groups.setdefault((root, node.block_size), []).append(node)
    lengths: dict[str, int] = {}
    for (root, size), members in groups.items():
        parent, holders = root, members
        # At least one token must be computed, so the last one never counts as cached.
        for end in range(size, len(ask.known_ids), size):
            images = salt(ask.images, end - size, end) if ask.images else b""
            parent = chain(parent, ask.known_ids[end - size : end], images)
            holders = [node for node in holders if parent in node.prefix]
            if not holders:
                break
            lengths.update(
                (node.boot_id, end)
                for node in holders
                if node.checkpoints is None or parent in node.checkpoints
            )
    return lengths


def _starts_in_time(node: NodeSnapshot, ask: Ask, cached: int) -> bool:
    expected_s = expected_ttft_s(node, len(ask.known_ids) - cached)
    return meets(expected_s, ask.slo.ttft_s) and not _blocks_short(node, ask, cached)


def _streams_in_time(node: NodeSnapshot, ask: Ask) -> bool:
    return meets(expected_tpot_s(node), ask.slo.tpot_s) and not _blocks_short(node, ask, 0)


def _drawn(
    nodes: Sequence[NodeSnapshot], ask: Ask, cached: dict[str, int], tie: float
) -> Sequence[NodeSnapshot]:
    """Return two of the nodes, chosen by `tie`, if the nodes differ only in load; else all."""
    count = len(nodes)
    if count <= 2:
        return nodes
    if any(node.boot_id == ask.session_boot for node in nodes):
        return nodes
    if len({cached.get(node.boot_id, 0) for node in nodes}) > 1:
        return nodes
    first, rest = divmod(int(tie * count * (count - 1)), count - 1)
    return nodes[first], nodes[(first + 1 + rest) % count]


def _blocks_short(node: NodeSnapshot, ask: Ask, cached: int) -> int:
    """Return how many blocks must become free before the request fits on `node`.

    0 if the node has not reported its pool.
    """
    if node.load.total_blocks == 0:
        return 0
    needed = -(-(len(ask.known_ids) + 1) // node.block_size)
    return max(0, needed - cached // node.block_size - node.load.free_blocks)


def _fitting(nodes: Sequence[NodeSnapshot], ask: Ask) -> Sequence[NodeSnapshot]:
    """Return the nodes whose whole pool could hold the request; avoided nodes only if all are.

    Raises ContextLengthExceeded.
    """
    if ask.avoided:
        nodes = [node for node in nodes if node.boot_id not in ask.avoided] or nodes
    needed = len(ask.known_ids) + 1
    fitting = [
        node
        for node in nodes
        if node.load.total_blocks == 0 or needed <= node.load.total_blocks * node.block_size
    ]
    if not fitting:
        raise ContextLengthExceeded(
            f"{len(ask.known_ids)} tokens do not fit into any node's KV cache", field="prompt"
        )
    return fitting


def _cheapest(
    nodes: Sequence[NodeSnapshot], cost: Callable[[NodeSnapshot], float], tie: float
) -> NodeSnapshot:
    """Return one of the cheapest nodes, by `tie`.

    Costs within SIMILAR of the lowest count as equal, so routers with the same view do not all
    choose the same node.
    """
    if len(nodes) == 1:
        return nodes[0]
    costs = [(cost(node), node) for node in nodes]
    best = min(value for value, _ in costs)
    limit = best + SIMILAR * abs(best)
    equals = [node for value, node in costs if value <= limit]
    return equals[int(tie * len(equals))]
