"""`baton up` as a real command: real Redis, router and nodes, a tiny model, a kill -9, Ctrl-C."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from baton.client import Client
from deploy.plan import LOOPBACK
from tests.tiny_models import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60.0
pytestmark = pytest.mark.slow


@dataclass(slots=True)
class Up:
    """A running `baton up`. `lines`: what it printed; a reader thread fills it."""

    process: subprocess.Popen[str]
    run_dir: Path
    shown: list[str] = field(default_factory=list[str])
    lines: queue.SimpleQueue[str | None] = field(default_factory=queue.SimpleQueue)

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def wait_line(self, part: str) -> str:
        """The next line with `part` in it."""
        while True:
            line = self.lines.get(timeout=TIMEOUT_S)
            assert line is not None, "".join(self.shown)
            self.shown.append(line)
            if part in line:
                return line

    def children(self) -> list[int]:
        pid = self.process.pid
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def child(self, name: str) -> int:
        """The pid of the node `name`."""
        for pid in self.children():
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if "--node-id" in words and words[words.index("--node-id") + 1] == name:
                return pid
        raise AssertionError(f"no {name}")


@pytest.fixture
def up(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Up]:
    """A cluster with the marker's flags."""
    with running(tmp_path, request.param) as started:
        yield started


@contextmanager
def running(tmp_path: Path, more: list[str], **variables: str) -> Iterator[Up]:
    """A cluster of a tiny model; whatever is left at the end is killed. `variables`: added to its
    environment."""
    model = make_tiny_model("llama", tmp_path / "model")
    flags = ["--port", "0", "--grpc-port", "0", "--run-dir", str(tmp_path / "run")]
    flags += ["--model", str(model), "--served-model-name", "tiny", "--num-kv-blocks", "64"]
    command = [sys.executable, "-m", "deploy", "up", *flags, *more]
    environment = {name: value for name, value in os.environ.items() if "BATON_" not in name}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**environment, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        started = Up(process, tmp_path / "run")
        reader = threading.Thread(target=started.read)
        reader.start()
        try:
            yield started
        finally:
            left = started.children() if process.poll() is None else []
            process.kill()
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            reader.join(TIMEOUT_S)


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def ask(ready: dict[str, Any], api_key: str = "", prompt: str = "abc") -> str:
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
    }
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    url = f"{ready['url']}/v1/completions"
    response = httpx.post(url, json=body, headers=headers, timeout=TIMEOUT_S)
    assert response.status_code == httpx.codes.OK, response.text
    assert response.json()["usage"]["completion_tokens"] == 8
    return str(response.json()["choices"][0]["text"])


@pytest.mark.redis
@pytest.mark.parametrize(
    "up", [["--decode", "2", "--api-key", "k", "--admin-key", "o", "--no-warm-up"]], indirect=True
)
def test_serves_survives_a_killed_node_and_stops_cleanly(up: Up) -> None:
    ready = json.loads(up.wait_line('"ready": true'))
    shown = "".join(up.shown)
    assert f"curl -N {ready['url']}/v1/chat/completions" in shown
    answer = ask(ready, "k")
    assert httpx.get(f"{ready['url']}/v1/models").status_code == httpx.codes.UNAUTHORIZED
    with Client(ready["grpc"], "o") as client:
        nodes = {node.node_id: node.role for node in client.server_info().nodes}
    assert nodes == {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}

    os.kill(up.child("decode-0"), signal.SIGKILL)
    up.wait_line("ended (signal 9); starting again")
    assert ask(ready, "k") == answer  # by the other decode node
    up.wait_line("ready after")

    os.kill(up.child("decode-1"), signal.SIGKILL)
    up.wait_line("ended (signal 9); starting again")  # a second from now
    with socket.create_server((LOOPBACK, urlsplit(ready["metrics"]["decode-1"]).port or 0)):
        up.wait_line("its metrics port was taken meanwhile")
        told = up.wait_line("metrics at http").split()[-1]
        up.wait_line("ready after")
    assert "baton_" in httpx.get(told).text
    assert ask(ready, "k") == answer

    pids = up.children()
    assert len(pids) == 5  # redis, router, three nodes
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(TIMEOUT_S) == 0
    assert alive(pids) == []


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize("up", [["--no-warm-up"]], indirect=True)
def test_idle_cores_are_lent(up: Up) -> None:
    """While nobody decodes, the prefill node also computes on the decode node's core. While nobody
    prefills, the decode node's event loop also runs on the prefill node's."""
    ready = json.loads(up.wait_line('"ready": true'))
    assert ask(ready, prompt="abc" * 32)
    page = httpx.get(ready["metrics"]["prefill-0"]).text
    (spare,) = re.findall(r"^baton_engine_steps_on_spare_cores_total.* (\S+)$", page, re.MULTILINE)
    assert float(spare) > 0
    node, all_cores = up.child("decode-0"), os.sched_getaffinity(0)

    def roams() -> bool:
        body = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{ready['url']}/v1/completions", json=body) as stream:
            return any(os.sched_getaffinity(node) == all_cores for _ in stream.iter_lines())

    assert any(roams() for _ in range(20)), "it may end before it is looked at, but not each time"
    deadline = time.monotonic() + TIMEOUT_S
    while os.sched_getaffinity(node) == all_cores:  # until it waits for work
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.long
@pytest.mark.parametrize("up", [["--colocated"]], indirect=True)
def test_colocated_answers_its_first_question(up: Up) -> None:
    ready = json.loads(up.wait_line('"ready": true'))
    assert ready["first_answer_s"], "".join(up.shown)
    assert "> What is prefill?" in "".join(up.shown)
    assert ask(ready)
    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(TIMEOUT_S) == 0


@pytest.mark.parametrize("up", [["--model", "/nowhere/model"]], indirect=True)
def test_a_missing_model_is_one_line(up: Up) -> None:
    up.wait_line("--model /nowhere/model is neither a directory nor")
    assert up.process.wait(TIMEOUT_S) == 2
