"""A node's metrics: the sources of the values in its list (baton/node/metric_list.py).

A node does not push: each scrape reads the current values. Endpoint: baton/node/metrics_server.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from prometheus_client import CollectorRegistry, Histogram

from baton.engine.state.stats import STEP_TOKENS, EngineStats, KVUsage
from baton.node.metric_list import NODE
from baton.protocol.errors import KVCorrupt, KVLost, KVRefused, KVStale, KVTimeout
from baton.protocol.handles import NodeLoad
from baton.runtime.metrics import Sums, Values, cache_usage, render
from kv_transfer.connector import Connector
from kv_transfer.stats import LaneStats, TransferStats

# Outcomes of fetches that are shown from the start; one that has no series yet cannot rise.
FETCH_FAULTS: Final = tuple(
    each.code for each in (KVCorrupt, KVLost, KVRefused, KVStale, KVTimeout)
)


def with_counters(load: NodeLoad, stats: EngineStats, connector: Connector) -> NodeLoad:
    """Return the engine's load with the counters of engine and connector. Any thread."""
    transfer, utilization = connector.stats, stats.utilization
    return replace(
        load,
        export_bytes=connector.export_bytes,
        kv_received_bytes=transfer.total_received,
        kv_sent_bytes=transfer.total_sent,
        kv_adopted_bytes=transfer.total_adopted,
        kv_fetches=transfer.fetches,
        kv_fetch_failures=transfer.total_failures,
        preemptions=stats.num_preemptions,
        prefix_query_tokens=stats.num_prefix_query_tokens,
        prefix_hit_tokens=stats.num_prefix_hit_tokens,
        steps=stats.num_steps,
        step_tokens=stats.num_prompt_tokens + stats.num_generated_tokens,
        kv_tail_seconds=transfer.exposed_tail_seconds,
        mbu=utilization.mbu,
        mfu=utilization.mfu,
    )


@dataclass(frozen=True, slots=True)
class NodeFigures:
    """The values behind one scrape of a node.

    `kv_usage`: as of the last heartbeat.
    """

    load: NodeLoad
    engine: EngineStats
    transfer: TransferStats
    active_exports: int = 0
    kv_usage: KVUsage = field(default_factory=KVUsage)
    block_size: int = 0
    cache_dtype: str = ""


class NodeMetrics:
    """A node's metrics. Each scrape calls `figures` on its own thread; `figures` must not block."""

    def __init__(
        self, model: str, node_id: str, role: str, figures: Callable[[], NodeFigures]
    ) -> None:
        self.registry = CollectorRegistry()
        node = (model, node_id, role)
        NODE.watch(self.registry, lambda: values_of(figures()), node)
        spec = NODE["baton_kv_transfer_seconds"]
        self._fetch_seconds = Histogram(
            spec.name, spec.meaning, spec.labels, buckets=spec.buckets, registry=self.registry
        ).labels(*node)

    def observe_fetch(self, seconds: float) -> None:
        """Count a KV fetch that succeeded after `seconds`. Any thread."""
        self._fetch_seconds.observe(seconds)

    def render(self) -> bytes:
        return render(self.registry)


def values_of(now: NodeFigures) -> dict[str, Values]:
    """Return name -> values of all metrics of one node, without the labels of the node itself."""
    transfer, engine = now.transfer, now.engine
    fetches = dict.fromkeys(FETCH_FAULTS, 0) | {"ok": transfer.fetches} | dict(transfer.failures)
    lanes = sorted(dict(transfer.lanes).items())
    return {
        **_gauges(now),
        **_engine_counters(engine),
        **_transfer_counters(transfer),
        "baton_kv_transfer_fetches": {(name,): count for name, count in sorted(fetches.items())},
        "baton_departures": {
            (name,): count for name, count in sorted(dict(engine.departures).items())
        },
        "vllm:iteration_tokens_total": {
            (): Sums.of(STEP_TOKENS, engine.step_tokens, engine.num_counted_tokens)
        },
        "vllm:cache_config_info": {
            (str(now.block_size), str(now.load.total_blocks), now.cache_dtype): 1
        },
        "vllm:num_requests_waiting_by_reason": {
            ("capacity",): now.load.waiting,
            ("deferred",): now.load.fetching,
        },
        **{
            name: {(lane,): value_of(stats) for lane, stats in lanes}
            for name, value_of in _OF_LANE.items()
        },
    }


def _gauges(now: NodeFigures) -> Mapping[str, float]:
    load, limits = now.load, now.engine.utilization.limits
    return {
        "vllm:num_requests_running": load.running,
        "vllm:num_requests_waiting": load.waiting,
        "vllm:kv_cache_usage_perc": cache_usage(load),
        "baton_kv_blocks_free": load.free_blocks,
        "vllm:gpu_cache_usage_perc": cache_usage(load),
        "baton_kv_blocks": load.total_blocks,
        "baton_kv_waste": now.kv_usage.waste,
        "baton_state_slots": now.kv_usage.state_slots,
        "baton_state_slots_used": now.kv_usage.used_state_slots,
        "baton_state_slots_exported": now.kv_usage.exported_state_slots,
        "baton_state_checkpoint_slots": now.kv_usage.checkpoint_slots,
        "baton_state_checkpoint_slots_used": now.kv_usage.used_checkpoint_slots,
        "vllm:num_requests_swapped": load.swapped,
        "baton_waiting_tokens": load.waiting_tokens,
        "baton_step_seconds": load.step_seconds,
        "baton_mbu": load.mbu,
        "baton_mfu": load.mfu,
        # 0 means unknown.
        "baton_memory_bandwidth_bytes_per_second": limits.read_bytes_per_s if limits else 0.0,
        "baton_peak_flops": limits.flops_per_s if limits else 0.0,
        "baton_draining": float(load.draining),
        "baton_stalled": float(load.stalled),
        "baton_kv_transfer_fetching": load.fetching,
        "baton_kv_transfer_active_exports": now.active_exports,
        "baton_kv_transfer_export_bytes": load.export_bytes,
    }


