"""What `baton up` decides before it starts anything."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.config import EngineConfig
from baton.protocol.errors import ConfigError
from baton.runtime.config import load
from deploy.plan import (
    ClusterPlan,
    UpOptions,
    computes_on_cpu,
    node_command,
    node_options,
    plan_cluster,
    router_command,
    split_cores,
    to_flags,
)


def plan_for(options: UpOptions, cores: list[int]) -> ClusterPlan:
    return plan_cluster(options, cores, 9000, 9001)


def flags_of(command: list[str]) -> dict[str, list[str]]:
    """`--name value` pairs of a command line."""
    found: dict[str, list[str]] = {}
    for name, value in zip(command[3::2], command[4::2], strict=True):
        found.setdefault(name, []).append(value)
    return found


@given(st.integers(1, 64), st.integers(1, 20))
def test_cores_are_split_evenly_without_sharing(num_cores: int, num_nodes: int) -> None:
    shares = split_cores(range(num_cores), num_nodes)
    assert len(shares) == num_nodes
    assert all(shares)
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    used = [core for share in shares for core in share]
    if num_cores >= num_nodes:
        assert sorted(used) == list(range(num_cores))
    else:
        assert set(used) <= set(range(num_cores))


def test_two_cores_prefill_and_decode_apart() -> None:
    plan = plan_for(UpOptions(), [0, 1])
    assert [(node.name, node.cores) for node in plan.nodes] == [
        ("prefill-0", (0,)),
        ("decode-0", (1,)),
    ]
    assert plan.router_cores == (0,)  # beside prefill, away from decode
    assert (plan.router_port, plan.grpc_port) == (9000, 9001)
    assert {node.port for node in plan.nodes} == {0}  # each takes a free one


def test_colocated_takes_every_core_and_no_prefill_node() -> None:
    plan = plan_for(UpOptions(colocated=True), [0, 1])
    assert [(node.role, node.cores) for node in plan.nodes] == [("decode", (0, 1))]
    assert plan.router_cores == (0, 1)


def test_three_prefill_two_decode() -> None:
    plan = plan_for(UpOptions(prefill=3, decode=2), [4, 5, 6, 7, 8])
    assert [node.name for node in plan.nodes] == [
        "prefill-0", "prefill-1", "prefill-2", "decode-0", "decode-1",
    ]  # fmt: skip
    assert plan.router_cores == (4, 5, 6)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("decode", -1),
        ("prefill", 0),
        ("decode", 65),
        ("port", 70000),
        ("grpc_port", -1),
        ("admin_port", 65536),
    ],
)
def test_impossible_numbers_are_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(ConfigError) as caught:
        load(UpOptions, {name: value})
    assert caught.value.field == name


def test_an_encoder_has_prefill_nodes_only() -> None:
    options = load(UpOptions, {"prefill": 2}).of_model("embed")
    plan = plan_cluster(options, [0, 1], 1, 2)
    assert [node.name for node in plan.nodes] == ["prefill-0", "prefill-1"]
    assert "kv_lanes" not in node_options("prefill", options, {})
    for values, task, field in (
        ({"decode": 2}, "embed", "decode"),
        ({"colocated": True}, "score", "colocated"),
        ({"decode": 0}, None, "decode"),
    ):
        with pytest.raises(ConfigError) as caught:
            load(UpOptions, values).of_model(task)
        assert caught.value.field == field
    assert load(UpOptions, {}).of_model(None) == UpOptions()


def test_ports_differ() -> None:
    for taken in ("port", "grpc_port"):
        with pytest.raises(ConfigError) as caught:
            load(UpOptions, {taken: 9000, "admin_port": 9000})
        assert caught.value.field == "admin_port"
    load(UpOptions, {"port": 0, "admin_port": 0})


def test_node_command_carries_the_engine_flags() -> None:
    options = UpOptions(prefill_block_size=64)
    plan = plan_for(options, [0, 1])
    engine = {"model": "/m", "block_size": "16", "enable_prefix_caching": False, "threads": None}
    prefill, decode = (node_command(node, options, engine, "unix:///r") for node in plan.nodes)
    assert prefill[:3] == [sys.executable, "-m", "prefill_node"]
    assert decode[:3] == [sys.executable, "-m", "decode_node"]
    assert prefill[prefill.index("--block-size") + 1] == "64"
    assert decode[decode.index("--block-size") + 1] == "16"
    assert "--no-enable-prefix-caching" in decode
    assert "--threads" not in decode
    assert decode[decode.index("--redis-url") + 1] == "unix:///r"
    assert decode[decode.index("--cpu-cores") + 1] == "1"
    assert decode[decode.index("--metrics-port") + 1] == "0"


def test_ranks_of_a_node_take_free_ports() -> None:
    options = UpOptions()
    [node, _] = plan_for(options, [0, 1]).nodes
    node = replace(node, port=7000, metrics_port=7001)
    for size, ports in (("1", ["7000", "7001"]), ("2", ["0", "0"])):
        engine = {"model": "/m", "data_parallel_size": size}
        told = flags_of(node_command(node, options, engine, "unix:///r"))
        assert told["--port"] + told["--metrics-port"] == ports
        assert told["--data-parallel-size"] == [size]


@pytest.mark.parametrize(
    ("engine", "prefill_nodes", "tokens"),
    [
        ({"device": "cpu"}, 1, ["512", "128"]),
        (
            {"device": "cpu", "max_num_batched_tokens": None, "max_num_seqs": None},
            1,
            ["512", "128"],
        ),
        ({"device": "cpu", "max_num_batched_tokens": "640"}, 1, ["640", "640"]),
        ({"device": "cpu", "max_num_seqs": "200"}, 1, [None, None]),
        ({"device": "cpu"}, 0, [None]),
        ({"device": "cuda"}, 1, [None, "128"]),
        ({"device": "cuda", "exact_chunk_tokens": "16"}, 1, [None, "128"]),
        ({"device": "cpu", "max_num_batched_tokens": "96"}, 1, ["96", "96"]),
        ({"device": "cuda"}, 0, [None]),
    ],
)
def test_nodes_apart_take_small_steps(
    engine: dict[str, object], prefill_nodes: int, tokens: list[str | None]
) -> None:
    options = UpOptions(colocated=not prefill_nodes)
    nodes = plan_for(options, [0, 1]).nodes
    commands = [flags_of(node_command(node, options, engine, None)) for node in nodes]
    assert [each.get("--max-num-batched-tokens", [None])[0] for each in commands] == tokens
    assert len({exact_chunk(each) for each in commands}) == 1, "either may compute the prompt"


def exact_chunk(flags: Mapping[str, list[str]]) -> int:
    """The chunks in which a node of these flags computes prompts of exact requests."""
    config = EngineConfig("m")
    for name in ("max_num_batched_tokens", "max_num_seqs", "exact_chunk_tokens"):
        if told := flags.get(f"--{name.replace('_', '-')}"):
            config = replace(config, **{name: int(told[0])})
    return config.exact_chunk


def test_where_nodes_compute(tmp_path: Path) -> None:
    missing = tmp_path / "none"
    assert computes_on_cpu({}, missing)
    assert computes_on_cpu({"device": "auto"}, missing)
    assert not computes_on_cpu({"device": None}, tmp_path)
    assert computes_on_cpu({"device": "cpu"}, tmp_path)
    assert not computes_on_cpu({"device": "cuda"}, missing)


@pytest.mark.parametrize(
    ("options", "lanes"),
    [
        (UpOptions(), ["auto"]),
        (UpOptions(kv_lanes="grpc"), ["grpc"]),
        (UpOptions(colocated=True, decode=2), ["auto"]),
        (UpOptions(colocated=True), None),  # nobody to hand over to
    ],
)
def test_nodes_that_hand_over_share_memory_where_they_can(
    options: UpOptions, lanes: list[str] | None
) -> None:
    for node in plan_for(options, [0, 1]).nodes:
        assert flags_of(node_command(node, options, {}, None)).get("--kv-lanes") == lanes


def test_where_prompts_are_computed_is_the_routers_to_know() -> None:
    for options, placement in (
        (UpOptions(), "auto"),
        (UpOptions(prefill_placement="remote"), "remote"),
    ):
        command = router_command(plan_for(options, [0, 1]), options, {"model": "/m"}, None)
        assert flags_of(command)["--prefill-placement"] == [placement]


def test_router_finds_nodes_by_redis_or_by_address() -> None:
    options = UpOptions(decode=2)
    plan = plan_for(options, [0, 1])
    for port, node in enumerate(plan.nodes, 9100):
        plan = plan.with_node(replace(node, port=port))
    with_redis = flags_of(router_command(plan, options, {"model": "/m"}, "redis://h"))
    assert with_redis["--redis-url"] == ["redis://h"]
    assert "--decode-node" not in with_redis
    without = flags_of(router_command(plan, options, {"model": "/m"}, None))
    assert without["--prefill-node"] == [plan.nodes[0].address]
    assert without["--decode-node"] == ["127.0.0.1:9101", "127.0.0.1:9102"]
    assert without["--model"] == ["/m"]


def test_flags() -> None:
    values = {"a_b": 1, "on": True, "off": False, "none": None, "many": ["x", "y"]}
    assert to_flags(values) == ["--a-b", "1", "--on", "--no-off", "--many", "x", "--many", "y"]


# ---- cores of idle nodes ----


@given(st.integers(1, 64), st.integers(1, 6), st.integers(1, 6), st.integers(0, 3))
def test_each_core_has_one_user(cores: int, prefill: int, decode: int, encode: int) -> None:
    options = UpOptions(prefill=prefill, decode=decode, encode=encode)
    nodes = plan_for(options, list(range(cores))).nodes
    spare = [core for node in nodes for core in node.spare_cores]
    assert len(spare) == len(set(spare))
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        own = {core for node in nodes if node.role == role for core in node.cores}
        taken = {core for node in nodes if node.role == other for core in node.spare_cores}
        assert taken == (own if cores >= len(nodes) else set())
    assert not any(node.spare_cores for node in nodes if node.role == "encode")


def test_cores_without_a_place_on_the_board_are_not_lent() -> None:
    assert [node.spare_cores for node in plan_for(UpOptions(), [1022, 1023]).nodes] == [
        (1023,),
        (1022,),
    ]
    assert not any(node.spare_cores for node in plan_for(UpOptions(), [1023, 1024]).nodes)


@pytest.mark.parametrize(
    ("options", "flags", "spare"),
    [
        (UpOptions(), {"device": "cpu"}, ["1", "0"]),
        (UpOptions(decode=3), {"device": "cpu"}, ["1,2,3", "0", None, None]),
        (UpOptions(lend_cores=False), {"device": "cpu"}, [None, None]),
        (UpOptions(colocated=True, decode=2), {"device": "cpu"}, [None, None]),
        (UpOptions(), {"device": "cuda"}, [None, None]),
        (UpOptions(), {"device": "cpu", "deterministic": True}, [None, None]),
        (UpOptions(), {"device": "cpu", "threads": "1"}, [None, None]),
        (UpOptions(), {"device": "cpu", "tensor_parallel_size": "2"}, [None, None]),
        (UpOptions(), {"device": "cpu", "data_parallel_size": "2"}, [None, None]),
    ],
)
def test_nodes_compute_on_idle_cores(
    options: UpOptions, flags: dict[str, object], spare: list[str | None]
) -> None:
    nodes = plan_for(options, [0, 1, 2, 3][: max(2, len(spare))]).nodes
    commands = [node_command(node, options, flags, None, Path("/run/cores")) for node in nodes]
    told = [" ".join(each).partition(" --spare-cores ")[2].split(" ")[0] for each in commands]
    assert told == [each or "" for each in spare]
    boards = [("--core-board" in each, "/run/cores" in each) for each in commands]
    assert boards == [(bool(each), bool(each)) for each in spare]
