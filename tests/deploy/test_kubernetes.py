"""The chart's objects against Kubernetes' own schemas, its policies, and each other.

Without a cluster. What the processes are told is in test_kubernetes_processes.py, what autoscalers
and Prometheus ask in test_kubernetes_monitoring.py; what only a real cluster shows:
deploy/try_kubernetes.sh.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from tests.deploy.pod_security import violations
from tests.deploy.rendered_chart import (
    BASE,
    CHART,
    KUBERNETES,
    RENDERED,
    ROOT,
    SETS,
    VALUES,
    Json,
    helm,
    named,
    needs_helm,
    of_kind,
    parsed,
    pod_template,
    pods,
    processes,
    rendered,
    rendered_text,
    role_of,
    value_files,
)
from tools.kustomize_base import PAGE, base

SCHEMAS = files("kubernetes_validate").joinpath("kubernetes-json-schema")
VERSIONS = ("1.28.0", "1.37.0")
# Operators' own kinds, of which the package has no schemas.
CUSTOM = {
    "Certificate", "HTTPRoute", "LeaderWorkerSet", "PrometheusRule", "ScaledObject",
    "ServiceMonitor",
}  # fmt: skip
ROLES = ("router", "prefill", "decode")
NEWER = {"ingress": "1.37.0"}  # image volumes are not in 1.28


@cache
def registry(folder: str) -> Registry[Any]:
    contents = json.loads(SCHEMAS.joinpath(folder, "_definitions.json").read_text())
    return Resource.from_contents(contents) @ Registry()


@cache
def validator(version: str, kind: str, api: str) -> Draft202012Validator:
    """Kubernetes' strict schema of a kind: a field that it does not know is an error."""
    folder = f"v{version}-local-strict"
    group, _, number = api.rpartition("/")
    name = f"{group.partition('.')[0]}-{number}" if group else number
    schema = json.loads(SCHEMAS.joinpath(folder, f"{kind.lower()}-{name}.json").read_text())
    return Draft202012Validator(schema, registry=Resource.from_contents(schema) @ registry(folder))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", RENDERED)
def test_objects_fit_kubernetes_schemas(name: str, version: str) -> None:
    if version < NEWER.get(name, version):
        pytest.skip(f"needs Kubernetes {NEWER[name]}")
    for each in rendered(name):
        if each["kind"] in CUSTOM:
            continue
        faults = list(validator(version, each["kind"], each["apiVersion"]).iter_errors(each))
        assert not faults, (each["kind"], each["metadata"]["name"], faults[0].message)


@needs_helm
@pytest.mark.parametrize(
    ("version", "api", "known"),
    [
        ("1.20.2", "policy/v1beta1", False),
        ("1.21.0", "policy/v1", False),
        ("1.27.0", "policy/v1", True),
    ],
)
def test_budgets_are_of_what_the_cluster_knows(version: str, api: str, known: bool) -> None:
    told = helm(
        "template", "baton", str(CHART), *value_files("trial"), "--kube-version", version
    )  # fmt: skip
    budgets = of_kind(parsed(told.stdout), "PodDisruptionBudget")
    assert {each["apiVersion"] for each in budgets} == {api}
    assert [each["spec"].pop("unhealthyPodEvictionPolicy", None) for each in budgets] == (
        ["AlwaysAllow" if known else None] * len(ROLES)
    )
    wanted = of_kind(rendered("trial"), "PodDisruptionBudget")
    assert [each["spec"]["selector"] for each in budgets] == [
        each["spec"]["selector"] for each in wanted
    ]


@needs_helm
@pytest.mark.parametrize(("version", "known"), [("1.21.0", False), ("1.22.0", True)])
def test_stateful_sets_have_no_field_that_the_cluster_lacks(version: str, known: bool) -> None:
    """kubectl and Helm refuse an object with a field that the cluster does not know."""
    told = helm("template", "baton", str(CHART), *value_files("tls"), "--kube-version", version)
    sets = {role_of(each): each["spec"] for each in of_kind(parsed(told.stdout), "StatefulSet")}
    assert {role: "minReadySeconds" in spec for role, spec in sets.items()} == {
        "prefill": known, "decode": known, "redis": False,
    }  # fmt: skip


