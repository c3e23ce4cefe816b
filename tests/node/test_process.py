"""The node as a process: options, the READY line, signals, exit statuses."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import signal
import socket
import sys
import threading
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import httpx
import pytest

from baton.node.main import LOADER, load_node, main
from baton.protocol.errors import ModelRefused
from baton.protocol.messages import SessionHello, session_metadata
from baton.protocol.wire import node_message_from_wire, router_message_to_wire
from decode_node.__main__ import PROGRAM
from tests.fakes import FakeClock
from tests.node.fakes import open_call
from tests.tiny_models import make_tiny_model
from tests.transfer.certificates import make_files

START_S = 90.0  # importing torch on a busy machine


@asynccontextmanager
async def process(module: str, *flags: str, secret: str = "") -> AsyncIterator[Process]:
    environment = os.environ | ({"BATON_SECRET": secret} if secret else {})
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *flags, stdout=PIPE, stderr=PIPE, env=environment
    )
    try:
        yield running
    finally:
        if running.returncode is None:
            running.kill()
        await running.communicate()


async def health(port: int) -> dict[str, int]:
    """The status of each page of a health port."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=START_S) as client:
        return {
            name: (await client.get(f"/{name}")).status_code
            for name in ("startupz", "livez", "readyz")
        }


@pytest.mark.slow
@pytest.mark.parametrize("module", ["prefill_node", "decode_node"])
async def test_ready_then_serving_then_gone_on_sigterm(module: str, tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path / "model")
    core = str(min(os.sched_getaffinity(0)))
    flags = ("--model", str(model), "--num-kv-blocks", "16", "--cpu-cores", core)
    ports = ("--metrics-port", "0", "--health-port", "0")
    async with process(module, *flags, *ports, secret="s") as running:
        assert running.stdout is not None
        async with asyncio.timeout(START_S):
            ready = json.loads(await running.stdout.readline())
        assert ready["ready"] is True
        assert ready["role"] == module.removesuffix("_node")
        assert ready["num_blocks"] == 16
        assert ready["kv_address"].startswith("127.0.0.1:")
        assert await health(ready["health_port"]) == {"startupz": 200, "livez": 200, "readyz": 200}
        channel, call = await open_call(ready["address"], session_metadata("s", "router-1"))
        async with channel, asyncio.timeout(START_S):
            await call.write(router_message_to_wire(SessionHello("router-1"), FakeClock()))
            record = node_message_from_wire(await call.read())
            assert record.boot_id == ready["boot_id"]  # type: ignore[union-attr]
            running.send_signal(signal.SIGTERM)
            assert await running.wait() == 0


@pytest.mark.slow
async def test_a_signal_is_heard_while_the_model_loads(tmp_path: Path) -> None:
    """A checkpoint that takes seconds to round: the node ends without having been ready. Its health
    port is open by then, and asks for no certificate."""
    files = make_files(tmp_path / "tls")
    model = make_tiny_model(
        "llama", tmp_path / "model", hidden_size=1024, intermediate_size=2816, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=8, head_dim=128, torch_dtype="bfloat16",
    )  # fmt: skip
    flags = ("--model", str(model), "--log-level", "debug", "--quantization", "int4")
    flags += ("--tls-cert", str(files.cert), "--tls-key", str(files.key), "--tls-ca", str(files.ca))
    async with process("prefill_node", *flags, "--health-port", "0") as running:
        assert running.stderr is not None
        assert running.stdout is not None
        port = 0
        async with asyncio.timeout(START_S):
            async for line in running.stderr:
                if found := re.search(rb"health port: (\d+)", line):
                    port = int(found[1])
                if b"loading" in line:
                    break
            assert await health(port) == {"startupz": 503, "livez": 200, "readyz": 503}
            running.send_signal(signal.SIGTERM)
            assert await running.wait() == 0
            assert await running.stdout.read() == b""


async def test_a_load_that_fails_behind_a_stop_is_not_logged() -> None:
    """As of a data-parallel rank that rank 0 has stopped, because it refuses the same model."""
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    stop, go = asyncio.Event(), threading.Event()
    stop.set()

    def load() -> NoReturn:
        go.wait()
        raise ModelRefused("8 experts cannot be split over 3 ranks", field="data_parallel_size")

    assert await load_node(load, stop, lambda _: pytest.fail("it was loaded")) is None
    go.set()
    for thread in threading.enumerate():
        if thread.name == LOADER:
            await asyncio.to_thread(thread.join)
    await asyncio.sleep(0)
    gc.collect()
    assert not told


def test_a_bad_option_stops_the_start_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, text in (
        (("--model", str(tmp_path), "--host", "10.9.8.7"), "BATON_SECRET"),
        ((), "model"),
    ):
        assert main(PROGRAM, flags, {}) == 2
        assert text in capsys.readouterr().err


@pytest.mark.slow
async def test_a_model_that_is_not_there_stops_the_start_by_name(tmp_path: Path) -> None:
    flags = ("--model", str(tmp_path / "nowhere"))
    async with process("decode_node", *flags) as running, asyncio.timeout(START_S):
        _, complaint = await running.communicate()
        assert running.returncode == 2
        assert b"nowhere" in complaint
        assert b"Traceback" not in complaint


async def test_a_kv_port_that_is_taken_stops_the_start_by_name(
    tmp_path: Path, redis_url: str
) -> None:
    """No traceback hides it, though the node has no record yet that it could withdraw."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        flags = (
            "--model",
            str(make_tiny_model("llama", tmp_path)),
            "--kv-port",
            port,
            "--kv-lanes",
            "grpc",
        )
        redis = ("--redis-url", redis_url)
        async with process("decode_node", *flags, *redis) as running, asyncio.timeout(START_S):
            _, complaint = await running.communicate()
    assert running.returncode == 2
    assert f"cannot bind the KV port 127.0.0.1:{port}" in complaint.decode()
    assert b"Traceback" not in complaint
