"""The lists of metrics are what /metrics shows, what docs/metrics.md says, what queries ask for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from baton.runtime.metrics import KERNEL, PROCESS, MetricKind, MetricSpec
from tests.front.test_metrics_pages import RECORDED
from tests.system.test_endpoints import BOARD
from tools.metrics_page import BEGIN, LISTS, PAGE, page

ROOT = Path(__file__).resolve().parents[2]
SPECS = [spec for metrics in LISTS.values() for spec in metrics]
SUFFIXES = ("_bucket", "_sum", "_count")
# Not metrics: fields of requests and replies, and words of the text.
OTHERS = {
    "baton_command", "baton_error", "baton_kv", "baton_notes", "baton_receipt", "baton_resume",
    "baton_s", "baton_timing",
}  # fmt: skip
NAME = re.compile(r"\b(vllm:\w+|baton_\w+)(\*?)(?:\{([^}]*)\}(\w*))?")
SERIES = re.compile(r"\b((?:vllm:|baton_)\w+_(?:total|bucket|sum|count))()(?:\{([^}]*)\})?()")

GONE = "baton_kv_blocks_total"  # bench.router_trees reads it of older routers


def test_the_page_shows_the_lists() -> None:
    shown = PAGE.read_text()
    assert shown == page(shown), "python -m tools.metrics_page writes it"


def test_what_the_kernel_knows_is_what_is_scraped() -> None:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    shown = {each.name: (each.type, each.documentation) for each in registry.collect()}
    assert shown == {each.name: (each.kind.value, each.meaning) for each in KERNEL}


def test_each_series_has_one_owner() -> None:
    """A sum over all routers and nodes is the truth, but for what each process tells of itself."""
    owned = {
        process: {name for spec in metrics if spec not in PROCESS for name in spec.names}
        for process, metrics in LISTS.items()
    }
    assert owned["router"] & owned["node"] == set()
    for metrics in LISTS.values():
        assert set(PROCESS) <= set(metrics)


# vLLM's, of `vllm/v1/metrics/loggers.py`: its boards and alerts may name one of them.
VLLM_TOKEN = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
VLLM_REQUEST = "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
VLLM_FIRST = "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160"
VLLM_SECONDS = {
    "vllm:time_to_first_token_seconds": f"{VLLM_FIRST} 640 2560",
    "vllm:inter_token_latency_seconds": VLLM_TOKEN,
    "vllm:e2e_request_latency_seconds": VLLM_REQUEST,
    "vllm:request_queue_time_seconds": VLLM_REQUEST,
}


def test_buckets_of_seconds_serve_gpus_and_cpus() -> None:
    timed = [spec for spec in SPECS if spec.unit == "seconds" and spec.buckets]
    assert len(timed) >= 10
    for spec in timed:
        assert spec.buckets[0] <= 0.001, spec.name  # a GPU
        assert spec.buckets[-1] >= 60, spec.name  # a CPU, or a full queue
        steps = [after / bound for bound, after in pairwise(spec.buckets)]
        assert 1 < min(steps) <= max(steps) <= 2.5, spec.name
    named = {name: spec.buckets for spec in timed for name in spec.names}
    for name, bounds in VLLM_SECONDS.items():
        assert set(map(float, bounds.split())) <= set(named[name]), name
    of_waits = ("vllm:request_queue_time_seconds", "baton_admission_wait_seconds")
    assert all(named[name][0] == 0.0001 for name in of_waits)


@pytest.mark.parametrize("process", LISTS)
def test_the_list_is_what_is_scraped(process: str) -> None:
    """Of the recorded page, which is what a process shows today (test_metrics_pages.py)."""
    text = (RECORDED / f"{process}.txt").read_text()
    scraped = {
        family.name: (family.type, family.documentation, labels_of(family.samples))
        for family in text_string_to_metric_families(text)
    }
    declared = {
        name: (spec.kind.value, spec.meaning, set(spec.labels))
        for spec in LISTS[process]
        for name in (spec.name, *spec.aliases)
    }
    of_kernel = {spec.name for spec in KERNEL}  # not recorded: they vary
    assert scraped.keys() == declared.keys() - of_kernel
    for name, (kind, meaning, labels) in scraped.items():
        assert (kind, meaning) == declared[name][:2], name
        assert labels in (declared[name][2], None), name
    for spec in LISTS[process]:
        assert spec.unit, spec.name
        if spec.buckets:
            assert f'{spec.name}_bucket{{le="{float(spec.buckets[-1])}"' in text


def labels_of(samples: Sequence[Sample]) -> set[str] | None:
    """None without samples."""
    found = [set(sample.labels) - {"le"} for sample in samples]
    return set.union(*found) if found else None


def queries() -> Iterator[tuple[str, str]]:
    """(where, text) of whatever names metrics: documents, boards and rules, vLLM's board."""
    documents = [*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("docs/*.md")]
    rules = [
        each for kind in ("yaml", "yml", "json", "cfg") for each in ROOT.glob(f"deploy/**/*.{kind}")
    ]
    for path in (*documents, *rules):
        if path.name != "CHANGELOG.md":
            yield str(path.relative_to(ROOT)), path.read_text().partition(BEGIN)[0]
    for expression in BOARD:
        yield "vLLM's board", expression


