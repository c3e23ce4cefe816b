"""Every flag of router, nodes and engine is one of `baton up`: it arrives, or is refused.

Made of the configurations themselves: one that is added later is tested here without a line more.
"""

from __future__ import annotations

import argparse
import os
import typing
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import pytest

from baton.engine.config import EngineConfig
from baton.node.config import NodeConfig
from baton.protocol.errors import ConfigError
from baton.runtime.config import add_options, load
from deploy import cli
from deploy.flags import REFUSED, option_names
from deploy.plan import UpOptions, node_command, plan_cluster, router_command
from router.config import RouterConfig

CONFIGS = (RouterConfig, NodeConfig, EngineConfig)
# What `up` gives its processes itself, whatever it is told: their own ports, names, cores, nodes.
PORTS_OF_NODES = {"health_port", "metrics_port", "port"}
# The front door's alone: nodes listen on loopback, without TLS.
FRONT_DOOR = {"host", "tls_cert", "tls_key", "tls_ca", "insecure"}
# Refused by the others.
OF_PREFILL = {"vision_tower"}
# Travel in the environment, where `ps` does not show them.
IN_ENVIRONMENT = {"admin_key", "api_key", "secret"}
# Where a 7 is no value: the option's own rules say more than its type.
SAMPLES: dict[str, Any] = {
    "gpu_memory_utilization": 0.7, "kv_cache_memory": "7MB", "kv_lanes": "grpc",
    "max_num_batched_tokens": 77, "redis_url": "redis://h:7", "speculative_method": "ngram",
}  # fmt: skip
# Options that are given together.
BESIDE = {"speculative_model": ["--speculative-method", "draft"], "tls_key": ["--tls-cert", "c"]}


def options_of(cls: type) -> list[Field[Any]]:
    return [spec for spec in fields(cls) if "help" in spec.metadata]


def sample(cls: type, spec: Field[Any]) -> tuple[list[str], Any]:
    """A value that is not the default: as words of a command line, and as it must arrive."""
    kind = typing.get_type_hints(cls)[spec.name]
    if spec.name in SAMPLES:
        return [str(SAMPLES[spec.name])], SAMPLES[spec.name]
    if kind is bool:
        return ([], True) if spec.default is False else ([], False)
    if spec.metadata["choices"]:
        other = next(each for each in spec.metadata["choices"] if each != spec.default)
        return [other], other
    names = {*typing.get_args(kind), kind}
    if typing.get_origin(kind) is tuple:
        return (["7"], (7,)) if int in names else (["7=x"], ("7=x",))
    return ["7"], "7" if str in names else Path("7") if Path in names else 7


def given(cls: type, spec: Field[Any]) -> list[str]:
    """The flag with its sample."""
    words, value = sample(cls, spec)
    flag = spec.name.replace("_", "-")
    return [f"--no-{flag}"] if value is False else [f"--{flag}", *words]


def commands(*words: str) -> dict[str, list[str]]:
    """The command line of each process, without anything being looked at on the disk."""
    arguments = cli.build_parser().parse_args(["up", "--model", "m", *words])
    options = load(UpOptions, arguments, {})
    flags = cli.given_flags(arguments, UpOptions)
    plan = plan_cluster(options, [0, 1], options.port or 0, options.grpc_port or 0)
    made = {node.role: node_command(node, options, flags, options.redis_url) for node in plan.nodes}
    return {**made, "router": router_command(plan, options, flags, options.redis_url)}


def parsed(cls: type, command: list[str], name: str) -> Any:
    """What the process of this command line takes the option for, as its own `main` reads it."""
    parser = argparse.ArgumentParser()
    for config in (RouterConfig,) if cls is RouterConfig else (NodeConfig, EngineConfig):
        add_options(parser, config)
    return getattr(load(cls, parser.parse_args(command[3:]), {}), name)


def cases() -> list[Any]:
    return [
        pytest.param(cls, spec, id=f"{cls.__name__}-{spec.name}")
        for cls in CONFIGS
        for spec in options_of(cls)
        if spec.name not in REFUSED and not spec.metadata["secret"]
    ]


@pytest.mark.parametrize(("cls", "spec"), cases())
def test_a_flag_arrives_at_every_process_that_has_it(cls: type, spec: Field[Any]) -> None:
    words = given(cls, spec) + BESIDE.get(spec.name, [])
    made = commands(*words)
    _, wanted = sample(cls, spec)
    if spec.name in IN_ENVIRONMENT:
        arguments = cli.build_parser().parse_args(["up", *words])
        assert getattr(load(UpOptions, arguments, {}), spec.name) == wanted
        return
    if cls is RouterConfig:
        assert parsed(cls, made["router"], spec.name) == wanted
        return
    if spec.name in FRONT_DOOR | PORTS_OF_NODES:
        return  # never a single node's: see the next test
    for role in ("prefill",) if spec.name in OF_PREFILL else ("prefill", "decode"):
        assert parsed(cls, made[role], spec.name) == wanted, role


def test_what_is_the_front_doors_never_reaches_a_node() -> None:
    words = ["--host", "10.0.0.9", "--port", "7", "--insecure", "--tls-cert", "c", "--tls-key", "k"]
    made = commands(*words)
    for role in ("prefill", "decode"):
        assert parsed(NodeConfig, made[role], "host") == "127.0.0.1"
        assert parsed(NodeConfig, made[role], "port") == 0
        assert parsed(NodeConfig, made[role], "tls_cert") is None
        assert not parsed(NodeConfig, made[role], "insecure")


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_flag_without_sense_is_refused_with_the_sentence_why(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = "--" + name.replace("_", "-")
    assert cli.main(["up", flag, "7"] if name != "reuse_port" else ["up", flag]) == 2
    told = capsys.readouterr().err
    assert told == f"baton: {flag} is no flag of `baton up`: {REFUSED[name]}\n"


def test_every_option_has_a_place() -> None:
    """A flag, or refused by name; secrets are the environment's."""
    parser = argparse.ArgumentParser()
    cli.add_flags(parser, UpOptions)
    known = {action.dest for action in parser._actions}
    secret = {spec.name for cls in CONFIGS for spec in options_of(cls) if spec.metadata["secret"]}
    wanted = frozenset().union(*map(option_names, CONFIGS))
    assert wanted - known <= secret
    assert REFUSED.keys() <= wanted, "only what there is needs a refusal"
    own = option_names(UpOptions)
    assert not REFUSED.keys() & own


def test_values_that_a_process_would_refuse_stop_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in os.environ if name.startswith("BATON_")]:
        monkeypatch.delenv(name)
    for words, field in (
        (["--request-timeout-s", "0"], "request_timeout_s"),
        (["--max-queued-fetches", "0"], "max_queued_fetches"),
        (["--max-live-requests", "none"], "max_live_requests"),
        (["--drain-s", "-1"], "drain_s"),
        (["--enable-auto-tool-choice"], "tool_call_parser"),
    ):
        arguments = cli.build_parser().parse_args(["up", *words])
        with pytest.raises(ConfigError) as caught:
            cli.up_settings(arguments)
        assert caught.value.field == field


def test_a_long_drain_is_waited_for() -> None:
    assert (UpOptions().router_stop_s, UpOptions().node_stop_s) == (10.0, 8.0)
    patient = UpOptions(drain_s=30.0, shutdown_s=20.0)
    assert patient.router_stop_s > 50.0
    assert patient.node_stop_s > 30.0
