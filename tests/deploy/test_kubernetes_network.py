"""Who may open a connection to whom, derived from the rendered objects.

The policies are read as Kubernetes does: a connection needs a rule of the policies that select its
source (egress) and one of those that select its target (ingress); a pod that no policy selects is
open. Each port of each container is tried from each pod of the release and from strangers, and what
is open must be exactly what USERS says. Whether a cluster enforces it, only a cluster shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.deploy.rendered_chart import (
    RENDERED,
    Json,
    main_container,
    needs_helm,
    of_kind,
    options_file,
    pods,
    rendered,
    rendered_values,
    role_of,
)

NODES = ("prefill", "decode", "encode")
CLIENT, MONITORING, GATEWAY, STRANGER = "a client", "Prometheus", "a gateway", "a stranger"
# What a port is for, by the first word of its name: who opens connections to it. A port whose name
# is not here fails the test: whoever adds one says who uses it.
USERS: dict[str, set[str]] = {
    "http": {CLIENT},
    "grpc": {CLIENT},
    "picker": {GATEWAY},
    "node": {"router"},
    "kv": {"prefill", "decode"},  # and rows of images; encode nodes fetch nothing
    "metrics": set(),  # MONITORING, where a release has it
    "health": set(),  # the kubelet, whom policies let in
    "redis": {"router", *NODES},
}
# What is open on no pod: the admin server, which listens on loopback, and what nothing listens at.
CLOSED = (22, 443, 6443, 9000, 50099)


@dataclass(frozen=True)
class Place:
    """A pod, or somebody outside: what policies select by. `ports`: name -> number."""

    name: str
    labels: dict[str, str] = field(default_factory=dict[str, str])
    namespace: dict[str, str] = field(default_factory=dict[str, str])  # its labels
    ports: dict[str, int] = field(default_factory=dict[str, int])


HOME = {"kubernetes.io/metadata.name": "serving"}


def places(objects: list[Json]) -> list[Place]:
    return [
        Place(
            role,
            pod["metadata"]["labels"],
            HOME,
            {port["name"]: port["containerPort"] for port in main_container(pod)["ports"]},
        )
        for role, pod in pods(objects)
    ]


def may(objects: list[Json], source: Place, target: Place, port: int) -> bool:
    """Whether `source` may open a TCP connection to a port of `target`."""
    policies = [each["spec"] for each in of_kind(objects, "NetworkPolicy")]
    out = [each for each in policies if governs(each, source, "Egress")]
    into = [each for each in policies if governs(each, target, "Ingress")]
    return (
        not out or any(opens(rule, "to", target, target, port) for rule in rules(out, "egress"))
    ) and (
        not into
        or any(opens(rule, "from", source, target, port) for rule in rules(into, "ingress"))
    )


def governs(policy: Json, place: Place, way: str) -> bool:
    labels = policy["podSelector"]["matchLabels"]
    return (
        place.namespace == HOME and way in policy["policyTypes"] and selects(labels, place.labels)
    )


def rules(policies: list[Json], way: str) -> Iterator[Json]:
    return (rule for each in policies for rule in each.get(way) or [])


def opens(rule: Json, way: str, peer: Place, target: Place, port: int) -> bool:
    """`peer`: the other end, which the rule's `from` or `to` must name."""
    named = [each for each in rule.get("ports", []) if each.get("protocol", "TCP") == "TCP"]
    numbers = {target.ports.get(each["port"], each["port"]) for each in named}
    if "ports" in rule and port not in numbers:
        return False
    return way not in rule or any(matches(each, peer) for each in rule[way])


def matches(each: Json, place: Place) -> bool:
    if "ipBlock" in each:
        return False  # an address outside the cluster
    where = each.get("namespaceSelector", {}).get("matchLabels", {})
    inside = (
        selects(where, place.namespace) if "namespaceSelector" in each else place.namespace == HOME
    )
    return inside and selects(each.get("podSelector", {}).get("matchLabels", {}), place.labels)


def selects(wanted: dict[str, str], labels: dict[str, str]) -> bool:
    return wanted.items() <= labels.items()


def outsiders(objects: list[Json]) -> list[Place]:
    """Somebody of each kind, in namespaces that values name, and some that nobody has named."""
    labels = places(objects)[0].labels
    return [
        Place(CLIENT, {"app": "front"}, {"kubernetes.io/metadata.name": "ingress"}),
        Place(GATEWAY, {"app": "envoy"}, {"kubernetes.io/metadata.name": "gateways"}),
        Place(MONITORING, {"app": "prometheus"}, {"kubernetes.io/metadata.name": "monitoring"}),
        Place(STRANGER, {"app": "other"}, {"kubernetes.io/metadata.name": "other"}),
        Place(STRANGER, {"app": "other"}, HOME),
        *(
            Place(STRANGER, labels | {"app.kubernetes.io/component": role}, {"a": "b"})
            for role in ("router", *NODES, "redis")
        ),
        *(
            Place(STRANGER, labels | changed, HOME)
            for role in ("router", *NODES, "redis")
            for changed in [
                {"app.kubernetes.io/component": role, "app.kubernetes.io/instance": "another"}
            ]
        ),
    ]