def test_the_schemas_refuse_what_is_wrong() -> None:
    """A field of another version, and a misspelt one."""
    volume = {"name": "model", "image": {"reference": "x"}}
    pod: Json = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"},
        "spec": {"containers": [{"name": "c", "image": "i"}], "volumes": [volume]},
    }  # fmt: skip
    assert not list(validator("1.37.0", "Pod", "v1").iter_errors(pod))
    assert list(validator("1.28.0", "Pod", "v1").iter_errors(pod))
    pod["spec"]["tolerration"] = []
    assert list(validator("1.37.0", "Pod", "v1").iter_errors(pod))


@needs_helm
@pytest.mark.parametrize("name", SETS)
def test_helm_lint(name: str) -> None:
    told = helm("lint", "--strict", str(CHART), *value_files(name))
    assert told.returncode == 0, told.stdout + told.stderr


@needs_helm
@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({}, "exactly one of claim, hostPath, image, imageVolume and hub; given: none"),
        ({"model": {"hub": "a/b", "image": "c"}}, "given: image, hub"),
        ({"model": {"hub": "a/b"}, "decode": {"replica": 2}}, "'replica' not allowed"),
        (
            {"model": {"hub": "a/b"}, "tls": {"nodes": {"issuer": {"name": "ca"}}}},
            "tls.nodes.secret",
        ),
        (
            {
                "model": {"hub": "a/b"}, "monitoring": {"enabled": True},
                "tls": {"clients": {"secret": "s", "mutual": True}},
            },
            "monitoring.certificate",
        ),
        ({"model": {"hub": "a/b"}, "nodes": {"workload": "DaemonSet"}}, "/nodes/workload"),
        (
            {
                "model": {"hub": "a/b"},
                "decode": {"deletionCost": True, "workload": "StatefulSet"},
            },
            "deletionCost of decode: a StatefulSet removes its pods in an order of its own",
        ),
        (
            {"model": {"hub": "a/b"}, "router": {"options": {"picker-port": 9002}}},
            "network.gateways says who may ask the picker",
        ),
    ],
    ids=[
        "no-model", "two-models", "misspelt", "no-secret", "no-certificate", "workload", "cost",
        "picker",
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_name(values: Json, text: str, tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    told = helm("template", "baton", str(CHART), "-f", str(tmp_path / "values.yaml"))
    assert told.returncode != 0
    assert text in told.stderr


def keys(schema: Json, whole: Json, place: str = "") -> set[str]:
    """The path of each value that the schema names; of a role, once."""
    if "$ref" in schema:
        if place != "/nodes":
            return {place}
        schema = whole["definitions"]["node"]
    inner = schema.get("properties", {})
    found = {place} if place and not inner else set[str]()
    for name, each in inner.items():
        found |= keys(each, whole, f"{place}/{name}")
    return found


def test_values_file_shows_each_value_that_there_is() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for path in keys(schema, schema) - {"/global"}:
        at: Any = values
        for word in path.strip("/").split("/"):
            assert word in at, path
            at = at[word]


def test_each_value_set_is_tested() -> None:
    assert {path.stem for path in VALUES.glob("*.yaml")} == set(" ".join(SETS).split())


@needs_helm
def test_encode_nodes_are_there_if_wanted_with_all_that_a_role_has() -> None:
    def of_role(name: str) -> list[str]:
        return sorted(each["kind"] for each in rendered(name) if role_of(each) == "encode")

    assert of_role("monitoring keda") == []
    own = ["ConfigMap", "Deployment", "NetworkPolicy", "PodDisruptionBudget", "Service"]
    assert of_role("images") == own
    watched = sorted([*own, "ScaledObject", "ServiceMonitor"])
    assert of_role("images monitoring keda") == watched
    for role in ("prefill", "decode"):
        kinds = [
            each["kind"] for each in rendered("images monitoring keda") if role_of(each) == role
        ]
        assert sorted(kinds) == watched


# ---- policies ----


@pytest.mark.parametrize("name", RENDERED)
def test_pods_are_restricted(name: str) -> None:
    """Pod Security Standard `restricted`; two sources of a model are more than it allows."""
    expected = {"leader_worker_set": ["volume model: hostPath"], "ingress": ["volume model: image"]}
    for role, pod in pods(rendered(name)):
        assert violations(pod["spec"]) == (expected.get(name, []) if role != "redis" else []), role
        assert pod["spec"]["automountServiceAccountToken"] is False
        for container in pod["spec"]["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["resources"]["limits"]["memory"]
            assert container["resources"]["requests"]["cpu"]


@pytest.mark.parametrize("name", RENDERED)
def test_every_pod_has_its_policy_and_budget(name: str) -> None:
    objects = rendered(name)
    policed = [
        each["spec"]["podSelector"]["matchLabels"] for each in of_kind(objects, "NetworkPolicy")
    ]
    guarded = [
        each["spec"]["selector"]["matchLabels"] for each in of_kind(objects, "PodDisruptionBudget")
    ]
    for role, pod in pods(objects):
        labels = pod["metadata"]["labels"]
        assert (labels in policed) == (name != "gpu rdma"), role
        assert (labels in guarded) == (role != "redis"), role
        assert pod["spec"]["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"] == labels


# ---- what refers to what ----


@pytest.mark.parametrize("name", RENDERED)
def test_what_an_object_names_is_there(name: str) -> None:
    objects = rendered(name)
    for role, pod in pods(objects):
        spec = pod["spec"]
        assert named(objects, "ServiceAccount", spec["serviceAccountName"])
        volumes = {each["name"] for each in spec["volumes"]} | claimed(objects, role)
        for volume in spec["volumes"]:
            if "configMap" in volume:
                assert named(objects, "ConfigMap", volume["configMap"]["name"])["data"]
        used = set[str]()
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            used |= {each["name"] for each in container["volumeMounts"]}
        assert used == volumes, role
    for service in of_kind(objects, "Service"):
        (pod,) = [each for _, each in pods(objects) if selected(service["spec"]["selector"], each)]
        ports = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for scaler in of_kind(objects, "HorizontalPodAutoscaler", "ScaledObject"):
        target = scaler["spec"]["scaleTargetRef"]
        workload = named(objects, target["kind"], target["name"])
        assert workload["apiVersion"] == target["apiVersion"]
        assert "replicas" not in workload["spec"], "each upgrade would undo the autoscaler"
    for each in of_kind(objects, "StatefulSet"):
        assert named(objects, "Service", each["spec"]["serviceName"])


def claimed(objects: list[Json], role: str) -> set[str]:
    """Names of the volumes that a StatefulSet of this role makes itself."""
    sets = [each for each in of_kind(objects, "StatefulSet") if role_of(each) == role]
    return {
        claim["metadata"]["name"]
        for each in sets
        for claim in each["spec"].get("volumeClaimTemplates", [])
    }


def selected(selector: dict[str, str], pod: Json) -> bool:
    return selector.items() <= pod["metadata"]["labels"].items()


@pytest.mark.parametrize("name", RENDERED)
def test_a_selector_takes_the_pods_of_one_workload(name: str) -> None:
    objects = rendered(name)
    for workload in of_kind(objects, *("Deployment", "StatefulSet")):
        assert (
            workload["spec"]["selector"]["matchLabels"]
            == pod_template(workload)["metadata"]["labels"]
        )
    labels = [tuple(sorted(pod["metadata"]["labels"].items())) for _, pod in pods(objects)]
    assert len(set(labels)) == len(labels)


@needs_helm
def test_two_models_in_a_namespace_share_nothing() -> None:
    """One release each; only the gateway that they name is the same."""
    releases = {each: rendered(each, release=each) for each in ("chat", "coder")}
    names = {
        release: {(each["kind"], each["metadata"]["name"]) for each in objects}
        for release, objects in releases.items()
    }
    assert not names["chat"] & names["coder"]
    for _, pod in pods(releases["chat"]):
        for service in of_kind(releases["coder"], "Service"):
            assert not selected(service["spec"]["selector"], pod)
    paths = [
        of_kind(objects, "HTTPRoute")[0]["spec"]["rules"][0]["matches"][0]["path"]["value"]
        for objects in releases.values()
    ]
    assert paths == ["/chat", "/coder"]


@needs_helm
def test_a_new_version_of_the_chart_restarts_no_pod(tmp_path: Path) -> None:
    """Nor Redis, which would forget: what changes with the version is on no pod."""
    copy = tmp_path / "chart"
    shutil.copytree(CHART, copy)
    text = (copy / "Chart.yaml").read_text()
    (copy / "Chart.yaml").write_text(text.replace("0.1.0", "9.9.9"))
    told = helm("template", "baton", str(copy), "--namespace", "serving", *value_files("trial"))
    later = parsed(told.stdout)
    assert later != rendered("trial")
    assert dict(pods(later)) == dict(pods(rendered("trial")))


@needs_helm
def test_the_base_is_the_chart() -> None:
    text = base(rendered_text("trial", namespace="default"))
    assert PAGE.read_text() == text, "python -m tools.kustomize_base"


def test_kustomize_takes_the_base() -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl")
    told = subprocess.run(
        [kubectl, "kustomize", str(BASE)], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert told.returncode == 0, told.stderr
    assert len(parsed(told.stdout)) == len(rendered("base"))


# ---- the page ----


README = (KUBERNETES / "README.md").read_text()


def test_the_page_names_each_set_and_each_file() -> None:
    listed = set(re.findall(r"`values/(\w+)\.yaml`", README))
    assert listed == {path.stem for path in VALUES.glob("*.yaml")}
    for path in re.findall(r"deploy/kubernetes/[\w./]+", README):
        assert (ROOT / path.rstrip(".")).exists(), path


def test_values_that_the_page_names_exist() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    named_values = re.findall(
        r"`((?:model|router|nodes|redis|tls|network|monitoring)\.[a-z][\w.]*)", README
    )
    for path in [*named_values, *re.findall(r"--set ([\w.]+)=", README)]:
        at: Any = {**values, "decode": {**values["nodes"], **values["decode"]}}
        for word in path.split("."):
            if word == "options":
                break
            assert word in at, path
            at = at[word]


@needs_helm
def test_the_pages_names_are_those_of_its_release() -> None:
    """`helm install baton` makes each object that the page's commands name."""
    names = {each["metadata"]["name"] for each in rendered("trial")}
    commands = re.findall(r"(?:deploy|deployment|service)/(baton[\w-]*)", README)
    assert set(commands) <= names
    assert len(commands) >= 5


# ---- scripts, and what stands beside the chart ----


@pytest.mark.parametrize("version", VERSIONS)
def test_the_job_that_downloads_a_model_is_one(version: str) -> None:
    claim, job = parsed((KUBERNETES / "download_model.yaml").read_text())
    for each in (claim, job):
        assert not list(validator(version, each["kind"], each["apiVersion"]).iter_errors(each))
    pod = job["spec"]["template"]["spec"]
    assert violations(pod) == []
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


@pytest.mark.parametrize(
    "name", ["job", *(pytest.param(f"external_redis {each}", marks=needs_helm) for each in ROLES)]
)
def test_the_hubs_program_takes_the_command(name: str, tmp_path: Path) -> None:
    """Without a network it ends, but not because of how it is called: that would be status 2."""
    if name == "job":
        _, job = parsed((KUBERNETES / "download_model.yaml").read_text())
        (container,) = job["spec"]["template"]["spec"]["containers"]
    else:
        values, role = name.split()
        (pod,) = [pod for its, pod in processes(rendered(values)) if its == role]
        (container,) = pod["spec"]["initContainers"]
    program, *words = container["command"]
    words = [f"{tmp_path}{word}" if word.startswith("/") else word for word in words]
    told = subprocess.run(
        [Path(sys.executable).parent / program, *words],
        env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert told.returncode == 1, told.stdout + told.stderr
    assert "offline" in (told.stdout + told.stderr).lower()


@pytest.mark.parametrize("name", ["try_kubernetes.sh", "kubernetes/images.sh"])
def test_scripts_parse_and_may_be_run(name: str) -> None:
    script = ROOT / "deploy" / name
    assert os.access(script, os.X_OK)
    subprocess.run(["sh", "-n", str(script)], check=True)


@needs_helm
def test_the_try_names_pods_that_there_are() -> None:
    scripts = ("deploy/try_kubernetes.sh", "deploy/kubernetes/try_rotation.sh")
    script = "".join((ROOT / each).read_text() for each in scripts)
    workloads = {
        f"{each['kind'].lower()}/{each['metadata']['name']}"
        for values in ("trial", "tls")
        for each in of_kind(rendered(values), "Deployment", "StatefulSet")
    }
    named_there = set(re.findall(r"(?:statefulset|deployment)/baton-[a-z]+", script))
    assert named_there == workloads


def test_hadolint_of_the_models_image() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    file = str(KUBERNETES / "model.Dockerfile")
    told = subprocess.run([hadolint, file], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr


@needs_helm
def test_the_images_are_those_that_the_script_builds() -> None:
    script = (KUBERNETES / "images.sh").read_text()
    built = {"demo-model", *re.findall(r"ROLES:-([a-z ]+)", script)[0].split()}
    for _, pod in processes(rendered("trial")):
        for container in [*pod["spec"]["initContainers"], *pod["spec"]["containers"]]:
            name, _, tag = container["image"].partition(":")
            assert name.removeprefix("baton-") in built
            assert f"TAG=${{TAG:-{tag}}}" in script
