"""What /metrics says of known events is, byte for byte, what was recorded: scrapers depend on it.

`python -m tests.front.test_metrics_pages` records anew, for a change that is meant.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from dataclasses import fields, replace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry
from starlette.routing import Route

from baton.engine.state.stats import STEP_TOKENS, EngineStats, KVUsage
from baton.engine.state.work import Limits, Utilization
from baton.node.metrics import NodeFigures, NodeMetrics
from baton.protocol.handles import Endpoint, NodeLoad, NodeRecord, Role
from baton.protocol.kv_spec import PoolFormat
from baton.protocol.sampling import SamplingParams
from baton.runtime.rotation.file_metrics import watch_values
from baton.runtime.task_metrics import watch_tasks
from baton.text.pieces import PieceStats
from kv_transfer.stats import LaneStats, TransferStats
from router.metrics.parts import watch_failures, watch_gate
from router.metrics.resumable import RunStats, watch_runs
from router.metrics.router import RouterMetrics, watch_pieces
from router.nodes.health import HealthStats
from router.nodes.migration import MigrationStats
from router.nodes.policy import NodeSnapshot
from router.nodes.registry import NodeStatus
from router.request.gate.admission import AdmissionStats
from router.request.gate.gate import GateStats
from router.request.trace import RequestTrace
from router.server.exchanges import HttpMeter
from router.store.catch_up import CatchUpStats
from router.store.guard import StoreStats

RECORDED = Path(__file__).parent / "recorded_metrics"


def numbered(kind: type[Any], first: int, **given: Any) -> Any:
    """One of `kind` whose plain counters are `first`, `first` + 1, ..."""
    made = kind(**given)
    plain = [
        field.name
        for field in fields(kind)
        if field.name not in given and type(getattr(made, field.name)) in (int, float)
    ]
    return kind(**given, **{name: first + index for index, name in enumerate(plain)})


def node(name: str, role: Role, first: int) -> NodeRecord:
    load = numbered(NodeLoad, first, total_blocks=100, draining=role is Role.PREFILL, mbu=0.5)
    return NodeRecord(
        node_id=name, boot_id=f"boot-{name}", role=role, address="127.0.0.1:1", model='m"\n',
        model_digest="0", block_size=16, max_model_len=64, vocab_size=64, load=load,
        endpoint=Endpoint(f"boot-{name}", "layout", PoolFormat(16, "bfloat16"), ()),
        adapters=("sql@1",), precision=f"precision of {name}",
    )  # fmt: skip


def router_page(loop: asyncio.AbstractEventLoop) -> bytes:
    """A router with two nodes that has served, refused, moved and lost something."""
    metrics = RouterMetrics()
    nodes = [node("p", Role.PREFILL, 10), node("d", Role.DECODE, 40)]
    metrics.watch_nodes(lambda: nodes)
    metrics.watch_adapters(lambda: {'m"\n': {"sql"}})
    metrics.watch_migrations(lambda: numbered(MigrationStats, 1))
    waits = _watch_rest(metrics, nodes)
    for wait in (0.0, 0.02):
        waits(wait)
    for index, outcome in enumerate(("length", "stop", "node_lost")):
        meter = metrics.begin("m", 1.0)
        meter.params = SamplingParams(max_tokens=7, n=1 + index)
        for step in range(5):
            meter.tokens(1.5 + 0.25 * step, 1 + step, step % (1 + index))
        trace = RequestTrace(
            dispatched_at=1.125, handover_at=1.75, subscribed_at=1.5, first_token_at=1.5,
            prefill_node="p", decode_node="d", retries=index, cached_tokens=4, preemptions=index,
        )  # fmt: skip
        meter.end(3.0, trace, 11, outcome)
    metrics.begin("other", 1.0)
    metrics.pooled("m", 12, "ok")
    asked = metrics.instruments
    meter = HttpMeter(asked.http_requests, asked.http_seconds, [Route("/v1/models", _nothing)])
    answers, seconds = meter.tally({"method": "GET", "path": "/v1/models"}, 200)
    answers.inc()
    seconds.observe(0.02)
    watch_tasks(metrics.registry, loop)
    watch_reloaded(metrics.registry)
    return metrics.render()


async def _nothing(_: object) -> None:
    """Stands for an endpoint."""


def _watch_rest(metrics: RouterMetrics, nodes: list[NodeRecord]) -> Any:
    """Everything that a router adds; the callback of the gate's waits."""
    stats = GateStats(served={"": 12.0})
    stats.ttft.met, stats.tpot.missed, stats.tpot.refused = 1, 2, 3
    admission = numbered(AdmissionStats, 1)
    for index, reason in enumerate(admission.refused):
        admission.refused[reason] = index
    queue = SimpleNamespace(
        num_live=2, queued_tokens=30.0, queued_by_tenant=lambda: {"": 4}, tokens_per_s=None,
        stats=admission,
    )  # fmt: skip
    watch_gate(metrics.registry, cast(Any, SimpleNamespace(queue=queue, stats=stats)))
    watch_pieces(metrics.registry, [PieceStats(9, 5)])
    runs = numbered(RunStats, 1)
    for index, start in enumerate(runs.readings):
        runs.readings[start] = index
    watch_runs(metrics.registry, cast(Any, SimpleNamespace(stats=runs, num_live=3)))
    store = SimpleNamespace(
        stats=numbered(StoreStats, 1, away=True),
        catch_up=SimpleNamespace(stats=numbered(CatchUpStats, 4)),
    )
    snapshots = [replace(NodeSnapshot.of(each), load=each.load) for each in nodes]
    registry = SimpleNamespace(
        records=lambda: nodes,
        snapshots=lambda encoding=False: [] if encoding else snapshots,
        statuses=lambda: [
            NodeStatus("a", each.node_id == "d", each, "", 3, each.load) for each in nodes
        ],
        health=SimpleNamespace(stats=numbered(HealthStats, 7)),
    )
    retries = SimpleNamespace(granted=1, refused=2)
    watched = SimpleNamespace(store=store, registry=registry, retries=retries)
    watch_failures(metrics.registry, cast(Any, watched))
    return stats.waits[0]


