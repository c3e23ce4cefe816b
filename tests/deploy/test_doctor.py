"""`baton doctor`: between two probes, between two running nodes, and what it shows."""

from __future__ import annotations

import asyncio
import io
import json
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import pytest
from rich.console import Console

from baton.engine.config import EngineConfig
from baton.engine.core.assembly import load_parts
from baton.node.config import NodeConfig
from baton.node.lanes import LaneSettings, PoolPlace, make_lanes, parse_lanes
from baton.node.main import NodeProcess, NodeProgram, Surroundings
from baton.protocol.clock import SystemClock
from baton.protocol.errors import ConfigError, NodeLost
from baton.runtime.config import AUTO, load
from bench.transfer_peer import TransferPeer
from deploy import cli
from deploy.doctor import (
    Diagnosis,
    LaneReport,
    NodeAccess,
    ProbedNode,
    choose,
    diagnose,
    probe_nodes,
    view,
)
from deploy.machine import MachineFacts, copy_rate, machine_facts, processor, redis_state, waiting
from deploy.plan import UpOptions, node_options
from tests.node.fakes import DECODE, PREFILL, TIMING
from tests.tiny_models import make_tiny_model

FACTS = MachineFacts(
    "A CPU", ("avx2",), 2, 9.5, 2 << 30, 1 << 30, "answers", "2.13", 1, "spin", "compiled", "asks",
    "torch's own serve: this processor has no avx512_vnni", "none: torch sees no GPU",
)  # fmt: skip
LANES = (
    LaneReport("shm", False, "no /dev/shm"),
    LaneReport("stream", True, "", 3.5, 0.4, chosen=True),
    LaneReport("grpc", True, "", 1.2, 1.5),
)


async def started(
    stack: AsyncExitStack, program: NodeProgram, model: Path, shared: Path
) -> NodeProcess:
    """A whole node in this process, with every lane of --kv-lanes auto."""
    config = EngineConfig(
        model=str(model), dtype="float32", block_size=16, num_kv_blocks=128, threads=1,
        enable_prefix_caching=False,
    )  # fmt: skip
    names = parse_lanes(AUTO)
    place = PoolPlace(names, shared)
    stack.callback(place.close)
    parts = await asyncio.to_thread(load_parts, config, place.memory)
    settings = LaneSettings(TIMING, unix_dir=shared, pool=parts.arena, shared=place.shared)
    lanes = make_lanes(names, settings)
    node = NodeProcess(program, NodeConfig(), parts, Surroundings(TIMING, SystemClock(), lanes))
    await node.start()
    stack.push_async_callback(node.stop)
    return node


def shown(found: Diagnosis) -> str:
    out = io.StringIO()
    Console(file=out, width=100).print(view(found))
    return out.getvalue()


def test_the_best_lane_that_works_is_chosen() -> None:
    found = [LaneReport("grpc", True), LaneReport("shm", False), LaneReport("stream", True)]
    chosen = choose(found, ["shm", "stream", "grpc"])
    assert [lane.lane for lane in chosen if lane.chosen] == ["stream"]
    assert not any(lane.chosen for lane in choose(found, ["shm"]))


def test_square_brackets_are_shown_as_they_are() -> None:
    lane = LaneReport("nixl", False, "lane nixl needs the extra baton[nixl]")
    facts = replace(FACTS, redis="no answer [red]")
    text = shown(Diagnosis(("p", "d"), (lane,), facts))
    assert "baton[nixl]" in text
    assert "no answer [red]" in text


def test_the_tables_say_lanes_and_machine() -> None:
    text = shown(Diagnosis(("p", "d"), LANES, FACTS))
    assert "no /dev/shm" in text
    row = next(line for line in text.splitlines() if "stream" in line)
    assert "3.50" in row
    assert "0.4 ms" in row
    assert "chosen" in row
    assert "A CPU, 2 cores" in text
    assert "1.1 of 2.1 GB free" in text
    assert "this processor has no avx512_vnni" in text
    assert "none: torch sees no GPU" in text


