"""The launcher with stand-ins for router and nodes: start, failure, restart, order of stopping."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from baton.errors import ConfigError
from deploy import local
from deploy.local import Cluster, Report, StartFailed, choose_ports, ready_details
from deploy.plan import NodePlan, UpOptions
from deploy.process import Child, Exited, ProcessSpec, Ready

# A process as the launcher sees it: READY on stdout, words on stderr, a clean end on SIGTERM.
STAND_IN = """
import json, os, signal, sys
name, behaviour, journal = sys.argv[1:4]
def write(what):
    with open(journal, "a") as file:
        file.write(f"{what} {name}\\n")
def end(number, frame):
    write("stopped")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("loading", file=sys.stderr, flush=True)
if behaviour == "broken":
    print("no such model", file=sys.stderr, flush=True)
    sys.exit(7)
write("started")
print("not json", flush=True)
print(json.dumps({"ready": True, "address": name}), flush=True)
while True:
    signal.pause()
"""
TIMEOUT_S = 20.0


class Stage:
    """Clusters of stand-ins below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "stand_in.py"
        self.script.write_text(STAND_IN)
        self.journal = folder / "journal"
        self.journal.touch()
        self.behaviours: dict[str, str] = {}
        self.reports: SimpleQueue[Report] = SimpleQueue()

    def command(self, name: str) -> list[str]:
        behaviour = self.behaviours.get(name, "good")
        return [sys.executable, str(self.script), name, behaviour, str(self.journal)]

    def lines(self, what: str) -> list[str]:
        found = [line.split() for line in self.journal.read_text().splitlines()]
        return [name for verb, name in found if verb == what]

    def cluster(self, options: UpOptions) -> Cluster:
        return Cluster(options, {"model": "m"}, [0], self.folder / "run", self.reports.put)

    def wait_report(self, fits: Callable[[Report], bool]) -> Report:
        while True:
            report = self.reports.get(timeout=TIMEOUT_S)
            if fits(report):
                return report


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    stage = Stage(tmp_path)

    def node(node: NodePlan, *rest: object) -> list[str]:
        return stage.command(node.name)

    monkeypatch.setattr(local, "node_command", node)
    monkeypatch.setattr(local, "router_command", lambda *rest: stage.command("router"))
    monkeypatch.setattr(local, "find_redis_binary", lambda: None)
    return stage


@pytest.fixture
def supervised(stage: Stage) -> Iterator[Cluster]:
    """A started cluster whose supervise() runs in a thread until the test ends."""
    with stage.cluster(UpOptions(port=0)) as cluster:
        cluster.start({})
        failures: list[StartFailed] = []

        def supervise() -> None:
            try:
                cluster.supervise()
            except StartFailed as error:
                failures.append(error)

        # A daemon: supervise() only ends by a signal or by giving up.
        threading.Thread(target=supervise, daemon=True).start()
        yield cluster


def test_starts_everything_and_stops_the_router_first(stage: Stage) -> None:
    with stage.cluster(UpOptions(prefill=2, port=0)) as cluster:
        cluster.start({})
        names = {"prefill-0", "prefill-1", "decode-0", "router"}
        assert set(cluster.members) == names
        assert set(stage.lines("started")) == names
        assert stage.lines("started")[-1] == "router"  # without Redis it needs the nodes first
        assert cluster.members["decode-0"].details["address"] == "decode-0"
        pids = [member.child.pid for member in cluster.members.values() if member.child]
        log = (cluster.run_dir / "router.log").read_text()
        assert "loading" in log
        assert '"ready": true' in log
    assert stage.lines("stopped")[0] == "router"
    assert set(stage.lines("stopped")) == names
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    cluster.stop()  # twice is safe


def test_who_dies_at_start_is_quoted_and_the_others_stop(stage: Stage) -> None:
    stage.behaviours["decode-0"] = "broken"
    with (
        pytest.raises(StartFailed, match=r"decode-0 ended \(status 7\)(?s:.*)no such model"),
        stage.cluster(UpOptions(port=0)) as cluster,
    ):
        cluster.start({})
    assert stage.lines("stopped") == stage.lines("started")


def test_a_killed_node_is_started_again(
    stage: Stage, supervised: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = supervised.members["decode-0"].child
    assert child is not None
    os.kill(child.pid, signal.SIGKILL)
    stage.wait_report(lambda report: report.text.startswith("ended (signal 9); starting again"))
    again = stage.wait_report(lambda report: report.text.startswith("ready after"))
    assert again.member == "decode-0"
    assert stage.lines("started").count("decode-0") == 2
    assert stage.lines("started").count("router") == 1


def test_too_many_restarts_give_up(stage: Stage) -> None:
    with stage.cluster(UpOptions(port=0)) as cluster:
        cluster.start({})
        member = cluster.members["decode-0"]
        child = member.child
        assert child is not None
        event = Exited(child, -9)
        pauses = [cluster._restart_pause(member, event) for _ in range(local.MAX_RESTARTS)]
        assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0]
        with pytest.raises(StartFailed, match="decode-0 keeps ending"):
            cluster._restart_pause(member, event)


def test_a_given_redis_is_used_and_its_password_not_shown(stage: Stage) -> None:
    with stage.cluster(UpOptions(port=0, redis_url="redis://:pw@host/0")) as cluster:
        cluster.start({})
        assert "redis" not in cluster.members
        report = stage.wait_report(lambda report: report.member == "redis")
        assert report.text == "using redis://host/0"


def test_without_any_redis_it_warns(stage: Stage) -> None:
    with stage.cluster(UpOptions(port=0)) as cluster:
        cluster.start({})
        report = stage.wait_report(lambda report: report.member == "redis")
        assert report.trouble
        assert "memory" in report.text


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} .* try another --port"):
            choose_ports(UpOptions(port=port))


def test_all_chosen_ports_differ() -> None:
    ports = choose_ports(UpOptions(prefill=5, decode=5, port=0, grpc_port=0))
    assert len(set(ports)) == len(ports) == 12


@pytest.mark.parametrize("line", ["", "hello", "{not json", '{"ready": false}', "[]", "{}"])
def test_other_lines_are_not_ready(line: str) -> None:
    assert ready_details(line) == {}


@pytest.mark.parametrize(
    ("host", "address"),
    [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("10.0.0.1", "10.0.0.1")],
)
def test_reachable_address(host: str, address: str) -> None:
    assert local.reachable(host) == address


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    events: SimpleQueue[Ready | Exited] = SimpleQueue()
    script = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        " print('up', flush=True); signal.pause()"
    )
    command = [sys.executable, "-c", script]
    spec = ProcessSpec("stubborn", command, tmp_path / "log", lambda line: line == "up\n")
    child = Child(spec, events.put)
    assert isinstance(events.get(timeout=TIMEOUT_S), Ready)
    assert child.stop(timeout_s=0.1) == -signal.SIGKILL
    ended = events.get(timeout=TIMEOUT_S)
    assert isinstance(ended, Exited)
    assert ended.status == -signal.SIGKILL


def test_last_lines_of_a_log(tmp_path: Path) -> None:
    events: SimpleQueue[Ready | Exited] = SimpleQueue()
    command = [sys.executable, "-c", "for i in range(5000): print('line', i)"]
    child = Child(ProcessSpec("p", command, tmp_path / "log", lambda line: False), events.put)
    assert isinstance(events.get(timeout=TIMEOUT_S), Exited)
    assert child.last_lines(2) == ["line 4998", "line 4999"]
