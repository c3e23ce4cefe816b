"""The launcher with stand-ins for router and nodes: start, failure, restart, order of stopping."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

import pytest
from rich.console import Console

from baton.protocol.errors import ConfigError
from baton.runtime.socket_folder import SocketFolder, remove_stale
from deploy import cli, local, up
from deploy.local import (
    Cluster,
    Report,
    StartFailed,
    StopRequested,
    ready_details,
    router_ports,
)
from deploy.plan import (
    DEFAULT_GRPC_PORT,
    DEFAULT_PORT,
    DEMO_MODEL,
    ClusterPlan,
    NodePlan,
    UpOptions,
)
from deploy.process.child import Child, Exited, ProcessSpec, Ready
from deploy.process.ports import reachable

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
if behaviour == "refuses":
    sys.exit(2)
if behaviour == "late" and sys.argv[4:] != ["0", "0"]:
    print("router: cannot bind 127.0.0.1:50051: in use", file=sys.stderr, flush=True)
    sys.exit(2)
write("started")
print("not json", flush=True)
ready = {"ready": True, "address": f"{name}:7", "grpc_address": f"{name}:8", "metrics_port": 9}
print(json.dumps(ready), flush=True)
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

    def command(self, name: str, *ports: int) -> list[str]:
        """`ports`: what it is told to listen on."""
        behaviour = self.behaviours.get(name, "good")
        words = [name, behaviour, str(self.journal), *map(str, ports)]
        return [sys.executable, str(self.script), *words]

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
        return stage.command(node.name, node.port, node.metrics_port)

    def router(plan: ClusterPlan, *rest: object) -> list[str]:
        return stage.command("router", plan.router_port, plan.grpc_port)

    monkeypatch.setattr(local, "node_command", node)
    monkeypatch.setattr(local, "router_command", router)
    monkeypatch.setattr(local, "find_redis_binary", lambda: None)
    return stage


def test_groups_of_ranks_need_redis(stage: Stage) -> None:
    flags = {"model": "m", "data_parallel_size": "2"}
    with Cluster(UpOptions(port=0), flags, [0], stage.folder / "run", stage.reports.put) as cluster:
        with pytest.raises(StartFailed, match="finds all ranks of a node through Redis"):
            cluster.start({})
        assert not cluster.members


@pytest.fixture
def supervised(stage: Stage) -> Iterator[Cluster]:
    """A started cluster whose supervise() runs in a thread until the test ends."""
    with stage.cluster(UpOptions(port=0)) as cluster:
        cluster.start({})

        def supervise() -> None:
            with suppress(StopRequested):
                cluster.supervise()

        thread = threading.Thread(target=supervise)
        thread.start()
        yield cluster
        cluster.request_stop()
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def test_starts_everything_and_stops_the_router_first(stage: Stage) -> None:
    with stage.cluster(UpOptions(prefill=2, port=0)) as cluster:
        cluster.start({})
        names = {"prefill-0", "prefill-1", "decode-0", "router"}
        assert set(cluster.members) == names
        assert set(stage.lines("started")) == names
        assert stage.lines("started")[-1] == "router"  # without Redis it needs the nodes first
        assert cluster.members["decode-0"].details["address"] == "decode-0:7"
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


def test_who_refuses_at_start_makes_the_launcher_refuse(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.behaviours["decode-0"] = "refuses"
    refused = r"decode-0 ended \(status 2\)"
    with pytest.raises(ConfigError, match=refused), stage.cluster(UpOptions(port=0)) as cluster:
        cluster.start({})

    def refuse(*_: object) -> None:
        raise ConfigError("decode-0 ended (status 2)")

    monkeypatch.setattr(Cluster, "start", refuse)
    words = ["up", str(DEMO_MODEL), "--run-dir", str(tmp_path / "run"), "--port", "0"]
    assert cli.main(words) == 2


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
    spec = supervised.members["decode-0"].spec
    assert spec.command[-2:] == ["7", "9"]  # the ports that it had: others know them


def test_ports_are_what_the_processes_say(stage: Stage) -> None:
    with stage.cluster(UpOptions(port=0, grpc_port=0)) as cluster:
        cluster.start({})
        assert (cluster.url, cluster.grpc) == ("http://127.0.0.1:7", "127.0.0.1:8")
        assert [node.address for node in cluster.plan.nodes] == ["127.0.0.1:7"] * 2
        assert cluster.metrics == {
            "router": "http://127.0.0.1:7/metrics",
            "prefill-0": "http://127.0.0.1:9/metrics",
            "decode-0": "http://127.0.0.1:9/metrics",
        }


def test_a_default_port_that_is_taken_meanwhile_is_given_up(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "DEFAULT_PORT", free_port())
    monkeypatch.setattr(local, "DEFAULT_GRPC_PORT", free_port())
    stage.behaviours["router"] = "late"
    with stage.cluster(UpOptions()) as cluster:
        cluster.start({})
        assert stage.lines("started").count("router") == 1
        assert (cluster.url, cluster.grpc) == ("http://127.0.0.1:7", "127.0.0.1:8")
    report = stage.wait_report(lambda report: report.member == "router")
    assert report.trouble


def test_a_port_that_was_asked_for_is_not_given_up(stage: Stage) -> None:
    stage.behaviours["router"] = "late"
    with (
        pytest.raises(ConfigError, match="cannot bind"),
        stage.cluster(UpOptions(port=0, grpc_port=free_port())) as cluster,
    ):
        cluster.start({})


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
            router_ports(UpOptions(port=port))
        with pytest.raises(ConfigError, match=f"port {port} .* try another --grpc-port"):
            router_ports(UpOptions(port=0, grpc_port=port))


def test_defaults_give_way(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(local, "DEFAULT_PORT", taken.getsockname()[1])
        monkeypatch.setattr(local, "DEFAULT_GRPC_PORT", free := free_port())
        assert router_ports(UpOptions()) == (0, free)
        with stage.cluster(UpOptions()) as cluster:
            cluster.start({})
    report = stage.wait_report(lambda report: report.member == "router")
    assert report.text.endswith("is taken: using a free one")
    assert (DEFAULT_PORT, DEFAULT_GRPC_PORT) == (8000, 50051)  # as documented


def test_a_host_of_another_machine_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--host 192.0.2.1 is no address of this machine"):
        router_ports(UpOptions(host="192.0.2.1"))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_folders_of_the_dead_are_removed_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = (
        "from baton.runtime.socket_folder import SocketFolder;"
        "folder = SocketFolder('baton-up-'); print(folder.path)"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    dead = subprocess.run(
        [sys.executable, "-c", made], env=environment, capture_output=True, text=True, check=True
    )
    assert Path(dead.stdout.strip()).is_dir()
    (tmp_path / "baton-up-other").mkdir()  # just being made: its lock has no name yet
    mine = SocketFolder("baton-up-")  # removes the dead one's
    assert remove_stale("baton-up-") == []
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(
        [mine.path.name, "baton-up-other"]
    )
    mine.remove()
    mine.remove()
    assert not mine.path.exists()


@pytest.mark.parametrize("turn", range(20))
def test_two_signals_at_once_stop_cleanly(
    turn: int, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it starts (odd turns) or serves; INT before TERM or after."""
    senders: list[threading.Thread] = []
    pair = [signal.SIGINT, signal.SIGTERM] if turn % 4 < 2 else [signal.SIGTERM, signal.SIGINT]

    def send(*_: object) -> None:
        def work() -> None:
            for number in pair:
                os.kill(os.getpid(), number)

        senders.append(threading.Thread(target=work))
        senders[-1].start()

    monkeypatch.setattr(up, "announce_start", send if turn % 2 else lambda *rest: None)
    monkeypatch.setattr(up, "introduce", send)
    stop = Cluster.stop

    def stop_when_both_are_sent(cluster: Cluster) -> None:
        for sender in senders:
            sender.join(TIMEOUT_S)
        stop(cluster)

    monkeypatch.setattr(Cluster, "stop", stop_when_both_are_sent)
    stray: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: stray.append(number)) for number in pair
    }
    try:
        options = UpOptions(port=0, grpc_port=0, run_dir=stage.folder / "run", cores=None)
        status = up.up(options, {"model": "m"}, {}, Console(file=io.StringIO()))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert status == 0
    assert len(senders) == 1
    assert stray == []
    # One that is told to end while it starts says the latter alone.
    assert set(stage.lines("started")) <= set(stage.lines("stopped"))


@pytest.mark.parametrize("line", ["", "hello", "{not json", '{"ready": false}', "[]", "{}"])
def test_other_lines_are_not_ready(line: str) -> None:
    assert ready_details(line) == {}


@pytest.mark.parametrize(
    ("host", "address"),
    [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("10.0.0.1", "10.0.0.1")],
)
def test_reachable_address(host: str, address: str) -> None:
    assert reachable(host) == address


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
