"""What the chart's pods may do: their accounts of the API server."""

from __future__ import annotations

from typing import Any

import pytest

from baton.node.config import NodeConfig
from tests.deploy.rendered_chart import (
    RENDERED,
    Json,
    main_container,
    named,
    needs_helm,
    of_kind,
    pods,
    processes,
    rendered,
    role_of,
)

NODES = ("prefill", "decode", "encode")
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
WITH_COSTS = "images monitoring keda"  # whose nodes keep their pods' deletion cost


def account_volumes(pod: Json) -> list[Json]:
    return [each for each in pod["spec"]["volumes"] if "projected" in each]


@pytest.mark.parametrize("name", RENDERED)
def test_pods_have_no_right_and_no_token_unless_they_keep_a_cost(name: str) -> None:
    objects = rendered(name)
    allowed = {
        subject["name"]
        for binding in of_kind(objects, "RoleBinding", "ClusterRoleBinding")
        for subject in binding["subjects"]
    }
    for role, pod in pods(objects):
        keeps = "keda" in name and role in NODES
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert (pod["spec"]["serviceAccountName"] in allowed) == keeps, role
        assert bool(account_volumes(pod)) == keeps, role
    for account in of_kind(objects, "ServiceAccount"):
        assert account["automountServiceAccountToken"] is False


@needs_helm
def test_the_only_right_is_to_patch_pods_status_in_the_own_namespace() -> None:
    objects = rendered(WITH_COSTS)
    assert of_kind(objects, "ClusterRole", "ClusterRoleBinding") == []
    (role,) = of_kind(objects, "Role")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods/status"], "verbs": ["patch"]}]
    (binding,) = of_kind(objects, "RoleBinding")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (subject,) = binding["subjects"]
    assert (subject["kind"], subject["namespace"]) == ("ServiceAccount", "serving")
    assert named(objects, "ServiceAccount", subject["name"])


@needs_helm
def test_a_nodes_container_alone_has_the_files_that_it_reads() -> None:
    for role, pod in processes(rendered(WITH_COSTS)):
        if role == "router":
            continue
        (volume,) = account_volumes(pod)
        mounted = {
            container["name"]: each["mountPath"]
            for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]
            for each in container["volumeMounts"]
            if each["name"] == volume["name"]
        }
        assert mounted == {role: ACCOUNT}
        assert NodeConfig().service_account == ACCOUNT
        assert files_of(volume["projected"]["sources"]) == {"token", "ca.crt", "namespace"}
        environment = {each["name"]: each for each in main_container(pod)["env"]}
        field = environment["BATON_POD_NAME"]["valueFrom"]["fieldRef"]["fieldPath"]
        assert field == "metadata.name"


def files_of(sources: list[Json]) -> set[str]:
    """The names of the files that a projected volume has."""
    found = set[str]()
    for source in sources:
        (content,) = source.values()
        found |= {each["path"] for each in content.get("items", [content])}
    return found


@needs_helm
def test_nodes_that_keep_a_cost_may_reach_an_api_server() -> None:
    policies: dict[str, Any] = {
        role_of(each): each["spec"]["egress"]
        for each in of_kind(rendered(WITH_COSTS), "NetworkPolicy")
    }
    for role, egress in policies.items():
        ports = {port["port"] for rule in egress for port in rule["ports"]}
        assert ({443, 6443} <= ports) == (role in NODES), role
