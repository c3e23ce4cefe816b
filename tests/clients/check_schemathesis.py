"""schemathesis against /openapi.json of a real cluster: no server error, replies as described, and
no body refused that is as described: `./run clients`.

What the document does not say of a body is allowed for in scripts/schemathesis_hooks.py, by the
message of its refusal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.clients.conftest import SCRIPTS, Cluster, Install, run_client

pytestmark = pytest.mark.asyncio(loop_scope="session")

RUN_S: Final = 900.0
HOOKS: Final = SCRIPTS / "schemathesis_hooks.py"
OPTIONS: Final = (
    "--phases", "examples,coverage,fuzzing", "-n", "5", "--workers", "1", "--checks", "all",
    "--continue-on-failure", "--no-color", "--request-timeout", "100", "--max-response-time", "100",
)  # fmt: skip


async def test_replies_are_as_described(install: Install, brief: Cluster, tmp_path: Path) -> None:
    python = install(["schemathesis"])
    (tmp_path / "schemathesis.toml").write_text(f'hooks = "{HOOKS}"\n')
    command = [str(python.parent / "schemathesis"), "run", f"{brief.url}/openapi.json"]
    command += ["--header", f"Authorization: Bearer {brief.key}", *OPTIONS]
    said = await run_client(command, RUN_S, tmp_path)
    assert "Tested: " in said, said