def watch_reloaded(registry: CollectorRegistry) -> None:
    """One file that is as it was read, and a certificate of which the new files are broken."""
    secret = SimpleNamespace(name="secret_file", value=tuple, succeeded=True, read_at=900.0)
    tls = SimpleNamespace(name="tls", value=lambda: 5000.0, succeeded=False, read_at=950.0)
    watch_values(registry, [cast(Any, secret)], [cast(Any, tls)])


def node_page(loop: asyncio.AbstractEventLoop) -> bytes:
    """A decode node that has used two lanes."""
    lanes = {"stream": numbered(LaneStats, 300), "grpc": numbered(LaneStats, 400)}
    transfer = numbered(TransferStats, 200, lanes=lanes, failures={"kv_lost": 1})
    limits = Limits(read_bytes_per_s=3e9, flops_per_s=4e9)
    stats = numbered(
        EngineStats,
        100,
        step_tokens=list(range(len(STEP_TOKENS) + 1)),
        departures={"whole": 2, "waiting": 1},
        utilization=numbered(Utilization, 500, limits=limits),
    )
    load = numbered(NodeLoad, 1, total_blocks=100, draining=True, mbu=0.25, export_bytes=8)
    usage = KVUsage(
        2, 2, 0, 8, 7, state_slots=4, used_state_slots=3, exported_state_slots=2,
        checkpoint_slots=6, used_checkpoint_slots=5,
    )  # fmt: skip
    now = NodeFigures(load, stats, transfer, 2, usage, 16, "bfloat16")
    metrics = NodeMetrics("m", "d", "decode", lambda: now)
    metrics.observe_fetch(0.003)
    watch_tasks(metrics.registry, loop)
    watch_reloaded(metrics.registry)
    return metrics.render()


class Page(Enum):
    ROUTER = "router"
    NODE = "node"

    @property
    def file(self) -> Path:
        return RECORDED / f"{self.value}.txt"

    def render(self) -> bytes:
        with closing(asyncio.new_event_loop()) as loop:
            return router_page(loop) if self is Page.ROUTER else node_page(loop)


@pytest.mark.parametrize("page", Page)
def test_a_page_is_what_was_recorded(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    assert page.render().decode().splitlines() == page.file.read_text().splitlines()


if __name__ == "__main__":
    time.time = lambda: 1000.0
    RECORDED.mkdir(exist_ok=True)
    for page in Page:
        page.file.write_bytes(page.render())
