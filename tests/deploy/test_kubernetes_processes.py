"""What the chart's processes are told, against Baton's own parsers and the images.

Each container is followed as Kubernetes would start it: its environment (with a stand-in for what a
Secret or the pod gives), the image's environment and entry point, and the file of options.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

from baton.engine.config import EngineConfig
from baton.node.config import NodeConfig
from baton.node.data_ranks import options_of_ranks
from baton.node.lanes import AFTER_STREAM, parse_lanes, row_lanes
from baton.protocol.clock import SystemClock
from baton.protocol.handles import Role
from baton.runtime.health_port import Health
from router.config import RouterConfig
from tests.deploy.rendered_chart import (
    KUBERNETES,
    RENDERED,
    ROOT,
    Json,
    main_container,
    named,
    needs_helm,
    node_roles,
    of_kind,
    options_file,
    pods,
    processes,
    rendered,
    rendered_values,
    role_of,
)
from tests.deploy.test_containers import CACHE, image_environment, last, parse, started

OPTIONS = "/etc/baton/options/options.yaml"
# What is no option: the entry point reads the first, and the second is a part of a URL.
OTHER_NAMES = {"BATON_GRACE_S", "POD_IP", "REDIS_PASSWORD", "UCX_NET_DEVICES"}
CONFIGS = {
    "router": (RouterConfig,),
    "prefill": (NodeConfig, EngineConfig),
    "decode": (NodeConfig, EngineConfig),
    "encode": (NodeConfig, EngineConfig),
}


def environment(container: Json) -> dict[str, str]:
    """A container's variables as Kubernetes sets them: `$(NAME)` is an earlier one's value."""
    made: dict[str, str] = {}
    for each in container["env"]:
        if "value" in each:
            value = each["value"]
            for name, known in made.items():
                value = value.replace(f"$({name})", known)
        elif "fieldRef" in each["valueFrom"]:
            given = {"status.podIP": "10.9.8.7", "metadata.name": "pod-0"}
            value = given[each["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            value = f"the-{each['valueFrom']['secretKeyRef']['key']}"
            value = "rediss://a:b@redis.example:6380/0" if value == "the-redis-url" else value
        assert "$(" not in value
        made[each["name"]] = value
    return made


@cache
def configured(name: str, role: str) -> list[Any]:
    """The configurations that a role's processes run with; an unknown option ends the test."""
    return configuration(rendered(name), role)


def configuration(objects: list[Json], role: str) -> list[Any]:
    (container,) = [main_container(pod) for its, pod in pods(objects) if its == role]
    assert container["args"] == ["--config", OPTIONS]
    with TemporaryDirectory() as folder:
        file = Path(folder, "options.yaml")
        file.write_text(options_file(objects, role))
        words = [str(file) if word == OPTIONS else word for word in container["args"]]
        return parse(*started(role, Path(folder), words, environment(container)))


@pytest.mark.parametrize("name", RENDERED)
def test_baton_takes_each_option_and_may_start(name: str) -> None:
    for role, pod in processes(rendered(name)):
        config, *engine = configured(name, role)
        config.check()  # a secret or key, and TLS or --insecure
        assert config.host == "0.0.0.0"
        assert config.secret_file == mounted_secret(pod)
        assert config.redis_url.partition("://")[0] in ("redis", "rediss")
        model = engine[0].model if engine else config.model
        assert model == "/model"
        served = engine[0].served_model_name if engine else config.served_model_name
        assert served


def mounted_secret(pod: dict[str, Any]) -> str:
    """Where a pod finds the key `secret` of the Secret."""
    [volume] = [each for each in pod["spec"]["volumes"] if each["name"] == "secret"]
    [item] = volume["secret"]["items"]
    assert (volume["secret"]["secretName"], item["key"]) == ("baton", "secret")
    mounts = main_container(pod)["volumeMounts"]
    [mount] = [each for each in mounts if each["name"] == "secret"]
    assert "subPath" not in mount, "a file that is mounted so never changes"
    return f"{mount['mountPath']}/{item['path']}"


