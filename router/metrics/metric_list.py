"""All metrics of a router, each declared once: kind, name, help text, unit, labels.

Names that begin with `vllm:` are vLLM's, so that its Grafana boards show data. Where Baton has a
name for the same thing, vLLM's is an alias. Each router counts its own requests, and what a node
knows is in the node's list alone (baton/node/metric_list.py): a sum over all routers and nodes is
the truth. docs/metrics.md shows this list.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from baton.runtime.metrics import (
    E2E_BUCKETS,
    PROCESS,
    QUEUE_BUCKETS,
    TPOT_BUCKETS,
    TRANSFER_BUCKETS,
    TTFT_BUCKETS,
    MetricList,
    MetricSpec,
    counter,
    gauge,
    histogram,
)

OF_MODEL: Final = ("model_name",)
# vLLM's: 1, 2, 5, 10, ... tokens.
TOKEN_BUCKETS: Final = tuple(
    base * 10**power for power in range(6) for base in (1, 2, 5) if base * 10**power <= 200_000
)
N_BUCKETS: Final = (1, 2, 5, 10, 20)
PREEMPTION_BUCKETS: Final = (1, 2, 3, 4, 5, 10, 20)


def also(spec: MetricSpec, *aliases: str) -> MetricSpec:
    """Return the metric with further names under which it is exported, too."""
    return replace(spec, aliases=aliases)


ROUTER: Final = MetricList(
    histogram(
        "vllm:request_prompt_tokens", "Tokens of a prompt", "tokens", OF_MODEL, TOKEN_BUCKETS
    ),
    histogram(
        "vllm:request_generation_tokens", "Tokens generated", "tokens", OF_MODEL, TOKEN_BUCKETS
    ),
    histogram(
        "vllm:request_max_num_generation_tokens",
        "Tokens of a request's output",
        "tokens",
        OF_MODEL,
        TOKEN_BUCKETS,
    ),
    histogram("vllm:request_params_n", "Samples asked for", "samples", OF_MODEL, N_BUCKETS),
    histogram(
        "vllm:request_params_max_tokens", "Most tokens asked for", "tokens", OF_MODEL, TOKEN_BUCKETS
    ),
    histogram(
        "vllm:request_num_preemptions",
        "How often a request lost its place",
        "preemptions",
        OF_MODEL,
        PREEMPTION_BUCKETS,
    ),
    histogram(
        "vllm:request_prefill_time_seconds",
        "From the end of the waits to token 1",
        "seconds",
        OF_MODEL,
        TTFT_BUCKETS,
    ),
    histogram(
        "vllm:request_decode_time_seconds",
        "From token 1 to the last",
        "seconds",
        OF_MODEL,
        E2E_BUCKETS,
    ),
    histogram(
        "vllm:request_inference_time_seconds",
        "Prefill and decode",
        "seconds",
        OF_MODEL,
        E2E_BUCKETS,
    ),
    also(
        histogram(
            "baton_time_to_first_token_seconds",
            "From arrival to the first token",
            "seconds",
            OF_MODEL,
            TTFT_BUCKETS,
        ),
        "vllm:time_to_first_token_seconds",
    ),
    also(
        histogram(
            "baton_inter_token_latency_seconds",
            "Between two tokens as shown",
            "seconds",
            OF_MODEL,
            TPOT_BUCKETS,
        ),
        "vllm:inter_token_latency_seconds",
        "vllm:time_per_output_token_seconds",
    ),
    also(
        histogram(
            "baton_request_time_per_output_token_seconds",
            "Mean of a request",
            "seconds",
            OF_MODEL,
            TPOT_BUCKETS,
        ),
        "vllm:request_time_per_output_token_seconds",
    ),
    also(
        histogram(
            "baton_e2e_request_latency_seconds",
            "From arrival to the end",
            "seconds",
            OF_MODEL,
            E2E_BUCKETS,
        ),
        "vllm:e2e_request_latency_seconds",
    ),
    also(
        histogram(
            "baton_request_queue_time_seconds",
            "Waiting: gate, choice, nodes",
            "seconds",
            OF_MODEL,
            QUEUE_BUCKETS,
        ),
        "vllm:request_queue_time_seconds",
    ),
    histogram(
        "baton_handover_seconds",
        "From token 1 to the decode node's first",
        "seconds",
        OF_MODEL,
        TRANSFER_BUCKETS,
    ),
    histogram(
        "baton_handover_queue_seconds",
        "Of it, waiting on the decode node",
        "seconds",
        OF_MODEL,
        TRANSFER_BUCKETS,
    ),
    histogram(
        "baton_handover_fetch_seconds",
        "Of it, fetching the KV",
        "seconds",
        OF_MODEL,
        TRANSFER_BUCKETS,
    ),
    histogram(
        "baton_handover_first_step_seconds",
        "Of it, the decode node's first step",
        "seconds",
        OF_MODEL,
        TRANSFER_BUCKETS,
    ),
    also(
        counter("baton_prompt_tokens", "Tokens of prompts", "tokens", OF_MODEL),
        "vllm:prompt_tokens",
    ),
    also(
        counter("baton_generation_tokens", "Tokens shown", "tokens", OF_MODEL),
        "vllm:generation_tokens",
    ),
    also(
        counter(
            "baton_request_success",
            "Requests that ended well",
            "requests",
            ("model_name", "finished_reason"),
        ),
        "vllm:request_success",
    ),
    counter("baton_request_failure", "Requests that did not", "requests", ("model_name", "code")),
    counter("baton_request_retries", "Retries on other nodes", "retries", OF_MODEL),
    also(
        counter("baton_prefix_cache_queries", "Prompt tokens looked up", "tokens", OF_MODEL),
        "vllm:prefix_cache_queries",
    ),
    also(
        counter("baton_prefix_cache_hits", "Prompt tokens found on the node", "tokens", OF_MODEL),
        "vllm:prefix_cache_hits",
    ),
    counter(
        "vllm:prompt_tokens_by_source",
        "Tokens of prompts, by where their KV came from when the prompt was computed",
        "tokens",
        ("model_name", "source"),
    ),
    counter(
        "baton_node_requests",
        "Requests by the node that ran them",
        "requests",
        ("model_name", "role", "node"),
    ),
    counter(
        "baton_pooling_requests", "Embeddings, scores: calls", "calls", ("model_name", "outcome")
    ),
    gauge("baton_live_requests", "Requests in flight here", "requests"),
    gauge(
        "baton_router_nodes",
        "Nodes as this router sees them",
        "nodes",
        ("role", "state"),
    ),
    gauge(
        "baton_node_live_requests",
        "Requests of this router that are at a node",
        "requests",
        ("role", "node"),
    ),
    counter(
        "baton_migrations", "Requests asked to change their decode node", "requests", ("outcome",)
    ),
    counter("baton_migrated_tokens", "Tokens whose KV moved", "tokens"),
    counter("baton_migration_seconds", "Until the new node's first token, summed", "seconds"),
    gauge(
        "vllm:lora_requests_info",
        "Adapters in use",
        "seconds since 1970",
        ("model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    ),
    counter(
        "baton_http_requests",
        "Answers on the public port; 499: the client left before one began",
        "answers",
        ("method", "route", "status"),
    ),
    histogram(
        "baton_http_request_seconds",
        "From the head of a request to the end of its answer",
        "seconds",
        ("method", "route"),
        E2E_BUCKETS,
    ),
    histogram(
        "baton_admission_wait_seconds",
        "Waits for room of requests that were let in; 0 for none",
        "seconds",
        (),
        QUEUE_BUCKETS,
    ),
    gauge("baton_admission_live", "Requests that were let in", "requests"),
    gauge("baton_admission_queued_tokens", "Estimated tokens that wait", "tokens"),
    gauge("baton_admission_queue_length", "Requests that wait for room", "requests", ("tenant",)),
    gauge(
        "baton_admission_drain_tokens_per_second",
        "How fast the queue drains, as last seen; 0 before",
        "tokens/s",
    ),
    counter("baton_admission_admitted", "Requests let in", "requests"),
    counter("baton_admission_waited", "Of these, after a wait", "requests"),
    counter("baton_admission_cancelled", "Clients that left while they waited", "requests"),
    also(
        counter("baton_admission_refused", "Requests refused", "requests", ("reason",)),
        "vllm:admission_rejections",
    ),
    counter(
        "baton_slo_requests",
        "Requests with a service level of their own, by what became of it",
        "requests",
        ("slo", "outcome"),
    ),
    counter("baton_tenant_tokens", "Prompt and output tokens served", "tokens", ("tenant",)),
    counter("baton_tokenizer_cache_queries", "Characters of chats to encode", "characters"),
    counter("baton_tokenizer_cache_hits", "Those whose tokens were kept", "characters"),
    gauge("baton_resumable_live", "Resumable requests that run here", "requests"),
    gauge("baton_resumable_readers", "Answers to them under way", "answers"),
    counter("baton_resumable_begun", "Resumable requests taken on", "requests"),
    counter("baton_resumable_adopted", "Taken over from routers that are gone", "requests"),
    counter("baton_resumable_adopted_tokens", "Tokens in their logs", "tokens"),
    counter("baton_resumable_not_adopted", "Claimed, and given up again", "requests"),
    counter("baton_resumable_abandoned", "Cancelled, for nobody read them", "requests"),
    counter("baton_resumable_lost", "Taken over by another router", "requests"),
    counter(
        "baton_resumable_readings", "Answers told from a log, by their start", "answers", ("start",)
    ),
    gauge("baton_store_away", "1 while the store is away", "1 or 0"),
    counter("baton_store_outages", "Times the store went away", "outages"),
    counter("baton_store_skipped", "Calls not made, or failed, with it away", "calls"),
    counter("baton_store_refused", "Requests fenced or gapped in the store", "requests"),
    counter("baton_store_late_requests", "Requests that caught up", "requests"),
    counter("baton_store_late_tokens", "Tokens logged after an outage", "tokens"),
    counter("baton_store_dropped_tokens", "Tokens that no log will have", "tokens"),
    counter("baton_node_deaths", "Sessions with nodes that broke", "sessions"),
    counter("baton_node_stalls", "Of these, ended by the watchdog", "sessions"),
    counter("baton_node_quarantines", "Nodes put in quarantine", "quarantines"),
    counter("baton_node_panics", "Times most nodes were unhealthy", "panics"),
    counter("baton_stale_events", "Events of requests that had moved on", "events"),
    gauge(
        "baton_node_precisions",
        "Precisions that nodes of a role compute in; with more than one, failovers may change"
        " tokens",
        "precisions",
        ("role",),
    ),
    counter("baton_retry_budget", "Second tries after refusals", "retries", ("outcome",)),
    *PROCESS,
)
