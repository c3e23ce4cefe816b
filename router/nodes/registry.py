"""NodeRegistry: the nodes that this router knows, their sessions, and snapshots for the policy.

Addresses of nodes come from the directory (Redis records, read at least at each heartbeat) or from
the command line. A node is used only after its Hello. While the directory is away, the known nodes
stay. The life: start() -> run() as a task -> stop().
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from baton.protocol.clock import Clock
from baton.protocol.errors import ConfigError, StoreUnavailable
from baton.protocol.handles import NodeLoad, NodeRecord, Role
from baton.protocol.kv_spec import PROTOCOL_VERSION
from baton.runtime.rotation.deployment_secret import Secrets
from baton.runtime.timing import Timing
from baton.runtime.tls import TlsFiles
from router.events import EventRing
from router.nodes.attachments import StepLog
from router.nodes.directory import (
    CouldServe,
    ExpectedNodes,
    ModelOf,
    NodeDirectory,
    only_model,
)
from router.nodes.flows import FlowRate
from router.nodes.health import Known, NodeHealth
from router.nodes.policy import NodeSnapshot
from router.nodes.session import NodeSession, SessionContext

logger = logging.getLogger(__name__)
STOP_S: Final = 2.0
RESTLESS: Final = 10  # heartbeats after a change of the nodes in which others may follow
LOOKS: Final = 20  # reads of the directory in a heartbeat meanwhile


@dataclass(frozen=True, slots=True)
class ReportedModel:
    """What the nodes of a model say of it. `max_model_len` is the smallest one of all nodes."""

    name: str
    digest: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RegistryParts:
    """What a registry is made of. `addresses`: HOST:PORT -> the role given on the command line.

    `store_away`: returns whether the store is away. Then nodes cannot renew their records, so a
    missing record does not mean that the node is gone. `model_of`: which of the router's models a
    node serves.
    """

    router_id: str
    secrets: Secrets
    timing: Timing
    clock: Clock
    log: StepLog
    addresses: Mapping[str, Role] = field(default_factory=dict[str, Role])
    directory: NodeDirectory | None = None
    tls: TlsFiles | None = None  # for the sessions with nodes; None: without TLS
    store_away: Callable[[], bool] = lambda: False
    node_wait_s: float = 0.0  # for how long requests wait for a node that was here
    exact: bool = False  # all nodes of a role must compute in the same precision
    events: EventRing = field(default_factory=EventRing)
    model_of: ModelOf = only_model


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One known address, for `baton status` and ServerInfo. `refused`: why this router does not use
    the node, "" if it does. `load`: as last reported."""

    address: str
    connected: bool
    record: NodeRecord | None
    refused: str
    assigned: int
    load: NodeLoad
    stalled: bool = False
    quarantined: bool = False


@dataclass(frozen=True, slots=True)
class _Links:
    """The sessions that are up, with their nodes' records and models, and the same sessions by boot
    id. `computing`: those of prefill and decode nodes; `encoding`: those of encode nodes.

    `broken`: the groups of data-parallel ranks of which a session is down: all their nodes end.
    """

    connected: Sequence[tuple[NodeSession, NodeRecord, str]]
    computing: Sequence[tuple[NodeSession, NodeRecord, str]]
    encoding: Sequence[tuple[NodeSession, NodeRecord, str]]
    by_boot: Mapping[str, NodeSession]
    broken: frozenset[str]


