"""`baton doctor`: which KV lanes work between two nodes, how fast, and facts about this machine.

Without addresses two probe processes on this machine play the nodes. With --from and --to it talks
to running nodes as a router would: one node prefills a prompt, and the other decodes it with a
handle that offers a single lane. The time until the decode node continues is the lane's. Nothing is
left behind, because every probe is an ordinary request of two tokens.
It does not import torch: other processes do the probing.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import grpc
from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

from baton.node.config import NodeConfig
from baton.protocol.clock import SystemClock
from baton.protocol.errors import BatonError, ConfigError, NodeLost
from baton.protocol.events import HandleReady, RequestFailed, TokenEvent
from baton.protocol.handles import KVHandle, NodeRecord, Role
from baton.protocol.messages import (
    AbortRequest,
    ReleaseExport,
    RouterMessage,
    SubmitDecode,
    SubmitPrefill,
)
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from baton.runtime.rotation.deployment_secret import fixed
from baton.runtime.timing import Timing
from baton.runtime.tls import TlsFiles
from bench.transfer_link import PeerError, ShapedLink
from deploy.machine import MachineFacts, machine_facts
from deploy.plan import split_cores
from router.nodes.attachments import Attempt, NodeEvent, SessionLost
from router.nodes.session import NodeSession, SessionContext

ANSWER_S: Final = 120.0
PATIENCE_S: Final = 2 * Timing().connect_s
LARGE_TOKENS: Final = 512
SMALL_TOKENS: Final = 8
REPEATS: Final = 3
PROBE: Final = {"layers": 8, "heads": 8, "dim": 128, "tokens": LARGE_TOKENS}  # 16 MiB


@dataclass(frozen=True, slots=True)
class NodeAccess:
    """What a router needs to be let in at the nodes.

    It is the deployment's secret, and certificates if the nodes use TLS.
    """

    secret: str = ""
    tls: TlsFiles | None = None

    def credentials(self) -> Callable[[], grpc.ChannelCredentials] | None:
        """Return the credentials, None without TLS. Raises ConfigError for a file that cannot be
        used.
        """
        return None if self.tls is None else self.tls.channel_credentials()


@dataclass(frozen=True, slots=True)
class LaneReport:
    """The report about one lane between the two nodes.

    `latency_ms` is the time of a hand-over of a few tokens. `gb_per_s` is the rate of copied bytes,
    None if none were copied. `adopted_bytes` are the bytes of a large hand-over that the decode
    node reads where they lie.
    """

    lane: str
    available: bool
    reason: str = ""
    gb_per_s: float | None = None
    latency_ms: float | None = None
    adopted_bytes: int = 0
    chosen: bool = False

    @classmethod
    def measured(
        cls, lane: str, small_s: float, large_s: float, copied: float, adopted: float
    ) -> LaneReport:
        """Return the report of an available lane, from a small and a large hand-over.

        `copied` and `adopted` are bytes of the large one.
        """
        rate = copied / 1e9 / large_s if copied else None
        return cls(lane, True, "", rate, small_s * 1e3, round(adopted))


@dataclass(frozen=True, slots=True)
class Diagnosis:
    between: tuple[str, str]
    lanes: tuple[LaneReport, ...]
    machine: MachineFacts

    @property
    def healthy(self) -> bool:
        return any(lane.chosen for lane in self.lanes)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "healthy": self.healthy}


async def diagnose(
    source: str | None, target: str | None, access: NodeAccess, redis: str, flags: NodeConfig
) -> Diagnosis:
    """Diagnose the nodes at `source` and `target`, or two local probes if both are None.

    `flags` are those of the nodes that the probes stand for. Probes have the cores that `baton up`
    gives a prefill node and a decode node here, so kernels choose as they do there. Raises
    ConfigError for a single address or for nodes that cannot hand over, and NodeLost.
    """
    if (source is None) != (target is None):
        raise ConfigError("--from and --to come together")
    of_prefill, of_decode = split_cores(sorted(os.sched_getaffinity(0)), 2)
    async with ShapedLink.spawn(of_decode) as d:
        facts = await d.ask("facts", kv_lanes=flags.kv_lanes, kv_adopt=flags.kv_adopt)
        machine = await machine_facts(redis, facts)
        if source is None or target is None:
            async with ShapedLink.spawn(of_prefill) as p:
                ways = [way for way in facts["ways"] if "tls" not in way]  # certificates are yours
                lanes = await probe_local(p, d, ways, facts["preferred"], flags.kv_shm_dir)
            return Diagnosis(("a local probe", "another"), lanes, machine)
    lanes = await probe_nodes(source, target, access)
    return Diagnosis((source, target), lanes, machine)


def choose(found: Sequence[LaneReport], preferred: Sequence[str]) -> tuple[LaneReport, ...]:
    """Mark the first of `preferred` that is available: two nodes would agree on that lane."""
    available = {lane.lane for lane in found if lane.available}
    best = next((name for name in preferred if name in available), None)
    return tuple(replace(lane, chosen=lane.lane == best) for lane in found)


# ---- two processes of our own --------------------------------------------------------------------


async def probe_local(
    p: ShapedLink, d: ShapedLink, ways: Sequence[str], preferred: Sequence[str], shm_dir: str
) -> tuple[LaneReport, ...]:
    for link in (p, d):
        made = await link.ask("pool", **PROBE, directory=shm_dir)
    offered = await p.ask("open", ways=list(ways), tls=None)
    opened = await d.ask("open", ways=offered["ways"], tls=None)
    missing: dict[str, str] = offered["missing"] | opened["missing"]
    found: list[LaneReport] = []
    for way in ways:
        if way in missing:
            found.append(LaneReport(way, False, missing[way]))
            continue
        try:
            large = await _best_s(lambda way=way: _fetch_s(p, d, way, LARGE_TOKENS))
            small = await _best_s(lambda way=way: _fetch_s(p, d, way, SMALL_TOKENS))
            copied = (await _fetch(p, d, way, LARGE_TOKENS))["bytes"]
        except PeerError as error:
            found.append(LaneReport(way, False, error.message))
        else:
            adopted = made["bytes"] - copied
            found.append(LaneReport.measured(way, small, large, copied, adopted))
    return choose(found, preferred)


async def _fetch(p: ShapedLink, d: ShapedLink, way: str, tokens: int) -> dict[str, Any]:
    export = await p.ask("export", way=way, tokens=tokens)
    return await d.ask("fetch", way=way, handle=export["handle"])


async def _fetch_s(p: ShapedLink, d: ShapedLink, way: str, tokens: int) -> float:
    fetched = await _fetch(p, d, way, tokens)
    return fetched["ended_at"] - fetched["began_at"]


async def _best_s(measure: Callable[[], Coroutine[Any, Any, float]]) -> float:
    """Return the median of a few measurements, after one that warms up."""
    await measure()
    return statistics.median([await measure() for _ in range(REPEATS)])


# ---- two running nodes ---------------------------------------------------------------------------


class NoLog:
    """A router.nodes.attachments.StepLog that logs nothing."""

    def note(self, event: TokenEvent) -> bool:
        return True

    def shows_logged(self, request_id: str) -> bool:
        return False

    async def append(self, events: Sequence[TokenEvent]) -> None:
        return


class ProbedNode:
    """A session with one running node, like a router's."""

    def __init__(self, address: str, access: NodeAccess) -> None:
        self._changed = asyncio.Event()
        router_id = f"doctor-{uuid.uuid4().hex[:8]}"
        context = SessionContext(
            router_id, fixed(access.secret), Timing(), SystemClock(), NoLog(), self._admit,
            self._changed.set, credentials=access.credentials(),
        )  # fmt: skip
        self.session = NodeSession(address, context)

    def _admit(self, address: str, record: NodeRecord) -> None:
        """Accept every node."""

    @classmethod
    @asynccontextmanager
    async def connect(
        cls, address: str, access: NodeAccess, patience_s: float = PATIENCE_S
    ) -> AsyncGenerator[ProbedNode, None]:
        """Connect to a node. Raises NodeLost if none answers there, or not to this secret."""
        node = cls(address, access)
        running = asyncio.create_task(node.session.run(), name=f"doctor-{address}")
        try:
            try:
                async with asyncio.timeout(patience_s):
                    await node._changed.wait()
            except TimeoutError as error:
                text = f"no node answers at {address} (or BATON_SECRET or TLS differ)"
                raise NodeLost(text) from error
            yield node
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    @property
    def record(self) -> NodeRecord:
        record = self.session.record
        assert record is not None, "connected"
        return record

    @asynccontextmanager
    async def request(
        self, request: Request, message: RouterMessage
    ) -> AsyncGenerator[asyncio.Queue[NodeEvent], None]:
        """Send `message` and yield the queue of the node's events about the request."""
        events: asyncio.Queue[NodeEvent] = asyncio.Queue()
        self.session.attach(Attempt(request.id, request.epoch, events.put_nowait))
        try:
            self.session.send(message)
            yield events
        finally:
            self.session.detach(request.id)
            self.session.send(AbortRequest(request.id, request.epoch))


