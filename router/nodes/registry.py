"""NodeRegistry: the nodes that this router knows, a session each, snapshots for the policy.

Nodes come from the directory (Redis records, each heartbeat) or from the command line; either way a
node counts only after its own Hello. While the directory is away known nodes stay. Life: start() ->
run() as a task -> stop().
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
from baton.protocol.handles import NodeRecord, Role
from baton.protocol.kv_spec import PROTOCOL_VERSION
from baton.runtime.timing import Timing
from baton.runtime.tls import TlsFiles
from router.nodes.directory import CouldServe, ExpectedNodes, NodeDirectory
from router.nodes.health import Known, NodeHealth
from router.nodes.policy import NodeSnapshot
from router.nodes.session import NodeSession, SessionContext, StepLog

logger = logging.getLogger(__name__)
STOP_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the nodes serve. `max_model_len` is the smallest of theirs."""

    name: str
    digest: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RegistryParts:
    """What a registry is made of. `addresses`: HOST:PORT -> the role that the command line says.

    `store_away`: nodes cannot renew their records now, so a missing one says nothing.
    """

    router_id: str
    secret: str
    timing: Timing
    clock: Clock
    log: StepLog
    addresses: Mapping[str, Role] = field(default_factory=dict[str, Role])
    directory: NodeDirectory | None = None
    tls: TlsFiles | None = None  # towards nodes
    store_away: Callable[[], bool] = lambda: False
    node_wait_s: float = 0.0  # that requests wait for a node which was here
    exact: bool = False  # whoever goes on with a request must compute the same tokens


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One known address, for `baton status` and ServerInfo."""

    address: str
    connected: bool
    record: NodeRecord | None
    refused: str
    assigned: int


@dataclass(frozen=True, slots=True)
class _Links:
    """The sessions that stand, and their nodes' records."""

    connected: Sequence[tuple[NodeSession, NodeRecord]]
    by_boot: Mapping[str, NodeSession]


