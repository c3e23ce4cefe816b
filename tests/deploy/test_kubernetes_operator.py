"""What an operator says wrongly, and what the page's commands do: values that the chart refuses,
and patches of the Secret.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml

from tests.deploy.rendered_chart import (
    CHART,
    KUBERNETES,
    Json,
    helm,
    main_container,
    needs_helm,
    parsed,
    processes,
    rendered,
)
from tests.deploy.test_containers import started
from tests.deploy.test_kubernetes_processes import CONFIGS, environment

README = (KUBERNETES / "README.md").read_text()
PODS = (CHART / "templates" / "_pods.tpl").read_text()


@needs_helm
@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"router": {"options": {"drain_s": 20}}}, "drain-s is set by the chart: graceSeconds"),
        ({"decode": {"options": {"port": 9}}}, "options of decode: port is set by the chart"),
        ({"tls": {"clients": {"mutual": True}}}, "tls.clients.mutual needs tls.clients.secret"),
        (
            {"decode": {"autoscaling": {"kind": "hpa", "min": 3, "max": 2}}},
            "autoscaling of decode: min 3 is above max 2",
        ),
        (
            {"router": {"autoscaling": {"enabled": True, "max": 1}}},
            "router.autoscaling: min 2 is above max 1",
        ),
        (
            {"prefill": {"rollout": {"maxSurge": 0}}},
            "rollout of prefill: maxSurge or maxUnavailable must be above 0",
        ),
    ],
    ids=["environment", "port", "mutual", "nodes", "routers", "rollout"],
)  # fmt: skip
def test_what_cannot_work_is_refused(values: Json, text: str, tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(yaml.safe_dump({"model": {"hub": "a/b"}, **values}))
    told = helm("template", "baton", str(CHART), "-f", str(tmp_path / "values.yaml"))
    assert told.returncode != 0
    assert text in told.stderr


@needs_helm
def test_options_that_the_environment_sets_are_those_that_the_chart_refuses(tmp_path: Path) -> None:
    """The environment of image, entry point and pod goes before the file of options."""
    checked = PODS.partition('define "baton.options.check"')[2]
    # `dict NAME SETTER NAME SETTER ...`: of all, of nodes, of routers
    listed = re.findall(r"\$(?:set|own) :?= dict (.*)", checked)[:3]
    of_all, of_nodes, of_routers = (set(re.findall(r'"([^"]*)"', each)[::2]) for each in listed)
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for name in ("images", "ha", "picker", "monitoring keda"):
        for role, pod in processes(rendered(name)):
            words = environment(main_container(pod))
            _, _, made = started(role, tmp_path, [], words)
            options = {spec.name for config in CONFIGS[role] for spec in dataclasses.fields(config)}
            told = {each.removeprefix("BATON_").lower() for each in made} & options
            found[role == "router"] |= {each.replace("_", "-") for each in told}
    # The chart leaves this variable out where the option is there.
    assert found[True] - {"picker-router"} == of_all | of_routers
    assert found[False] == of_all | of_nodes


@needs_helm
def test_all_keys_of_the_secret_for_redis_are_files() -> None:
    """CA, client certificate and password, as values/external_redis.yaml says."""
    for _, pod in processes(rendered("external_redis")):
        [volume] = [each for each in pod["spec"]["volumes"] if each["name"] == "redis-ca"]
        assert volume["secret"] == {"secretName": "redis-ca", "defaultMode": 0o440}


def test_the_page_sets_two_secrets_on_two_lines() -> None:
    [patch] = re.findall(r"kubectl patch secret baton -p '([^']*)'", README)
    assert json.loads(patch)["stringData"]["secret"].splitlines() == ["OLD", "NEW"]


def test_the_job_takes_the_image_that_the_machine_has() -> None:
    """Kubernetes would fetch a `latest` each time, also one that is in no registry."""
    _, job = parsed((KUBERNETES / "download_model.yaml").read_text())
    assert main_container(job["spec"]["template"])["imagePullPolicy"] == "IfNotPresent"
