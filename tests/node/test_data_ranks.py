"""A data-parallel group as rank 0 sees it, the others being sockets in this process; real processes
are in tests/system/test_data_parallel.py."""

from __future__ import annotations

import json
import queue
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from baton.engine.config import EngineConfig
from baton.engine.parallel.messages import Gone, Link, MessageKind
from baton.engine.parallel.ranks import RankProcess
from baton.node import data_ranks
from baton.node.config import NodeConfig
from baton.node.data_ranks import FirstRank, RankOptions, options_of_ranks
from baton.protocol.errors import ConfigError
from baton.protocol.handles import Role

TIMEOUT_S = 10.0


@dataclass
class FakeProcess:
    """Implements ranks.Process; `status` is set by kill(), or by the test."""

    status: int | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def poll(self) -> int | None:
        return self.status

    def wait(self, timeout: float | None = None) -> int:
        if not self.ended.wait(TIMEOUT_S if timeout is None else timeout):
            raise subprocess.TimeoutExpired("rank", timeout or TIMEOUT_S)
        return self.status or 0

    def end(self, status: int) -> None:
        self.status = status
        self.ended.set()

    def kill(self) -> None:
        if self.status is None:
            self.end(-9)


@dataclass
class Stage:
    """The other ranks of a group: their ends of the sockets, and their processes."""

    links: list[Link] = field(default_factory=list[Link])
    processes: list[FakeProcess] = field(default_factory=list[FakeProcess])
    started: list[RankOptions] = field(default_factory=list[RankOptions])
    dead: queue.SimpleQueue[Callable[[], None]] = field(default_factory=queue.SimpleQueue)

    @property
    def folder_is_there(self) -> bool:
        return Path(self.started[0].directory).exists()

    def start(self, options: RankOptions, role: Role) -> RankProcess:
        ours, theirs = socket.socketpair()
        self.started.append(options)
        self.links.append(Link(theirs))
        self.processes.append(FakeProcess())
        return RankProcess(options.place.rank, self.processes[-1], Link(ours))


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    stage = Stage()
    monkeypatch.setattr(data_ranks, "start_rank", stage.start)
    monkeypatch.setattr(data_ranks, "end", stage.dead.put)
    yield stage
    for link in stage.links:
        link.close()


@pytest.fixture
def first(stage: Stage) -> Iterator[FirstRank]:
    engine = EngineConfig("m", data_parallel_size=3)
    group = FirstRank(NodeConfig(node_id="d"), engine, Role.DECODE)
    yield group
    for process in stage.processes:
        process.kill()
    group.close()


def test_each_rank_has_ports_a_name_and_a_share_of_the_threads() -> None:
    config = NodeConfig(
        node_id="d", port=7000, kv_port=7100, kv_stream_port=7200, metrics_port=0, secret="s"
    )
    engine = EngineConfig(
        "m", data_parallel_size=3, threads=7, lora_modules=("a=b",), served_model_name=("x", "y")
    )
    ranks = options_of_ranks(config, engine, Role.DECODE, "/tmp/folder")
    assert [each.config.node_id for each in ranks] == ["d", "d-r1", "d-r2"]
    assert [each.config.port for each in ranks] == [7000, 7001, 7002]
    assert [each.config.kv_port for each in ranks] == [7100, 7101, 7102]
    assert [each.config.kv_stream_port for each in ranks] == [7200, 7204, 7208], "and their lanes'"
    assert {each.config.metrics_port for each in ranks} == {0}, "any free ones"
    assert {each.config.health_port for each in ranks} == {None}
    assert {each.engine.threads for each in ranks} == {2}
    assert len({each.group for each in ranks}) == 1
    again = options_of_ranks(config, engine, Role.DECODE, "/tmp/folder")
    assert again[0].group != ranks[0].group, "a group that comes back is another one"
    for each in ranks:
        assert RankOptions.from_json(json.loads(json.dumps(each.to_json()))) == each


def test_ports_beyond_the_last_one_are_refused(stage: Stage) -> None:
    with pytest.raises(ConfigError, match="port must be between"):
        FirstRank(NodeConfig(port=65535), EngineConfig("m", data_parallel_size=2), Role.DECODE)
    assert not stage.started


@pytest.mark.parametrize(
    ("ports", "said"),
    [
        ({"port": 50061, "kv_port": 50062}, "port 50062 would be rank 0's kv_port and rank 1's"),
        ({"kv_port": 7003, "kv_stream_port": 7000}, "7003 would be rank 0's kv_stream_port and"),
        ({"metrics_port": 9090, "health_port": 9091}, "9091 would be rank 0's health_port and"),
    ],
)
def test_ports_that_two_ranks_would_have_are_refused(ports: dict[str, Any], said: str) -> None:
    engine = EngineConfig("m", data_parallel_size=2)
    with pytest.raises(ConfigError, match=said) as refused:
        options_of_ranks(NodeConfig(**ports), engine, Role.DECODE, "/tmp/folder")
    assert refused.value.field == list(ports)[-1]


def test_a_rank_that_cannot_load_says_why(stage: Stage, first: FirstRank) -> None:
    """Another one has ended before it, perhaps because of it: the reason counts."""
    stage.links[0].close()
    stage.links[1].send_json(MessageKind.FAILED, {"message": "no room", "field": "model"})
    with pytest.raises(ConfigError, match="rank 2: no room") as caught:
        first.meet()
    assert caught.value.field == "model"


def test_a_rank_that_ends_while_it_loads_ends_the_others(stage: Stage, first: FirstRank) -> None:
    stage.links[0].close()
    stage.processes[0].end(-9)
    assert stage.processes[1].wait() == -9
    stage.links[1].close()
    with pytest.raises(ConfigError, match="rank 1 has ended"):
        first.meet()
    assert stage.dead.empty(), "this process says it in the ordinary way"


async def test_a_rank_that_ends_while_all_serve_ends_all(
    stage: Stage,
    first: FirstRank,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for number, link in enumerate(stage.links, start=1):
        link.send_json(MessageKind.READY, {"address": f"a{number}"})
    await first.ready({"address": "a0"})
    line = json.loads(capsys.readouterr().out)
    assert line["address"] == "a0"
    assert [(rank["rank"], rank["address"]) for rank in line["ranks"]] == [
        (0, "a0"), (1, "a1"), (2, "a2"),
    ]  # fmt: skip
    cleaned: list[str] = []
    first.on_death(lambda: cleaned.append("pool"))
    stage.processes[1].end(-9)
    stage.dead.get(timeout=TIMEOUT_S)()
    assert cleaned == ["pool"]
    with pytest.raises(Gone):
        stage.links[0].receive()
    assert stage.processes[0].status == -9, "it did not end by itself"
    assert "data-parallel group lost, all ranks end: rank 2 has ended with status -9" in caplog.text
    assert not stage.folder_is_there


async def test_all_drain_and_stop_together(stage: Stage, first: FirstRank) -> None:
    drained: list[str] = []

    async def drain() -> None:
        for link in stage.links:
            assert link.receive()[0] is MessageKind.DRAIN, "at once, not after rank 0"
            link.send(MessageKind.DRAINED)
        drained.append("rank 0")

    await first.drain(drain)
    assert drained == ["rank 0"]
    first.stop()
    first.stop()
    for link, process in zip(stage.links, stage.processes, strict=True):
        assert link.receive()[0] is MessageKind.STOP
        process.end(0)
    first.close()
    assert stage.dead.empty()
    assert not stage.folder_is_there