def named(spec: MetricSpec) -> set[str]:
    if spec.kind is not MetricKind.HISTOGRAM:
        return set(spec.names)
    return {name + end for name in spec.names for end in ("", *SUFFIXES)}


def fault(name: str, star: str, braces: str | None, end: str) -> str | None:
    """What is wrong with `name{braces}end` as a document writes it."""
    if star or (braces is not None and end) or name.endswith("_"):
        words = braces.split(",") if braces is not None and end else [""]
        wanted = {name + word.strip() + end for word in words}
        known = {each for spec in SPECS for each in named(spec)}
        missing = {each for each in wanted if not any(one.startswith(each) for one in known)}
        return f"no metric begins with {missing}" if missing else None
    found = [spec for spec in SPECS if name in named(spec)]
    if not found:
        return "no such metric"
    labels = set(re.findall(r"(\w+)\s*(?:=|!|,|$)", re.sub(r'"[^"]*"', "", braces or "")))
    known = [{*spec.labels, "le", "instance", "job"} for spec in found]  # two are Prometheus'
    return None if any(labels <= each for each in known) else f"no labels {labels}"


def test_whatever_asks_for_a_metric_asks_for_one_that_exists() -> None:
    faults = {
        (where, match[0]): wrong
        for where, text in queries()
        for match in NAME.finditer(text)
        if match[1] not in OTHERS and (wrong := fault(match[1], match[2], match[3], match[4] or ""))
    }
    assert faults == {}


def test_programs_read_series_that_exist() -> None:
    paths = [*ROOT.glob("bench/*.py"), *ROOT.glob("deploy/*.py"), *ROOT.glob("tests/**/*.py")]
    faults = {
        (path.name, match[1])
        for path in paths
        for match in SERIES.finditer(path.read_text())
        if match[1] != GONE and fault(match[1], "", None, "") is not None
    }
    assert faults == set()


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("`baton_node_deaths_total`", False),
        ("`baton_node_deaths`", True),
        ('rate(vllm:request_success_total{finished_reason="stop"}[1m])', False),
        ('rate(vllm:request_success_total{reason="stop"}[1m])', True),
        ("`baton_store_{outages,skipped}_total`", False),
        ("`baton_store_{outages,missing}_total`", True),
        ("`baton_kv_lane_*{lane}`", False),
        ("`baton_handover_seconds_bucket{le}`", False),
    ],
)
def test_what_is_a_fault(text: str, wrong: bool) -> None:
    match = NAME.search(text)
    assert match is not None
    assert (fault(match[1], match[2], match[3], match[4] or "") is not None) == wrong
