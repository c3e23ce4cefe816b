"""All metrics of a node, each declared once: kind, name, help text, unit, labels.

Names that begin with `vllm:` are vLLM's. No router has one of these names, so a sum over all
processes is the truth; only the metrics of a process itself (PROCESS) are on every page.
docs/metrics.md shows this list.
"""

from __future__ import annotations

from typing import Final

from baton.engine.state.stats import STEP_TOKENS
from baton.runtime.metrics import (
    OF_NODE,
    PROCESS,
    TRANSFER_BUCKETS,
    MetricList,
    counter,
    gauge,
    histogram,
)

OF_LANE: Final = (*OF_NODE, "lane")

NODE: Final = MetricList(
    gauge("vllm:num_requests_running", "Requests in the running batch", "requests", OF_NODE),
    gauge("vllm:num_requests_waiting", "Requests waiting to be scheduled", "requests", OF_NODE),
    gauge("vllm:kv_cache_usage_perc", "KV blocks in use; 1 = all", "share of 1", OF_NODE),
    gauge("vllm:gpu_cache_usage_perc", "Its older name", "share of 1", OF_NODE),
    gauge(
        "vllm:cache_config_info",
        "Sizes",
        "always 1",
        (*OF_NODE, "block_size", "num_gpu_blocks", "cache_dtype"),
    ),
    gauge("baton_kv_blocks_free", "KV blocks that a request could have", "blocks", OF_NODE),
    gauge("baton_kv_blocks", "KV blocks of the pool", "blocks", OF_NODE),
    gauge("baton_kv_waste", "Share of allocated KV slots without a token", "share of 1", OF_NODE),
    gauge("baton_state_slots", "Slots of recurrent state; 0 = none is kept", "slots", OF_NODE),
    gauge("baton_state_slots_used", "Those in use", "slots", OF_NODE),
    gauge("baton_state_slots_exported", "Those pinned for exports", "slots", OF_NODE),
    gauge("baton_state_checkpoint_slots", "Room for states of prefixes", "slots", OF_NODE),
    gauge("baton_state_checkpoint_slots_used", "Those with a checkpoint", "slots", OF_NODE),
    gauge("vllm:num_requests_swapped", "Requests swapped to host memory", "requests", OF_NODE),
    gauge("baton_waiting_tokens", "Prompt tokens not yet computed", "tokens", OF_NODE),
    gauge("baton_step_seconds", "Moving mean of the engine's steps", "seconds", OF_NODE),
    gauge("baton_mbu", "Share of the read bandwidth, last steps", "share of 1", OF_NODE),
    gauge("baton_mfu", "Share of the matrix products' rate, last steps", "share of 1", OF_NODE),
    gauge("baton_memory_bandwidth_bytes_per_second", "Measured or given", "bytes/s", OF_NODE),
    gauge("baton_peak_flops", "Rate of matrix products, measured or given", "FLOP/s", OF_NODE),
    gauge("baton_draining", "1 while the node takes no new requests", "1 or 0", OF_NODE),
    gauge("baton_kv_transfer_fetching", "KV fetches under way or queued", "fetches", OF_NODE),
    gauge("baton_kv_transfer_active_exports", "Exports under a lease", "exports", OF_NODE),
    gauge("baton_kv_transfer_export_bytes", "Bytes pinned under leases", "bytes", OF_NODE),
    gauge("baton_stalled", "1 while its engine makes no progress", "1 or 0", OF_NODE),
    counter("vllm:num_preemptions", "Requests preempted", "preemptions", OF_NODE),
    counter("baton_node_prompt_tokens", "Prompt tokens computed", "tokens", OF_NODE),
    counter("baton_node_generation_tokens", "Tokens sampled", "tokens", OF_NODE),
    counter("baton_preemptions", "Requests preempted", "preemptions", OF_NODE),
    counter("baton_node_prefix_queries", "Prompt tokens looked up", "tokens", OF_NODE),
    counter("baton_node_prefix_hits", "Prompt tokens found", "tokens", OF_NODE),
    counter("baton_state_checkpoint_hits", "Prompts begun from one", "prompts", OF_NODE),
    counter("baton_state_checkpoint_stores", "States of prefixes kept", "checkpoints", OF_NODE),
    counter(
        "baton_state_checkpoint_replacements",
        "Of these, dropped because another one needed the room",
        "checkpoints",
        OF_NODE,
    ),
    counter("baton_state_rollbacks", "States taken back behind drafts", "rows", OF_NODE),
    counter("baton_swapped_out_blocks", "KV blocks copied to the host", "blocks", OF_NODE),
    counter("baton_swapped_in_blocks", "KV blocks copied back", "blocks", OF_NODE),
    counter("baton_forks", "Block tables shared by samples", "block tables", OF_NODE),
    counter("baton_copied_blocks", "KV blocks copied on write", "blocks", OF_NODE),
    counter("baton_window_freed_blocks", "KV blocks no token sees", "blocks", OF_NODE),
    counter("baton_export_refusals", "Steps without room for an export", "steps", OF_NODE),
    counter("vllm:spec_decode_num_draft_tokens", "Tokens proposed", "tokens", OF_NODE),
    counter("vllm:spec_decode_num_accepted_tokens", "Of these, right", "tokens", OF_NODE),
    counter(
        "baton_first_step_draft_tokens",
        "Of the proposed: in a request's first decode step here, made by the node before it",
        "tokens",
        OF_NODE,
    ),
    counter("baton_encoded_images", "Images that the vision tower read", "images", OF_NODE),
    counter("baton_reused_images", "Images it had read for others", "images", OF_NODE),
    counter("baton_fetched_images", "Images that encode nodes had read", "images", OF_NODE),
    counter("baton_replayed_tokens", "Output tokens computed again", "tokens", OF_NODE),
    counter("baton_engine_requests", "Requests that came to the engine", "requests", OF_NODE),
    counter(
        "baton_queue_seconds",
        "Time that requests waited here for room or for their place in a step, all added up: its"
        " rate is how many waited on average",
        "seconds",
        OF_NODE,
    ),
    counter("baton_engine_steps", "Engine steps", "steps", OF_NODE),
    counter("baton_engine_steps_ahead", "Of these, planned ahead", "steps", OF_NODE),
    counter(
        "baton_engine_steps_on_spare_cores",
        "Of these, also on cores of other nodes that were idle",
        "steps",
        OF_NODE,
    ),
    counter("baton_engine_busy_seconds", "Time in engine steps", "seconds", OF_NODE),
    counter("baton_read_bytes", "Weights and KV that steps had to read", "bytes", OF_NODE),
    counter("baton_flops", "Floating-point operations of steps", "FLOP", OF_NODE),
    counter("vllm:estimated_read_bytes_per_gpu", "As baton_read_bytes", "bytes", OF_NODE),
    counter("vllm:estimated_flops_per_gpu", "As baton_flops", "FLOP", OF_NODE),
    counter("baton_pooled_prompts", "Prompts turned into vectors", "prompts", OF_NODE),
    counter("baton_pooled_tokens", "Tokens of these", "tokens", OF_NODE),
    counter("baton_left_behind_tokens", "Handed on without their KV", "tokens", OF_NODE),
    counter("baton_prefill_chunks", "Chunks of prompts computed", "chunks", OF_NODE),
    counter("baton_kv_transfer_exports", "Exports made", "exports", OF_NODE),
    counter("baton_kv_transfer_expired_leases", "Exports nobody claimed", "exports", OF_NODE),
    counter("baton_kv_transfer_held_back", "Looks without room for an export", "looks", OF_NODE),
    counter("baton_kv_transfer_window_bytes", "KV no token would see", "bytes", OF_NODE),
    counter("baton_kv_transfer_sent_bytes", "KV bytes sent", "bytes", OF_NODE),
    counter("baton_kv_transfer_bytes", "KV bytes received and verified", "bytes", OF_NODE),
    counter("baton_kv_transfer_fetches", "KV fetches by outcome", "fetches", (*OF_NODE, "outcome")),
    counter(
        "baton_departures",
        "Requests asked to leave, by how much KV left",
        "requests",
        (*OF_NODE, "kv"),
    ),
    histogram(
        "vllm:iteration_tokens_total", "Tokens per engine step", "tokens", OF_NODE, STEP_TOKENS
    ),
    gauge(
        "vllm:num_requests_waiting_by_reason",
        "Requests waiting, by what for",
        "requests",
        (*OF_NODE, "reason"),
    ),
    counter("baton_kv_lane_sent_bytes", "KV bytes sent", "bytes", OF_LANE),
    counter("baton_kv_lane_received_bytes", "KV bytes received and verified", "bytes", OF_LANE),
    counter("baton_kv_lane_adopted_bytes", "KV bytes read where they lie", "bytes", OF_LANE),
    counter("baton_kv_lane_state_bytes", "Received recurrent state", "bytes", OF_LANE),
    counter("baton_kv_lane_sent_frames", "DATA frames sent", "frames", OF_LANE),
    counter("baton_kv_lane_received_frames", "DATA frames received", "frames", OF_LANE),
    counter("baton_kv_lane_fetches", "KV fetches that ended well", "fetches", OF_LANE),
    counter("baton_kv_lane_fetch_seconds", "Time of these fetches", "seconds", OF_LANE),
    counter("baton_kv_lane_exposed_tails", "Hand-overs acknowledged", "hand-overs", OF_LANE),
    counter("baton_kv_lane_exposed_tail_seconds", "Token 1 to acknowledgement", "seconds", OF_LANE),
    counter("baton_kv_lane_corrupt_frames", "Frames refused", "frames", OF_LANE),
    counter(
        "baton_kv_lane_retries", "Fetches begun again after a corrupt frame", "fetches", OF_LANE
    ),
    counter(
        "baton_kv_lane_fallbacks", "Conversations that took the next lane", "conversations", OF_LANE
    ),
    counter("baton_kv_lane_connections", "Connections opened from here", "connections", OF_LANE),
    counter("baton_kv_lane_reused_connections", "Taken up again", "conversations", OF_LANE),
    counter("baton_kv_lane_expired_leases", "Exports nobody claimed", "exports", OF_LANE),
    histogram(
        "baton_kv_transfer_seconds",
        "Time from subscribing to an export until every digest was checked",
        "seconds",
        OF_NODE,
        TRANSFER_BUCKETS,
    ),
    *PROCESS,
)
