"""What the chart's autoscalers and Prometheus objects ask for: metrics and pages that Baton has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.node.metric_list import NODE
from baton.node.metrics_server import metrics_token
from router.metrics.metric_list import ROUTER
from tests.deploy.rendered_chart import (
    KUBERNETES,
    ROOT,
    Json,
    main_container,
    named,
    needs_helm,
    of_kind,
    pods,
    rendered,
    role_of,
)

pytestmark = needs_helm
RULES = ROOT / "deploy" / "observability" / "rules"
OF_NODES = {name for spec in NODE for name in spec.names}
NAME = re.compile(r"(?<![\w\"'=~{.-])(?:baton_|vllm:|baton:)\w+(?:[:]\w+)*")


def asked(query: str) -> set[str]:
    """The metrics that an expression of PromQL reads."""
    return set(NAME.findall(re.sub(r"\{[^}]*\}|by \([^)]*\)", "", query)))


def queries(name: str) -> dict[tuple[str, str], str]:
    """(role, target) -> expression, of each ScaledObject."""
    return {
        (role_of(each), trigger["metadata"]["threshold"]): trigger["metadata"]["query"]
        for each in of_kind(rendered(name), "ScaledObject")
        for trigger in each["spec"]["triggers"]
    }


def adapter_rules() -> list[Json]:
    return yaml.safe_load((KUBERNETES / "prometheus_adapter.yaml").read_text())["rules"]["external"]


def test_keda_asks_for_what_nodes_say() -> None:
    found = queries("images monitoring keda")
    assert {role for role, _ in found} == {"prefill", "decode", "encode"}
    for (role, _), query in found.items():
        assert asked(query) <= OF_NODES
        assert f'namespace="serving",service="baton-{role}"' in query
    assert {(role, target) for role, target in found if "queue_seconds" in found[role, target]} == {
        ("prefill", "0.5"), ("decode", "1"),
    }  # fmt: skip


def test_the_adapter_serves_what_the_hpa_asks_for() -> None:
    rules = yaml.safe_load((KUBERNETES / "prometheus_adapter.yaml").read_text())["rules"][
        "external"
    ]
    served = {rule["name"]["as"]: rule for rule in rules}
    for each in rules:
        assert asked(each["seriesQuery"].split('"')[1]) <= OF_NODES
    wanted = set()
    for each in of_kind(rendered("monitoring hpa"), "HorizontalPodAutoscaler"):
        for metric in each["spec"]["metrics"]:
            wanted.add(metric["external"]["metric"]["name"])
            labels = metric["external"]["metric"]["selector"]["matchLabels"]
            assert labels == {"service": each["spec"]["scaleTargetRef"]["name"]}
    assert wanted == served.keys()


def test_both_ask_the_same_series() -> None:
    """Each external metric is KEDA's expression, its series named once."""
    rules = yaml.safe_load((KUBERNETES / "prometheus_adapter.yaml").read_text())["rules"][
        "external"
    ]
    of_adapter = {each["seriesQuery"].split('"')[1] for each in rules}
    assert of_adapter == {
        name for query in queries("monitoring keda").values() for name in asked(query)
    }


def test_services_that_are_scraped_have_the_label_by_which_series_are_chosen() -> None:
    """The operator writes the service's name into `service`, and the selector takes one service."""
    objects = rendered("monitoring keda")
    for monitor in of_kind(objects, "ServiceMonitor"):
        (service,) = [
            each for each in of_kind(objects, "Service")
            if monitor["spec"]["selector"]["matchLabels"].items()
            <= each["metadata"]["labels"].items()
        ]  # fmt: skip
        (endpoint,) = monitor["spec"]["endpoints"]
        assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
        assert service["metadata"]["name"] == f"baton-{role_of(monitor)}"
        assert endpoint["path"] == "/metrics"
        key = endpoint["authorization"]["credentials"]["key"]
        assert key == ("api-key" if role_of(monitor) == "router" else "metrics-token")
        assert monitor["metadata"]["labels"]["release"] == "kube-prometheus-stack"


def test_under_tls_prometheus_presents_a_certificate_to_nodes() -> None:
    for name in ("tls monitoring", "tls mutual_tls monitoring"):
        for monitor in of_kind(rendered(name), "ServiceMonitor"):
            (endpoint,) = monitor["spec"]["endpoints"]
            assert endpoint["scheme"] == "https"
            shown = endpoint["tlsConfig"].get("cert", {}).get("secret", {}).get("name")
            of_router = "prometheus-client" if "mutual_tls" in name else None
            assert shown == (of_router if role_of(monitor) == "router" else "baton-nodes")


