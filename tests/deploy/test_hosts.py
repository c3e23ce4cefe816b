"""deploy/hosts: each variable is an option of its process, each file is where README.md puts it."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.engine.config import EngineConfig
from baton.node.config import NodeConfig
from baton.runtime.config import load
from baton.runtime.redis.urls import check_redis_url
from baton.runtime.tls import TlsFiles
from router.config import RouterConfig
from tests.deploy.test_containers import image_environment

ROOT = Path(__file__).resolve().parents[2]
HOSTS = ROOT / "deploy" / "hosts"
ROLES = ("router", "prefill", "decode")
# Of the image's entry point, and of other programs.
OTHERS = {"BATON_GRACE_S", "XDG_CACHE_HOME"}
PLACES = {"secret", "redis_password", "baton.env", "api_keys.toml", "redis_users.acl"} | {
    f"tls/{name}" for name in ("host.pem", "host.key", "ca.pem")
}


def variables(text: str) -> dict[str, str]:
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def service(kind: str) -> dict[str, Any]:
    (found,) = yaml.safe_load((HOSTS / f"{kind}.yaml").read_text())["services"].values()
    return found


def unit(kind: str) -> list[tuple[str, str]]:
    """(name, value) of each line of a unit; lines that go on are joined."""
    text = (HOSTS / "systemd" / f"baton-{kind}.service").read_text().replace("\\\n", " ")
    return [
        (name, value)
        for name, sign, value in (line.partition("=") for line in text.splitlines())
        if sign and not name.startswith("#")
    ]


def of_compose(role: str) -> dict[str, str]:
    own = {name: str(value) for name, value in service(role)["environment"].items()}
    return image_environment(role) | variables((HOSTS / "baton.env").read_text()) | own


def of_unit(role: str) -> dict[str, str]:
    own = [value.partition("=") for name, value in unit(role) if name == "Environment"]
    shared = variables((HOSTS / "baton.env").read_text())
    return shared | {name: value for name, _, value in own}


def configured(role: str, environ: Mapping[str, str]) -> RouterConfig | NodeConfig:
    """The checked configuration of a process with these variables."""
    if role == "router":
        config: RouterConfig | NodeConfig = load(RouterConfig, {}, environ)
    else:
        config = load(NodeConfig, {}, environ)
        assert load(EngineConfig, {}, environ).model == "/srv/model"
    config.check()
    return config


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("read", [of_compose, of_unit])
def test_a_process_starts_with_these_variables(role: str, read: Any) -> None:
    config = configured(role, read(role))
    assert config.host == "0.0.0.0"
    assert not config.insecure
    assert config.secret_file == "/etc/baton/secret"
    assert config.tls is not None
    if isinstance(config, RouterConfig):
        assert (config.port, config.grpc_port) == (8000, 50051)
        assert config.node_tls == TlsFiles(*map(Path, _files()), prefix="node_tls")
        assert config.tls.ca is None, "clients need no certificate"
        assert config.api_keys == "/etc/baton/api_keys.toml"
    else:
        assert (config.port, config.kv_port, config.kv_stream_port) == (50061, 50062, 50063)
        assert (config.metrics_port, config.advertise_host) == (9090, "10.0.0.2")
        assert config.tls == config.kv_tls == TlsFiles(*map(Path, _files()), prefix="tls")
    assert config.health_port == 8080
    assert config.redis_url is not None
    check_redis_url(config.redis_url)


def _files() -> list[str]:
    return [f"/etc/baton/tls/{name}" for name in ("host.pem", "host.key", "ca.pem")]


@pytest.mark.parametrize("role", ROLES)
def test_no_variable_is_misspelt(role: str) -> None:
    classes = [RouterConfig] if role == "router" else [NodeConfig, EngineConfig]
    known = {f"BATON_{name.upper()}" for each in classes for name in each.__dataclass_fields__}
    for given in (service(role)["environment"], of_unit(role)):
        assert set(given) - OTHERS <= known | set(variables((HOSTS / "baton.env").read_text()))


def test_each_file_of_a_host_is_in_the_readme() -> None:
    told = (HOSTS / "README.md").read_text()
    for path in [*HOSTS.glob("*.yaml"), *HOSTS.glob("systemd/*"), HOSTS / "baton.env"]:
        used = set(re.findall(r"/etc/baton/([\w./]*\w)", path.read_text()))
        assert used <= PLACES, path.name
    for place in PLACES:
        assert place.rpartition("/")[2] in told or place.startswith("tls/"), place


@pytest.mark.parametrize("kind", [*ROLES, "redis"])
def test_containers_are_hardened_and_see_files_that_change(kind: str) -> None:
    found = service(kind)
    assert found["read_only"] is True
    assert found["cap_drop"] == ["ALL"]
    assert found["network_mode"] == "host"
    assert "/etc/baton:/etc/baton:ro" in [each.split(" ")[0] for each in found["volumes"]]
    stop = dict(unit(kind))["TimeoutStopSec"]
    assert found["stop_grace_period"] == f"{stop}s"


def test_units_run_baton_and_wait_until_it_has_drained() -> None:
    for role in ROLES:
        lines = dict(unit(role))
        assert lines["ExecStart"] == f"/opt/baton/bin/baton {role}"
        environ = of_unit(role)
        waits = environ["BATON_SHUTDOWN_S" if role == "router" else "BATON_DRAIN_S"]
        assert float(waits) < float(lines["TimeoutStopSec"])


def test_both_redis_speak_tls_alone() -> None:
    (_, _, script) = service("redis")["command"]
    for words in (shlex.split(script), shlex.split(dict(unit("redis"))["ExecStart"])):
        given = dict(pairwise(words))
        assert (given["--port"], given["--tls-port"]) == ("0", "6379")
        assert given["--tls-auth-clients"] == "yes"
        assert given["--tls-cert-file"] == "/etc/baton/tls/host.pem"
        assert given["--aclfile"].endswith("users.acl")


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    copies: list[str] = []
    for path in HOSTS.glob("systemd/*.service"):
        copy = tmp_path / path.name
        copy.write_text(re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", path.read_text()))
        copies.append(str(copy))
    assert len(copies) == 4
    told = subprocess.run(
        ["systemd-analyze", "verify", *copies],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert (told.returncode, told.stderr) == (0, "")


def test_the_script_makes_certificates_that_hosts_can_use(tmp_path: Path) -> None:
    folder = tmp_path / "certificates"
    make = [str(HOSTS / "make_certificates.sh"), str(folder)]
    subprocess.run([*make, "router=10.0.0.1", "redis=10.0.0.4"], check=True, timeout=60)
    before = (folder / "ca.pem").read_bytes()
    subprocess.run([*make, "decode-1=10.0.0.3"], check=True, timeout=60)
    assert (folder / "ca.pem").read_bytes() == before, "a second call keeps the CA"
    for name, address in (("router", "10.0.0.1"), ("decode-1", "10.0.0.3")):
        files = TlsFiles(
            *(folder / name / each for each in ("host.pem", "host.key", "ca.pem")), prefix="tls"
        )
        files.server_context()
        files.channel_credentials()
        for question in (("-verify_ip", address), ("-verify_hostname", name)):
            told = subprocess.run(
                ["openssl", "verify", *question, "-CAfile", str(files.ca), str(files.cert)],
                capture_output=True, text=True, check=False, timeout=60,
            )  # fmt: skip
            assert told.returncode == 0, told.stderr
        assert (files.key.stat().st_mode & 0o077) == 0
