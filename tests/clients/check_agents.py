"""Coding agents, unmodified, do a task of two steps by calling their tools: `./run clients`.

Each reads a file, finds a number there, and writes it to another. The model knows that number only
where the result of its first call tells it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.clients.agent_model import FOUND, TASK, WRITTEN
from tests.clients.agents import AGENTS, settle
from tests.clients.conftest import Cluster, InstallAgent, run_client

pytestmark = pytest.mark.asyncio(loop_scope="session")

RUN_S: Final = 300.0


@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_does_its_task(
    name: str, install_agent: InstallAgent, agent: Cluster, tmp_path: Path
) -> None:
    home, folder = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    folder.mkdir()
    asked = AGENTS[name](agent)
    settle(asked, home)
    (folder / "question.txt").write_text(f"{FOUND}\n")
    binary = install_agent(asked.package, asked.binary)
    command = [str(binary), *asked.command, TASK]
    said = await run_client(command, RUN_S, folder, {**asked.environment, "HOME": str(home)})
    assert (folder / "answer.txt").read_text().strip() == "7", said
    assert WRITTEN in said