class NodeRegistry:
    def __init__(self, parts: RegistryParts) -> None:
        """Raises ConfigError for TLS files that cannot be used."""
        self._parts = parts
        self._sessions: dict[str, NodeSession] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._model: ServedModel | None = None
        self._links: _Links | None = None  # None: they may have changed
        self._directory_away = False
        self._doubtful_until = 0.0  # before then records may be missing that nodes could not renew
        self._changed = asyncio.Event()
        self._watchers: list[Callable[[], None]] = []
        self._expected = ExpectedNodes(parts.clock, parts.node_wait_s)
        self.health = NodeHealth(parts.clock)
        self._context = SessionContext(
            router_id=parts.router_id,
            secret=parts.secret,
            timing=parts.timing,
            clock=parts.clock,
            log=parts.log,
            admit=self.admit,
            changed=self._notify,
            lost=lambda record: self._expected.here([record]),
            reported=self._on_report,
            credentials=None if parts.tls is None else parts.tls.channel_credentials(),
            health=self.health,
        )

    # ---- life ----

    async def start(self) -> None:
        for address in self._parts.addresses:
            self._open(address)
        await self.refresh()

    async def run(self) -> None:
        """Read the directory each heartbeat until cancelled."""
        while True:
            await asyncio.sleep(self._parts.timing.heartbeat_s)
            await self.refresh()

    async def stop(self) -> None:
        """Close all sessions; the nodes abort what was under way. Twice is safe."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        self._tasks.clear()
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
        self._model = self._model or _model_of(records)
        if now >= self._doubtful_until:
            self._close_all_but({record.address for record in records})

    def _found(self, record: NodeRecord) -> None:
        """The directory has this record."""
        session = self._sessions.get(record.address)
        if session is None:
            self._open(record.address)
        elif session.record is not None and session.record.boot_id != record.boot_id:
            session.wake()
        if session is None or not session.refused:
            self._expected.here([record])

    def _close_all_but(self, found: set[str]) -> None:
        """Close the sessions that are down, to addresses which nobody names any more."""
        named = found | set(self._parts.addresses)
        for address, session in list(self._sessions.items()):
            if address not in named and not session.connected:
                self._close(address)

    # ---- what is known ----

    def snapshots(self) -> list[NodeSnapshot]:
        """The connected nodes, as of now."""
        health, connected = self.health, self._known().connected
        if not health.holds_any:
            return [session.snapshot(record) for session, record in connected]
        panic = health.panicking(self._seen)
        found: list[NodeSnapshot] = []
        for session, record in connected:
            snapshot = session.snapshot(record)
            if record.role not in panic and health.in_quarantine(session.keys):
                snapshot = replace(snapshot, shunned=True)
            found.append(snapshot)
        return found

    def session(self, boot_id: str) -> NodeSession | None:
        """The session with one incarnation of a node, None once it is lost."""
        return self._known().by_boot.get(boot_id)

    def records(self) -> list[NodeRecord]:
        """The connected nodes' records with their current load."""
        return [replace(record, load=session.load) for session, record in self._known().connected]

    def statuses(self) -> list[NodeStatus]:
        """Every known address, connected or not."""
        return [
            NodeStatus(s.address, s.connected, s.record, s.refused, s.assigned)
            for s in self._sessions.values()
        ]

    def model(self) -> ServedModel | None:
        """The served model; the last known one while no node is up, None before the first."""
        self._known()
        return self._model

    def can_serve(self) -> bool:
        """Is there a decode node that takes requests? (Without prefill nodes it prefills, too.)"""
        return any(
            record.role is Role.DECODE and session.takes_requests
            for session, record in self._known().connected
        )

    @property
    def connect_s(self) -> float:
        """The longest time that the session with a living node takes to come up."""
        return self._parts.timing.connect_s

    @property
    def changed(self) -> asyncio.Event:
        """Set when a session next comes up or goes down, or a node begins to drain; a new event
        stands here from then on."""
        return self._changed

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Until `condition` holds; it is looked at whenever a session comes up or goes down, or a
        node begins to drain."""
        while not condition():
            await self._changed.wait()

    def expected_s(self, could_serve: CouldServe) -> float:
        """For how long a node that could serve is worth waiting for; 0: there is none."""
        self._expected.here(record for _, record in self._known().connected)
        return self._expected.left_s(could_serve)

    async def may_come(self, could_serve: CouldServe) -> bool:
        """Wait for news of the nodes; False, at once: none that could serve is expected.

        Some changes send no notice, like the end of a quarantine, so it waits for a heartbeat at
        most.
        """
        left_s = self.expected_s(could_serve)
        if left_s <= 0:
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(left_s, self._parts.timing.heartbeat_s)):
                await self._changed.wait()
        return True

    def watch_reports(self, watcher: Callable[[], None]) -> None:
        """Call `watcher` whenever a node has reported and its requests have been notified."""
        self._watchers.append(watcher)

    def admit(self, address: str, record: NodeRecord) -> None:
        """Raise ConfigError, naming the field, for a node that must not serve with the others."""
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
        for session, other in self._known().connected:
            if session.address == address:
                continue  # it was started again
            if other.node_id == record.node_id and other.boot_id != record.boot_id:
                raise ConfigError(
                    f"the node id {record.node_id} is another node's, at {session.address}",
                    field="node_id",
                )
            if other.model_digest != record.model_digest:
                raise ConfigError(
                    f"node {record.node_id} serves model {record.model_digest[:12]},"
                    f" node {other.node_id} serves {other.model_digest[:12]}",
                    field="model_digest",
                )
            if other.role is record.role:
                self._compare_precision(record, other)
            if other.endpoint.layout_fingerprint != record.endpoint.layout_fingerprint:
                logger.warning(
                    "nodes %s and %s cannot exchange KV: their layouts differ",
                    record.node_id, other.node_id,
                )  # fmt: skip

    # ---- inside ----

    def _compare_precision(self, record: NodeRecord, other: NodeRecord) -> None:
        """Compare two nodes that may go on with each other's requests. Raises ConfigError if their
        precision differs though the same tokens are promised. Nodes of an older version do not
        report a precision."""
        reported = record.precision and other.precision
        if not reported or _computes(record) == _computes(other):
            return
        text = f"node {record.node_id} computes in {_computes(record)}, node {other.node_id} in"
        text += f" {_computes(other)}"
        if self._parts.exact or record.deterministic or other.deterministic:
            raise ConfigError(text, field="dtype")
        logger.warning("%s: a failover between them may change tokens", text)

    def _known(self) -> _Links:
        """The sessions that stand. Made anew only after a session came up or went down."""
        if self._links is None:
            connected = [
                (session, session.record)
                for session in self._sessions.values()
                if session.connected and session.record is not None
            ]
            by_boot = {record.boot_id: session for session, record in reversed(connected)}
            self._links = _Links(connected, by_boot)
            self._model = _model_of([record for _, record in connected]) or self._model
        return self._links

    def _seen(self) -> list[Known]:
        """The nodes that have said hello once, for the share of them that is healthy."""
        return [
            Known(session.keys, session.record.role, session.connected and not session.stalled)
            for session in self._sessions.values()
            if session.record is not None
        ]

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
        self._links = None
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_report()


def _computes(record: NodeRecord) -> str:
    return f"{record.precision}, deterministic" if record.deterministic else record.precision


def _model_of(records: Sequence[NodeRecord]) -> ServedModel | None:
    """What the nodes serve; None without nodes."""
    if not records:
        return None
    first = records[0]
    return ServedModel(
        name=first.model,
        digest=first.model_digest,
        max_model_len=min(record.max_model_len for record in records),
        vocab_size=first.vocab_size,
        eos_token_ids=first.eos_token_ids,
    )
