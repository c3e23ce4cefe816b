"""A node's counters in the shape of baton/runtime/metrics.py. Endpoint:
baton/node/metrics_server.py."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.state.stats import EngineStats
from baton.protocol.handles import NodeLoad
from baton.runtime.metrics import EngineTotals, LaneTotals, NodeFigures, TransferTotals
from kv_transfer.connector import Connector
from kv_transfer.stats import LaneStats


def with_counters(load: NodeLoad, stats: EngineStats, connector: Connector) -> NodeLoad:
    """The engine's load with what engine and connector have counted. Any thread."""
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


def snapshot(
    load: NodeLoad, stats: EngineStats, connector: Connector, kv_waste: float = 0.0
) -> NodeFigures:
    """One scrape. Any thread; reads plain numbers only."""
    transfer = connector.stats
    fetches = {"ok": transfer.fetches, **dict(transfer.failures)}
    return NodeFigures(
        load=load,
        engine=EngineTotals(
            steps=stats.num_steps,
            steps_ahead=stats.num_steps_ahead,
            prefill_chunks=stats.num_prefill_chunks,
            prompt_tokens=stats.num_prompt_tokens,
            generation_tokens=stats.num_generated_tokens,
            prefix_queries=stats.num_prefix_query_tokens,
            prefix_hits=stats.num_prefix_hit_tokens,
            preemptions=stats.num_preemptions,
            swapped_out_blocks=stats.num_swapped_out_blocks,
            swapped_in_blocks=stats.num_swapped_in_blocks,
            forks=stats.num_forks,
            copied_blocks=stats.num_copied_blocks,
            window_freed_blocks=stats.num_window_freed_blocks,
            export_refusals=stats.num_export_refusals,
            drafted_tokens=stats.num_drafted_tokens,
            accepted_tokens=stats.num_accepted_tokens,
            replayed_tokens=stats.num_replayed_tokens,
            pooled_prompts=stats.num_pooled_prompts,
            pooled_tokens=stats.num_pooled_tokens,
            departures=dict(stats.departures),
            left_behind_tokens=stats.num_left_behind_tokens,
            busy_seconds=stats.utilization.busy_seconds,
            read_bytes=stats.utilization.read_bytes,
            flops=stats.utilization.flops,
        ),
        limits=_limits(stats),
        transfer=TransferTotals(
            sent_bytes=transfer.total_sent,
            received_bytes=transfer.total_received,
            exports=transfer.exports,
            active_exports=connector.active_exports,
            export_bytes=connector.export_bytes,
            expired_leases=transfer.expired_leases,
            held_back=transfer.held_back,
            window_bytes=transfer.window_bytes,
            lanes={name: lane_totals(lane) for name, lane in dict(transfer.lanes).items()},
            fetches=fetches,
        ),
        kv_waste=kv_waste,
    )


def _limits(stats: EngineStats) -> tuple[float, float]:
    limits = stats.utilization.limits
    return (0.0, 0.0) if limits is None else (limits.read_bytes_per_s, limits.flops_per_s)


def lane_totals(lane: LaneStats) -> LaneTotals:
    """Of one lane. Any thread."""
    return LaneTotals(
        sent_bytes=lane.bytes_sent,
        received_bytes=lane.bytes_received,
        adopted_bytes=lane.bytes_adopted,
        sent_frames=lane.frames_sent,
        received_frames=lane.frames_received,
        fetches=lane.fetches,
        fetch_seconds=lane.fetch_seconds,
        tails=lane.tails,
        tail_seconds=lane.tail_seconds,
        corrupt_frames=lane.corrupt,
        retries=lane.retries,
        fallbacks=lane.fallbacks,
        connections=lane.connections,
        reused_connections=lane.reused,
        expired_leases=lane.expired,
    )
