"""guidellm, unmodified, measures a real cluster: every request is completed, `./run clients`."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from tests.clients.agent_model import DEMO
from tests.clients.conftest import OFFLINE, Cluster, Install

pytestmark = pytest.mark.asyncio(loop_scope="session")

RUN_S: Final = 240.0
REQUESTS: Final = 24
PROMPT_TOKENS: Final = 64
OUTPUT_TOKENS: Final = 32


async def test_guidellm_completes_every_request(
    install: Install, demo: Cluster, tmp_path: Path
) -> None:
    # It imports torch without saying so. By its version, pip takes a CPU build where it knows one.
    python = install(["torch==2.13.0", "guidellm"])
    backend = f"kind=openai_http,target={demo.url},model={demo.model},api_key={demo.key}"
    data = f"prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"
    command = [
        str(python.parent / "guidellm"), "run",
        "--backend", backend,
        "--profile", "kind=concurrent,streams=4",
        "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--tokenizer", f"kind=hf_auto,model={DEMO}",
        "--data", f"kind=synthetic_text,{data}",
        "--disable-progress",
        "--output", f"kind=json,path={tmp_path / 'report.json'}",
    ]  # fmt: skip
    said = await _run(command, tmp_path)
    benchmark = json.loads((tmp_path / "report.json").read_text())["benchmarks"][0]
    totals: dict[str, Any] = benchmark["metrics"]["request_totals"]
    assert totals["successful"] == REQUESTS, said
    assert (totals["errored"], totals["incomplete"]) == (0, 0), said


async def _run(command: list[str], folder: Path) -> str:
    """Run it; what it said. Fails unless it ends well, in time."""
    kept = {key: os.environ[key] for key in ("PATH", "HOME", "TMPDIR") if key in os.environ}
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env={**kept, **OFFLINE},
    )  # fmt: skip
    try:
        async with asyncio.timeout(RUN_S):
            said, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    text = said.decode("utf-8", "replace")
    assert process.returncode == 0, text
    return text