def test_bytes_that_stay_where_they_are_have_no_rate() -> None:
    adopted = LaneReport.measured("shm", 0.0021, 0.004, 0, 16_777_216)
    assert adopted == LaneReport("shm", True, "", None, 2.1, 16_777_216)
    copied = LaneReport.measured("stream", 0.002, 0.004, 16_777_216, 0)
    assert copied.gb_per_s == pytest.approx(4.194304)
    text = shown(Diagnosis(("p", "d"), choose([adopted, copied], ["shm"]), FACTS))
    shm, stream = (
        next(each for each in text.splitlines() if name in each) for name in ("shm", "stream")
    )
    for words in ("in place", "2.1 ms", "chosen, 16.8 MB read where they lie"):
        assert words in shm
    assert "4.19" in stream
    assert "lie" not in stream


def test_json_says_whether_anything_works() -> None:
    assert json.loads(json.dumps(Diagnosis(("p", "d"), LANES, FACTS).as_json()))["healthy"] is True
    assert Diagnosis(("p", "d"), LANES[:1], FACTS).as_json()["healthy"] is False


def test_waiting_threads_are_told_as_openmp_reads_them() -> None:
    assert waiting({"GOMP_SPINCOUNT": "7", "HOME": "/"}).startswith("GOMP_SPINCOUNT=7, as ")


async def test_the_machine_is_looked_at() -> None:
    engine = {
        "torch": "2.13", "torch_threads": 3, "kernels": "torch's own serve", "asking": "",
        "integer_kernels": "torch's own serve: as above", "gpu": "none: torch sees no GPU",
    }  # fmt: skip
    facts = await machine_facts("", engine)
    assert facts.copy_gb_per_s > 0
    assert facts.cores > 0
    assert dict(facts.rows())["torch"] == "2.13, 3 threads in a node of `baton up`"
    assert dict(facts.rows())["CPU kernels"] == "torch's own serve"
    assert "prefetch" not in dict(facts.rows())
    assert dict(FACTS.rows())["prefetch"] == "asks"
    assert dict(facts.rows())["GPU"] == "none: torch sees no GPU"
    assert copy_rate() > 0


def test_a_processor_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("model name\t: X\nflags\t\t: avx2 fma\n\nmodel name\t: Y\n")
    assert processor(path) == ("X", frozenset({"avx2", "fma"}))
    assert processor(tmp_path / "none") == ("", frozenset())


async def test_redis_answers_or_not(redis_url: str) -> None:
    assert (await redis_state(redis_url)).startswith("answers in")
    assert (await redis_state("redis://127.0.0.1:1")).startswith("not reachable")
    with pytest.raises(ConfigError):
        await redis_state("http://x")


@pytest.mark.long
async def test_two_probes_find_the_lanes_of_this_machine(tmp_path: Path) -> None:
    flags = NodeConfig(kv_lanes=AUTO, kv_shm_dir=str(tmp_path))
    found = await diagnose(None, None, NodeAccess(), "", flags)
    by_name = {lane.lane: lane for lane in found.lanes}
    assert by_name["grpc"].available
    assert (by_name["stream"].gb_per_s or 0) > 0
    assert (by_name["stream"].latency_ms or 0) > 0
    assert found.healthy
    with pytest.raises(ConfigError, match="come together"):
        await diagnose("127.0.0.1:1", None, NodeAccess(), "", flags)
    assert [lane.lane for lane in found.lanes if lane.chosen] == ["shm adopted"]


async def test_probes_prefer_what_nodes_with_these_flags_would_take() -> None:
    peer = TransferPeer()
    asked = (("auto", True), ("auto", False), ("grpc,shm", True), ("stream,grpc", True))
    found = [(await peer.answer_facts(lanes, adopt))["preferred"] for lanes, adopt in asked]
    assert found == [
        ["shm adopted", "stream", "grpc"], ["shm", "stream", "grpc"],
        ["grpc", "shm adopted"], ["stream", "grpc"],
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="no KV lane 'fax'"):
        await peer.answer_facts("fax")


