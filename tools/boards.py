"""Write Grafana's boards, deploy/observability/grafana/boards/*.json: `python -m tools.boards`.

A board is rows of panels; a panel has one or more expressions in PromQL, each with a legend. A test
(tests/deploy/test_observability.py) fails while a file shows something else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).resolve().parent.parent / "deploy/observability/grafana/boards"
SOURCE: Final = {"type": "prometheus", "uid": "baton-prometheus"}
WIDTH: Final = 24  # Grafana's columns
HEIGHT: Final = 8


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart. `lines`: (expression, legend); `unit`: Grafana's name of one."""

    title: str
    unit: str
    lines: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Board:
    """A page of charts. `chosen`: label -> expression whose values a reader may choose from."""

    uid: str
    title: str
    rows: Sequence[tuple[str, Sequence[Panel]]]
    chosen: Sequence[tuple[str, str]] = ()

    @property
    def panels(self) -> list[Panel]:
        return [panel for _, panels in self.rows for panel in panels]


def quantiles(name: str, of: str = "") -> list[tuple[str, str]]:
    """Return lines of a histogram's 50th, 95th and 99th percentile; `of`: a choice of series."""
    rates = f"sum by (le) (rate({name}_bucket{of}[$__rate_interval]))"
    return [(f"histogram_quantile({q / 100}, {rates})", f"p{q}") for q in (50, 95, 99)]


def rate(name: str, by: str, legend: str = "") -> tuple[str, str]:
    """Return a line of a counter's rate, summed by labels."""
    shown = legend or " ".join(f"{{{{{label.strip()}}}}}" for label in by.split(","))
    return f"sum by ({by}) (rate({name}[$__rate_interval]))", shown


OVERVIEW: Final = Board(
    "baton-overview",
    "Baton: overview",
    (
        (
            "What clients see",
            (
                Panel("Time to first token", "s", quantiles("baton_time_to_first_token_seconds")),
                Panel("Time between tokens", "s", quantiles("baton_inter_token_latency_seconds")),
                Panel("Whole request", "s", quantiles("baton_e2e_request_latency_seconds")),
            ),
        ),
        (
            "Traffic",
            (
                Panel(
                    "Tokens per second",
                    "short",
                    (
                        ("sum(baton:prompt_tokens:rate1m)", "prompt"),
                        ("sum(baton:generation_tokens:rate1m)", "generated"),
                    ),
                ),
                Panel(
                    "Requests per second, by their end",
                    "reqps",
                    (
                        rate("baton_request_success_total", "finished_reason"),
                        rate("baton_request_failure_total", "code"),
                    ),
                ),
                Panel(
                    "Answers per second, by status",
                    "reqps",
                    (rate("baton_http_requests_total", "route, status"),),
                ),
            ),
        ),
        (
            "State",
            (
                Panel(
                    "Requests",
                    "short",
                    (
                        ("sum(baton_live_requests)", "in flight"),
                        ("sum(baton_admission_queue_length)", "wait to be let in"),
                        ("baton:queue_seconds:rate1m", "wait on {{role}} nodes"),
                    ),
                ),
                Panel(
                    "Nodes, as the routers see them",
                    "short",
                    (("max by (role, state) (baton_router_nodes)", "{{role}} {{state}}"),),
                ),
                Panel(
                    "Redis",
                    "short",
                    (
                        ("max(baton_store_away)", "away"),
                        ("sum(increase(baton_store_skipped_total[$__rate_interval]))", "skipped"),
                    ),
                ),
            ),
        ),
        (
            "Failures",
            (
                Panel(
                    "Nodes that broke",
                    "short",
                    (
                        ("sum(increase(baton_node_deaths_total[$__rate_interval]))", "deaths"),
                        ("sum(increase(baton_node_stalls_total[$__rate_interval]))", "stalls"),
                        (
                            "sum(increase(baton_node_quarantines_total[$__rate_interval]))",
                            "quarantines",
                        ),
                    ),
                ),
                Panel(
                    "Requests that went on elsewhere",
                    "short",
                    (
                        ("sum(increase(baton_request_retries_total[$__rate_interval]))", "retries"),
                        (
                            "sum by (outcome) (increase(baton_migrations_total[$__rate_interval]))",
                            "migrations: {{outcome}}",
                        ),
                    ),
                ),
                Panel(
                    "Process memory",
                    "bytes",
                    (("process_resident_memory_bytes", "{{job}} {{instance}}"),),
                ),
            ),
        ),
    ),
)

