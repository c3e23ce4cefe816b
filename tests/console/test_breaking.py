"""Break it: the launcher's socket, the router's route, and both in a real `baton up --demo`."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from baton.protocol.errors import BatonError
from baton.runtime.failpoints import FailurePlan
from deploy.breaking import LANE_MS, BreakServer, faults_file
from router.api.http.web_errors import on_baton_error
from router.console.nodes import BreakApi
from router.events import EventRing
from tests.deploy.test_up import TIMEOUT_S, Up, running
from tests.waiting import eventually


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    program = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(program, start_new_session=True) as process:
        yield process
        process.kill()


def state_of(pid: int) -> str:
    """R, S, T (stopped), ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def until_state(pid: int, *wanted: str) -> None:
    async def there() -> bool:
        return state_of(pid) in wanted

    await eventually(there)


def client_of(address: str | None, events: EventRing) -> httpx.AsyncClient:
    app = Starlette(
        routes=BreakApi(address, events).routes(), exception_handlers={BatonError: on_baton_error}
    )
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin")


async def test_the_route_asks_the_launcher(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    events = EventRing()
    path = tmp_path / "s"
    server = BreakServer(path, {"decode-0": sleeper.pid}.get)
    assert path.stat().st_mode & 0o777 == 0o600
    try:
        async with client_of(str(path), events) as client:

            async def ask(action: str, node: str = "decode-0") -> httpx.Response:
                body = {"node": node, "action": action}
                return await client.post("/console/data/break", json=body)

            reply = await ask("stop")
            assert "SIGSTOP" in reply.json()["done"]
            await until_state(sleeper.pid, "T")
            assert (await ask("resume")).status_code == 200
            await until_state(sleeper.pid, "S", "R")
            assert (await ask("slow")).status_code == 200
            await until_state(sleeper.pid, "T")
            await until_state(sleeper.pid, "S", "R")
            plan = FailurePlan(f"@{faults_file(tmp_path, 'decode-0')}", None)
            for slow in (True, False, True):
                done = (await ask("slow-lane")).json()["done"]
                assert ("longer" in done) is slow
                plan.hit("accepted")  # looks at the file
                faults: Any = vars(plan)["_faults"]
                assert [(it.name, it.delay_ms) for it in faults] == (
                    [("kv.last", LANE_MS)] if slow else []
                )
            unknown = await ask("kill", "decode-7")
            assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "node")
            assert (await ask("explode")).status_code == 400
            assert (await ask("kill")).status_code == 200
            assert await asyncio.to_thread(sleeper.wait, TIMEOUT_S) == -signal.SIGKILL
    finally:
        server.stop()
        server.stop()
    assert [each.node for each in events.newest(9) if each.kind == "broken"] == ["decode-0"] * 7
    async with client_of(str(path), events) as client:
        body = {"node": "decode-0", "action": "kill"}
        assert (await client.post("/console/data/break", json=body)).status_code == 503
    async with client_of(None, events) as client:
        assert (await client.post("/console/data/break", json=body)).status_code == 404


async def test_a_stopped_process_goes_on_when_the_launcher_ends(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    server = BreakServer(tmp_path / "s", {"n": sleeper.pid}.get)
    server.act("n", "stop")
    await until_state(sleeper.pid, "T")
    server.stop()
    await until_state(sleeper.pid, "S", "R")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("demo", [True, False])
def test_a_node_is_killed_from_the_console_and_comes_back(tmp_path: Path, demo: bool) -> None:
    flags = ["--no-warm-up", "--decode", "2", *(["--demo"] if demo else [])]
    with running(tmp_path, flags) as up:
        ready = json.loads(up.wait_line('"ready": true'))
        shown = next(line for line in up.shown if line.startswith("console  "))
        url, key = shown.removeprefix("console  ").strip().split("#key=")
        assert ready["console"] == url
        file = up.run_dir / "console_url"
        assert file.read_text().strip() == f"{url}#key={key}"
        assert file.stat().st_mode & 0o777 == 0o600
        assert key not in (up.run_dir / "ready.json").read_text()
        with httpx.Client(
            base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=TIMEOUT_S
        ) as client:
            _break(client, up, demo)
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(TIMEOUT_S) == 0
        assert not file.exists()


def _break(client: httpx.Client, up: Up, demo: bool) -> None:
    snapshot = client.get("/data/snapshot").json()
    assert {each["id"] for each in snapshot["nodes"]} == {"prefill-0", "decode-0", "decode-1"}
    assert snapshot["router"]["demo"] is demo
    assert client.get("/data/nodes/decode-0").json()["role"] == "decode"
    assert client.get("/data/snapshot", headers={"authorization": "Bearer x"}).status_code == 401
    chat = {"model": "tiny", "prompt": "abc", "max_tokens": 8, "ignore_eos": True}
    assert client.post("/api/v1/completions", json=chat).status_code == 200
    reply = client.post("/data/break", json={"node": "decode-0", "action": "kill"})
    if not demo:
        assert reply.status_code == 404
        return
    assert reply.status_code == 200
    up.wait_line("ended (signal 9); starting again")
    up.wait_line("ready after")
    kinds: list[tuple[str, str]] = []
    with client.stream("GET", "/data/stream") as stream:
        for line in stream.iter_lines():
            told = json.loads(line[6:]) if line.startswith("data: ") else {}
            kinds += [(each["kind"], each["node"]) for each in told.get("events", [])]
            if kinds.count(("node-joined", "decode-0")) == 2:
                assert ("broken", "decode-0") in kinds
                assert ("node-lost", "decode-0") in kinds
                return