async def expect(events: asyncio.Queue[NodeEvent]) -> HandleReady | TokenEvent:
    """Return the next handle or token event. Raises NodeLost, or ConfigError with what failed."""
    while True:
        try:
            async with asyncio.timeout(ANSWER_S):
                event = await events.get()
        except TimeoutError as error:
            raise NodeLost(f"a node said nothing for {ANSWER_S} s") from error
        match event:
            case RequestFailed():
                raise ConfigError(f"{event.code}: {event.message}")
            case SessionLost():
                raise NodeLost(event.reason)
            case HandleReady() | TokenEvent():
                return event
            case _:
                continue


async def probe_nodes(source: str, target: str, access: NodeAccess) -> tuple[LaneReport, ...]:
    """Probe every lane that either node announces. Raises ConfigError, NodeLost."""
    async with ProbedNode.connect(source, access) as p:
        preferred = [lane.name for lane in p.record.endpoint.lanes]
        async with ProbedNode.connect(target, access) as d:
            refuse_pair(p.record, d.record)
            theirs = [lane.name for lane in d.record.endpoint.lanes]
        found: list[LaneReport] = []
        for name in dict.fromkeys([*theirs, *preferred]):
            if name not in theirs or name not in preferred:
                missing = target if name not in theirs else source
                found.append(LaneReport(name, False, f"{missing} does not open it"))
                continue
            try:
                found.append(await _probe_lane(p, (target, access), name))
            except BatonError as error:
                found.append(LaneReport(name, False, error.message))
    return choose(found, theirs)