PD_FLOW: Final = Board(
    "baton-pd-flow",
    "Baton: prefill to decode",
    (
        (
            "Where the time goes",
            (
                Panel(
                    "Waits, by role",
                    "s",
                    (("baton:queue_wait_seconds:mean1m", "{{role}}, mean of a request"),),
                ),
                Panel("KV fetch", "s", quantiles("baton_kv_transfer_seconds")),
                Panel("Hand-over", "s", quantiles("baton_handover_seconds")),
            ),
        ),
        (
            "What moves",
            (
                Panel(
                    "KV received, by lane",
                    "Bps",
                    (
                        rate("baton_kv_lane_received_bytes_total", "lane"),
                        rate("baton_kv_lane_adopted_bytes_total", "lane", "{{lane}}, not copied"),
                    ),
                ),
                Panel(
                    "KV received and sent, by node",
                    "Bps",
                    (
                        rate("baton_kv_transfer_bytes_total", "node", "{{node}} received"),
                        rate("baton_kv_transfer_sent_bytes_total", "node", "{{node}} sent"),
                    ),
                ),
                Panel(
                    "Fetches per second",
                    "ops",
                    (rate("baton_kv_transfer_fetches_total", "outcome"),),
                ),
            ),
        ),
        (
            "What waits",
            (
                Panel(
                    "Under way",
                    "short",
                    (
                        ("sum by (node) (baton_kv_transfer_fetching)", "{{node}} fetches"),
                        ("sum by (node) (baton_kv_transfer_active_exports)", "{{node}} exports"),
                    ),
                ),
                Panel(
                    "KV under leases", "bytes", (("baton_kv_transfer_export_bytes", "{{node}}"),)
                ),
                Panel(
                    "Prompt tokens, by source",
                    "short",
                    (rate("vllm:prompt_tokens_by_source_total", "source"),),
                ),
            ),
        ),
        (
            "What goes wrong",
            (
                Panel(
                    "Lanes",
                    "short",
                    (
                        rate("baton_kv_lane_corrupt_frames_total", "lane", "{{lane}} corrupt"),
                        rate("baton_kv_lane_retries_total", "lane", "{{lane}} begun again"),
                        rate("baton_kv_lane_fallbacks_total", "lane", "{{lane}} given up"),
                    ),
                ),
                Panel(
                    "Exports",
                    "short",
                    (
                        rate("baton_kv_transfer_expired_leases_total", "node", "{{node}} expired"),
                        rate("baton_export_refusals_total", "node", "{{node}} without room"),
                    ),
                ),
                Panel(
                    "Requests at nodes",
                    "short",
                    (("sum by (role, node) (baton_node_live_requests)", "{{role}} {{node}}"),),
                ),
            ),
        ),
    ),
)

_OF: Final = '{node=~"$node"}'


def of_node(name: str) -> str:
    """Return the rate of a counter of the chosen nodes."""
    return f"rate({name}{_OF}[$__rate_interval])"


