"""The transfer benchmark: its goals, its child processes, one small contest for real."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from baton.protocol.errors import ConfigError, InternalError
from baton.runtime.timing import Timing
from bench import transfer, transfer_client, transfer_tail
from bench.transfer import Goal
from bench.transfer_client import OUTPUT, ClientPlan, Seen
from bench.transfer_engine import write_model
from bench.transfer_lanes import ADOPTED, all_ways, lane_of, make_way, write_certificates
from bench.transfer_link import PeerError, ShapedLink, spread
from bench.transfer_raw import KINDS
from bench.transfer_tail import TailPlan
from bench.transfer_throughput import Contested, LoadShape, measure

SMALL = LoadShape(tokens=96, layers=3, heads=2, dim=16)


def rate(value: float) -> dict[str, float]:
    return {"median": value, "min": value, "max": value}


def row(way: str, value: float, ms: float = 1.0, copied: int = 10) -> dict[str, Any]:
    return {"way": way, "gb_per_s": rate(value), "ms": rate(ms), "copied_bytes": copied,
            "cpu_s_per_gb": rate(0.5)}  # fmt: skip


def test_goals_compare_within_one_run() -> None:
    rows = [
        row("raw tcp", 4.0), row("raw unix", 5.0), row("bare grpc", 1.0), row("stream tcp", 3.5),
        row("stream", 4.0), row("grpc", 0.95), row("shm", 8.0, ms=29.0),
        row(ADOPTED, 50.0, ms=0.6, copied=0),
    ]  # fmt: skip
    goals = transfer.throughput_goals({"rows": rows, "intact": {"grpc": True, "shm": False}})
    assert {goal.name: goal.passed for goal in goals} == {
        "stream tcp / raw tcp": True,
        "stream / raw unix": False,
        "grpc / bare grpc": True,
        "shm hand-off, ms": True,
        "shm bytes copied": True,
        "grpc: the right bytes": True,
        "shm: the right bytes": False,
    }
    fast = transfer.throughput_goals(
        {"rows": [row("bare grpc", 2.0), row("grpc", 1.1)], "intact": {}}
    )
    assert [(goal.name, goal.passed) for goal in fast] == [("grpc GB/s", True)]


def test_tails_have_a_bound_per_lane() -> None:
    rows = [
        {"lane": "stream", "layer_wise_ms": rate(6)},
        {"lane": "grpc", "layer_wise_ms": rate(6)},
    ]
    assert [goal.passed for goal in transfer.tail_goals({"rows": rows})] == [False, True]
    assert Goal("x", 1.0, 2.0, at_least=False).as_json()["passed"] is True


def test_what_a_client_sees_is_paired() -> None:
    apart, local = Seen(), Seen()
    for extra in (0.001, 0.003):
        steps = [0.1 + 0.01 * index for index in range(OUTPUT)]
        transfer_client.note([0.1 + extra, *[s + 0.02 for s in steps[1:]]], 0.095, apart)
        transfer_client.note(steps, 0.09, local)
    transfer_client.note([0.1], 0.1, Seen())  # too short an answer has no gaps
    plan = ClientPlan("demo", "", [(64, 2)], "shm")
    found = transfer_client.row(plan, 64, apart, local)
    assert found["ttft_added_ms"]["median"] == pytest.approx(2.0)
    assert found["token2_beyond_step_ms"]["median"] == pytest.approx(18.0)
    assert found["cpu_added_ms"]["median"] == pytest.approx(5.0)
    slower = {**found, "tokens": 512, "lane": "stream", "ttft_added_ms": rate(7.0)}
    goals = transfer.client_goals({"rows": [found, slower]})
    assert [goal.passed for goal in goals] == [True, False, True, False]
    assert goals[2].limit == pytest.approx(8.0), "the lane's CPU before token 1 comes on top"
    assert transfer.client_goals({"rows": []}) == []


def test_a_median_is_known_the_better_the_more_there_is() -> None:
    few, many = transfer_client.confident([1.0, 9.0]), transfer_client.confident(range(101))
    assert (few["low"], few["high"]) == (1.0, 9.0)
    assert (many["low"], many["median"], many["high"]) == (40, 50, 60)


def test_cpu_time_of_a_process_grows_with_its_work() -> None:
    before, until = transfer_client.cpu_s(os.getpid()), time.process_time() + 0.02
    while time.process_time() < until:
        pass
    assert transfer_client.cpu_s(os.getpid()) - before >= 0.015


def test_a_spread_needs_values() -> None:
    assert spread([3.0, 1.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}
    with pytest.raises(InternalError):
        spread([])


def test_every_way_names_a_lane(tmp_path: Path) -> None:
    assert {"stream", "stream tcp", "grpc"} <= set(all_ways())
    assert lane_of("stream tcp") == "stream"
    certificates = write_certificates(tmp_path)
    for way in ("stream", "stream tcp", "grpc"):
        assert make_way(way, Timing(), None).name == lane_of(way)
    with pytest.raises(ConfigError, match="no KV lane"):
        make_way("pigeon", Timing(), None)
    with pytest.raises(ConfigError, match="certificates"):
        make_way("grpc tls", Timing(), None)
    if certificates is not None:
        assert make_way("stream tls", Timing(), certificates).name == "stream"


@pytest.mark.long
async def test_a_child_answers_refuses_and_ends() -> None:
    async with ShapedLink.spawn() as link:
        with pytest.raises(PeerError, match="KeyError"):
            await link.ask("no_such_question")
        with pytest.raises(PeerError, match="pool"):
            await link.ask("pool", unknown=1)
        assert (await link.ask("usage"))["cpu_s"] > 0
    with pytest.raises(PeerError, match="ended"):
        await link.ask("usage")


@pytest.mark.long
async def test_a_small_contest_between_real_processes(tmp_path: Path) -> None:
    """Sockets and every lane of this machine: the right bytes arrive each way."""
    certificates = write_certificates(tmp_path)
    ways = [*all_ways(), "pigeon"]
    found = await measure(ways, certificates, Contested(SMALL, 1, ([], [])))
    assert "pigeon" in found["missing"]
    assert {"stream", "stream tcp", "grpc"} <= found["intact"].keys()
    assert all(found["intact"].values())
    named = [each["way"] for each in found["rows"]]
    assert named[: len(KINDS) + 1] == ["memcpy", *KINDS]
    assert all(each["gb_per_s"]["median"] > 0 for each in found["rows"])
    copied = {each["way"]: each["copied_bytes"] for each in found["rows"]}
    assert copied.pop(ADOPTED, 0) == 0
    assert set(copied.values()) == {found["bytes"]}
    json.dumps(found)


@pytest.mark.long
async def test_tails_are_taken_from_a_real_engine(tmp_path: Path) -> None:
    small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64}
    model = write_model(tmp_path / "model", num_attention_heads=2, num_key_value_heads=1, **small)
    found = await transfer_tail.measure(["stream"], TailPlan(str(model), 96, 2, 1), ([], []))
    (row,) = found["rows"]
    assert row["lane"] == "stream"
    assert found["bytes"] == 2 * 2 * 2 * 1 * 128 * 96
    for name in ("layer_wise_ms", "from_last_layer_ms", "whole_ms", "prefill_ms"):
        assert row[name]["max"] >= row[name]["min"]
    assert row["whole_ms"]["min"] > 0
    assert row["from_last_layer_ms"]["min"] > 0
    assert row["prefill_ms"]["min"] > 0
