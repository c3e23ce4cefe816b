"""The chart of deploy/kubernetes as Helm renders it, and what is asked of the objects.

Helm is taken from PATH or from beside this Python (`python -m tools.helm` puts it there). Without
it only the kustomize base is there, which is the chart as it was rendered last.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
CHART = KUBERNETES / "chart"
VALUES = KUBERNETES / "values"
BASE = KUBERNETES / "base"
# Sets of files in deploy/kubernetes/values; a later file lies on top of those before it.
SETS = (
    "trial", "ha", "gpu", "gpu rdma", "leader_worker_set", "external_redis", "tls",
    "tls mutual_tls", "chat", "coder", "monitoring", "monitoring keda", "monitoring hpa", "ingress",
    "images", "tls images", "images monitoring keda", "picker", "tls picker",
)  # fmt: skip
HELM = shutil.which("helm", path=str(Path(sys.executable).parent)) or shutil.which("helm")
needs_helm = pytest.mark.skipif(HELM is None, reason="no helm: `python -m tools.helm`")
# Everything that may be asked without Helm, too, is asked of the base.
RENDERED = [
    pytest.param("base", id="base"),
    *(pytest.param(each, id=each.replace(" ", "+"), marks=needs_helm) for each in SETS),
]
WORKLOADS = ("Deployment", "StatefulSet", "LeaderWorkerSet")

Json = dict[str, Any]


def helm(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run Helm; what it prints is in the result, whose status the caller reads."""
    assert HELM is not None
    return subprocess.run(
        [HELM, *arguments], capture_output=True, text=True, check=False, timeout=120, input=stdin
    )


def value_files(name: str) -> list[str]:
    return [word for each in name.split() for word in ("-f", str(VALUES / f"{each}.yaml"))]


def rendered_text(name: str, release: str = "baton", namespace: str = "serving") -> str:
    """What Helm prints of a set of values."""
    told = helm(
        "template", release, str(CHART), "--namespace", namespace, *value_files(name)
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    return told.stdout


@cache
def rendered(name: str, release: str = "baton") -> list[Json]:
    """The objects of a set of values, or of the kustomize base. To be read only: it is kept."""
    if name == "base":
        return parsed((BASE / "baton.yaml").read_text())
    return parsed(rendered_text(name, release))


def rendered_values(values: Json) -> list[Json]:
    """The objects of values of the test's own, on top of the chart's."""
    told = helm(
        "template", "baton", str(CHART), "--namespace", "serving", "-f", "-",
        stdin=yaml.safe_dump(values),
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    return parsed(told.stdout)


def parsed(text: str) -> list[Json]:
    return [each for each in yaml.safe_load_all(text) if each is not None]


def of_kind(objects: list[Json], *kinds: str) -> list[Json]:
    return [each for each in objects if each["kind"] in kinds]


def named(objects: list[Json], kind: str, name: str) -> Json:
    (found,) = [each for each in of_kind(objects, kind) if each["metadata"]["name"] == name]
    return found


def role_of(each: Json) -> str:
    return each["metadata"]["labels"]["app.kubernetes.io/component"]


def pod_template(workload: Json) -> Json:
    if workload["kind"] == "LeaderWorkerSet":
        return workload["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    return workload["spec"]["template"]


def pods(objects: list[Json]) -> Iterator[tuple[str, Json]]:
    """(role, pod template) of each workload."""
    for workload in of_kind(objects, *WORKLOADS):
        yield role_of(workload), pod_template(workload)


def processes(objects: list[Json]) -> Iterator[tuple[str, Json]]:
    """(role, pod template) of those that run Baton."""
    return ((role, pod) for role, pod in pods(objects) if role != "redis")


def node_roles(objects: list[Json]) -> list[str]:
    """The roles of nodes that there are."""
    return [role for role, _ in processes(objects) if role != "router"]


def main_container(pod: Json) -> Json:
    (container,) = pod["spec"]["containers"]
    return container


def options_file(objects: list[Json], role: str) -> str:
    (found,) = [each for each in of_kind(objects, "ConfigMap") if role_of(each) == role]
    return found["data"]["options.yaml"]