_HITS: Final = of_node("baton_node_prefix_hits_total")
_LOOKED_UP: Final = of_node("baton_node_prefix_queries_total")
NODE_BOARD: Final = Board(
    "baton-node",
    "Baton: node",
    (
        (
            "Batch",
            (
                Panel(
                    "Requests",
                    "short",
                    (
                        (f"vllm:num_requests_running{_OF}", "{{node}} running"),
                        (f"vllm:num_requests_waiting{_OF}", "{{node}} waiting"),
                        (f"vllm:num_requests_swapped{_OF}", "{{node}} swapped"),
                    ),
                ),
                Panel(
                    "Tokens per step",
                    "short",
                    quantiles("vllm:iteration_tokens_total", _OF),
                ),
                Panel("Time of a step", "s", ((f"baton_step_seconds{_OF}", "{{node}}"),)),
            ),
        ),
        (
            "Memory",
            (
                Panel(
                    "KV blocks in use",
                    "percentunit",
                    ((f"vllm:kv_cache_usage_perc{_OF}", "{{node}}"),),
                ),
                Panel(
                    "Prefix hits",
                    "percentunit",
                    ((f"{_HITS} / ({_LOOKED_UP} > 0)", "{{node}}"),),
                ),
                Panel(
                    "Preemptions per second",
                    "ops",
                    ((of_node("vllm:num_preemptions_total"), "{{node}}"),),
                ),
            ),
        ),
        (
            "Roofline",
            (
                Panel(
                    "Share of the machine's limits",
                    "percentunit",
                    (
                        (f"baton_mbu{_OF}", "{{node}} read bandwidth"),
                        (f"baton_mfu{_OF}", "{{node}} matrix products"),
                    ),
                ),
                Panel(
                    "Tokens per second",
                    "short",
                    (
                        (of_node("baton_node_prompt_tokens_total"), "{{node}} prompt"),
                        (of_node("baton_node_generation_tokens_total"), "{{node}} generated"),
                    ),
                ),
                Panel(
                    "Busy",
                    "percentunit",
                    ((of_node("baton_engine_busy_seconds_total"), "{{node}}"),),
                ),
            ),
        ),
    ),
    (("node", "label_values(baton_step_seconds, node)"),),
)

TENANTS: Final = Board(
    "baton-tenants",
    "Baton: tenants",
    (
        (
            "By tenant",
            (
                Panel("Tokens per second", "short", (rate("baton_tenant_tokens_total", "tenant"),)),
                Panel(
                    "Wait to be let in",
                    "short",
                    (("sum by (tenant) (baton_admission_queue_length)", "{{tenant}}"),),
                ),
            ),
        ),
        (
            "The gate",
            (
                Panel("Waits", "s", quantiles("baton_admission_wait_seconds")),
                Panel(
                    "Let in and refused per second",
                    "reqps",
                    (
                        ("sum(rate(baton_admission_admitted_total[$__rate_interval]))", "let in"),
                        rate("baton_admission_refused_total", "reason"),
                    ),
                ),
                Panel(
                    "Service levels",
                    "reqps",
                    (rate("baton_slo_requests_total", "slo, outcome"),),
                ),
            ),
        ),
    ),
)
BOARDS: Final = (OVERVIEW, PD_FLOW, NODE_BOARD, TENANTS)


def grafana(board: Board) -> dict[str, Any]:
    """Return a board as Grafana imports it."""
    return {
        "uid": board.uid,
        "title": board.title,
        "schemaVersion": 39,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "tags": ["baton"],
        "templating": {"list": [_variable(*each) for each in board.chosen]},
        "panels": list(_placed(board)),
    }


def _placed(board: Board) -> Iterator[dict[str, Any]]:
    y, number = 0, 0
    for title, panels in board.rows:
        number += 1
        row = {"h": 1, "w": WIDTH, "x": 0, "y": y}
        yield {"id": number, "type": "row", "title": title, "gridPos": row, "panels": []}
        y += 1
        width = WIDTH // len(panels)
        for index, panel in enumerate(panels):
            number += 1
            place = {"h": HEIGHT, "w": width, "x": index * width, "y": y}
            yield {"id": number, "gridPos": place, **_chart(panel)}
        y += HEIGHT


def _chart(panel: Panel) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend}
        for index, (expression, legend) in enumerate(panel.lines)
    ]
    return {
        "type": "timeseries",
        "title": panel.title,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [{**target, "datasource": SOURCE} for target in targets],
    }


def _variable(label: str, values: str) -> dict[str, Any]:
    return {
        "name": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": values, "refId": label},
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    }


def pages() -> dict[str, str]:
    """Return the text of each file, by its name."""
    return {
        f"{board.uid.removeprefix('baton-')}.json": json.dumps(grafana(board), indent=1) + "\n"
        for board in BOARDS
    }


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