@pytest.mark.parametrize("name", RENDERED)
def test_each_option_in_a_file_is_one_of_its_process(name: str) -> None:
    """Nodes and routers ignore nothing: what the file says is what some configuration has."""
    objects = rendered(name)
    for role, _ in processes(objects):
        known = {spec.name for config in CONFIGS[role] for spec in dataclasses.fields(config)}
        told = yaml.safe_load(options_file(objects, role))
        assert {key.replace("-", "_") for key in told} <= known


@pytest.mark.parametrize("name", RENDERED)
def test_each_variable_is_one_that_baton_reads(name: str) -> None:
    for role, pod in processes(rendered(name)):
        known = {
            f"BATON_{spec.name.upper()}"
            for config in CONFIGS[role]
            for spec in dataclasses.fields(config)
        }
        told = {each["name"] for each in main_container(pod)["env"]}
        assert told <= known | OTHER_NAMES, role
        assert pod["spec"]["enableServiceLinks"] is False, "a service `baton` sets BATON_PORT"


def test_the_grace_period_is_a_variable_of_the_entry_point() -> None:
    assert "${BATON_GRACE_S:-" in (ROOT / "deploy/image/entrypoint.sh").read_text()


@pytest.mark.parametrize("name", RENDERED)
def test_a_process_has_ended_when_it_is_killed(name: str) -> None:
    """The time to drain is less than that between SIGTERM and SIGKILL; no hook takes some of it."""
    objects = rendered(name)
    for role, pod in processes(objects):
        container = main_container(pod)
        grace = pod["spec"]["terminationGracePeriodSeconds"]
        assert environment(container)["BATON_GRACE_S"] == str(grace)
        assert "lifecycle" not in container
        (config, *_) = configured(name, role)
        drain = config.drain_s + (config.shutdown_s if role == "router" else 0)
        assert grace - 6 <= drain <= grace - 5
        if role == "router":
            assert config.drain_s >= 5, "balancers notice"