class NodeRegistry:
    def __init__(self, parts: RegistryParts) -> None:
        """Raises ConfigError for TLS files that cannot be used."""
        self._parts = parts
        self._sessions: dict[str, NodeSession] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._models: dict[str, ReportedModel] = {}  # by key
        self._links: _Links | None = None  # None: a session came up or went down since
        self._directory_away = False
        self._doubtful_until = 0.0  # until then records of living nodes may be missing
        self._restless_until = 0.0  # until then more nodes may come
        self._changed = asyncio.Event()
        self._watchers: list[Callable[[], None]] = []
        self._expected = ExpectedNodes(parts.clock, parts.node_wait_s, parts.model_of)
        self.health = NodeHealth(parts.clock, events=parts.events)
        self._context = SessionContext(
            router_id=parts.router_id,
            secrets=parts.secrets,
            timing=parts.timing,
            clock=parts.clock,
            log=parts.log,
            admit=self.admit,
            changed=self._notify,
            lost=lambda record: self._expected.here([record]),
            reported=self._on_report,
            credentials=None if parts.tls is None else parts.tls.channel_credentials(),
            health=self.health,
            events=parts.events,
        )

    # ---- life ----

    async def start(self) -> None:
        for address in self._parts.addresses:
            self._open(address)
        await self.refresh()

    async def run(self) -> None:
        """Read the directory each heartbeat until cancelled; more often while nodes may be
        starting."""
        while True:
            await asyncio.sleep(self._pause_s())
            await self.refresh()

    def _pause_s(self) -> float:
        """Return the seconds until the directory is read again.

        Nodes may be starting while none can serve, and soon after a change: a cluster's nodes come
        and go together."""
        heartbeat_s, now = self._parts.timing.heartbeat_s, self._parts.clock.monotonic()
        settled = self._directory_away or (self.can_serve() and now >= self._restless_until)
        return heartbeat_s if settled else heartbeat_s / LOOKS

    async def stop(self) -> None:
        """Close all sessions; the nodes abort this router's requests. May be called twice."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_S)

    async def refresh(self) -> None:
        """Read the directory once: open sessions to new nodes, close those to nodes that are
        gone."""
        directory = self._parts.directory
        if directory is None:
            return
        now = self._parts.clock.monotonic()
        if self._directory_away or self._parts.store_away():
            self._doubtful_until = now + self._parts.timing.node_record_s
        try:
            records = await directory.records()
        except StoreUnavailable as error:
            if not self._directory_away:
                logger.warning("no node records, known nodes stay: %s", error.message)
            self._directory_away = True
            return
        self._directory_away = False
        for record in records:
            self._found(record)
        self._models = self._by_model(records) | self._models
        if now >= self._doubtful_until:
            self._close_all_but({record.address for record in records})

    def _found(self, record: NodeRecord) -> None:
        """Open or wake the session of a node that the directory names, and expect the node."""
        session = self._sessions.get(record.address)
        if session is None:
            self._open(record.address)
        elif session.record is not None and session.record.boot_id != record.boot_id:
            session.wake()
        if session is None or not session.refused:
            self._expected.here([record])

    def _close_all_but(self, found: set[str]) -> None:
        """Close the sessions that are down and whose addresses neither `found` nor the command line
        names."""
        named = found | set(self._parts.addresses)
        for address, session in list(self._sessions.items()):
            if address not in named and not session.connected:
                self._close(address)

    # ---- what is known ----

    def snapshots(self, *, encoding: bool = False) -> list[NodeSnapshot]:
        """Return snapshots of the connected prefill and decode nodes, or of the encode nodes."""
        health, links = self.health, self._known()
        nodes = links.encoding if encoding else links.computing
        if not (health.holds_any or links.broken):
            return [session.snapshot(record, model) for session, record, model in nodes]
        panic = health.panicking(self._seen)
        found: list[NodeSnapshot] = []
        for session, record, model in nodes:
            snapshot = session.snapshot(record, model)
            held = (model, record.role) not in panic and health.in_quarantine(session.keys)
            if held or record.group in links.broken:
                snapshot = replace(snapshot, shunned=True)
            found.append(snapshot)
        return found

    def session(self, boot_id: str) -> NodeSession | None:
        """Return the session with one incarnation of a node; None if it is not connected."""
        return self._known().by_boot.get(boot_id)

    def records(self, model: str | None = None) -> list[NodeRecord]:
        """Return the records of the connected nodes, with their current load. `model`: the key of a
        model whose nodes alone are wanted."""
        return [
            replace(record, load=session.load)
            for session, record, key in self._known().connected
            if model in (None, key)
        ]

    def statuses(self) -> list[NodeStatus]:
        """Return the status of every known address, connected or not."""
        health = self.health
        return [
            NodeStatus(
                s.address, s.connected, s.record, s.refused, s.assigned, s.load, s.stalled,
                health.holds_any and health.in_quarantine(s.keys),
            )
            for s in self._sessions.values()
        ]  # fmt: skip

    def flows(self) -> list[tuple[str, str, FlowRate]]:
        """Return what moves between nodes now: the names of exporter and fetcher, and the flow."""
        links = self._known()
        names = {record.boot_id: record.node_id for _, record, _ in links.connected}
        return [
            (names.get(rate.peer, rate.peer), record.node_id, rate)
            for session, record, _ in links.connected
            for rate in session.flows.rates()
        ]

    def model(self, key: str = "") -> ReportedModel | None:
        """Return what its nodes say of a model; the last known while none of them is up, None
        before the first."""
        self._known()
        return self._models.get(key)

    def can_serve(self) -> bool:
        """Whether some decode node takes requests. (Without prefill nodes it also prefills.) Of an
        encoder any node does."""
        return any(
            (record.role is Role.DECODE or record.encodes) and session.takes_requests
            for session, record, _ in self._known().connected
        )

    @property
    def connect_s(self) -> float:
        """The longest time that the session with a living node takes to come up."""
        return self._parts.timing.connect_s

    @property
    def changed(self) -> asyncio.Event:
        """An event that is set when a session next comes up or goes down, or a node begins to
        drain. Each change replaces it by a new event."""
        return self._changed

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition()` is true. It is evaluated now, and whenever a session comes up or
        goes down or a node begins to drain."""
        while not condition():
            await self._changed.wait()

    def expected_s(self, could_serve: CouldServe) -> float:
        """Return for how many seconds a node that could serve is still expected; 0 if none is."""
        self._expected.here(record for _, record, _ in self._known().connected)
        return self._expected.left_s(could_serve)

    async def may_come(self, could_serve: CouldServe) -> bool:
        """Wait for a change of the nodes and return True; return False at once if no node that
        could serve is expected.

        The wait lasts a heartbeat at most, because some changes send no notice, like the end of a
        quarantine.
        """
        left_s = self.expected_s(could_serve)
        if left_s <= 0:
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(left_s, self._parts.timing.heartbeat_s)):
                await self._changed.wait()
        return True

    def watch_reports(self, watcher: Callable[[], None]) -> None:
        """Call `watcher` from now on after each node's step, once its requests have their events,
        and after each change of the nodes."""
        self._watchers.append(watcher)

    def admit(self, address: str, record: NodeRecord) -> None:
        """Check a node's record against the other nodes.

        Raises ConfigError that names the field, if the node must not serve together with them.
        """
        try:
            self._check(address, record)
        except ConfigError:
            self._expected.refused(record)
            raise

    def _check(self, address: str, record: NodeRecord) -> None:
        if record.endpoint.protocol_version != PROTOCOL_VERSION:
            raise ConfigError(
                f"node {record.node_id} speaks protocol {record.endpoint.protocol_version},"
                f" this router {PROTOCOL_VERSION}",
                field="protocol_version",
            )
        expected = self._parts.addresses.get(address)
        if expected is not None and expected is not record.role:
            raise ConfigError(
                f"{address} was given as a {expected.value} node, it is a {record.role.value} node",
                field="role",
            )
        model = self._parts.model_of(record)
        if model is None:
            raise ConfigError(
                f"node {record.node_id} serves {record.model!r} ({record.model_digest[:12]}), which"
                " is none of this router's models (--models)",
                field="model",
            )
        for session, other, served in self._known().connected:
            if session.address == address:
                continue  # the same node, restarted
            if other.node_id == record.node_id and other.boot_id != record.boot_id:
                raise ConfigError(
                    f"the node id {record.node_id} is another node's, at {session.address}",
                    field="node_id",
                )
            if served != model:
                continue
            if other.model_digest != record.model_digest:
                raise ConfigError(
                    f"node {record.node_id} serves model {record.model_digest[:12]},"
                    f" node {other.node_id} serves {other.model_digest[:12]}: another checkpoint,"
                    " weights in another format (--quantization), or a draft head on one of them"
                    " (--speculative-method)",
                    field="model_digest",
                )
            if other.role is record.role:
                self._compare_precision(record, other)
            if Role.ENCODE in (other.role, record.role):
                continue  # it has no KV
            if other.endpoint.layout_fingerprint != record.endpoint.layout_fingerprint:
                logger.warning(
                    "nodes %s and %s cannot exchange KV: their layouts differ",
                    record.node_id, other.node_id,
                )  # fmt: skip

    # ---- inside ----

    def _compare_precision(self, record: NodeRecord, other: NodeRecord) -> None:
        """Compare the precision of two nodes that may go on with each other's requests.

        Raises ConfigError if the precisions differ and the same tokens were promised; else a
        difference is only logged. Nodes of an older version report no precision and are not
        compared.
        """
        reported = record.precision and other.precision
        if not reported or _computes(record) == _computes(other):
            return
        text = f"node {record.node_id} computes in {_computes(record)}, node {other.node_id} in"
        text += f" {_computes(other)}"
        if self._parts.exact or record.deterministic or other.deterministic:
            raise ConfigError(text, field="dtype")
        logger.warning("%s: a failover between them may change tokens", text)

    def _known(self) -> _Links:
        """Return the sessions that are up; computed only after one came up or went down."""
        if self._links is None:
            connected = [
                (session, session.record, self._parts.model_of(session.record) or "")
                for session in self._sessions.values()
                if session.connected and session.record is not None
            ]
            by_boot = {record.boot_id: session for session, record, _ in reversed(connected)}
            known = [each for each in self._sessions.values() if each.record is not None]
            groups = (each.record.group for each in known if each.record and not each.connected)
            encoding = [each for each in connected if each[1].role is Role.ENCODE]
            computing = [each for each in connected if each[1].role is not Role.ENCODE]
            broken = frozenset(groups) - {""}
            self._links = _Links(connected, computing, encoding, by_boot, broken)
            self._models |= self._by_model([record for _, record, _ in computing])
        return self._links

    def _seen(self) -> list[Known]:
        """Return all nodes that have ever sent a Hello, for the share of healthy ones."""
        return [
            Known(
                session.keys,
                session.record.role,
                session.connected and not session.stalled,
                self._parts.model_of(session.record) or "",
            )
            for session in self._sessions.values()
            if session.record is not None
        ]

    def _by_model(self, records: Sequence[NodeRecord]) -> dict[str, ReportedModel]:
        """Return what the nodes with these records say of each model, by its key."""
        found: dict[str, list[NodeRecord]] = {}
        for record in records:
            if (key := self._parts.model_of(record)) is not None:
                found.setdefault(key, []).append(record)
        return {key: _info_of(mine) for key, mine in found.items()}

    def _open(self, address: str) -> None:
        session = NodeSession(address, self._context)
        self._sessions[address] = session
        self._tasks[address] = asyncio.create_task(session.run(), name=f"session {address}")

    def _close(self, address: str) -> None:
        del self._sessions[address]
        self._tasks.pop(address).cancel()
        self._links = None

    def _on_report(self) -> None:
        for watcher in self._watchers:
            watcher()

    def _notify(self) -> None:
        timing, now = self._parts.timing, self._parts.clock.monotonic()
        self._restless_until = now + RESTLESS * timing.heartbeat_s
        self._links = None
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_report()


def _computes(record: NodeRecord) -> str:
    return f"{record.precision}, deterministic" if record.deterministic else record.precision


def _info_of(records: Sequence[NodeRecord]) -> ReportedModel:
    """Return what the nodes of a model say of it. `records`: at least one."""
    first = records[0]
    return ReportedModel(
        name=first.model,
        digest=first.model_digest,
        max_model_len=min(record.max_model_len for record in records),
        vocab_size=first.vocab_size,
        eos_token_ids=first.eos_token_ids,
    )