def test_the_commands_probes_have_the_flags_of_nodes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not said: as `baton up` would start them; the environment is theirs, too."""
    asked: list[NodeConfig] = []

    def doctor(*given: object) -> Diagnosis:
        asked.append(cast("NodeConfig", given[-1]))
        return Diagnosis(("p", "d"), LANES, FACTS)

    monkeypatch.setattr("deploy.doctor.doctor", doctor)
    monkeypatch.delenv("BATON_KV_LANES", raising=False)
    assert cli.main(["doctor", "--json"]) == 0
    options = UpOptions()
    told = load(NodeConfig, node_options("decode", options, {}), {})
    assert (asked[0].kv_lanes, asked[0].kv_adopt) == (told.kv_lanes, told.kv_adopt)
    monkeypatch.setenv("BATON_KV_LANES", "grpc")
    assert cli.main(["doctor", "--json", "--no-kv-adopt"]) == 0
    assert (asked[1].kv_lanes, asked[1].kv_adopt) == ("grpc", False)
    assert cli.main(["doctor", "--json", "--kv-lanes", "shm"]) == 0
    assert asked[2].kv_lanes == "shm"
    capsys.readouterr()


async def test_running_nodes_are_probed_lane_by_lane(tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path / "model")
    async with AsyncExitStack() as stack:
        # A folder of pytest's is too deep for a socket.
        shared = Path(stack.enter_context(TemporaryDirectory(prefix="baton-")))
        p = await started(stack, PREFILL, model, shared)
        d = await started(stack, DECODE, model, shared)
        found = await probe_nodes(p.address, d.address, NodeAccess())
        stats, token_bytes = d.shell.connector.stats, d.shell.connector.bytes_of(1)
        with pytest.raises(ConfigError, match="--from is a decode node"):
            await probe_nodes(d.address, p.address, NodeAccess())
        for node in (p, d):
            assert node.shell.connector.active_exports == 0
    by_name = {lane.lane: lane for lane in found}
    assert list(by_name) == ["shm", "stream", "grpc"]
    assert all(lane.available and (lane.latency_ms or 0) > 0 for lane in found)
    assert [lane.lane for lane in found if lane.chosen] == ["shm"]
    # By shm nothing is copied: no rate of it, and the bytes are said by themselves.
    assert {name: lane.gb_per_s is None for name, lane in by_name.items()} == {
        "shm": True, "stream": False, "grpc": False,
    }  # fmt: skip
    assert {name: lane.adopted_bytes for name, lane in by_name.items() if lane.adopted_bytes} == {
        "shm": (512 - 8) * token_bytes
    }
    assert stats.fetches == 8 * len(found)  # one to warm up, three that count


async def test_nobody_there_is_said_so() -> None:
    with pytest.raises(NodeLost, match="no node answers"):
        async with ProbedNode.connect("127.0.0.1:1", NodeAccess(), patience_s=0.3):
            pass


def test_the_command_prints_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Diagnosis(("p", "d"), LANES, FACTS)
    asked: list[tuple[object, ...]] = []

    def doctor(*given: object) -> Diagnosis:
        asked.append(given)
        return found

    monkeypatch.setattr("deploy.doctor.doctor", doctor)
    monkeypatch.setenv("BATON_SECRET", "s")
    assert cli.main(["doctor", "--from", "a:1", "--to", "b:2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lanes"][1]["chosen"] is True
    assert asked == [("a:1", "b:2", NodeAccess("s"), "", NodeConfig(kv_lanes="auto", secret="s"))]
    found = Diagnosis(("p", "d"), LANES[:1], FACTS)
    assert cli.main(["doctor"]) == 1
    assert "not available" in capsys.readouterr().out