def _engine_counters(engine: EngineStats) -> Mapping[str, float]:
    utilization = engine.utilization
    return {
        "vllm:num_preemptions": engine.num_preemptions,
        "baton_node_prompt_tokens": engine.num_prompt_tokens,
        "baton_node_generation_tokens": engine.num_generated_tokens,
        "baton_preemptions": engine.num_preemptions,
        "baton_node_prefix_queries": engine.num_prefix_query_tokens,
        "baton_node_prefix_hits": engine.num_prefix_hit_tokens,
        "baton_state_checkpoint_hits": engine.num_checkpoint_hits,
        "baton_state_checkpoint_stores": engine.num_checkpoints_stored,
        "baton_state_checkpoint_replacements": engine.num_checkpoints_replaced,
        "baton_state_rollbacks": engine.num_rollbacks,
        "baton_swapped_out_blocks": engine.num_swapped_out_blocks,
        "baton_swapped_in_blocks": engine.num_swapped_in_blocks,
        "baton_forks": engine.num_forks,
        "baton_copied_blocks": engine.num_copied_blocks,
        "baton_window_freed_blocks": engine.num_window_freed_blocks,
        "baton_export_refusals": engine.num_export_refusals,
        "vllm:spec_decode_num_draft_tokens": engine.num_drafted_tokens,
        "vllm:spec_decode_num_accepted_tokens": engine.num_accepted_tokens,
        "baton_first_step_draft_tokens": engine.num_first_step_drafts,
        "baton_encoded_images": engine.num_encoded_images,
        "baton_reused_images": engine.num_reused_images,
        "baton_fetched_images": engine.num_fetched_images,
        "baton_replayed_tokens": engine.num_replayed_tokens,
        "baton_engine_requests": engine.num_requests,
        "baton_queue_seconds": engine.queue_seconds,
        "baton_engine_steps": engine.num_steps,
        "baton_engine_steps_ahead": engine.num_steps_ahead,
        "baton_engine_steps_on_spare_cores": engine.num_spare_core_steps,
        "baton_engine_busy_seconds": utilization.busy_seconds,
        "baton_read_bytes": utilization.read_bytes,
        "baton_flops": utilization.flops,
        "vllm:estimated_read_bytes_per_gpu": utilization.read_bytes,
        "vllm:estimated_flops_per_gpu": utilization.flops,
        "baton_pooled_prompts": engine.num_pooled_prompts,
        "baton_pooled_tokens": engine.num_pooled_tokens,
        "baton_left_behind_tokens": engine.num_left_behind_tokens,
        "baton_prefill_chunks": engine.num_prefill_chunks,
    }


def _transfer_counters(transfer: TransferStats) -> Mapping[str, float]:
    return {
        "baton_kv_transfer_exports": transfer.exports,
        "baton_kv_transfer_expired_leases": transfer.expired_leases,
        "baton_kv_transfer_held_back": transfer.held_back,
        "baton_kv_transfer_window_bytes": transfer.window_bytes,
        "baton_kv_transfer_sent_bytes": transfer.total_sent,
        "baton_kv_transfer_bytes": transfer.total_received,
    }


# The metrics of one lane; each lane that has been used has its own series.
_OF_LANE: Final[Mapping[str, Callable[[LaneStats], float]]] = {
    "baton_kv_lane_sent_bytes": lambda lane: lane.bytes_sent,
    "baton_kv_lane_received_bytes": lambda lane: lane.bytes_received,
    "baton_kv_lane_adopted_bytes": lambda lane: lane.bytes_adopted,
    "baton_kv_lane_state_bytes": lambda lane: lane.state_bytes,
    "baton_kv_lane_sent_frames": lambda lane: lane.frames_sent,
    "baton_kv_lane_received_frames": lambda lane: lane.frames_received,
    "baton_kv_lane_fetches": lambda lane: lane.fetches,
    "baton_kv_lane_fetch_seconds": lambda lane: lane.fetch_seconds,
    "baton_kv_lane_exposed_tails": lambda lane: lane.tails,
    "baton_kv_lane_exposed_tail_seconds": lambda lane: lane.tail_seconds,
    "baton_kv_lane_corrupt_frames": lambda lane: lane.corrupt,
    "baton_kv_lane_retries": lambda lane: lane.retries,
    "baton_kv_lane_fallbacks": lambda lane: lane.fallbacks,
    "baton_kv_lane_connections": lambda lane: lane.connections,
    "baton_kv_lane_reused_connections": lambda lane: lane.reused,
    "baton_kv_lane_expired_leases": lambda lane: lane.expired,
}
