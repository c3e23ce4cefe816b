"""Real clusters for real clients: router, prefill and decode node as processes of their own."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from tests.clients import agent_model
from tests.clients.environment import NotInstallable, cache_folder, node_program, python_with
from tests.system.processes import Processes

SCRIPTS = Path(__file__).parent / "scripts"
SCRIPT_S = 180.0
KEY = "clients-key"
AGENT_FLAGS = (
    "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"
)  # fmt: skip
# Clients that would ask the internet first: they must not need it.
OFFLINE = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


@dataclass(frozen=True)
class Cluster:
    """One router with its nodes. `url` has no path; both of its APIs demand `key`."""

    url: str
    grpc: str
    model: str
    key: str = KEY


Install = Callable[[Sequence[str]], Path]
InstallAgent = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def install() -> Install:
    """An interpreter with these packages; the test is skipped if pip cannot install them."""

    def installed(requirements: Sequence[str]) -> Path:
        try:
            return python_with(requirements)
        except NotInstallable as error:
            pytest.skip(f"{', '.join(requirements)} cannot be installed: {error}")

    return installed


@pytest.fixture(scope="session")
def install_agent() -> InstallAgent:
    """A program of an npm package; the test is skipped if npm cannot install it."""

    def installed(package: str, name: str) -> Path:
        try:
            return node_program(package, name)
        except NotInstallable as error:
            pytest.skip(f"{package} cannot be installed: {error}")

    return installed


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def agent(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """A cluster whose model thinks and calls a tool."""
    model = agent_model.kept_in(cache_folder())
    async with Processes(model, tmp_path_factory.mktemp("agent-logs")) as processes:
        yield await _serve(processes, AGENT_FLAGS)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def brief(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """As `agent`, but every answer is short, whatever is asked."""
    model = agent_model.kept_in(cache_folder())
    async with Processes(model, tmp_path_factory.mktemp("brief-logs")) as processes:
        yield await _serve(processes, AGENT_FLAGS, ["--max-model-len", "64"])


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def demo(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """A cluster that serves the demo model."""
    async with Processes(agent_model.DEMO, tmp_path_factory.mktemp("demo-logs")) as processes:
        yield await _serve(processes)


async def _serve(
    processes: Processes, flags: Sequence[str] = (), node_flags: Sequence[str] = ()
) -> Cluster:
    prefill, decode = await processes.nodes(1, 1, ["--num-kv-blocks", "256", *node_flags])
    served = ["--served-model-name", "served", "--api-key", KEY]
    router = await processes.router(prefill, decode, [*flags, *served])
    return Cluster(f"http://{router.address}", str(router.ready["grpc_address"]), "served")


async def run_script(python: Path, name: str, cluster: Cluster, *more: str) -> str:
    """Run a client's script against a cluster; what it printed. Fails with all it said."""
    script = [str(python), str(SCRIPTS / name), cluster.url, cluster.model, cluster.key]
    return await run_client([*script, *more], SCRIPT_S)


async def run_client(
    command: Sequence[str],
    timeout_s: float,
    folder: Path | None = None,
    more: Mapping[str, str] | None = None,
) -> str:
    """Run a client in `folder`, without the internet and with `more` in its environment; all it
    said. Fails unless it ends well, in time."""
    environment = {key: os.environ[key] for key in ("PATH", "HOME", "TMPDIR") if key in os.environ}
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env={**environment, **OFFLINE, **(more or {})},
    )  # fmt: skip
    try:
        async with asyncio.timeout(timeout_s):
            said, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    text = said.decode("utf-8", "replace")
    assert process.returncode == 0, f"{command[:2]}:\n{text}"
    return text
