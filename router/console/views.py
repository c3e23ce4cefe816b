"""What the console is told, as values: counts, times and names, never a prompt or an output.

A missing number is None. The fields are those of docs/console.md.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from router.api.timelines import RequestSummary
from router.events import RouterEvent


class LatencyPercentiles(msgspec.Struct, frozen=True, gc=False):
    """Milliseconds; None if nothing was measured."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


class RouterFacts(msgspec.Struct, frozen=True):
    """The router that answers. `needs_api_key`: its public routes ask for one."""

    id: str
    version: str
    models: tuple[str, ...]
    uptime_s: float
    draining: bool
    demo: bool
    needs_api_key: bool


class LoadTotals(msgspec.Struct, frozen=True):
    """What this router does now; rates and percentiles are over the last 30 s. `requests_per_s`:
    those that ended. `failed_per_s`: those that ended by a server's fault."""

    running: int
    waiting: int
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    refused_per_s: float
    retried_per_s: float
    failed_per_s: float
    ttft_ms: LatencyPercentiles
    tpot_ms: LatencyPercentiles


class StoreFacts(msgspec.Struct, frozen=True, gc=False):
    kind: str
    ok: bool
    text: str


NodeState = Literal[
    "serving", "draining", "paused", "asleep", "unhealthy", "quarantined", "refused", "lost"
]


class NodeCard(msgspec.Struct, frozen=True, gc=False):
    """A node as this router sees it. `id`: its address until it has told its name. `role`: None
    until then. `instance`: its life, new with each start. `text`: why it does not serve."""

    id: str
    role: str | None
    state: NodeState
    address: str
    instance: str | None = None
    model: str | None = None
    running: int = 0
    waiting: int = 0
    kv_used: int = 0
    kv_total: int = 0
    kv_cached: int | None = None
    mbu: float | None = None
    mfu: float | None = None
    tokens_per_s: float = 0.0
    precision: str = ""
    ranks: int = 1
    text: str = ""


class FlowCard(msgspec.Struct, frozen=True, gc=False, rename={"source": "from", "target": "to"}):
    """KV that goes from one node to another by one lane, over the last seconds."""

    source: str
    target: str
    lane: str
    bytes_per_s: float
    transfers_per_s: float
    ms_p50: float | None = None
    ms_p99: float | None = None
    faults: int = 0


class RequestCard(msgspec.Struct, frozen=True, gc=False):
    """A request under way. `stage`: of router/request/timeline.py."""

    request_id: str
    age_ms: float
    stage: str
    prompt_tokens: int
    output_tokens: int
    prefill_node: str | None
    decode_node: str | None
    retries: int
    migrations: int
    tenant: str | None


class RequestCards(msgspec.Struct, frozen=True):
    """`live`: the oldest ones. `ended`: the newest ones, the newest first."""

    live: list[RequestCard]
    num_live: int
    ended: list[RequestSummary]


class ConsoleSnapshot(msgspec.Struct, frozen=True):
    """The whole state at one moment. `seq` counts the states of a stream."""

    seq: int
    at: float
    router: RouterFacts
    totals: LoadTotals
    store: StoreFacts
    nodes: list[NodeCard]
    flows: list[FlowCard]
    requests: RequestCards
    events: list[RouterEvent]


class RequestsDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """Absent: unchanged. `ended`: new ones alone."""

    live: list[RequestCard] | msgspec.UnsetType = msgspec.UNSET
    num_live: int | msgspec.UnsetType = msgspec.UNSET
    ended: list[RequestSummary] | msgspec.UnsetType = msgspec.UNSET


class ConsoleDelta(msgspec.Struct, frozen=True):
    """What changed from one state to the next. Absent: unchanged. `nodes`: those that changed, each
    whole. `gone`: ids of nodes that are no more. `events`: new ones alone."""

    seq: int
    at: float
    totals: LoadTotals
    router: RouterFacts | msgspec.UnsetType = msgspec.UNSET
    store: StoreFacts | msgspec.UnsetType = msgspec.UNSET
    nodes: list[NodeCard] | msgspec.UnsetType = msgspec.UNSET
    gone: list[str] | msgspec.UnsetType = msgspec.UNSET
    flows: list[FlowCard] | msgspec.UnsetType = msgspec.UNSET
    requests: RequestsDelta | msgspec.UnsetType = msgspec.UNSET
    events: list[RouterEvent] | msgspec.UnsetType = msgspec.UNSET