def test_jobs_are_named_as_the_alerts_expect() -> None:
    objects = rendered("monitoring")
    jobs = {
        rule["replacement"]
        for monitor in of_kind(objects, "ServiceMonitor")
        for rule in monitor["spec"]["endpoints"][0]["relabelings"]
        if rule["targetLabel"] == "job"
    }
    described = yaml.safe_load((ROOT / "deploy/observability/prometheus.yml").read_text())
    assert jobs == {job["job_name"] for job in described["scrape_configs"]}


def test_rules_are_those_of_deploy() -> None:
    (rules,) = of_kind(rendered("monitoring"), "PrometheusRule")
    groups: list[Any] = []
    for name in ("recording", "alerts"):
        groups += yaml.safe_load((RULES / f"{name}.yml").read_text())["groups"]
    assert rules["spec"]["groups"] == groups


def test_prometheus_takes_the_rules_and_the_expressions(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool")
    (rules,) = of_kind(rendered("monitoring"), "PrometheusRule")
    asked_for = [*queries("monitoring keda").values()]
    for each in adapter_rules():
        name = each["seriesQuery"].split('"')[1]
        query = each["metricsQuery"].replace("<<.Series>>", name)
        query = query.replace("<<.LabelMatchers>>", 'service="s"').replace(
            "<<.GroupBy>>", "service"
        )
        asked_for.append(query)
    recorded = [{"record": f"asked:{i}", "expr": query} for i, query in enumerate(asked_for)]
    groups = [*rules["spec"]["groups"], {"name": "autoscalers", "rules": recorded}]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": groups}))
    told = subprocess.run(
        [promtool, "check", "rules", str(tmp_path / "rules.yml")],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert told.returncode == 0, told.stdout + told.stderr
    assert len(recorded) == 7


def test_boards_are_those_of_deploy_with_the_clusters_source() -> None:
    (boards,) = [
        each for each in of_kind(rendered("monitoring"), "ConfigMap") if role_of(each) == "boards"
    ]
    files = sorted((ROOT / "deploy/observability/grafana/boards").glob("*.json"))
    assert sorted(boards["data"]) == [f"baton-{file.name}" for file in files]
    assert boards["metadata"]["labels"]["grafana_dashboard"] == "1"
    for file in files:
        shown = json.loads(boards["data"][f"baton-{file.name}"])
        text = file.read_text().replace("baton-prometheus", "prometheus")
        assert shown == json.loads(text)


def test_prometheus_may_reach_what_it_scrapes() -> None:
    objects = rendered("images monitoring keda")
    for policy in of_kind(objects, "NetworkPolicy"):
        if role_of(policy) == "redis":
            continue
        rule = policy["spec"]["ingress"][-1]
        assert rule["from"] == [
            {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
        ]
        (monitor,) = [
            each for each in of_kind(objects, "ServiceMonitor") if role_of(each) == role_of(policy)
        ]
        (pod,) = [pod for role, pod in pods(objects) if role == role_of(policy)]
        numbers = {port["name"]: port["containerPort"] for port in main_container(pod)["ports"]}
        scraped = monitor["spec"]["endpoints"][0]["port"]
        assert rule["ports"] in ([{"port": scraped}], [{"port": numbers[scraped]}])


def test_a_router_scales_by_its_cpu() -> None:
    objects = rendered("monitoring keda")
    scaler: Json = named(objects, "HorizontalPodAutoscaler", "baton-router")
    (metric,) = scaler["spec"]["metrics"]
    assert metric["resource"]["name"] == "cpu"
    (pod,) = [pod for role, pod in pods(objects) if role == "router"]
    assert main_container(pod)["resources"]["requests"]["cpu"], "a percentage of this"


def test_the_token_of_the_readme_is_the_nodes() -> None:
    """deploy/kubernetes/README.md makes metrics-token by openssl."""
    told = subprocess.run(
        ["sh", "-c", 'printf metrics | openssl dgst -sha256 -hmac "$SECRET" | sed "s/.* //"'],
        env={"SECRET": "abc", "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert told.stdout.strip() == metrics_token("abc")


def test_metrics_are_found_in_expressions() -> None:
    query = 'sum by (role) (rate(baton_queue_seconds_total{x="baton_no"}[1m])) / vllm:a > baton:b:c'
    assert asked(query) == {"baton_queue_seconds_total", "vllm:a", "baton:b:c"}
    assert {name for spec in ROUTER for name in spec.names} & asked(
        "rate(baton_http_requests_total[5m])"
    )