def refuse_pair(p: NodeRecord, d: NodeRecord) -> None:
    """Raise ConfigError for two nodes that may not hand over."""
    if p.role is not Role.PREFILL or d.role is not Role.DECODE:
        raise ConfigError(f"--from is a {p.role.value} node and --to a {d.role.value} node")
    if p.endpoint.layout_fingerprint != d.endpoint.layout_fingerprint:
        raise ConfigError(f"the nodes serve different models: {p.model} and {d.model}")


async def _probe_lane(p: ProbedNode, target: tuple[str, NodeAccess], name: str) -> LaneReport:
    """Probe one lane.

    The decode node's counters come with its hello, so a new session is opened before and after.
    """
    tokens = min(LARGE_TOKENS, p.record.max_model_len - 8)
    async with ProbedNode.connect(*target) as d:
        before = d.record.load
        small = await _best_s(lambda: _hand_over_s(p, d, name, SMALL_TOKENS))
        large = await _best_s(lambda: _hand_over_s(p, d, name, tokens))
    async with ProbedNode.connect(*target) as d:
        after = d.record.load
    # All hand-overs moved the same bytes per token.
    share = tokens / ((REPEATS + 1) * (SMALL_TOKENS + tokens))
    copied = (after.kv_received_bytes - before.kv_received_bytes) * share
    adopted = (after.kv_adopted_bytes - before.kv_adopted_bytes) * share
    return LaneReport.measured(name, small, large, copied, adopted)


async def _hand_over_s(p: ProbedNode, d: ProbedNode, lane: str, tokens: int) -> float:
    """Return the seconds from the order to D until D continues, when P has long finished."""
    vocabulary = range(1, p.record.vocab_size)
    prompt = tuple(random.SystemRandom().choices(vocabulary, k=tokens))
    params = SamplingParams(max_tokens=2, seed=1, temperature=0, ignore_eos=True)
    request = Request(f"doctor-{uuid.uuid4().hex}", prompt, params)
    handle: KVHandle | None = None
    try:
        async with p.request(request, SubmitPrefill(request)) as events:
            while isinstance(event := await expect(events), HandleReady):
                handle = event.handle
        if handle is None:
            raise ConfigError("the prefill node offered no KV")
        offered = tuple(each for each in handle.endpoint.lanes if each.name == lane)
        only = replace(handle, endpoint=replace(handle.endpoint, lanes=offered))
        began = time.monotonic()
        async with d.request(request, SubmitDecode(request, only)) as events:
            await expect(events)
            return time.monotonic() - began
    finally:
        if handle is not None:  # released whether fetched or not, so that nothing stays pinned
            p.session.send(ReleaseExport(handle, "the probe is over"))


# ---- showing -------------------------------------------------------------------------------------


def doctor(
    source: str | None, target: str | None, access: NodeAccess, redis: str, flags: NodeConfig
) -> Diagnosis:
    """Run `diagnose` to its end."""
    return asyncio.run(diagnose(source, target, access, redis, flags))


def show(found: Diagnosis, console: Console) -> None:
    console.print(view(found))


def view(found: Diagnosis) -> RenderableType:
    """Return the tables of lanes and machine."""
    title = f"KV lanes from {found.between[0]} to {found.between[1]}"
    lanes = Table(title=title, box=box.SIMPLE, title_justify="left")
    for name in ("lane", "GB/s", "latency", ""):
        lanes.add_column(name, justify="left" if name in ("lane", "") else "right")
    for lane in found.lanes:
        if not lane.available:
            reason = escape(f"not available: {lane.reason}")  # as in baton[nixl], which is no style
            lanes.add_row(lane.lane, "-", "-", reason, style="dim")
            continue
        rate = "in place" if lane.gb_per_s is None else f"{lane.gb_per_s:.2f}"
        notes = ["[green]chosen[/]"] if lane.chosen else []
        if lane.adopted_bytes:
            notes.append(f"{lane.adopted_bytes / 1e6:.1f} MB read where they lie")
        lanes.add_row(lane.lane, rate, f"{lane.latency_ms:.1f} ms", ", ".join(notes))
    facts = Table(title="This machine", box=box.SIMPLE, title_justify="left", show_header=False)
    for name, value in found.machine.rows():
        facts.add_row(name, escape(value))
    return Group(lanes, facts)