@pytest.mark.parametrize("name", RENDERED)
def test_ports_are_the_images_and_probes_ask_pages_that_there_are(name: str) -> None:
    health = Health(SystemClock(), 60.0)
    for role, pod in processes(rendered(name)):
        container = main_container(pod)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        ports.pop("picker", None)  # what is optional is not in the image
        assert set(ports.values()) <= set(map(int, last("EXPOSE", role).split()))
        assert ports["health"] == int(image_environment(role)["BATON_HEALTH_PORT"])
        pages = {}
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            asked = container[kind]["httpGet"]
            assert asked["port"] == "health"
            assert health.answer(asked["path"]) is not None
            pages[kind] = asked["path"]
        assert pages == {
            "startupProbe": "/startupz", "livenessProbe": "/livez", "readinessProbe": "/readyz",
        }  # fmt: skip
        probe = container["startupProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] >= 300


PORTS = {
    "http": "port", "grpc": "grpc_port", "node": "port", "kv-grpc": "kv_port",
    "kv-stream": "kv_stream_port", "metrics": "metrics_port", "health": "health_port",
}  # fmt: skip


@pytest.mark.parametrize("name", RENDERED)
def test_a_ports_name_is_what_listens_there(name: str) -> None:
    objects = rendered(name)
    for role, pod in processes(objects):
        config, *engine = configured(name, role)
        ports = {port["name"]: port["containerPort"] for port in main_container(pod)["ports"]}
        for port, number in ports.items():
            if port in PORTS:
                assert getattr(config, PORTS[port]) == number
        if role == "router":
            picker = set() if config.picker_port is None else {config.picker_port}
            own = {config.port, config.grpc_port, config.health_port}
            assert set(ports.values()) == own | picker
        else:
            assert sorted(ports.values()) == sorted(listening(role, config, engine[0]))
    for service in of_kind(objects, "Service"):
        for port in service["spec"]["ports"]:
            assert port["name"] == port["targetPort"]
            if role_of(service) != "redis":
                (pod,) = [pod for role, pod in pods(objects) if role == role_of(service)]
                listed = main_container(pod)["ports"]
                assert {"name": port["name"], "containerPort": port["port"]} in listed


def listening(role: str, config: NodeConfig, engine: EngineConfig) -> list[int]:
    """Every port that a node's process opens, those of all data-parallel ranks."""
    names = parse_lanes(config.kv_lanes)
    if role == "encode":
        names = row_lanes(names)
    found = list[int]()
    for rank in options_of_ranks(config, engine, Role(role), "/tmp"):
        own = rank.config
        lanes = {name: own.kv_stream_port + AFTER_STREAM.get(name, 0) for name in names}
        lanes |= {"grpc": own.kv_port}
        assert own.metrics_port is not None
        assert own.health_port is not None
        found += [own.port, own.metrics_port, own.health_port, *(lanes[name] for name in names)]
    return found


@needs_helm
@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"kv-lanes": "auto"}, 3),
        ({"kv-lanes": "shm"}, 1),
        ({"kv-lanes": "grpc"}, 1),
        ({"kv-lanes": "nixl, dist,stream"}, 3),
        ({"data-parallel-size": 3}, 6),
        ({"data-parallel-size": 2, "kv-lanes": "stream,shm,grpc"}, 6),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_no_two_ports_meet_whatever_the_lanes_and_ranks(options: Json, count: int) -> None:
    values = {"model": {"hub": "a/b"}, "nodes": {"options": options}, "encode": {"replicas": 1}}
    objects = rendered_values(values)
    for role in node_roles(objects):
        config, engine = configuration(objects, role)
        (pod,) = [pod for its, pod in pods(objects) if its == role]
        listed = [port["containerPort"] for port in main_container(pod)["ports"]]
        assert sorted(listed) == sorted(set(listening(role, config, engine)))
        assert len(set(listed)) == len(listed)
        names = [port["name"] for port in main_container(pod)["ports"]]
        assert all(len(each) <= 15 for each in names), "Kubernetes takes no longer one"
        assert len(set(names)) == len(names)
        if role != "encode":
            assert sum(each.startswith("kv-") for each in names) == count


@pytest.mark.parametrize("name", RENDERED)
def test_what_is_read_is_mounted_and_what_is_written_is_not_read_only(name: str) -> None:
    objects = rendered(name)
    for role, pod in processes(objects):
        mounts = {each["mountPath"]: each for each in main_container(pod)["volumeMounts"]}
        read = [OPTIONS, "/model"]
        for config in configured(name, role):
            values = (getattr(config, spec.name) for spec in dataclasses.fields(config))
            read += [each for each in values if str(each).startswith("/etc/")]
        for path in read:
            above = [mount for mount in mounts if Path(path).is_relative_to(mount)]
            assert above, path
            assert mounts[above[0]]["readOnly"] is True
        written = ["/tmp", image_environment(role)["HF_HOME"]]
        if role != "router":
            written += [CACHE, image_environment(role)["TRITON_CACHE_DIR"], "/dev/shm"]
        for path in written:
            above = [mount for mount in mounts if Path(path).is_relative_to(mount)]
            assert above, path
            assert not mounts[above[0]].get("readOnly")
        assert pod["spec"]["securityContext"]["runAsUser"] == int(last("USER", role))


@pytest.mark.parametrize("name", RENDERED)
def test_all_that_a_pod_wants_of_the_secret_is_in_its_description(name: str) -> None:
    """values.yaml names each key of the Secret."""
    described = (KUBERNETES / "chart" / "values.yaml").read_text().partition("secret: baton")[0]
    for _, pod in pods(rendered(name)):
        for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
            for each in container.get("env", []):
                if "secretKeyRef" in each.get("valueFrom", {}):
                    key = each["valueFrom"]["secretKeyRef"]["key"]
                    assert f"`{key}`" in described or key in described.split()


