"""Nodes that are forked from a server: each is a process as if it had been started anew."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from deploy import __main__ as entry
from deploy.local import says_ready
from deploy.process.child import Child, Exited, ProcessSpec, Ready
from deploy.process.fork_server import CannotFork, ForkedProcess, ForkServer, helps
from tests.tiny_models import make_tiny_model

TIMEOUT_S = 60.0
pytestmark = pytest.mark.slow


class Nodes:
    """Nodes of one server, and what they report."""

    def __init__(self, server: ForkServer, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.model = make_tiny_model("llama", folder / "model")
        self.events: SimpleQueue[Ready | Exited] = SimpleQueue()

    def spec(self, role: str, *more: str, **variables: str) -> ProcessSpec:
        """What `baton up` would start; its log is named after its role."""
        flags = ["--model", str(self.model), "--num-kv-blocks", "16", "--port", "0", *more]
        command = [sys.executable, "-m", f"{role}_node", *flags]
        log = self.folder / f"{role}.log"
        return ProcessSpec(role, command, log, says_ready, {"BATON_SECRET": "s", **variables})

    def start(self, spec: ProcessSpec) -> Child:
        return Child(spec, self.events.put, self.server.start)

    def ready(self) -> dict[str, str]:
        event = self.events.get(timeout=TIMEOUT_S)
        assert isinstance(event, Ready), event.child.last_lines(20)
        return json.loads(event.line)

    def status(self) -> int:
        event = self.events.get(timeout=TIMEOUT_S)
        assert isinstance(event, Exited)
        return event.status


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with ForkServer() as server:
        yield Nodes(server, tmp_path)


def fields(pid: int) -> list[str]:
    """Those of /proc/PID/stat after the name: state, parent, group, session, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def words(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")


def is_forked(child: Child) -> bool:
    """A fork's own memory still holds the environment that its server got."""
    return b"OPENBLAS_NUM_THREADS=1\0" in Path(f"/proc/{child.pid}/environ").read_bytes()


def test_forked_nodes_look_as_if_they_were_started_anew(nodes: Nodes) -> None:
    specs = [nodes.spec(role, BATON_NODE_ID=f"my-{role}") for role in ("prefill", "decode")]
    children = [nodes.start(spec) for spec in specs]
    assert {nodes.ready()["node_id"], nodes.ready()["node_id"]} == {"my-prefill", "my-decode"}
    for child in children:
        pid = str(child.pid)
        assert is_forked(child)
        assert fields(child.pid)[1:4] == [str(os.getpid()), pid, pid], "parent, group, session"
        assert words(child.pid) == child.spec.command
        assert os.readlink(f"/proc/{pid}/fd/0") == os.devnull
        assert not any("socket:" in each for each in child_files(child)[:3])
        assert any("loading" in line for line in child.last_lines(100)), "its log"
    assert [child.stop(TIMEOUT_S) for child in children] == [0, 0]


def child_files(child: Child) -> list[str]:
    folder = Path(f"/proc/{child.pid}/fd")
    return [os.readlink(folder / str(number)) for number in range(3)]


def test_a_forked_node_outlives_its_server_and_is_started_anew(nodes: Nodes) -> None:
    spec = nodes.spec("decode")
    child = nodes.start(spec)
    nodes.ready()
    assert is_forked(child)
    nodes.server.close()
    os.kill(child.pid, 0)
    child.kill()
    assert nodes.status() == -signal.SIGKILL
    with pytest.raises(CannotFork), spec.log.open("ab") as log:
        nodes.server.fork(spec.command, {}, log)
    child = nodes.start(spec)
    nodes.ready()
    assert not is_forked(child)
    assert child.stop(TIMEOUT_S) == 0


def test_a_server_that_was_killed_is_missed_by_nobody(nodes: Nodes) -> None:
    os.kill(nodes.server.pid, signal.SIGKILL)
    child = nodes.start(nodes.spec("prefill"))
    nodes.ready()
    assert not is_forked(child)
    assert child.stop(TIMEOUT_S) == 0


def test_a_forked_node_refuses_with_its_own_status_and_words(nodes: Nodes) -> None:
    child = nodes.start(nodes.spec("decode", "--kv-lanes", "nonsense"))
    assert nodes.status() == 2
    assert "nonsense" in child.last_lines(1)[0]


def test_a_forked_process_can_be_waited_for_with_a_limit(nodes: Nodes) -> None:
    spec = nodes.spec("decode")
    with spec.log.open("ab") as log:
        node = nodes.server.fork(spec.command, os.environ | spec.variables, log)
    with node.stdout:
        assert says_ready(node.stdout.readline())
        with pytest.raises(subprocess.TimeoutExpired):
            node.wait(0.01)
        node.send_signal(signal.SIGKILL)
        assert node.wait(TIMEOUT_S) == node.wait() == -signal.SIGKILL
        node.send_signal(signal.SIGKILL)  # not to whoever has its number now
    assert isinstance(node, ForkedProcess)


LAUNCHER = """
import os, signal, sys
from deploy.process.fork_server import ForkServer
server = ForkServer()
with open(sys.argv[1], "ab") as log:
    node = server.fork([sys.executable, "-m", *sys.argv[2:]], dict(os.environ), log)
node.stdout.readline()
server.close()
print(node.pid, flush=True)
signal.pause()
"""


def test_a_forked_node_ends_with_its_launcher(nodes: Nodes) -> None:
    spec = nodes.spec("decode")
    command = [sys.executable, "-c", LAUNCHER, str(spec.log), *spec.command[2:]]
    environ = os.environ | spec.variables
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environ, text=True) as launcher:
        assert launcher.stdout is not None
        ended = os.pidfd_open(int(launcher.stdout.readline()))
        launcher.kill()
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    assert poll.poll(TIMEOUT_S * 1000), "it lives on"
    os.close(ended)


def test_only_up_on_a_cpu_has_a_server(tmp_path: Path) -> None:
    absent = tmp_path / "driver"
    assert helps(["up", "--decode", "2"], absent)
    assert not helps(["status"], absent)
    assert not helps([], absent)
    absent.touch()
    assert not helps(["up"], absent)


def test_the_command_runs_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["trace", "--url", "http://127.0.0.1:9"]) == 1
    assert "127.0.0.1:9" in capsys.readouterr().err