def users(port: str, *, narrow: bool, watched: bool) -> set[str]:
    """Who may use a port. `narrow`: values say who the clients are; `watched`: and who scrapes."""
    word = port.partition("-")[0]
    found = set(USERS[word])
    if CLIENT in found and not narrow:
        found |= {GATEWAY, MONITORING, STRANGER}  # everybody but this release's own pods
    if watched and word in ("metrics", "http"):
        found.add(MONITORING)
    return found


def prove(objects: list[Json], *, narrow: bool = False, watched: bool = False) -> None:
    """Each port is open to its users, and nothing is open to anybody else."""
    inside = places(objects)
    for target in inside:
        wanted = {
            number: users(name, narrow=narrow, watched=watched)
            for name, number in target.ports.items()
        }
        everywhere = {number for each in inside for number in each.ports.values()}
        for port in everywhere | set(CLOSED):
            for source in [*inside, *outsiders(objects)]:
                assert may(objects, source, target, port) == (
                    source.name in wanted.get(port, set())
                ), (source, target.name, port)


@pytest.mark.parametrize("name", RENDERED)
def test_each_port_is_open_to_its_users_and_to_nobody_else(name: str) -> None:
    if name == "gpu rdma":
        assert of_kind(rendered(name), "NetworkPolicy") == []
        return
    prove(rendered(name), narrow=name == "ha", watched="monitoring" in name)


@needs_helm
@pytest.mark.parametrize(
    "options", [{"data-parallel-size": 3}, {"kv-lanes": "auto"}, {"kv-lanes": "dist,nixl,grpc"}]
)
def test_ports_of_ranks_and_lanes_are_open_too(options: Json) -> None:
    prove(
        rendered_values(
            {"model": {"hub": "a/b"}, "nodes": {"options": options}, "encode": {"replicas": 1}}
        )
    )


@needs_helm
def test_roles_may_have_other_lanes_than_each_other() -> None:
    """A decode node calls the ports of a prefill node, not its own."""
    objects = rendered_values({
        "model": {"hub": "a/b"},
        "prefill": {"options": {"data-parallel-size": 2, "kv-lanes": "stream"}},
        "decode": {"options": {"kv_lanes": "grpc"}},
    })  # fmt: skip
    prove(objects)
    ports = {place.name: sorted(place.ports.values()) for place in places(objects)}
    assert ports["prefill"] == [8080, 8081, 9090, 9091, 50061, 50062, 50065, 50069]
    assert ports["decode"] == [8080, 9090, 50061, 50062]


@pytest.mark.parametrize("name", RENDERED)
def test_pods_go_nowhere_else(name: str) -> None:
    """Beyond the release: names (DNS), an API server if they keep a cost, and what values name."""
    objects = rendered(name)
    for policy in of_kind(objects, "NetworkPolicy"):
        role = role_of(policy)
        beyond = [
            {port["port"] for port in rule["ports"]}
            for rule in policy["spec"]["egress"]
            if not all("podSelector" in peer for peer in rule.get("to", [{}]))
        ]
        wanted: list[set[int]] = []
        if role != "redis":
            wanted.append({53})
            if "keda" in name and role in NODES:
                wanted.append({443, 6443})
            wanted += {"ha": [{6379}], "external_redis": [{6380}, {443}]}.get(name, [])
        assert beyond == wanted, role


@needs_helm
def test_where_the_api_server_is_can_be_said() -> None:
    where = [{"ipBlock": {"cidr": "10.0.0.1/32"}}]
    objects = rendered_values({
        "model": {"hub": "a/b"}, "decode": {"deletionCost": True}, "network": {"apiServer": where},
    })  # fmt: skip
    for policy in of_kind(objects, "NetworkPolicy"):
        found = [rule for rule in policy["spec"]["egress"] if {"port": 6443} in rule["ports"]]
        assert [rule["to"] for rule in found] == ([where] if role_of(policy) == "decode" else [])


def test_the_reading_of_policies_is_kubernetes_own() -> None:
    """Where nothing is said, all is open; where something is said, only that."""
    target = Place("a", {"app": "a"}, HOME, {"web": 80})
    source = Place("b", {"app": "b"}, HOME)
    peer = {"podSelector": {"matchLabels": {"app": "b"}}}
    spec: dict[str, Any] = {
        "podSelector": {"matchLabels": {"app": "a"}}, "policyTypes": ["Ingress"],
        "ingress": [{"ports": [{"port": "web"}], "from": [peer]}],
    }  # fmt: skip
    policy = {"kind": "NetworkPolicy", "spec": spec}
    assert may([], source, target, 80)
    assert may([policy], source, target, 80)
    assert not may([policy], source, target, 81)
    assert not may([policy], Place("b", {"app": "b"}, {"x": "y"}), target, 80)
    assert not may([policy], Place("c", {"app": "c"}, HOME), target, 80)
    assert may([policy], target, source, 80), "its own way out is not governed"
    spec["ingress"][0]["from"] = [{"namespaceSelector": {"matchLabels": {"x": "y"}}}]
    assert may([policy], Place("b", {"app": "b"}, {"x": "y"}), target, 80)
    assert not may([policy], source, target, 80)
    spec["ingress"] = []
    assert not may([policy], source, target, 80)


@pytest.mark.parametrize("name", RENDERED)
def test_the_admin_server_has_no_port_on_the_network(name: str) -> None:
    objects = rendered(name)
    told = options_file(objects, "router")
    assert "admin-host" not in told, "its default is loopback"
    for place in places(objects):
        assert 9000 not in place.ports.values()