# ---- names and certificates ----


@needs_helm
@pytest.mark.parametrize("name", ["tls", "tls images"])
def test_a_certificate_names_every_node(name: str) -> None:
    objects = rendered(name)
    (certificate,) = of_kind(objects, "Certificate")
    for role in node_roles(objects):
        (pod,) = [each for its, each in processes(objects) if its == role]
        announced = environment(main_container(pod))["BATON_ADVERTISE_HOST"]
        first, _, rest = announced.partition(".")
        assert first == "pod-0"
        assert f"*.{rest}" in certificate["spec"]["dnsNames"]
        service = named(objects, "Service", rest.partition(".")[0])
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"] is True
        workload = named(objects, "StatefulSet", rest.partition(".")[0])
        assert workload["spec"]["serviceName"] == service["metadata"]["name"]
        secrets = [volume.get("secret", {}).get("secretName") for volume in pod["spec"]["volumes"]]
        assert certificate["spec"]["secretName"] in secrets
    assert set(certificate["spec"]["usages"]) >= {"server auth", "client auth"}


@needs_helm
@pytest.mark.parametrize("name", ["tls", "tls mutual_tls", "tls images"])
def test_with_tls_nothing_is_insecure(name: str) -> None:
    for role, _ in processes(rendered(name)):
        (config, *_) = configured(name, role)
        assert config.insecure is False
        assert config.tls is not None
        if role == "router":
            assert config.node_tls is not None
            assert (config.tls.ca is not None) == (name == "tls mutual_tls")
        else:
            assert config.tls.ca is not None


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
def test_without_tls_nodes_announce_their_address(role: str) -> None:
    (config, *_) = configured("base", role)
    assert config.insecure is True
    if role != "router":
        assert config.advertise_host == "10.9.8.7"
        assert config.node_id == "pod-0"


@needs_helm
def test_keys_with_tenants_take_the_place_of_the_plain_one() -> None:
    (config,) = configured("ha", "router")
    assert config.api_keys == "/etc/baton/keys/keys.toml"
    assert config.api_key == ()
    assert (config.admin_port, config.admin_host) == (9000, "127.0.0.1")
    assert config.admin_key == ("the-admin-key",)
    assert config.max_request_tokens == 1 << 20  # Helm writes 1.048576e+06


@needs_helm
def test_a_picker_names_its_own_router_or_what_it_is_told() -> None:
    (config,) = configured("picker", "router")
    assert (config.picker_port, config.picker_router) == (9002, ("10.9.8.7:8000",))
    options = {"picker-port": 9002, "picker-router": ["10.96.0.9:8000"]}
    values = {
        "model": {"hub": "a/b"}, "router": {"options": options}, "network": {"gateways": [{}]},
    }  # fmt: skip
    (told,) = configuration(rendered_values(values), "router")
    assert told.picker_router == ("10.96.0.9:8000",)


# ---- Redis ----


def test_redis_knows_batons_user_and_password() -> None:
    objects = rendered("base")
    (users,) = [
        each["data"]["redis_users.acl"]
        for each in of_kind(objects, "ConfigMap")
        if role_of(each) == "redis"
    ]
    assert users.strip() == (ROOT / "deploy/redis_users.acl").read_text().strip()
    (pod,) = [pod for role, pod in pods(objects) if role == "redis"]
    container = main_container(pod)
    (variable,) = container["env"]
    (told,) = container["args"]
    assert f"${variable['name']}" in told
    for _, other in processes(objects):
        given = {each["name"]: each for each in main_container(other)["env"]}
        assert given["REDIS_PASSWORD"]["valueFrom"] == variable["valueFrom"]
        host = given["BATON_REDIS_URL"]["value"].rpartition("@")[2].partition(":")[0]
        assert named(objects, "Service", host)["spec"]["ports"][0]["port"] == 6379
