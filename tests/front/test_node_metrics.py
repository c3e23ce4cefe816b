"""A node's metrics: asked at scrape time, under both names."""

from __future__ import annotations

from dataclasses import fields

from baton.engine.state.stats import STEP_TOKENS, EngineStats, KVUsage
from baton.engine.state.work import Limits, Utilization
from baton.node.metrics import NodeFigures, NodeMetrics
from baton.protocol.handles import NodeLoad
from baton.runtime.metrics import cache_usage
from kv_transfer.stats import LaneStats, TransferStats

REASON = 'model_name="tiny",node="decode-0",reason="%s",role="decode"'


def test_a_scrape_shows_the_snapshot_of_that_moment() -> None:
    totals = {"steps": 1}

    def snapshot() -> NodeFigures:
        return NodeFigures(
            NodeLoad(
                running=3, waiting=2, fetching=5, total_blocks=4, free_blocks=1, draining=True
            ),
            EngineStats(
                num_steps=totals["steps"],
                step_tokens=[4, totals["steps"] - 4, *[0] * (len(STEP_TOKENS) - 1)],
                num_counted_tokens=11,
                num_steps_ahead=1,
                queue_seconds=1.5,
                num_prompt_tokens=8,
                num_generated_tokens=3,
                num_pooled_tokens=12,
                num_prefix_query_tokens=10,
                num_prefix_hit_tokens=4,
                num_preemptions=2,
                num_swapped_out_blocks=5,
                num_accepted_tokens=6,
            ),
            TransferStats({"stream": LaneStats(bytes_received=99, fetches=2)}, {"kv_lost": 1}),
            kv_usage=KVUsage(1, 1, 0, 4, 3, state_slots=8, used_state_slots=2),
        )

    metrics = NodeMetrics("tiny", "decode-0", "decode", snapshot)
    metrics.observe_fetch(0.003)
    totals["steps"] = 7
    lines = metrics.render().decode().splitlines()
    node = 'model_name="tiny",node="decode-0",role="decode"'
    lost = 'model_name="tiny",node="decode-0",outcome="kv_lost",role="decode"'
    for expected in (
        f"baton_engine_steps_total{{{node}}} 7.0",
        f"baton_engine_steps_ahead_total{{{node}}} 1.0",
        f"vllm:num_requests_running{{{node}}} 3.0",
        f"vllm:iteration_tokens_total_count{{{node}}} 7.0",
        f"vllm:iteration_tokens_total_sum{{{node}}} 11.0",
        f'vllm:iteration_tokens_total_bucket{{le="1.0",{node}}} 4.0',
        f'vllm:iteration_tokens_total_bucket{{le="8.0",{node}}} 7.0',
        f"baton_queue_seconds_total{{{node}}} 1.5",
        f"vllm:num_requests_waiting_by_reason{{{REASON % 'capacity'}}} 2.0",
        f"vllm:num_requests_waiting_by_reason{{{REASON % 'deferred'}}} 5.0",
        f"baton_pooled_tokens_total{{{node}}} 12.0",
        f"vllm:kv_cache_usage_perc{{{node}}} 0.75",
        f"baton_node_prefix_hits_total{{{node}}} 4.0",
        f"baton_preemptions_total{{{node}}} 2.0",
        f"baton_kv_transfer_bytes_total{{{node}}} 99.0",
        f"baton_swapped_out_blocks_total{{{node}}} 5.0",
        f"vllm:spec_decode_num_accepted_tokens_total{{{node}}} 6.0",
        f"baton_kv_waste{{{node}}} 0.25",
        f"baton_state_slots_used{{{node}}} 2.0",
        f"baton_draining{{{node}}} 1.0",
        f"baton_kv_transfer_seconds_count{{{node}}} 1.0",
        f"baton_kv_transfer_fetches_total{{{lost}}} 1.0",
    ):
        assert expected in lines


def test_a_scrape_shows_the_share_of_the_machine_s_limits() -> None:
    now = NodeFigures(
        NodeLoad(mbu=0.5, mfu=0.125),
        EngineStats(
            utilization=Utilization(
                Limits(3000.0, 9000.0), busy_seconds=1.5, read_bytes=4000.0, flops=6000.0
            )
        ),
        TransferStats(),
    )
    lines = NodeMetrics("tiny", "d", "decode", lambda: now).render().decode().splitlines()
    node = '{model_name="tiny",node="d",role="decode"}'
    for name, value in (
        ("baton_mbu", 0.5),
        ("baton_mfu", 0.125),
        ("baton_memory_bandwidth_bytes_per_second", 3000.0),
        ("baton_peak_flops", 9000.0),
        ("baton_engine_busy_seconds_total", 1.5),
        ("baton_read_bytes_total", 4000.0),
        ("baton_flops_total", 6000.0),
        ("vllm:estimated_read_bytes_per_gpu_total", 4000.0),
        ("vllm:estimated_flops_per_gpu_total", 6000.0),
    ):
        assert f"{name}{node} {value}" in lines


def test_every_counter_of_a_lane_has_a_series() -> None:
    names = [field.name for field in fields(LaneStats)]
    lanes = {
        lane: LaneStats(**{name: first + index for index, name in enumerate(names)})
        for lane, first in (("stream", 100), ("grpc", 200))
    }
    transfer = TransferStats(lanes, held_back=8, window_bytes=9)
    now = NodeFigures(NodeLoad(), EngineStats(), transfer)
    text = NodeMetrics("tiny", "p", "prefill", lambda: now).render().decode()
    series = [line for line in text.splitlines() if line.startswith("baton_kv_lane_")]
    for lane, first in (("stream", 100), ("grpc", 200)):
        values = {float(line.rsplit(" ", 1)[1]) for line in series if f'lane="{lane}"' in line}
        assert values == {float(first + index) for index in range(len(names))}
    assert len(series) == 2 * len(names)
    node = '{model_name="tiny",node="p",role="prefill"}'
    expired = sum(lane.expired for lane in lanes.values())
    for name, value in (("expired_leases", expired), ("held_back", 8), ("window_bytes", 9)):
        assert f"baton_kv_transfer_{name}_total{node} {value}.0" in text


def test_an_empty_pool_is_not_in_use() -> None:
    assert cache_usage(NodeLoad()) == 0.0
