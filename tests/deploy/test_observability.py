"""deploy/observability: Prometheus takes its files, each alert has a case, boards are as written.

Whether real processes have the series: tests/system/test_prometheus.py.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.boards import BOARDS, FOLDER, pages

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "deploy/observability"
CONFIGS = ("prometheus.yml", "prometheus.compose.yml")
PROMTOOL_S = 60.0
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is in Debian's package prometheus"
)


def read(name: str) -> Any:
    return yaml.safe_load((FILES / name).read_text())


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["promtool", *arguments], cwd=FILES, capture_output=True, text=True,
        timeout=PROMTOOL_S, check=False,
    )  # fmt: skip


@needs_promtool
@pytest.mark.parametrize("name", CONFIGS)
def test_prometheus_takes_the_config(name: str, tmp_path: Path) -> None:
    described = read(name)
    for job in described["scrape_configs"]:
        if "authorization" in job:  # a file that only the container has
            job["authorization"]["credentials_file"] = str(tmp_path / "token")
    described["rule_files"] = [str(FILES / each) for each in described["rule_files"]]
    (tmp_path / "token").write_text("t")
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(described))
    told = promtool("check", "config", "--lint-fatal", str(tmp_path / "prometheus.yml"))
    assert told.returncode == 0, told.stdout + told.stderr


@needs_promtool
def test_prometheus_takes_the_rules() -> None:
    rules = [f"rules/{name}.yml" for name in ("recording", "alerts")]
    told = promtool("check", "rules", "--lint-fatal", *rules)
    assert told.returncode == 0, told.stdout + told.stderr


@needs_promtool
def test_each_case_fires_its_alert_and_good_order_none() -> None:
    told = promtool("test", "rules", "rules/alerts_test.yml")
    assert told.returncode == 0, told.stdout + told.stderr


def test_each_alert_has_a_case_that_fires_it_and_one_that_does_not() -> None:
    alerts = {rule["alert"] for rule in read("rules/alerts.yml")["groups"][0]["rules"]}
    cases = [
        (each["alertname"], bool(each["exp_alerts"]))
        for test in read("rules/alerts_test.yml")["tests"]
        for each in test.get("alert_rule_test", ())
    ]
    assert {name for name, fires in cases if fires} == alerts
    assert {name for name, fires in cases if not fires} == alerts


def test_boards_are_as_written() -> None:
    kept = {path.name: path.read_text() for path in FOLDER.glob("*.json")}
    assert kept == pages(), "python -m tools.boards writes them"


def test_boards_name_the_source_and_recorded_rules_that_exist() -> None:
    recorded = {
        rule["record"] for group in read("rules/recording.yml")["groups"] for rule in group["rules"]
    }
    source = read("grafana/datasources.yml")["datasources"][0]["uid"]
    for board in BOARDS:
        assert f'"uid": "{source}"' in pages()[f"{board.uid.removeprefix('baton-')}.json"]
        for panel in board.panels:
            for expression, _ in panel.lines:
                words = expression.replace("(", " ").replace(")", " ").split()
                assert {word for word in words if word.startswith("baton:")} <= recorded


def test_each_recorded_rule_is_asked_for() -> None:
    recorded = {
        rule["record"] for group in read("rules/recording.yml")["groups"] for rule in group["rules"]
    }
    boards = [line for board in BOARDS for panel in board.panels for line, _ in panel.lines]
    alerts = [rule["expr"] for rule in read("rules/alerts.yml")["groups"][0]["rules"]]
    asked = " ".join([*boards, *alerts])
    assert [name for name in recorded if name not in asked] == []


def test_compose_finds_all_files() -> None:
    services = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]
    for name in ("prometheus", "grafana"):
        assert services[name]["profiles"] == ["observability"]
        for port in services[name]["ports"]:
            assert ":-127.0.0.1:" in port
        for volume in services[name]["volumes"]:
            place = volume.partition(":")[0]
            if place.startswith("."):
                assert (ROOT / "deploy" / place).exists(), place
    [command] = services["prometheus"]["command"]
    assert all(f"/etc/prometheus/{name}" in command for name in CONFIGS[1:])
    jobs = read("prometheus.compose.yml")["scrape_configs"]
    found = {name for job in jobs for each in job["dns_sd_configs"] for name in each["names"]}
    assert found == {"router", "prefill", "decode", "encode"} <= services.keys()
    written = {job["authorization"]["credentials_file"] for job in jobs}
    assert all(f"> {path}" in command for path in written)
